"""The rows of the table of recipes: what is trained, for how long, from what and on what.

`RECIPE`, then what differs from the project's settings: `@STEPS`, `without DOMAIN` (its training
prompts are left out), and `warm ` in front where a draft is trained on.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from draftsmith.artifacts import digest_json, short
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.warm_start import DraftSource
from draftsmith.drafts.settings import (
    EagleConfig,
    LayerChoice,
    MedusaConfig,
    StudentConfig,
    TrainedConfig,
)
from draftsmith.errors import ConfigError

TRIMMED, WHOLE = 8192, 0
FORM = "[warm ]RECIPE[@STEPS][ without DOMAIN]"
_ROW = re.compile(
    r"(?P<warm>warm )?(?P<recipe>.+?)(@(?P<steps>[1-9]\d*))?( without (?P<domain>.+))?"
)

Corpus = tuple[str, dict[str, list[Rollout]]]


def _student(layers: tuple[int, ...] | LayerChoice, vocabulary_size: int) -> StudentConfig:
    return StudentConfig("student", layers, vocabulary_size)


def _eagle(vocabulary_size: int, unroll: int = 2) -> EagleConfig:
    return EagleConfig("eagle", (), vocabulary_size, unroll, 0.8)


RECIPES: dict[str, TrainedConfig] = {
    "eagle, 8k": _eagle(TRIMMED),
    "student, 2 layers, 8k": _student((0, -1), TRIMMED),
    "student, 1 layer, 8k": _student((0,), TRIMMED),
    "student, 4 layers, 8k": _student((0, 1, -2, -1), TRIMMED),
    "student, 2 chosen layers, 8k": _student(LayerChoice(2), TRIMMED),
    "medusa, 8k": MedusaConfig(
        "medusa", 4, 1, own_heads=False, vocabulary_size=TRIMMED, head_decay=0.8
    ),
    "eagle, 8k, unroll 4": _eagle(TRIMMED, 4),
    "eagle, 8k, own head": dataclasses.replace(_eagle(TRIMMED), own_head=True),
    "student, 2 layers": _student((0, -1), WHOLE),
    "eagle": _eagle(WHOLE),
}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: As it was asked for.
        recipe: What is trained.
        config: How.
        source: A draft that the training goes on from; None starts from the target.
        without: A domain whose training prompts are left out.
    """

    name: str
    recipe: TrainedConfig
    config: DistillConfig
    source: DraftSource | None = None
    without: str | None = None

    @property
    def digest(self) -> str:
        """Identity of recipe and settings, as a manifest states it."""
        started_from = None if self.source is None else self.source.draft_digest
        return recipe_digest(self.recipe, self.config, started_from=started_from)

    @property
    def slug(self) -> str:
        """Its name for files."""
        return re.sub(r"[^a-z0-9]+", "-", self.name)

    def folder(self, target_digest: str, corpus_digest: str) -> str:
        """Name of its folder: another target, corpus or setting is another one."""
        key = digest_json([target_digest, corpus_digest, self.digest, self.without])
        return f"{self.slug}-{short(key)}"

    def corpus(self, corpus: Corpus) -> Corpus:
        """What it is trained on.

        Raises:
            ConfigError: The corpus has no training prompts of the domain that is left out.
        """
        if self.without is None:
            return corpus
        digest, splits = corpus
        kept = [rollout for rollout in splits["train"] if rollout.domain != self.without]
        if len(kept) == len(splits["train"]):
            domains = sorted({rollout.domain for rollout in splits["train"]})
            raise _unknown(self.name, f"a domain of the corpus: {', '.join(domains)}")
        return digest_json([digest, self.without]), {**splits, "train": kept}


def row_of(name: str, config: DistillConfig, source: DraftSource | None) -> Row:
    """The row that a name asks for.

    Raises:
        ConfigError: There is no such recipe, or no draft that it could go on from.
    """
    found = _ROW.fullmatch(name)
    if found is None or found["recipe"] not in RECIPES:
        raise _unknown(name, f"{FORM}, RECIPE one of {'; '.join(RECIPES)}")
    if found["warm"] and source is None:
        raise _unknown(name, "the folder of the draft that it goes on from: --warm-start FOLDER")
    steps = int(found["steps"] or config.steps)
    warmup = min(config.warmup_steps, steps)
    config = dataclasses.replace(config, steps=steps, warm_start_steps=steps, warmup_steps=warmup)
    return Row(
        name, RECIPES[found["recipe"]], config, source if found["warm"] else None, found["domain"]
    )


def _unknown(name: str, expected: str) -> ConfigError:
    return ConfigError(
        "choosing the rows of the table",
        found=name,
        expected=expected,
        remedy="see `python -m benchmarks.recipes --help`",
    )
