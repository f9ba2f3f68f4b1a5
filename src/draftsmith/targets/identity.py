"""What a target IS: digests of everything that decides its next-token distribution and its text.

Content, never location: a moved checkpoint keeps its identity, an overwritten one does not.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.artifacts import digest_file, digest_json, read_json
from draftsmith.errors import ArtifactError, TargetError
from draftsmith.targets.checkpoint import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    needed_files,
    read_object,
    stored_dtype,
    weight_files,
)
from draftsmith.targets.components import DTYPES, load_config, load_model, load_tokenizer

COMPONENTS = ("weights", "config", "tokenizer", "chat_template", "generation_config", "dtype")

# Where a model came from and how it happens to be run; the dtype is a component of its own.
_VOLATILE = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "_from_model_config",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "dtype",
        "torch_dtype",
    }
)
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """The record in build/target.json.

    Attributes:
        digest: Over the components below that end in `_digest`, and `dtype`.
        weights_digest: The safetensors files, with their index when sharded.
        config_digest: config.json without volatile keys.
        tokenizer_digest: The serialised fast tokenizer and its special tokens.
        chat_template_digest: None when there is no template.
        generation_config_digest: None when there is no generation_config.json.
        dtype: In which the target is served.
        model_type: Transformers' name of the architecture.
        num_parameters: Tied weights counted once.
        vocab_size: Rows of the embedding; may exceed `tokenizer_size` (padding).
        tokenizer_size: Tokens that the tokenizer knows, added ones included.
        max_positions: Context length in tokens.
        num_layers: Decoder layers.
        schema: Version of this record.
    """

    digest: str
    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    chat_template_digest: str | None
    generation_config_digest: str | None
    dtype: str
    model_type: str
    num_parameters: int
    vocab_size: int
    tokenizer_size: int
    max_positions: int
    num_layers: int
    schema: int = 1


def identify(directory: Path, dtype: str) -> TargetIdentity:
    """Identity of the Transformers checkpoint in `directory`, served in `dtype`.

    Args:
        directory: Holds config.json, safetensors weights and a fast tokenizer.
        dtype: "auto" (the dtype that the checkpoint states), bfloat16, float16 or float32.

    Raises:
        TargetError: A part is missing, damaged or not understood.
    """
    needed_files(directory)
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    served_in = _dtype_name(directory, config, dtype)
    model = load_model(directory, dtype=None)
    template = tokenizer.chat_template
    identity = TargetIdentity(
        digest="",
        weights_digest=_weights_digest(directory),
        config_digest=_config_digest(directory),
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template_digest=digest_json(template) if template else None,
        generation_config_digest=_generation_digest(directory),
        dtype=served_in,
        model_type=str(config.model_type),
        num_parameters=int(model.num_parameters()),
        vocab_size=_num_rows(model),
        tokenizer_size=len(tokenizer),
        max_positions=_max_positions(directory, config),
        num_layers=int(config.get_text_config().num_hidden_layers),
    )
    return with_dtype(identity, identity.dtype)


def with_dtype(identity: TargetIdentity, dtype: str) -> TargetIdentity:
    """The identity of the same files served in `dtype` (a name, not "auto")."""
    changed_dtype = dataclasses.replace(identity, dtype=dtype)
    parts = {name: _component(changed_dtype, name) for name in COMPONENTS}
    return dataclasses.replace(changed_dtype, digest=digest_json(parts))


def changed(before: TargetIdentity, after: TargetIdentity) -> list[str]:
    """Names of the components that differ, in the order of `COMPONENTS`."""
    return [name for name in COMPONENTS if _component(before, name) != _component(after, name)]


def _component(identity: TargetIdentity, name: str) -> str | None:
    value: str | None = getattr(identity, name if name == "dtype" else f"{name}_digest")
    return value


def read_identity(path: Path) -> TargetIdentity:
    """Read build/target.json, or a copy of it.

    Raises:
        ArtifactError: The file is missing, has other fields, or its digest is not that of its
            components.
    """
    data = read_json(path)
    try:
        identity = TargetIdentity(**data)
        is_whole = with_dtype(identity, identity.dtype).digest == identity.digest
    except TypeError as error:
        raise _foreign_record(path, str(error)) from error
    if not is_whole:
        raise _foreign_record(path, "a digest that is not that of its components")
    return identity


def _foreign_record(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        f"reading {path}",
        found=found,
        expected="a target identity of schema 1, as it was written",
        remedy="rerun `dvc repro resolve_target`",
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Digest of what turns text into ids and back.

    The chat template is left out, and so are padding and truncation: they are settings of a call.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    special = dict(tokenizer.special_tokens_map)
    extra = sorted(str(token) for token in tokenizer.extra_special_tokens)
    state = {key: value for key, value in backend.items() if key not in ("padding", "truncation")}
    return digest_json({"backend": state, "special": special, "extra": extra})


def _num_rows(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"embedding weights are {type(weight).__name__}")
    return int(weight.shape[0])


def _weights_digest(directory: Path) -> str:
    files = weight_files(directory)
    if files != [directory / WEIGHTS_FILE]:
        files = [*files, directory / INDEX_FILE]
    return digest_json({file.name: digest_file(file) for file in files})


def _config_digest(directory: Path) -> str:
    # The empty entry keeps the digests of targets that were registered when it could hold code.
    return digest_json({"config": _stable(read_object(directory / CONFIG_FILE)), "code": {}})


def _generation_digest(directory: Path) -> str | None:
    path = directory / GENERATION_FILE
    return digest_json(_stable(read_object(path))) if path.is_file() else None


def _stable(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """`value` without volatile keys, at every depth."""
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_stable(item) for item in value]
    return value


def _dtype_name(directory: Path, config: PreTrainedConfig, dtype: str) -> str:
    if dtype == "auto":
        stated = config.dtype or config.get_text_config().dtype or stored_dtype(directory)
        name = str(stated).removeprefix("torch.")
    else:
        name = dtype
    if name not in DTYPES:
        raise TargetError(
            f"choosing the dtype of {directory}",
            found=f"target.dtype {dtype}, {CONFIG_FILE} states {config.dtype}",
            expected=", ".join(DTYPES),
            remedy="set target.dtype to one of these",
        )
    return name


def _max_positions(directory: Path, config: PreTrainedConfig) -> int:
    text_config = config.get_text_config()
    for key in _LENGTH_KEYS:
        value = getattr(text_config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise TargetError(
        f"reading the context length of {directory}",
        found=f"none of {', '.join(_LENGTH_KEYS)} in {CONFIG_FILE}",
        expected="the number of positions that the model was made for",
        remedy=f"add max_position_embeddings to {CONFIG_FILE}",
    )
