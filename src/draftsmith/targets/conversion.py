"""GGUF file -> Transformers checkpoint directory with safetensors.

The quantised weights are expanded once, in a stated dtype; what is stored is what is served.
Knows nothing of where the file came from or where the directory ends up.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from draftsmith.artifacts import write_text, writing
from draftsmith.errors import TargetError
from draftsmith.targets.checkpoint import read_object
from draftsmith.targets.compatibility import require_chat_template
from draftsmith.targets.components import DTYPES, failures_of, quiet

# Loosely typed by Transformers; what they return is annotated where it is used.
_AUTO_MODEL: Any = AutoModelForCausalLM
_AUTO_TOKENIZER: Any = AutoTokenizer
_GENERATION_CONFIG: Any = GenerationConfig

_MAGIC = b"GGUF"
_DROPPED_KEYS = ("quantization_config", "_model_name_or_path", "_name_or_path", "dtype")
# Words that no template uses, to find what a template writes behind an answer.
_ANSWER = "zqxanswerzqx"


def check_gguf(file: Path) -> None:
    """Check that `file` is there and starts as a GGUF file does.

    Raises:
        TargetError: It is missing, unreadable, or something else.
    """
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise TargetError(
            f"reading {file}",
            found=error.strerror or str(error),
            expected="a GGUF file",
            remedy="set target.source to a .gguf file that exists",
        ) from error
    if magic != _MAGIC:
        raise TargetError(
            f"reading {file}",
            found=f"a file that starts with {magic!r}",
            expected=f"a GGUF file, which starts with {_MAGIC!r}",
            remedy="download the file again",
        )


def convert_gguf(file: Path, directory: Path, *, dtype: str) -> None:
    """Write the model in `file` to `directory` as config, safetensors, tokenizer and template.

    Args:
        file: A GGUF file of an architecture that Transformers can expand.
        directory: An existing folder; the same file always gives the same content.
        dtype: "auto" (bfloat16: GGUF states none), bfloat16, float16 or float32.

    Raises:
        TargetError: The file is damaged, not supported, or lacks a chat template.
        ArtifactError: The disk refused.
    """
    check_gguf(file)
    name = "bfloat16" if dtype == "auto" else dtype
    remedy = "use a whole GGUF file of an architecture that Transformers expands"
    with _no_bars(), failures_of(file, "GGUF file", remedy=remedy):
        tokenizer: PreTrainedTokenizerFast = _AUTO_TOKENIZER.from_pretrained(
            file.parent, gguf_file=file.name
        )
        require_chat_template(tokenizer, file)
        # Without dequantize, an installed kernel package would leave the weights packed.
        expanded: PreTrainedModel = _AUTO_MODEL.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=DTYPES[name],
            quantization_config=GgufConfig(dequantize=True),
        )
        model = _unquantised(expanded, DTYPES[name])
        model.generation_config = _generation_config(model.config, tokenizer)
    with writing(directory), quiet():
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory)
    _drop_foreign_tokens(directory / "tokenizer.json", int(model.config.vocab_size))


def _drop_foreign_tokens(file: Path, num_tokens: int) -> None:
    """Drop tokens that the GGUF file does not list, hence without an embedding row.

    Transformers builds every byte-level tokenizer on GPT-2's class, which adds its own
    `<|endoftext|>` behind a vocabulary that has none.
    """
    state = read_object(file)
    known = [token for token in state["added_tokens"] if token["id"] < num_tokens]
    if len(known) < len(state["added_tokens"]):
        write_text(file, json.dumps({**state, "added_tokens": known}, ensure_ascii=False))


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Like `quiet`, and for the bar of the GGUF reader too, which asks nobody whether to show."""
    stream = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with quiet(), contextlib.redirect_stderr(stream):
        yield


def _unquantised(expanded: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights under a config without the quantisation entry, so that they can be saved."""
    settings: dict[str, Any] = expanded.config.to_dict()
    for key in _DROPPED_KEYS:
        settings.pop(key, None)
    config = type(expanded.config).from_dict(settings)
    config.dtype = dtype
    config.architectures = [type(expanded).__name__]
    with torch.device("meta"):
        model: PreTrainedModel = _AUTO_MODEL.from_config(config, dtype=dtype)
    state = {key: tensor.to(dtype) for key, tensor in expanded.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model


def _generation_config(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> GenerationConfig:
    """Special ids from the file, with the token that ends a chat turn among the ends."""
    ends = {tokenizer.eos_token_id, _turn_end_id(tokenizer)} - {None}
    end_ids = sorted(int(end) for end in ends if end is not None)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else config.pad_token_id
    made: GenerationConfig = _GENERATION_CONFIG(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_ids[0] if len(end_ids) == 1 else end_ids or None,
        pad_token_id=pad_id,
    )
    return made


def _turn_end_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Id of the first special token that the template writes behind an assistant's answer."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _ANSWER}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    tail = text.rpartition(_ANSWER)[2]
    special = set(tokenizer.added_tokens_decoder)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((int(i) for i in ids if i in special), None)
