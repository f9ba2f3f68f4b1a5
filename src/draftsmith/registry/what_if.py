"""Whether distilling anew pays: how drafts age over updates of their target, and what that costs.

A draft that was taken over by later targets was evaluated on each, so the registry knows how its
acceptance fell. What alpha does to tau is the i.i.d. law, in the rounds that the draft guesses:
what is copied from the text does not age. The rest was measured. Pure.

Source: Leviathan et al. 2023, equation 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.drift.prediction import predicted_tau
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.choice import entry_of
from draftsmith.registry.pair import PairVersion, pair_digest

_SECONDS_PER_HOUR = 3600
_LEAST_ALPHA = 1e-6  # an alpha of 0 has no logarithm


@dataclass(frozen=True)
class Aged:
    """A draft on a target.

    Attributes:
        draft_digest: Which draft.
        updates: Targets that came after the one it was first evaluated on, this one included.
        alpha: Its acceptance rate there.
    """

    draft_digest: str
    updates: int
    alpha: float


def aged_drafts(
    versions: Sequence[PairVersion], incumbent: Mapping[str, Any], target_digest: str | None
) -> list[Aged]:
    """Every draft on every target that it was evaluated on.

    Args:
        versions: Of the registry, oldest first; targets are counted in the order in which they came
            to it. A target that came back is none that came later.
        incumbent: reports/incumbent.json: the draft of another target on the current one; empty
            where there is none. One that is of another target than the current, or has no alpha at
            the temperature of the versions' tags, tells nothing.
        target_digest: The current target.
    """
    seen = [
        (v.pair.draft_digest, v.pair.target_digest, float(v.tags["alpha"]))
        for v in versions
        if "alpha" in v.tags
    ]
    temperatures = {v.tags["temperature"] for v in versions if "temperature" in v.tags}
    pair, measured = incumbent.get("incumbent"), incumbent.get("record")
    if pair and measured and target_digest is not None and len(temperatures) == 1:
        draft, (temperature,) = str(pair["draft_digest"]), temperatures
        is_current = measured.get("pair_digest") == pair_digest(target_digest, draft)
        proposed = (incumbent.get("by_temperature") or {}).get(temperature)
        if is_current and proposed:
            seen.append((draft, target_digest, float(proposed["proposed"])))
    targets = dict.fromkeys(target for _, target, _ in seen)
    order = {target: index for index, target in enumerate(targets)}
    first: dict[str, int] = {}
    found: dict[tuple[str, int], Aged] = {}
    for draft, target, alpha in seen:
        updates = order[target] - first.setdefault(draft, order[target])
        if updates >= 0:
            found.setdefault((draft, updates), Aged(draft, updates, alpha))
    return list(found.values())


def alpha_when_new(drafts: Sequence[Aged], draft_digest: str) -> float | None:
    """What a draft had on the target that it was first evaluated on; None where nobody knows."""
    return next((d.alpha for d in drafts if (d.draft_digest, d.updates) == (draft_digest, 0)), None)


def retention(drafts: Sequence[Aged]) -> float | None:
    """Share of alpha that is left after one update of the target; None where no draft was kept.

    The geometric mean over what was seen, as if each update took the same share.
    """
    fresh = {draft.draft_digest: draft.alpha for draft in drafts if draft.updates == 0}
    losses = [
        math.log(max(draft.alpha, _LEAST_ALPHA) / max(fresh[draft.draft_digest], _LEAST_ALPHA))
        / draft.updates
        for draft in drafts
        if draft.updates and draft.draft_digest in fresh
    ]
    return math.exp(statistics.fmean(losses)) if losses else None


@dataclass(frozen=True)
class Service:
    """What a pair is asked for, and what a device costs.

    Attributes:
        tokens_per_day: Of all answers.
        price_per_hour: Of a device, in any currency.
        training_hours: Of a device: corpus, distillation and evaluation of a new draft.
        batch_size: Requests that are decoded together.
    """

    tokens_per_day: float
    price_per_hour: float
    training_hours: float
    batch_size: int = 1


@dataclass(frozen=True)
class Outcome:
    """A new draft against the old one.

    Attributes:
        alpha: Acceptance of a new draft, and of the old one on the new target.
        speedup: Likewise; 1 at least, since a service may decode without drafts.
        device_hours_per_day: Likewise.
        saved_per_day: By the new draft, in the price's currency.
        cost: Of distilling it.
        break_even_days: Until it has saved what it cost; None is never.
    """

    alpha: tuple[float, float]
    speedup: tuple[float, float]
    device_hours_per_day: tuple[float, float]
    saved_per_day: float
    cost: float
    break_even_days: float | None


def outcome(
    measured: Mapping[str, Any],
    service: Service,
    *,
    fresh: float,
    aged: float,
    own: float | None = None,
    copied: Mapping[str, Any] | None = None,
) -> Outcome:
    """What a new draft saves over the old one on a new target.

    Args:
        measured: The pair's record of the benchmark.
        service: Traffic and price.
        fresh: Alpha of a new draft on its target.
        aged: Alpha of the old draft on the new target.
        own: Alpha that the pair had when it was measured; None is that of a new draft.
        copied: Share of the rounds that are copied from the text and their survival by position,
            as evaluated; None copies nothing.

    Raises:
        EvidenceError: The record does not say how fast the target decodes alone.
    """
    speedup, lengths, plain = _speed(measured, service.batch_size)
    scale = speedup / _tau(fresh if own is None else own, lengths, copied)
    new, old = (max(1.0, scale * _tau(alpha, lengths, copied)) for alpha in (fresh, aged))
    speedups = (new, old)
    per_hour = [plain * value * _SECONDS_PER_HOUR for value in speedups]
    hours = (service.tokens_per_day / per_hour[0], service.tokens_per_day / per_hour[1])
    saved = hours[1] - hours[0]
    return Outcome(
        alpha=(fresh, aged),
        speedup=speedups,
        device_hours_per_day=hours,
        saved_per_day=saved * service.price_per_hour,
        cost=service.training_hours * service.price_per_hour,
        break_even_days=service.training_hours / saved if saved > 0 else None,
    )


def _tau(alpha: float, lengths: tuple[int, int], copied: Mapping[str, Any] | None) -> float:
    """Tokens of a round at an acceptance rate and at draft and copy lengths."""
    draft, copy = lengths
    guessed = predicted_tau(alpha, draft)
    if not copied or not copy:
        return guessed
    share = float(copied["share"])
    return (1 - share) * guessed + share * (1.0 + float(sum(copied["survival"][:copy])))


def _speed(measured: Mapping[str, Any], rows: int) -> tuple[float, tuple[int, int], float]:
    """Speedup, draft and copy lengths and tokens/s without drafts at a batch size."""
    entry = entry_of(measured, rows)
    copy = int(entry.get("lookup_length", measured.get("lookup_length")) or 0)
    try:
        if entry is measured:
            length = measured.get("chain_length", measured["draft_length"])
            plain = measured["arms"]["gamma_0"]["tokens_per_s"]
            return float(measured["speedup"]["mean"]), (int(length), copy), float(plain)
        plain = float(entry["baseline_tokens_per_s"])
        return float(entry["speedup"]), (int(entry["draft_length"]), copy), plain
    except KeyError as error:
        raise EvidenceError(
            "pricing a new draft",
            found=f"a benchmark of the champion without {error}",
            expected="its speed with and without drafts",
            remedy="run `dvc repro`, which measures it anew",
        ) from error


def report(drafts: Sequence[Aged], found: Outcome, *, updates: int) -> dict[str, Any]:
    """The command's `--json`."""
    ages = sorted({draft.updates for draft in drafts})
    seen = {age: [draft.alpha for draft in drafts if draft.updates == age] for age in ages}
    return {
        "alpha_by_updates": [
            {"updates": age, "alpha": statistics.fmean(alphas), "num_drafts": len(alphas)}
            for age, alphas in seen.items()
        ],
        "retention": retention(drafts),
        "updates": updates,
        **asdict(found),
    }
