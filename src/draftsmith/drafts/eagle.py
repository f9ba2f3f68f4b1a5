"""A feature-conditioned head: one decoder layer over the target's own hidden states.

Entry t of the head joins the embedding of token t + 1 with the fused feature of position t and
predicts token t + 2; its own output is the feature of the next entry where the target has not been
yet. The layer is one of the target's class, whose attention reads both halves: query, key and value
projections are twice as wide as the target's. Embedding and output rows stay the target's.

Knows nothing of caches, of training or of files.

Source: Li et al. 2025 (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.drafts.student import head_logits

JOINED = ("q_proj", "k_proj", "v_proj")  # what reads both halves


@dataclass(frozen=True)
class HeadOutput:
    """What a forward gives.

    Attributes:
        logits: `[rows, kept, entries]`.
        features: `[rows, kept, hidden]`: the head's own, for the entries that follow.
    """

    logits: Tensor
    features: Tensor


class EagleHead(PreTrainedModel):
    """The head; `SlotModel` can drive it like any causal language model.

    Args:
        body: A model of the target's class with one layer, joined to the target's embedding.
        lm_head: The target's output rows, trimmed or not.
        feature_layers: The target's layers that it reads the inputs of.
    """

    base_model_prefix = "body"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(
        self, body: PreTrainedModel, lm_head: nn.Module, feature_layers: Sequence[int]
    ) -> None:
        super().__init__(body.config)
        hidden = int(body.config.hidden_size)
        dtype, device = body.dtype, body.device
        self.feature_layers = tuple(feature_layers)
        self.body: Any = body  # torch does not know what its parts are
        self.norm: Any = body.norm
        self.lm_head = lm_head
        body.norm = nn.Identity()  # the layer's output is the feature; only logits are normed
        width = hidden * len(self.feature_layers)
        self.fc = nn.Linear(width, hidden, bias=False, dtype=dtype, device=device)
        layer = cast(Any, body).layers[0]
        for name in JOINED:
            setattr(layer.self_attn, name, _widened(getattr(layer.self_attn, name)))
        layer.input_layernorm = _JoinedNorm(layer.input_layernorm)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Leave it to the body: Transformers asks the module that a class stands in."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        """The target's embedding."""
        embedding: nn.Module = self.body.get_input_embeddings()
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        """The target's output rows."""
        rows: nn.Module = self.lm_head
        return rows

    def set_attn_implementation(
        self,
        attn_implementation: str | dict[str, Any],
        allow_all_kernels: bool = False,  # noqa: FBT001, FBT002  Transformers' signature
    ) -> None:
        """Set that of the layer, whose configuration is the head's."""
        self.body.set_attn_implementation(attn_implementation, allow_all_kernels)

    def fuse(self, features: Tensor) -> Tensor:
        """`[..., layers * hidden]` to one feature a position, `[..., hidden]`."""
        fused: Tensor = self.fc(features.to(self.fc.weight.dtype))
        return fused

    def run(self, tokens: Tensor, features: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        """Features of entries `[rows, width, hidden]`.

        Args:
            tokens: int64 `[rows, width]`: those behind the features.
            features: `[rows, width, hidden]`, fused or the head's own.
            **options: What the body reads besides: mask, positions, cache.
        """
        embedded = self.get_input_embeddings()(tokens).to(self.fc.weight.dtype)
        join = self.body.layers[0].input_layernorm
        join.embedded = embedded  # the layer's signature has one hidden state only
        try:
            hidden: Tensor = self.body(inputs_embeds=features, **options).last_hidden_state
        finally:  # a run that is computed again ends where nothing more is needed
            join.embedded = None
        return hidden

    def logits(self, features: Tensor) -> Tensor:
        """What the head's own features `[..., hidden]` predict, `[..., entries]`."""
        return head_logits(self, self.norm(features))

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        **options: Any,  # noqa: ANN401
    ) -> HeadOutput:
        """A step of drafting.

        Args:
            input_ids: As `tokens` of `run`.
            features: As in `run`; None is zeros, for a forward that is only timed.
            logits_to_keep: int64 `[kept]`: places whose output is wanted; None is all.
            **options: As in `run`.
        """
        if features is None:
            hidden = int(self.config.hidden_size)
            features = self.fc.weight.new_zeros(*input_ids.shape, hidden)
        own = self.run(input_ids, features, **options)
        if logits_to_keep is not None:
            own = own[:, logits_to_keep]
        return HeadOutput(self.logits(own), own)

    def last_hidden(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Normed states from which `head_logits` makes the law of the token behind each position.

        Args:
            token_ids: int64 `[rows, width]`.
            features: `[rows, width, layers * hidden]`, the target's at all positions.

        Returns:
            `[rows, width, hidden]`. Nothing predicts the second token of a text: zeros.
        """
        fused = self.fuse(features[:, :-1])
        own = self.norm(self.run(token_ids[:, 1:], fused, use_cache=False))
        return nn.functional.pad(own, (0, 0, 1, 0))


class _JoinedNorm(nn.Module):
    """In the place of the layer's first norm: norms both halves and joins them.

    Attributes:
        embedded: Embeddings of the entries of the forward that runs.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embedding = copy.deepcopy(norm)
        self.feature = norm
        self.embedded: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        assert self.embedded is not None, "run the head, not its body"
        return torch.cat([self.embedding(self.embedded), self.feature(features)], -1)


def _widened(linear: nn.Linear) -> nn.Linear:
    return nn.Linear(
        2 * linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        dtype=linear.weight.dtype,
        device=linear.weight.device,
    )
