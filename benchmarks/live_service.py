"""Simulated service of a draft whose acceptance rates by prompt were measured on a real pair.

A request draws the measured rate of a prompt and decodes rounds with it; the reference is measured
on some of these prompts, as stage evaluate does. So both sides carry the noise that they have in
life. Tests and `python -m benchmarks.live_calibration` share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from draftsmith.artifacts import read_json
from draftsmith.drift.settings import MonitorConfig
from draftsmith.drift.telemetry import ServedRequest
from draftsmith.evaluation.intervals import bootstrap_ratio_of_sums

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs/measurements/alpha-by-prompt-default-pair.json"
TEMPERATURE = "0.0"
MARGIN = 0.02
DIGEST = "pair-1"
_START = datetime(2026, 3, 1, tzinfo=UTC)
_EVALUATION = {"num_tokens": 48, "draft_length": 4}


def _measured_rates() -> dict[str, list[float]]:
    rates: dict[str, list[float]] = defaultdict(list)
    for entry in read_json(MEASURED)["by_prompt"]:
        rates[entry["domain"]].append(entry[TEMPERATURE])
    return dict(rates)


RATES = _measured_rates()
DOMAINS = sorted(RATES)


def monitor_config(**changes: float) -> MonitorConfig:
    """The settings of conf/monitor/default.yaml, but for `changes`."""
    usual = yaml.safe_load((ROOT / "conf/monitor/default.yaml").read_text(encoding="utf-8"))
    return MonitorConfig(**{**usual, **changes})


def decode_rounds(
    rng: np.random.Generator, rate: float, *, num_tokens: int, draft_length: int
) -> tuple[list[int], int]:
    """Accepted rounds by position, and the number of rounds, of an answer of `num_tokens`."""
    accepted = np.cumprod(rng.random((num_tokens, draft_length)) < rate, axis=1)
    committed = np.cumsum(accepted.sum(axis=1) + 1)
    rounds = int(np.searchsorted(committed, num_tokens)) + 1
    return accepted[:rounds].sum(axis=0).tolist(), rounds


def served(  # noqa: PLR0913  what a request is
    rng: np.random.Generator,
    index: int,
    *,
    domain: str,
    lost: float = 0.0,
    draft_length: int = 1,
    prompt_tokens: int | None = None,
    digest: str = DIGEST,
    labelled: bool = True,
    temperature: float = 0.0,
) -> ServedRequest:
    """Request number `index`; `lost` is what its draft accepts less than it was measured with."""
    rate = min(max(float(rng.choice(RATES[domain])) - lost, 0.01), 0.99)
    num_tokens = int(rng.integers(24, 97))
    accepted, rounds = decode_rounds(rng, rate, num_tokens=num_tokens, draft_length=draft_length)
    return ServedRequest(
        time_utc=(_START + timedelta(seconds=index)).isoformat(),
        pair_digest=digest,
        domain=domain if labelled else None,
        temperature=temperature,
        prompt_tokens=int(rng.integers(20, 400)) if prompt_tokens is None else prompt_tokens,
        rounds=rounds,
        drafted=(rounds,) * draft_length,
        accepted=tuple(accepted),
        draft_lengths=(0,) * draft_length + (rounds,),
        committed=num_tokens,
        latency_s=1.0,
    )


def stream(num_requests: int, seed: int, **given: Any) -> list[ServedRequest]:  # noqa: ANN401  a value, or one by index
    """Requests of all domains in even shares.

    Args:
        num_requests: How many.
        seed: Of everything drawn.
        **given: Arguments of `served`, or functions of the index that give them; `domain` may be
            a list to draw from.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(num_requests):
        values = {name: v(index) if isinstance(v, Callable) else v for name, v in given.items()}
        choice = values.pop("domain", DOMAINS)
        domain = choice if isinstance(choice, str) else choice[int(rng.integers(len(choice)))]
        requests.append(served(rng, index, domain=domain, **values))
    return requests


def evaluation_record(seed: int, *, per_domain: int = 11, digest: str = DIGEST) -> dict[str, Any]:
    """A RecipeEvaluation of the simulated pair, `per_domain` prompts of each domain decoded."""
    rng = np.random.default_rng(seed)
    prompts: list[dict[str, Any]] = []
    decoded: dict[str, list[tuple[float, float]]] = defaultdict(list)
    alphas: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for domain, rates in RATES.items():
        for place, rate in enumerate(rng.permutation(rates).tolist()):
            entry = {"prompt_id": f"{domain}-{place}", "domain": domain, "tau": {}}
            measured = {"alpha": {TEMPERATURE: rate}, "num_tokens": {TEMPERATURE: 96}}
            prompts.append(entry | measured)
            alphas[domain].append((rate, 1))
            if place < per_domain:
                accepted, rounds = decode_rounds(rng, rate, **_EVALUATION)
                decoded[domain].append((accepted[0], rounds))
    survival = _by_domain(decoded)
    rounds = sum(int(rounds) for pairs in decoded.values() for _, rounds in pairs)
    return {
        "recipe": "student",
        "draft_digest": "draft-1",
        "pair_digest": digest,
        "alpha": {TEMPERATURE: _by_domain(alphas)},
        "prompts": prompts,
        "positions": {TEMPERATURE: [{"survival": survival, "conditional_acceptance": survival}]},
        "position_counts": {TEMPERATURE: [rounds]},
    }


def _by_domain(groups: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    everything = [pair for pairs in groups.values() for pair in pairs]
    return _estimate(everything) | {"by_domain": {d: _estimate(p) for d, p in groups.items()}}


def _estimate(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return asdict(bootstrap_ratio_of_sums(*zip(*pairs, strict=True), seed=0))
