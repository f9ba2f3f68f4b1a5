"""Lossless speculative decoding on plain Transformers models.

Knows torch and Transformers; nothing of files, configuration, HTTP, clocks or MLflow.
"""

from draftsmith.decoding.answer_text import AnswerText
from draftsmith.decoding.draft_length import FixedLengths, LengthPolicy, Lengths
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.faults import RequestFaultError
from draftsmith.decoding.feature_proposer import FeatureProposer
from draftsmith.decoding.medusa_proposer import MedusaProposer
from draftsmith.decoding.proposers import (
    DraftModelProposer,
    LookupFirstProposer,
    NoProposer,
    PromptLookupProposer,
    Proposer,
    with_lookup,
)
from draftsmith.decoding.request import (
    Event,
    Request,
    Result,
    Sampling,
    SamplingParams,
    TokenLogprobs,
)
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.decoding.steps import compiled, graphed
from draftsmith.decoding.stopping import StopStrings
from draftsmith.decoding.token_text import TokenText
from draftsmith.decoding.trace import Trace
from draftsmith.decoding.tree import Tree
from draftsmith.decoding.tree_choice import NO_TREES, ChosenTree, Trees, TreesByRows

__all__ = [
    "NO_TREES",
    "AnswerText",
    "ChosenTree",
    "DraftModelProposer",
    "Engine",
    "Event",
    "FeatureProposer",
    "FixedLengths",
    "LengthPolicy",
    "Lengths",
    "LookupFirstProposer",
    "MedusaProposer",
    "NoProposer",
    "PromptLookupProposer",
    "Proposer",
    "Request",
    "RequestFaultError",
    "Result",
    "Sampling",
    "SamplingParams",
    "SlotModel",
    "StopStrings",
    "TokenLogprobs",
    "TokenText",
    "Trace",
    "Tree",
    "Trees",
    "TreesByRows",
    "compiled",
    "graphed",
    "with_lookup",
]
