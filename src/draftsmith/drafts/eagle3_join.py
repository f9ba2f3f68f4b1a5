"""A stored EAGLE-3 head beside its target, as a head of ours.

Its layer is one of Llama's class whatever the target's is: that is what it was trained as. Knows
nothing of files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle3_folder import StoredHead, refuse
from draftsmith.drafts.eagle3_layout import LAYER_IDS, TOKENS, stated_biases, weight_names
from draftsmith.drafts.eagle_start import empty_head
from draftsmith.drafts.student import output_rows, own_parameter_names, with_own_head
from draftsmith.errors import DraftMisfitError


def join_stored(stored: StoredHead, target: PreTrainedModel) -> tuple[EagleHead, Tensor | None]:
    """The head in its target's dtype and on its device, and the ids of its output rows.

    Output rows that are the target's own stay shared. It drafts as far as the target reads: the
    kinds of rotary embedding that are taken over know no end.

    Raises:
        DraftMisfitError: The head belongs to a target of another shape, or to another embedding.
    """
    text: Any = target.config.get_text_config()
    layers = stored.layers or _usual_layers(int(text.num_hidden_layers))
    refuse(stored.folder, _misfits(stored, target, layers), DraftMisfitError)
    config: Any = copy.deepcopy(stored.config)
    for name in (*TOKENS, "max_position_embeddings"):
        setattr(config, name, getattr(text, name, getattr(config, name)))
    theirs = output_rows(target, stored.token_ids).weight
    if not torch.equal(stored.tensors["lm_head.weight"].to(theirs), theirs):
        config = with_own_head(config)
    head = empty_head(config, target, stored.token_ids, layers)
    names = weight_names(stated_biases(config))
    state = {ours: stored.tensors[names[ours]] for ours in own_parameter_names(head)}
    refuse(stored.folder, _other_shapes(head, state), DraftMisfitError)
    head.load_state_dict(state, strict=False)
    return head, stored.token_ids


def _usual_layers(num_layers: int) -> tuple[int, ...]:
    """Of a head whose settings name none: what vLLM, SGLang and the trainers then take."""
    return 2, num_layers // 2, num_layers - 3


def _misfits(stored: StoredHead, target: PreTrainedModel, layers: tuple[int, ...]) -> Iterator[str]:
    """What of the head cannot be beside this target."""
    embedding: Any = target.get_input_embeddings()
    rows: Any = target.get_output_embeddings()
    num_tokens, width = embedding.weight.shape
    if stored.config.hidden_size != width:
        yield f"a hidden size of {stored.config.hidden_size}, the target's is {width}"
    if stored.config.vocab_size != num_tokens or len(rows.weight) != num_tokens:
        yield f"a vocabulary of {stored.config.vocab_size}, the target's is {num_tokens}"
    if type(embedding) is not nn.Embedding:
        yield f"a target that scales its embeddings ({type(embedding).__name__})"
    own = stored.tensors.get("embed_tokens.weight")
    if own is not None and not torch.equal(own.to(embedding.weight), embedding.weight):
        yield "an embed_tokens.weight that is not the target's embedding"
    if getattr(rows, "bias", None) is not None:
        yield "a target whose output rows have a bias"
    num_layers = int(target.config.get_text_config().num_hidden_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= min(layers) <= max(layers) < num_layers:
        yield f"{LAYER_IDS} {list(layers)}: no ascending inputs of the target's {num_layers} layers"
    columns = stored.tensors["fc.weight"].shape[-1]
    if columns != width * len(layers):
        yield f"an fc.weight over {columns} numbers, not over {len(layers)} layers of {width}"


def _other_shapes(head: EagleHead, state: dict[str, Tensor]) -> Iterator[str]:
    ours = head.state_dict()
    for name, tensor in state.items():
        if tensor.shape != ours[name].shape:
            found, stated = list(tensor.shape), list(ours[name].shape)
            yield f"{name} of shape {found} where its settings make it {stated}"
