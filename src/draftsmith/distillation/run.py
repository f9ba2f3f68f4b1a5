"""Distil one recipe: vocabulary, student, signals, training, checkpoint."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.artifacts import digest_json, short
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.batches import TrainingSequence, make_sequences
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import CachedSignals, OnlineSignals, SignalSource
from draftsmith.distillation.trainer import OnStep, TrainingOutcome, distill
from draftsmith.drafts.checkpoint import Lineage, save_draft
from draftsmith.drafts.manifest import DraftManifest
from draftsmith.drafts.settings import StudentConfig
from draftsmith.drafts.student import (
    build_student,
    check_head,
    head_logits,
    num_trained_parameters,
    resolve_layers,
)
from draftsmith.drafts.vocabulary import choose_tokens, count_tokens, coverage

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distillation:
    """Everything a recipe is distilled from.

    Attributes:
        name: The recipe's name.
        recipe: The recipe.
        config: The distill section.
        target: Live target in its serving dtype.
        target_digest: Its identity.
        tokenizer_digest: Its tokenizer's.
        corpus_digest: Identity of the rollouts.
        rollouts: Train and eval split; eval serves to report coverage only.
        stop_ids: Ids that must be in the draft's vocabulary.
    """

    name: str
    recipe: StudentConfig
    config: DistillConfig
    target: PreTrainedModel
    target_digest: str
    tokenizer_digest: str
    corpus_digest: str
    rollouts: dict[str, list[Rollout]]
    stop_ids: tuple[int, ...]

    def run(
        self, directory: Path, partial: Path, on_step: OnStep = lambda step, metrics: None
    ) -> DraftManifest:
        """Train and write the draft into `directory` (existing, empty).

        Args:
            directory: Where the draft goes.
            partial: Folder for checkpoints and the signal cache; emptied of this run's files at the end.
            on_step: Called after every optimizer step.
        """
        check_head(self.target, torch.tensor([self.rollouts["train"][0].prompt_ids[:32]]))
        sequences = make_sequences(
            [(rollout.prompt_ids, rollout.response_ids) for rollout in self.rollouts["train"]]
        )
        token_ids, held_out_coverage = self._vocabulary()
        num_layers = int(self.target.config.get_text_config().num_hidden_layers)
        layers = resolve_layers(self.recipe.layers, num_layers)
        student = build_student(self.target, layers, token_ids)
        self._to_float32(student)
        signals = self._signals(partial, sequences)
        outcome = distill(
            student,
            sequences,
            signals,
            self._target_head(student),
            config=self.config,
            checkpoints=partial / "checkpoints" / short(self._key()),
            on_step=on_step,
        )
        lineage = Lineage(
            self.name,
            recipe_digest(self.recipe, self.config),
            self.target_digest,
            self.tokenizer_digest,
            self.corpus_digest,
            layers,
        )
        facts = self._facts(outcome, student, held_out_coverage)
        student.to(self.target.dtype)
        manifest = save_draft(directory, student, token_ids, lineage=lineage, training=facts)
        shutil.rmtree(partial / "checkpoints" / short(self._key()), ignore_errors=True)
        return manifest

    def _key(self) -> str:
        settings = recipe_digest(self.recipe, self.config)
        return digest_json([self.target_digest, self.corpus_digest, settings])

    def _vocabulary(self) -> tuple[Tensor | None, float | None]:
        size = int(self.target.get_output_embeddings().weight.shape[0])
        if not 0 < self.recipe.vocabulary_size < size:
            return None, None
        counts = {
            split: count_tokens([rollout.response_ids for rollout in rows], size)
            for split, rows in self.rollouts.items()
        }
        token_ids = choose_tokens(counts["train"], self.recipe.vocabulary_size, always=self.stop_ids)
        held_out = coverage(counts["eval"], token_ids)
        _LOG.info("draft_vocabulary=%d held_out_coverage=%.3f", len(token_ids), held_out)
        return token_ids, held_out

    def _to_float32(self, student: PreTrainedModel) -> None:
        """Trained weights in float32; embedding and head stay the target's own."""
        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def _signals(self, partial: Path, sequences: list[TrainingSequence]) -> SignalSource:
        if self.config.signal == "online":
            return OnlineSignals(self.target)
        key = short(digest_json([self.target_digest, self.corpus_digest]))
        return CachedSignals(
            partial / "signals" / key, self.target, sequences, max_gb=self.config.max_cache_gb
        )

    def _target_head(self, student: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """Target logits over the draft's vocabulary: the student's frozen head is the target's, cut to it."""
        return lambda hidden: head_logits(student, hidden)

    def _facts(
        self, outcome: TrainingOutcome, student: PreTrainedModel, held_out_coverage: float | None
    ) -> dict[str, Any]:
        lengths = [len(r.prompt_ids) + len(r.response_ids) for r in self.rollouts["train"]]
        return {
            "steps": self.config.steps,
            "batch_size": self.config.batch_size,
            "seed": self.config.seed,
            "response_tokens": outcome.num_tokens,
            "mask_coverage": outcome.mask_coverage,
            "longest_sequence": max(lengths),
            "trained_parameters": num_trained_parameters(student),
            "held_out_coverage": held_out_coverage,
            "loss": outcome.history[-1]["loss"],
            "history": [
                {name: entry[name] for name in ("step", "loss", "alpha")} for entry in outcome.history
            ],
        }
