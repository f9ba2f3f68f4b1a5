"""A feature head written for vLLM, in the layout of EAGLE-3 checkpoints.

vLLM has one such head: a layer of Llama's class over embedding and fused feature. What that layer
cannot compute is refused; what vLLM names or orders otherwise is rewritten, and no number changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from draftsmith.artifacts import write_json, writing
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle3_layout import (
    ACTIVATION,
    CONFIG,
    OUR_LAYER,
    ROTARY,
    WEIGHTS,
    layout_config,
    layout_tensors,
    rotary_parameters,
    weight_names,
)
from draftsmith.errors import DraftError


def write_head(head: EagleHead, token_ids: Tensor | None, folder: Path) -> None:
    """Write the head into `folder`, which is made.

    Args:
        head: Joined to its target, whose output rows are written with it.
        token_ids: int64 `[entries]`: the target's id of each output row; None is the identity.
        folder: Gets `config.json` and `model.safetensors`.

    Raises:
        DraftError: vLLM's layer cannot compute what the head computes.
        ArtifactError: The disk refused.
    """
    _require_llama(head)
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, layout_config(head))
    with writing(folder):
        save_file(layout_tensors(head, token_ids), folder / WEIGHTS, metadata={"format": "pt"})


def _require_llama(head: EagleHead) -> None:
    found = next(_obstacles(head), None)
    if found is not None:
        raise DraftError(
            "exporting a feature head for vLLM",
            found=found,
            expected="what vLLM's EAGLE-3 head computes: one layer of Llama's class, over inputs "
            "of different layers of the target",
            remedy="use a recipe of family student for this target: vLLM loads students as whole "
            "models of the target's class",
        )


def _obstacles(head: EagleHead) -> Iterator[str]:
    """What vLLM's layer cannot compute."""
    config = head.config
    own = {name for name in head.state_dict() if not name.endswith("_proj.bias")}
    strange = {name for name in own ^ weight_names().keys() if name.startswith(OUR_LAYER)}
    if strange:
        name = min(strange).removeprefix(OUR_LAYER)
        yield f"a layer whose weights differ from Llama's by {name}"
    if getattr(config, "rms_norm_eps", None) is None:
        yield "norms other than Llama's"
    activation = getattr(config, "hidden_act", None)
    if activation != ACTIVATION:
        yield f"the activation {activation}"
    if _has_window(config):
        yield "a sliding window of attention"
    kind = rotary_parameters(config).get("rope_type")
    if kind not in ROTARY:
        yield f"rotary embeddings of type {kind}"
    if getattr(head.lm_head, "bias", None) is not None:
        yield "output rows with a bias"
    layers = head.feature_layers
    if len(set(layers)) < len(layers):
        yield f"features of the layers {list(layers)}, of which vLLM hands each over once only"


def _has_window(config: Any) -> bool:  # noqa: ANN401  configurations share no useful type
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    return getattr(config, "sliding_window", None) is not None
