"""The folder of a head that was trained elsewhere, checked as far as that goes without a target.

What would not come out as the same numbers is refused by name. The trainers' settings differ:

    SpecForge    `eagle_config` counts the target's layers by their outputs, as SGLang does
    speculators  the layer's settings lie in `transformer_layer_config`, its tensors in `layers.0`

Sources: vLLM, vllm/transformers_utils/configs/speculators/algos.py and
vllm/v1/worker/gpu_model_runner.py; SpecForge, specforge/modeling/target/eagle3_target_model.py;
speculators, speculators/models/eagle3; SGLang, sglang/srt/models/llama.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.drafts.eagle3_layout import (
    ACTIVATION,
    CONFIG,
    LAYER,
    LAYER_IDS,
    ROTARY,
    SHAPE,
    rotary_parameters,
    row_ids,
    stated_biases,
    vocabulary_tensors,
    weight_names,
)
from draftsmith.errors import DraftError, TargetError
from draftsmith.targets.checkpoint import read_object

_KIND = "speculators_model_type"
_ROTARY_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
_LAYER_FIELDS = (*SHAPE, "head_dim", "attention_bias", "mlp_bias", *_ROTARY_FIELDS)
_PLAIN: dict[str, object] = {  # what these say, where they say anything, of a head like ours
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": ACTIVATION,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "parallel_drafting": False,
    "is_causal": True,
    "bias": False,
    "qkv_bias": False,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}
_OPTIONAL = {"d2t", "t2d", "embed_tokens.weight"}


@dataclass(frozen=True)
class StoredHead:
    """What a folder holds, checked as far as that goes without a target.

    Attributes:
        folder: Where it lies.
        config: Of its layer.
        layers: The target's layers whose inputs it reads; None where its settings name none.
        tensors: Under the names of the layout.
        token_ids: int64 `[entries]`: the target's id of each output row; None is the identity.
    """

    folder: Path
    config: LlamaConfig
    layers: tuple[int, ...] | None
    tensors: dict[str, Tensor]
    token_ids: Tensor | None


def is_head(folder: Path) -> bool:
    """Whether the folder's configuration is that of a head on a target's states, of any kind."""
    try:
        config = read_object(folder / CONFIG)
    except TargetError:
        return False
    return _KIND in config or "eagle3" in str(config.get("architectures")).lower()


def head_files(folder: Path) -> list[Path]:
    """The files that belong to a head."""
    return [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]


def read_stored(folder: Path) -> StoredHead:
    """Read a head's folder.

    Raises:
        DraftError: It is damaged, or holds what cannot be taken over exactly; see the module.
        TargetError: There is no configuration.
    """
    stated = read_object(folder / CONFIG)
    settings = _settings(stated)
    refuse(folder, _other_kinds(stated, settings))
    config = _layer_config(folder, settings)
    refuse(folder, _other_rotary(config))
    tensors = _tensors(folder)
    refuse(folder, _other_tensors(tensors, weight_names(stated_biases(config)).values()))
    size = int(config.vocab_size)
    refuse(folder, _other_vocabulary(tensors, settings.get("draft_vocab_size") or size, size))
    token_ids = row_ids(tensors["d2t"]) if "d2t" in tensors else torch.arange(size)
    is_whole = torch.equal(token_ids, torch.arange(size))
    layers = _named_layers(folder, stated)
    return StoredHead(folder, config, layers, tensors, None if is_whole else token_ids)


def refuse(folder: Path, faults: Iterator[str], kind: type[DraftError] = DraftError) -> None:
    """Refuse a head for the first of its faults.

    Raises:
        DraftError: There is one; of class `kind`.
    """
    found = next(faults, None)
    if found is not None:
        raise _refusal(folder, found, kind)


def _refusal(folder: Path, found: str, kind: type[DraftError] = DraftError) -> DraftError:
    return kind(
        f"taking over the head in {folder}",
        found=found,
        expected="an EAGLE-3 head for this target that is one plain layer of Llama's class over "
        "the target's own embedding and inputs of different layers",
        remedy="choose or train a head of that form; another one would draft other tokens here "
        "than it was trained to",
    )


def _settings(stated: dict[str, Any]) -> dict[str, Any]:
    """All that a configuration says of the head, wherever it says it."""
    inner, nested = _section(stated, "transformer_layer_config"), _section(stated, "eagle_config")
    kind = (inner or stated).get("model_type")  # outside it is speculators' own
    return {**stated, **nested, **inner, "model_type": kind}


def _section(stated: dict[str, Any], name: str) -> dict[str, Any]:
    value = stated.get(name)
    return value if isinstance(value, dict) else {}


def _other_kinds(stated: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    kind = stated.get(_KIND, "eagle3")
    if kind != "eagle3":
        yield f"a head of the kind {kind}"
    for name, plain in _PLAIN.items():
        value = settings.get(name)
        if value is not None and value != plain:
            yield f"{name}: {json.dumps(value)}"
    if _KIND in stated and settings.get("norm_before_residual") is None:
        yield "no norm_before_residual, for which its readers assume different values"
    if settings.get("sliding_window") and settings.get("use_sliding_window", True):
        yield "a sliding window of attention"


def _layer_config(folder: Path, settings: dict[str, Any]) -> LlamaConfig:
    fields = {name: settings[name] for name in _LAYER_FIELDS if settings.get(name) is not None}
    try:
        return LlamaConfig(**fields, num_hidden_layers=1, tie_word_embeddings=False)
    except Exception as error:  # of many kinds: types, sizes and rotary embeddings are checked
        text = " ".join(str(error).split())
        raise _refusal(folder, f"settings that Transformers does not take ({text})") from error


def _other_rotary(config: LlamaConfig) -> Iterator[str]:
    rotary = rotary_parameters(config)
    if rotary.get("rope_type") not in ROTARY:
        yield f"rotary embeddings of type {rotary.get('rope_type')}"
    if rotary.get("partial_rotary_factor", 1) != 1:
        yield "rotary embeddings of a part of a head's dimensions"


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        found = {n: one for file in head_files(folder)[1:] for n, one in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise DraftError(
            f"reading the weights in {folder}",
            found=f"a damaged file ({error})",
            expected="whole safetensors files",
            remedy="copy the head again from its origin",
        ) from error
    first = "layers.0."
    return {
        f"{LAYER}{name.removeprefix(first)}" if name.startswith(first) else name: tensor
        for name, tensor in found.items()
    }


def _other_tensors(tensors: dict[str, Tensor], expected: Iterable[str]) -> Iterator[str]:
    known = set(expected)
    for name in sorted(known - tensors.keys()):
        yield f"no tensor {name}"
    for name in sorted(tensors.keys() - known - _OPTIONAL):
        yield f"a tensor {name}, for which there is no place"


def _other_vocabulary(tensors: dict[str, Tensor], stated: int, size: int) -> Iterator[str]:
    """Faults of a map of `stated` output rows into a vocabulary of `size` tokens."""
    rows = len(tensors["lm_head.weight"])
    if rows != stated:
        yield f"{rows} output rows where draft_vocab_size is {stated}"
    if "d2t" not in tensors:
        if rows != size:
            yield f"no d2t, which says which {rows} of {size} tokens have a row"
        return
    if tensors["d2t"].shape != (rows,):
        yield f"a d2t of shape {list(tensors['d2t'].shape)} for {rows} output rows"
    ids = row_ids(tensors["d2t"])
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        yield f"a d2t that names ids outside the vocabulary of {size} tokens"
    if len(ids.unique()) < rows:
        yield "a d2t that names an id twice"
    mask = tensors.get("t2d")
    if mask is not None and not torch.equal(mask.bool(), vocabulary_tensors(ids, size)["t2d"]):
        yield "a t2d that marks other ids than d2t names"


def _named_layers(folder: Path, stated: dict[str, Any]) -> tuple[int, ...] | None:
    """The target's layers whose inputs are read.

    Inside `eagle_config` the same name is used for two counts. A list that begins with 1 counts
    outputs, as trainers and SGLang take it: the output of layer 1 is the input of layer 2.
    """
    inputs = stated.get(LAYER_IDS)
    outputs = _section(stated, "eagle_config").get(LAYER_IDS)
    for layers in (inputs, outputs):
        if layers and not (isinstance(layers, list) and all(isinstance(i, int) for i in layers)):
            raise _refusal(folder, f"{LAYER_IDS}: {json.dumps(layers)}")
    if not outputs:
        return tuple(inputs) if inputs else None
    shifted = [layer + 1 for layer in outputs]
    if (inputs != shifted) if inputs else (outputs[0] != 1):
        raise DraftError(
            f"reading which layers of the target the head in {folder} reads",
            found=f"{LAYER_IDS} {outputs} in eagle_config, which some count by a layer's input and "
            "others by its output",
            expected="layers that are named outside eagle_config, by their inputs, or there a list "
            "that begins with 1, which counts outputs",
            remedy=f"in a copy of the folder, take {LAYER_IDS} out of eagle_config in {CONFIG} and "
            "write it outside: the layers whose inputs the head was trained on, 0 for the "
            "embedding",
        )
    return tuple(shifted)
