"""Distil one recipe: vocabulary, draft, signals, training, checkpoint."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.artifacts import digest_json, keep_only, short
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.batches import TrainingSequence, make_sequences, with_prompts
from draftsmith.distillation.building import (
    build_draft,
    in_float32,
    named_layers,
    objective_of,
)
from draftsmith.distillation.divergences import divergence_of
from draftsmith.distillation.early_stop import held_out_indices
from draftsmith.distillation.head_guesses import held_out_guesses
from draftsmith.distillation.layer_choice import calibration_loss, choose_layers
from draftsmith.distillation.processes import divide, divides_target, join
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import CachedSignals, OnlineSignals, SignalSource
from draftsmith.distillation.topk_signals import TopKSignals
from draftsmith.distillation.trainer import OnStep, TrainingOutcome, distill
from draftsmith.distillation.warm_start import DraftSource, start_from
from draftsmith.drafts.checkpoint import Lineage, save_draft
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.manifest import DraftManifest
from draftsmith.drafts.medusa import MedusaHeads
from draftsmith.drafts.settings import LayerChoice, StudentConfig, TrainedConfig
from draftsmith.drafts.student import check_head, num_trained_parameters
from draftsmith.drafts.vocabulary import choose_tokens, count_tokens, coverage
from draftsmith.errors import DraftError
from draftsmith.targets.loading import LoadedTarget

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distillation:
    """Everything a recipe is distilled from.

    Attributes:
        name: The recipe's name.
        recipe: The recipe.
        config: The distill section.
        target: The target in its serving dtype; the ids that end its turns are always in the
            draft's vocabulary.
        corpus_digest: Identity of the rollouts.
        rollouts: Train and eval split; eval serves only to report coverage and guesses.
        source: The draft whose weights the training starts from; None starts from the target's.
    """

    name: str
    recipe: TrainedConfig
    config: DistillConfig
    target: LoadedTarget
    corpus_digest: str
    rollouts: Mapping[str, Sequence[Rollout]]
    source: DraftSource | None = None

    @property
    def settings(self) -> DistillConfig:
        """Those of this training: a warm start has a number of steps of its own."""
        return self.config if self.source is None else self.config.warm_started()

    def run(
        self, directory: Path, partial: Path, on_step: OnStep = lambda _step, _metrics: None
    ) -> DraftManifest:
        """Train and write the draft into `directory` (existing, empty).

        Args:
            directory: Where the draft goes.
            partial: Folder for checkpoints and the signal cache. At the end the checkpoints go, and
                so do the caches of other targets or corpora; the next recipe uses this one's.
            on_step: Called after every optimizer step.
        """
        self._check_signal()
        target, train = self.target.model, self.rollouts["train"]
        held_out = self._held_out()
        sequences = self._sequences(held_out)
        token_ids, held_out_coverage = self._vocabulary()
        layers, choice = self._layers(token_ids, sequences)
        draft = build_draft(self.recipe, target, layers, token_ids)
        if self.source is not None:
            start_from(self.source, draft, target, layers=layers, token_ids=token_ids)
        if divides_target():
            divide(target)
            draft.to(target.device)  # type: ignore[arg-type]  # annotated as an unbound method
        check_head(target, torch.tensor([train[0].prompt_ids[:32]], device=target.device))
        self._make_trainable(draft)
        outcome = distill(
            objective_of(self.recipe, self.config, draft, target, token_ids),
            sequences,
            self._signals(partial, sequences, draft, token_ids),
            config=self.settings,
            checkpoints=partial / "checkpoints" / self.name / short(self._key()),
            held_out=held_out,
            on_step=on_step,
        )
        lineage = Lineage(
            self.name,
            self._recipe_digest(),
            self.target.identity.digest,
            self.target.identity.tokenizer_digest,
            self.corpus_digest,
            layers,
        )
        draft.to(target.dtype)  # type: ignore[arg-type]  # annotated as an unbound method
        facts = self._facts(outcome, draft, held_out_coverage) | choice
        facts |= self._guesses(draft, token_ids)
        manifest = save_draft(directory, draft, token_ids, lineage=lineage, training=facts)
        if join().is_main_process:
            shutil.rmtree(partial / "checkpoints" / self.name, ignore_errors=True)
            keep_only(partial / "signals", self._signal_key())
        return manifest

    def _recipe_digest(self) -> str:
        started_from = None if self.source is None else self.source.draft_digest
        return recipe_digest(self.recipe, self.config, started_from=started_from)

    def _key(self) -> str:
        settings = self._recipe_digest()
        return digest_json([self.target.identity.digest, self.corpus_digest, settings])

    def _signal_key(self) -> str:
        kind: list[object] = [self.config.topk] if self.config.signal == "topk" else []
        if self.config.prompt_positions:  # of which those that are held out have none
            kind += ["prompts", self.config.early_stop_patience > 0]
        return short(digest_json([self.target.identity.digest, self.corpus_digest, *kind]))

    def _sequences(self, held_out: Sequence[int]) -> list[TrainingSequence]:
        rows = [(r.prompt_ids, r.response_ids) for r in self.rollouts["train"]]
        sequences = make_sequences(rows)
        return with_prompts(sequences, held_out) if self.config.prompt_positions else sequences

    def _vocabulary(self) -> tuple[Tensor | None, float | None]:
        size = int(self.target.model.get_output_embeddings().weight.shape[0])
        if not 0 < self.recipe.vocabulary_size < size:
            return None, None
        responses = {
            split: count_tokens([rollout.response_ids for rollout in rows], size)
            for split, rows in self.rollouts.items()
        }
        # Answers take up words of their prompts, of which a small corpus has seen few answered.
        prompts = {rollout.prompt_id: rollout.prompt_ids for rollout in self.rollouts["train"]}
        counts = responses["train"] + count_tokens(prompts.values(), size)
        wanted = self.recipe.vocabulary_size
        stop_ids = make_chat(self.target.model, self.target.tokenizer).stop_ids
        token_ids = choose_tokens(counts, wanted, always=stop_ids)
        held_out = coverage(responses["eval"], token_ids)
        _LOG.info("draft_vocabulary=%d held_out_coverage=%.3f", len(token_ids), held_out)
        return token_ids, held_out

    def _layers(
        self, token_ids: Tensor | None, sequences: Sequence[TrainingSequence]
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The layers that the draft is about, and what the manifest says of their choice."""
        target, recipe = self.target.model, self.recipe
        num_layers = int(target.config.get_text_config().num_hidden_layers)
        wanted = recipe.layers if isinstance(recipe, StudentConfig) else None
        if not isinstance(wanted, LayerChoice):
            return named_layers(recipe, num_layers), {}
        if self.source is not None and len(self.source.layers) == wanted.choose:
            return self.source.layers, {}  # chosen before: its weights belong to them
        loss_of = calibration_loss(target, token_ids, sequences, divergence_of(self.config))
        chosen = choose_layers(num_layers, wanted.choose, loss_of)
        return chosen.layers, {"layer_choice": {"losses": list(chosen.losses)}}

    def _held_out(self) -> list[int]:
        """Training sequences that early stopping judges by."""
        if self.config.early_stop_patience == 0:
            return []
        answered = [r.prompt_id for r in self.rollouts["train"] if r.response_ids]
        return held_out_indices(answered)

    def _make_trainable(self, draft: PreTrainedModel) -> None:
        """Trained weights in float32; embedding and head stay the target's own."""
        if draft.device.type == "cpu":
            # The backward pass of torch's fused attention in bfloat16 is slow there: a training
            # step took 233 ms without it and 283 with it.
            draft.set_attn_implementation("eager")
        in_float32(draft)

    def _signals(
        self,
        partial: Path,
        sequences: list[TrainingSequence],
        draft: PreTrainedModel,
        token_ids: Tensor | None,
    ) -> SignalSource:
        target, config = self.target.model, self.config
        features = draft.feature_layers if isinstance(draft, EagleHead) else ()
        if config.signal == "online":
            return OnlineSignals(target, features)
        folder, max_gb = partial / "signals" / self._signal_key(), config.max_cache_gb
        with join().main_process_first():  # who comes later finds it
            if config.signal == "cache":
                return CachedSignals(
                    folder, target, sequences, max_gb=max_gb, feature_layers=features
                )
            return TopKSignals(
                folder, target, sequences, token_ids=token_ids, k=config.topk, max_gb=max_gb
            )

    def _check_signal(self) -> None:
        signal, family = self.config.signal, self.recipe.family
        if signal == "topk" and family != "student":
            raise DraftError(
                f"distilling {self.name}",
                found="distill.signal: topk, which holds probabilities only",
                expected=f"the target's states, which a recipe of family {family} reads",
                remedy="set distill.signal to cache or online",
            )
        if divides_target() and signal != "online":
            raise DraftError(
                f"distilling {self.name} with a target that FSDP divides",
                found=f"distill.signal: {signal}, which one process fills for all",
                expected="signals that all processes make together, in every step",
                remedy="set distill.signal to online, or launch without FSDP",
            )

    def _facts(
        self, outcome: TrainingOutcome, draft: PreTrainedModel, held_out_coverage: float | None
    ) -> dict[str, Any]:
        lengths = [len(r.prompt_ids) + len(r.response_ids) for r in self.rollouts["train"]]
        return (
            {
                "steps": self.settings.steps,
                "steps_done": int(outcome.history[-1]["step"]),  # fewer where it stopped early
                "batch_size": self.config.batch_size,
                "seed": self.config.seed,
                "predicted_tokens": outcome.num_tokens,
                "mask_coverage": outcome.mask_coverage,
                "longest_sequence": max(lengths),
                "trained_parameters": num_trained_parameters(draft),
                "held_out_coverage": held_out_coverage,
                "loss": outcome.history[-1]["loss"],
                "history": [
                    {name: entry[name] for name in ("step", "loss", "alpha")}
                    for entry in outcome.history
                ],
            }
            | self._judged(outcome)
            | self._origin()
        )

    def _guesses(self, draft: PreTrainedModel, token_ids: Tensor | None) -> dict[str, Any]:
        if not isinstance(draft, MedusaHeads):
            return {}
        found = held_out_guesses(draft, self.target.model, token_ids, self.rollouts["eval"])
        return {"held_out_guesses": found}

    def _judged(self, outcome: TrainingOutcome) -> dict[str, Any]:
        if not outcome.evaluations:
            return {}
        kept = outcome.evaluations[outcome.best]
        return {"early_stop": {"kept": kept, "evaluations": list(outcome.evaluations)}}

    def _origin(self) -> dict[str, Any]:
        if self.source is None:
            return {}
        digests = {
            "pair_digest": self.source.pair_digest,
            "draft_digest": self.source.draft_digest,
        }
        return {"started_from": digests}
