"""Heads on the target's last hidden state, each of which predicts a token further ahead.

Head k (from 1) turns the state of position t, which the target's output head reads to predict token
t + 1, into one from which output rows predict token t + 1 + k. It is one residual block or several,
h + silu(W h + b), that start as zero: a new head guesses what the target says next. By default all
heads read the target's own frozen output rows, so all that they say of a position is one product;
or each has rows of its own, which start as the target's, are trained and are stored.

Knows nothing of caches, of training or of files.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.1 (Medusa-1).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.drafts.student import head_logits, output_rows, student_config

OWN_ROWS = "rows."  # what names of own output rows begin with


@dataclass(frozen=True)
class HeadShape:
    """What heads are there.

    Attributes:
        num_heads: Positions that can be drafted.
        num_blocks: Residual blocks a head.
        own_heads: Each head has output rows of its own.
    """

    num_heads: int
    num_blocks: int
    own_heads: bool


@dataclass(frozen=True)
class StepOutput:
    """What a forward gives: logits `[rows, kept, heads * entries]`."""

    logits: Tensor


class MedusaHeads(PreTrainedModel):
    """The heads.

    Args:
        config: The target's, cut to a layer: heads have none, but a configuration wants one.
        shape: What heads are there.
        embedding: The target's; no head reads it.
        lm_head: The target's output rows, trimmed or not.
        feature_layers: The index that stands for the target's last hidden state.
    """

    _supports_attention_backend = True  # it has no attention that would be of another kind
    drafts_at_once = True

    def __init__(
        self,
        config: Any,  # noqa: ANN401  Transformers configurations share no useful type
        shape: HeadShape,
        *,
        embedding: nn.Module,
        lm_head: nn.Linear,
        feature_layers: tuple[int, ...],
    ) -> None:
        super().__init__(config)
        self.shape = shape
        self.feature_layers = feature_layers
        self.heads = nn.ModuleList(
            nn.Sequential(*(_Block(lm_head.weight) for _ in range(shape.num_blocks)))
            for _ in range(shape.num_heads)
        )
        self.embedding = embedding
        self.lm_head = lm_head
        self.rows = nn.ModuleList(
            copy.deepcopy(lm_head) for _ in range(shape.num_heads if shape.own_heads else 0)
        )
        for module in (embedding, lm_head):
            module.requires_grad_(requires_grad=False)
        self.rows.requires_grad_(requires_grad=True)

    @property
    def num_heads(self) -> int:
        """Positions that they can draft."""
        return self.shape.num_heads

    def get_input_embeddings(self) -> nn.Module:
        """The target's embedding."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The target's output rows."""
        rows: nn.Module = self.lm_head
        return rows

    def run(self, hidden: Tensor, num_heads: int) -> Tensor:
        """States of the first heads, `[..., heads, hidden]`.

        Args:
            hidden: `[..., hidden]`: the target's last hidden states.
            num_heads: At most all of them.
        """
        hidden = hidden.to(self.dtype).contiguous()
        return torch.stack([head(hidden) for head in islice(self.heads, num_heads)], -2)

    def logits(self, states: Tensor) -> Tensor:
        """What the first heads predict from their states, `[..., heads, entries]`."""
        if not self.shape.own_heads:
            return head_logits(self, states)
        parts = [self.logits_of(part, head) for head, part in enumerate(states.unbind(-2))]
        return torch.stack(parts, -2)

    def logits_of(self, states: Tensor, head: int) -> Tensor:
        """What one head (from 0) predicts from its states `[..., hidden]`: `[..., entries]`."""
        rows = self.rows[head] if self.shape.own_heads else self.lm_head
        # A slice of all heads' states has gaps, over which a CPU's bfloat16 product is slow.
        return head_logits(self, states.contiguous(), rows)

    def last_hidden(self, theirs: Tensor) -> Tensor:
        """States from which the first head makes the law of the token behind each position.

        Args:
            theirs: `[rows, width, hidden]`: the target's at all positions.

        Returns:
            `[rows, width, hidden]`. Nothing predicts the second token of a text: zeros.
        """
        own = self.run(theirs[:, :-1], 1).squeeze(-2)
        return nn.functional.pad(own, (0, 0, 1, 0))

    def forward(
        self,
        input_ids: Tensor,
        logits_to_keep: Tensor | None = None,
        **_options: Any,  # noqa: ANN401
    ) -> StepOutput:
        """All heads over states of zeros: a forward that is only timed.

        Args:
            input_ids: int64 `[rows, width]`; only their number counts.
            logits_to_keep: int64 `[kept]`: as many places are computed; None is all.
            **_options: What else a model is given: mask, positions, cache.
        """
        rows, width = input_ids.shape
        kept = width if logits_to_keep is None else len(logits_to_keep)
        states = self.lm_head.weight.new_zeros(rows, kept, self.lm_head.in_features)
        return StepOutput(self.logits(self.run(states, self.num_heads)).flatten(-2))


class _Block(nn.Module):
    """h + silu(W h + b), with W and b zero at first.

    Args:
        like: Output rows `[entries, hidden]`, of whose width, dtype and device it is.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        width = like.shape[1]
        self.linear = nn.Linear(width, width, dtype=like.dtype, device=like.device)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + nn.functional.silu(self.linear(hidden))
        return changed


def build_heads(target: PreTrainedModel, shape: HeadShape, token_ids: Tensor | None) -> MedusaHeads:
    """Heads that all guess the target's own next token.

    Args:
        target: Live target; its embedding module is shared, not copied.
        shape: What heads are there.
        token_ids: int64 `[entries]`, the draft's vocabulary; None keeps all output rows.
    """
    config = target.config.get_text_config()
    last = int(config.num_hidden_layers) - 1
    return empty_heads(student_config(config, [last]), target, token_ids, shape)


def empty_heads(
    config: Any,  # noqa: ANN401
    target: PreTrainedModel,
    token_ids: Tensor | None,
    shape: HeadShape,
) -> MedusaHeads:
    """Heads of a configuration beside the target, in its dtype and on its device."""
    # Made anew: which attention and which experts the target runs with is not for the heads.
    own_config = type(config).from_dict(config.to_dict())
    heads = MedusaHeads(
        own_config,
        shape,
        embedding=target.get_input_embeddings(),
        lm_head=output_rows(target, token_ids),
        feature_layers=(int(target.config.get_text_config().num_hidden_layers),),
    )
    heads.train(mode=False)
    return heads
