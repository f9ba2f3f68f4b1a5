"""Lossless speculative decoding on plain Transformers models.

Knows torch and Transformers; nothing of files, configuration, HTTP, clocks or MLflow.
"""

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.proposers import (
    DraftModelProposer,
    NoProposer,
    PromptLookupProposer,
    Proposer,
)
from draftsmith.decoding.request import Event, Request, Result, SamplingParams
from draftsmith.decoding.trace import Trace

__all__ = [
    "DraftModelProposer",
    "Engine",
    "Event",
    "NoProposer",
    "PromptLookupProposer",
    "Proposer",
    "Request",
    "Result",
    "SamplingParams",
    "Trace",
]
