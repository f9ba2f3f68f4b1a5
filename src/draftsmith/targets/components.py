"""A checkpoint directory's parts as Transformers objects: config, tokenizer, model.

Every failure of Transformers becomes a TargetError that names the directory. Knows nothing of
digests.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from draftsmith.errors import TargetError
from draftsmith.targets.checkpoint import (
    CONFIG_FILE,
    check_weights,
    require_config,
    stored_dtype,
)

# Transformers types these loosely or not at all; what they return is annotated where it is used.
_AUTO_MODEL: Any = AutoModelForCausalLM
_BARS: Any = transformers_logging

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars off inside the block unless standard error is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    was_shown = _BARS.is_progress_bar_enabled()
    _BARS.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            _BARS.enable_progress_bar()


@contextlib.contextmanager
def failures_of(directory: Path, what: str, *, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises inside the block into a TargetError about `directory`."""
    try:
        yield
    except TargetError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise TargetError(
            f"reading the {what} of {directory}",
            found=f"{type(error).__name__}: {text}",
            expected=f"a {what} that Transformers reads",
            remedy=remedy,
        ) from error


def load_config(directory: Path) -> PreTrainedConfig:
    """The checkpoint's config.

    Raises:
        TargetError: config.json is missing or damaged, or of a kind that Transformers lacks.
    """
    require_config(directory)
    remedy = "use a model class that this Transformers version knows"
    with quiet(), failures_of(directory, "config", remedy=remedy):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return config


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The checkpoint's fast tokenizer.

    Raises:
        TargetError: There is none, it is damaged, or it has no serialisable backend.
    """
    remedy = "save the tokenizer beside the weights: `tokenizer.save_pretrained(directory)`"
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise TargetError(
            f"reading the tokenizer of {directory}",
            found="no tokenizer file",
            expected="tokenizer.json",
            remedy=remedy,
        )
    with quiet(), failures_of(directory, "tokenizer", remedy=remedy):
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TargetError(
            f"reading the tokenizer of {directory}",
            found=type(tokenizer).__name__,
            expected="a fast tokenizer (tokenizer.json)",
            remedy=remedy,
        )
    return tokenizer


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


def load_model(directory: Path, *, dtype: str | None, device: str = "cpu") -> PreTrainedModel:
    """The whole model with `sdpa` attention, in eval mode, without gradients.

    Args:
        directory: A Transformers checkpoint.
        dtype: bfloat16, float16 or float32; None takes the weights as they are stored, mapped from
            their files and not read: enough to match every tensor and to count.
        device: Where the model goes, in torch's words.

    Raises:
        TargetError: A weight file is damaged, or the weights do not fill the architecture.
    """
    check_weights(directory)
    name = dtype or stored_dtype(directory)
    with quiet(), failures_of(directory, "model", remedy="save the checkpoint again, whole"):
        model, info = _AUTO_MODEL.from_pretrained(
            directory,
            dtype="auto" if name is None else DTYPES[name],
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that `_require_filled` can name them
        )
        _require_filled(directory, info)
        model = model.to(device).eval().requires_grad_(False)
    whole: PreTrainedModel = model
    return whole


def _require_filled(directory: Path, info: dict[str, Any]) -> None:
    """Transformers fills what a checkpoint lacks with random numbers and only warns."""
    gaps = {str(name) for name in info["missing_keys"]}
    gaps |= {str(name) for name, *_ in info["mismatched_keys"]}
    if gaps:
        raise TargetError(
            f"loading {directory}",
            found=f"{len(gaps)} tensors missing or of another shape, such as {sorted(gaps)[0]}",
            expected=f"every tensor of the model that {CONFIG_FILE} describes",
            remedy=f"use the {CONFIG_FILE} that was saved with these weights",
        )
