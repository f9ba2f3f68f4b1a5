"""Telemetry as Prometheus counters, named after vLLM's: text for a textfile collector. Pure.

Beside the accepted tokens by position stand the DRAFTED ones: where draft lengths vary, the later
positions are drafted in fewer rounds, and accepted over rounds would make them look worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from draftsmith.drift.telemetry import ServedRequest

_PREFIX = "draftsmith_spec_decode_"
_HELP = {
    "num_drafts": "Rounds in which the draft drafted.",
    "num_draft_tokens": "Tokens that it drafted.",
    "num_accepted_tokens": "Of them, tokens that the target accepted.",
    "num_draft_tokens_per_pos": "Tokens that it drafted, by position in the round.",
    "num_accepted_tokens_per_pos": "Tokens that the target accepted, by position in the round.",
}


class PairCounters:
    """Counts of served requests, by pair."""

    def __init__(self) -> None:
        self._drafted: dict[str, list[int]] = {}
        self._accepted: dict[str, list[int]] = {}

    def expect(self, pair_digest: str) -> None:
        """Show a pair before its first request, with nothing counted."""
        self._drafted.setdefault(pair_digest, [])
        self._accepted.setdefault(pair_digest, [])

    def add(self, request: ServedRequest) -> None:
        """Count a request."""
        self.expect(request.pair_digest)
        for counts, places in (
            (self._drafted, request.drafted),
            (self._accepted, request.accepted),
        ):
            sums = itertools.zip_longest(counts[request.pair_digest], places, fillvalue=0)
            counts[request.pair_digest] = [before + added for before, added in sums]

    def exposition(self) -> str:
        """The counters in the Prometheus text format."""
        samples = [sample for pair in sorted(self._drafted) for sample in self._samples(pair)]
        lines = []
        for name, text in _HELP.items():
            full = f"{_PREFIX}{name}_total"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} counter"]
            lines += [
                f"{full}{{{labels}}} {value}" for other, labels, value in samples if other == name
            ]
        return "\n".join(lines) + "\n"

    def _samples(self, pair: str) -> list[tuple[str, str, int]]:
        """Name, labels and value of each counter of one pair."""
        drafted, accepted = self._drafted[pair], self._accepted[pair]
        label = f'pair_digest="{escaped(pair)}"'
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


def exposition(requests: Iterable[ServedRequest]) -> str:
    """Counters over the requests, by pair, in the Prometheus text format.

    The totals fall where old telemetry is taken away, which readers take for a restart.
    """
    counters = PairCounters()
    for request in requests:
        counters.add(request)
    return counters.exposition()


def escaped(text: str) -> str:
    """A label's value as the format writes it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
