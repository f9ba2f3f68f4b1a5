"""The files of a Transformers checkpoint directory: which ones count, and whether they are whole.

Knows file names and the safetensors header; builds no model and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.errors import TargetError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# Small files that decide what the model or the tokenizer does; whatever else lies beside them
# (optimizer states, logs, other formats) is not part of the target.
_SIDE_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    "tokenizer.json",
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    TEMPLATE_FILE,
    "chat_template.json",
)
_EXTRA_TEMPLATES = "additional_chat_templates/*.jinja"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
HUB_PATTERNS = (*_SIDE_FILES, _EXTRA_TEMPLATES, WEIGHTS_FILE, INDEX_FILE, "model-*.safetensors")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that belongs to a checkpoint.

    Raises:
        TargetError: The file is missing, unreadable, not JSON or not an object.
    """
    remedy = f"restore {path.name} from the place where the checkpoint was made"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(
            f"reading {path}", found=str(error), expected="a JSON file", remedy=remedy
        ) from error
    if not isinstance(data, dict):
        raise TargetError(
            f"reading {path}", found=type(data).__name__, expected="a JSON object", remedy=remedy
        )
    return data


def is_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds a config and safetensors weights."""
    return (directory / CONFIG_FILE).is_file() and any(directory.glob("*.safetensors"))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that Transformers would load, sorted by name; the index is not one.

    Raises:
        TargetError: There are none, a shard is missing, or only pickled weights are there.
    """
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    if (directory / INDEX_FILE).is_file():
        return sorted(directory / name for name in set(_weight_map(directory).values()))
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise TargetError(
            f"reading the weights of {directory}",
            found=f"pickled weights only ({pickles[0]})",
            expected=f"{WEIGHTS_FILE}, or {INDEX_FILE} and its shards",
            remedy="load the model where you trust it and call "
            "`model.save_pretrained(directory)`, which writes safetensors",
        )
    raise TargetError(
        f"reading the weights of {directory}",
        found="neither",
        expected=f"{WEIGHTS_FILE}, or {INDEX_FILE} and its shards",
        remedy=_no_weights_remedy(directory),
    )


def _no_weights_remedy(directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return "this is an adapter: merge it into its model and save the merged model"
    return "point target.source at the folder that `save_pretrained` wrote"


def _weight_map(directory: Path) -> Mapping[str, str]:
    """Tensor name -> shard file name, checked against the folder."""
    index = directory / INDEX_FILE
    mapping = read_object(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise TargetError(
            f"reading {index}",
            found="no weight_map",
            expected="a map of tensor names to shard files",
            remedy="save the checkpoint again with `save_pretrained`",
        )
    for name in sorted({str(value) for value in mapping.values()}):
        if Path(name).name != name or not (directory / name).is_file():
            raise TargetError(
                f"reading the shards of {directory}",
                found=f"no file {name}",
                expected=f"every shard that {INDEX_FILE} lists, in the same folder",
                remedy="finish copying the checkpoint",
            )
    return mapping


def check_weights(directory: Path) -> None:
    """Check every weight file's header, length and listed tensors; tensor bytes are not read.

    Raises:
        TargetError: A file is truncated, is no safetensors file, or lacks a tensor.
    """
    names: dict[str, set[str]] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as stream:
                names[file.name] = set(stream.keys())
        except (SafetensorError, OSError) as error:
            raise TargetError(
                f"opening {file}",
                found=f"a damaged file ({error})",
                expected="a whole safetensors file",
                remedy="copy this file again from its origin; nothing was written",
            ) from error
    if set(names) == {WEIGHTS_FILE}:
        return
    for tensor, shard in _weight_map(directory).items():
        if tensor not in names[shard]:
            raise TargetError(
                f"reading {directory / shard}",
                found=f"no tensor {tensor}",
                expected=f"the tensors that {INDEX_FILE} lists for it",
                remedy="shards of two checkpoints were mixed: copy the checkpoint again",
            )


def stored_dtype(directory: Path) -> str | None:
    """Dtype of the first floating tensor, in torch's words; None when it is none we serve."""
    with safe_open(weight_files(directory)[0], framework="pt") as stream:
        codes = (str(stream.get_slice(name).get_dtype()) for name in sorted(stream.keys()))
        return next((_TORCH_NAMES[code] for code in codes if code in _TORCH_NAMES), None)


def needed_files(directory: Path) -> list[Path]:
    """Every file that belongs to the target, sorted by relative name.

    Raises:
        TargetError: There is no config, or the weights are missing or pickled.
    """
    require_config(directory)
    files = {directory / name for name in _SIDE_FILES if (directory / name).is_file()}
    files.update(directory.glob(_EXTRA_TEMPLATES))
    weights = weight_files(directory)
    files.update(weights)
    if weights != [directory / WEIGHTS_FILE]:
        files.add(directory / INDEX_FILE)
    return sorted(files)


def require_config(directory: Path) -> None:
    """Check that `directory` is a folder with a config, of a class that Transformers itself has.

    Raises:
        TargetError: It is missing, has no config.json, or brings the code of its own model.
    """
    if not directory.is_dir():
        raise TargetError(
            f"reading the target {directory}",
            found="no such directory",
            expected="a Transformers checkpoint directory",
            remedy="set target.source to the folder that holds config.json and the weights",
        )
    if not (directory / CONFIG_FILE).is_file():
        raise TargetError(
            f"reading the target {directory}",
            found=f"no {CONFIG_FILE}",
            expected=f"{CONFIG_FILE} beside the weights",
            remedy=_no_weights_remedy(directory),
        )
    _refuse_own_code(directory)


def _refuse_own_code(directory: Path) -> None:
    """Code that a config names is never run; where Transformers has the class, it is not needed."""
    config = read_object(directory / CONFIG_FILE)
    kind, code = str(config.get("model_type")), config.get("auto_map")
    if code and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise TargetError(
            f"accepting the target {directory}",
            found=f"a model_type {kind} that needs Python files of its own (auto_map {code})",
            expected="a model_type that Transformers has a causal language model for",
            remedy="use the checkpoint's conversion to such a class, or a Transformers version "
            "that has this one; Python files of a checkpoint are never run",
        )
