"""Telemetry as Prometheus counters, named after vLLM's: text for a textfile collector. Pure.

Beside the accepted tokens by position stand the DRAFTED ones: where draft lengths vary, the later
positions are drafted in fewer rounds, and accepted over rounds would make them look worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from draftsmith.drift.telemetry import ServedRequest

_PREFIX = "draftsmith_spec_decode_"
_HELP = {
    "num_drafts": "Rounds in which the draft drafted.",
    "num_draft_tokens": "Tokens that it drafted.",
    "num_accepted_tokens": "Of them, tokens that the target accepted.",
    "num_draft_tokens_per_pos": "Tokens that it drafted, by position in the round.",
    "num_accepted_tokens_per_pos": "Tokens that the target accepted, by position in the round.",
}


def exposition(requests: Iterable[ServedRequest]) -> str:
    """Counters over the requests, by pair, in the Prometheus text format.

    The totals fall where old telemetry is taken away, which readers take for a restart.
    """
    pairs: dict[str, list[ServedRequest]] = {}
    for request in requests:
        pairs.setdefault(request.pair_digest, []).append(request)
    samples = [sample for pair in sorted(pairs) for sample in _samples(pair, pairs[pair])]
    lines = []
    for name, text in _HELP.items():
        lines += [f"# HELP {_PREFIX}{name}_total {text}", f"# TYPE {_PREFIX}{name}_total counter"]
        lines += [
            f"{_PREFIX}{name}_total{{{labels}}} {value}"
            for other, labels, value in samples
            if other == name
        ]
    return "\n".join(lines) + "\n"


def _samples(pair: str, requests: Sequence[ServedRequest]) -> list[tuple[str, str, int]]:
    """Name, labels and value of each counter of one pair."""
    drafted, accepted = (
        [sum(place) for place in itertools.zip_longest(*counts, fillvalue=0)]
        for counts in ([r.drafted for r in requests], [r.accepted for r in requests])
    )
    escaped = pair.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'pair_digest="{escaped}"'
    return [
        ("num_drafts", label, drafted[0] if drafted else 0),
        ("num_draft_tokens", label, sum(drafted)),
        ("num_accepted_tokens", label, sum(accepted)),
        *(
            (name, f'{label},position="{place}"', value)
            for name, counts in (
                ("num_draft_tokens_per_pos", drafted),
                ("num_accepted_tokens_per_pos", accepted),
            )
            for place, value in enumerate(counts)
        ),
    ]
