"""A draft beside its target, and all that differs between families when it is used.

Who decodes, evaluates or measures asks here and nowhere else how a family drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding import (
    NO_TREES,
    DraftModelProposer,
    FeatureProposer,
    MedusaProposer,
    SlotModel,
    Trees,
)
from draftsmith.decoding.features import layer_inputs
from draftsmith.decoding.steps import BuildStep
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.manifest import CAUSAL_LM, EAGLE, MEDUSA, STUDENT, DraftManifest
from draftsmith.drafts.medusa import MedusaHeads
from draftsmith.drafts.student import (
    empty_student,
    has_own_head,
    head_logits,
    output_row_names,
    own_parameter_names,
)
from draftsmith.errors import DraftError

Drafter = DraftModelProposer | FeatureProposer | MedusaProposer


def family_of(draft: PreTrainedModel) -> str:
    """The family of a draft that is trained here."""
    if isinstance(draft, EagleHead):
        return EAGLE
    return MEDUSA if isinstance(draft, MedusaHeads) else STUDENT


def drafter_of(
    draft: PreTrainedModel,
    token_ids: Tensor | None = None,
    *,
    steps: BuildStep | None = None,
    trees: Trees = NO_TREES,
) -> Drafter:
    """What an engine drafts with; see `LoadedDraft`."""
    if isinstance(draft, EagleHead):
        return FeatureProposer(draft, draft, token_ids, trees)
    if isinstance(draft, MedusaHeads):
        return MedusaProposer(draft, token_ids, trees)
    return DraftModelProposer(SlotModel(draft, steps), token_ids, trees)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft beside its target.

    `token_ids` maps its output rows to the target's ids; None is the identity.
    """

    model: PreTrainedModel
    token_ids: Tensor | None
    manifest: DraftManifest

    def proposer(self, steps: BuildStep | None = None, trees: Trees = NO_TREES) -> Drafter:
        """What an engine drafts with.

        Args:
            steps: Compiles or captures the steps of a causal language model.
            trees: What it drafts instead of chains.
        """
        return drafter_of(self.model, self.token_ids, steps=steps, trees=trees)

    def last_hidden(self, target: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden states `[rows, width, hidden]` of target and draft on a text.

        The target's `head_logits` and the draft's `logits` make the law of the next token of them.

        Args:
            target: The target.
            token_ids: int64 `[rows, width]`, padded on the right.
        """
        model = self.model
        layers = model.feature_layers if isinstance(model, EagleHead) else ()
        with layer_inputs(target, layers) as features:
            theirs: Tensor = target.base_model(
                input_ids=token_ids, use_cache=False
            ).last_hidden_state
        if isinstance(model, EagleHead):
            return theirs, model.last_hidden(token_ids, torch.cat(features, -1))
        if isinstance(model, MedusaHeads):
            return theirs, model.last_hidden(theirs)
        return theirs, model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """What the draft says of the next token, `[..., entries]`, by its last hidden states."""
        if isinstance(self.model, MedusaHeads):
            return self.model.logits_of(hidden, 0)
        return head_logits(self.model, hidden)

    @property
    def drafts_combs(self) -> bool:
        """Whether only first guesses can have guesses behind them: each costs a step of the draft.

        Medusa heads guess every position without looking at the guesses before it.
        """
        return self.manifest.family != MEDUSA

    @property
    def max_draft_length(self) -> int:
        """Most tokens that it can draft in a round."""
        return self.model.num_heads if isinstance(self.model, MedusaHeads) else 1 << 30

    @property
    def is_causal_lm(self) -> bool:
        """Whether it predicts from tokens alone, so that other engines can draft with it."""
        return self.manifest.family not in (EAGLE, MEDUSA)

    def as_causal_lm(self, target: PreTrainedModel) -> PreTrainedModel:
        """The draft for engines that know whole models only.

        A student stands under the target's whole head: they know no trimmed vocabulary.

        Raises:
            DraftError: It is no model of its own; see `is_causal_lm`.
        """
        if not self.is_causal_lm:
            raise DraftError(
                "drafting with another engine",
                found=f"a draft of family {self.manifest.family}, which reads the target's states",
                expected="a causal language model",
                remedy="use a recipe of family student where another engine is to draft",
            )
        if self.manifest.family == CAUSAL_LM:
            return self.model
        full = empty_student(self.model.config, target, None)
        state, theirs = self.model.state_dict(), full.state_dict()
        own = {name: state[name] for name in own_parameter_names(full)}
        if has_own_head(full) and self.token_ids is not None:
            for name in output_row_names(full):  # a token that it cannot draft keeps its row
                own[name] = theirs[name].index_copy(0, self.token_ids, state[name])
        full.load_state_dict(own, strict=False)
        return full
