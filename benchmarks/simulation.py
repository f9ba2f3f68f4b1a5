"""Simulated runs of the drift verdicts on changes of alpha that were really measured.

A run draws prompts with replacement from the measured ones, takes their changes about the mean and
adds a known change. So the spread, its skew and its tails are those of real rollouts; only the
truth is chosen. Mirrored changes are what the way back would give: the draft of the updated target
on the old one. Knows no files but the measured ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from draftsmith.drift.comparison import Comparison, compare, compare_domains
from draftsmith.drift.settings import DriftConfig
from draftsmith.strict import build

MEASUREMENTS = Path(__file__).parents[1] / "docs" / "measurements"
Vector = NDArray[np.float64]
Judge = Callable[[Comparison, DriftConfig], str]


def default_config() -> DriftConfig:
    """The drift section as conf/ has it."""
    path = Path(__file__).parents[1] / "conf" / "drift" / "default.yaml"
    return build(DriftConfig, yaml.safe_load(path.read_text(encoding="utf-8")), "drift")


@dataclass(frozen=True)
class Measured:
    """Alpha of the same prompts twice.

    Attributes:
        name: What happened in between.
        domains: Domain of every prompt.
        before: Shape [num_prompts].
        after: Same shape.
    """

    name: str
    domains: Sequence[str]
    before: Vector
    after: Vector

    @classmethod
    def read(cls, name: str, temperature: str) -> Measured:
        """Read docs/measurements/alpha-by-prompt-<name>.json at one temperature."""
        path = MEASUREMENTS / f"alpha-by-prompt-{name}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["by_prompt"]
        pairs = np.array([row[temperature] for row in rows], dtype=np.float64)
        return cls(name, [row["domain"] for row in rows], pairs[:, 0], pairs[:, 1])

    def without_largest(self) -> Measured:
        """All prompts but the one whose alpha changed most."""
        kept = np.arange(len(self.before)) != np.abs(self.after - self.before).argmax()
        domains = [name for name, keep in zip(self.domains, kept, strict=True) if keep]
        return replace(self, domains=domains, before=self.before[kept], after=self.after[kept])

    def changes(self, *, mirrored: bool = False, by_domain: bool = False) -> Vector:
        """Changes by prompt about their mean, or about that of their domain."""
        changes = self.before - self.after if mirrored else self.after - self.before
        if not by_domain:
            return changes - changes.mean()
        names = np.array(self.domains)
        means = {name: changes[names == name].mean() for name in set(self.domains)}
        return changes - np.array([means[name] for name in self.domains])


def pooled_runs(
    measured: Measured,
    *,
    num_runs: int,
    num_prompts: int,
    seed: int,
    mirrored: bool = False,
) -> list[Comparison]:
    """Comparisons of two sides that do not differ, one a run.

    A known change is added afterwards by `shifted`: every bound moves along with it.
    """
    changes = measured.changes(mirrored=mirrored)
    rng = np.random.default_rng(seed)
    runs = []
    for run in range(num_runs):
        chosen = rng.integers(0, len(changes), num_prompts)
        before = dict(enumerate_ids(measured.before[chosen]))
        after = dict(enumerate_ids(measured.before[chosen] + changes[chosen]))
        runs.append(compare(before, after, seed=run))
    return runs


def shifted(comparison: Comparison, change: float) -> Comparison:
    """The comparison as it had come out with `change` more on every prompt."""
    moved = {
        name: getattr(comparison, name) + change for name in ("proposed", "change", "low", "high")
    }
    return replace(comparison, **moved)


def shares(
    runs: Sequence[Comparison], judge: Judge, *, drop: float, config: DriftConfig
) -> dict[str, float]:
    """Share of the runs by verdict when alpha really fell by `drop`."""
    counts = Counter(judge(shifted(run, -drop), config) for run in runs)
    return {verdict: count / len(runs) for verdict, count in sorted(counts.items())}


def detectable_drop(
    runs: Sequence[Comparison], judge: Judge, *, power: float, config: DriftConfig
) -> float:
    """The smallest drop that is called drifted in a share `power` of the runs, to 0.0001."""
    low, high = 0.0, 0.5
    while high - low > 1e-4:  # noqa: PLR2004  stated above
        middle = (low + high) / 2
        found = shares(runs, judge, drop=middle, config=config).get("drifted", 0.0)
        low, high = (low, middle) if found >= power else (middle, high)
    return high


def flag_runs(
    measured: Measured,
    *,
    drops: Mapping[str, float],
    num_runs: int,
    seed: int,
    config: DriftConfig,
    mirrored: bool = False,
) -> list[set[str]]:
    """The flagged domains of every run; every domain keeps its number of prompts.

    Args:
        measured: Where the spread comes from; every domain's own mean is taken out.
        drops: True drop by domain; domains that it does not name did not change.
        num_runs: Runs.
        seed: Seed.
        config: Margin and confidence.
        mirrored: Whether changes are turned around.
    """
    changes = measured.changes(mirrored=mirrored, by_domain=True)
    names = np.array(measured.domains)
    places = [np.flatnonzero(names == name) for name in sorted(set(measured.domains))]
    rng = np.random.default_rng(seed)
    runs = []
    for run in range(num_runs):
        chosen = np.concatenate([rng.choice(place, size=len(place)) for place in places])
        true = np.array([-drops.get(name, 0.0) for name in names[chosen]])
        before = dict(enumerate_ids(measured.before[chosen]))
        after = dict(enumerate_ids(measured.before[chosen] + changes[chosen] + true))
        domains = dict(zip(before, names[chosen].tolist(), strict=True))
        judged = compare_domains(before, after, domains=domains, seed=run, config=config)
        runs.append({name for name, domain in judged.items() if domain.flag})
    return runs


def enumerate_ids(values: Vector) -> Iterator[tuple[str, float]]:
    """Values under prompt ids of a run."""
    return ((f"{index:05d}", float(value)) for index, value in enumerate(values))
