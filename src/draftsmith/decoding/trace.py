"""What happened in a request's rounds: integers, no clocks. Ratios are taken last, from sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftsmith.errors import DecodingError


@dataclass
class Trace:
    """One entry a round.

    Attributes:
        drafted: Tokens proposed.
        accepted: Proposed tokens that were accepted, before trimming at a stop token or at the
            length limit.
        committed: Tokens that the round added to the result, residual or bonus token included,
            after trimming.
        from_text: Whether the drafts were copied from the text, so that no model guessed them.
        ranks: Of a tree: which guess of its position each accepted token is; empty of a chain.
        is_lossy: Whether drafts were kept by a rule that does not keep the target's law.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    from_text: list[bool] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    is_lossy: bool = False

    def record(
        self,
        *,
        drafted: int,
        accepted: int,
        committed: int,
        from_text: bool = False,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Add a round."""
        self.ranks.append(ranks)
        self.from_text.append(from_text)
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        self.committed.append(committed)

    @property
    def num_rounds(self) -> int:
        """Target forwards that this request took part in, prefill left out."""
        return len(self.committed)


@dataclass(frozen=True)
class PositionCounts:
    """Rounds by draft position.

    Attributes:
        drafted: Rounds that drafted it.
        reached: Rounds that accepted all before it.
        accepted: Rounds that accepted it.
    """

    drafted: list[int]
    reached: list[int]
    accepted: list[int]

    @property
    def survival(self) -> list[float]:
        """Share of rounds in which position i was accepted, over the rounds that drafted it."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Acceptance at i given that all before it were accepted."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]


def of_lossless(traces: Iterable[Trace]) -> list[Trace]:
    """The same traces, all of which may count for a pair.

    Raises:
        DecodingError: Some are of an engine that is lossy.
    """
    counted = list(traces)
    num_lossy = sum(trace.is_lossy for trace in counted)
    if num_lossy:
        raise DecodingError(
            "counting what a pair accepts",
            found=f"{num_lossy} of {len(counted)} requests that a lossy engine decoded",
            expected="requests that were decoded losslessly",
            remedy="decode them with verify='rejection' or 'match'",
        )
    return counted


def position_counts(
    traces: Iterable[Trace], num_positions: int, *, from_text: bool = False
) -> PositionCounts:
    """Sum the traces by draft position: rounds of the draft, or those copied from the text.

    A round that was trimmed says nothing of the positions behind its last committed token, so these
    are not counted as drafted: a round that drafted 4, accepted 4 and committed 2 (a stop token)
    counts positions 0 and 1 only. Of a tree the first guesses are counted, which are those that a
    chain would have drafted.
    """
    drafted, reached, accepted = ([0] * num_positions for _ in range(3))
    for trace in of_lossless(traces):
        for index, num_drafted in enumerate(trace.drafted):
            if trace.from_text[index] != from_text:
                continue
            num_accepted, num_committed = trace.accepted[index], trace.committed[index]
            is_whole = num_committed > num_accepted
            beside = next((place for place, rank in enumerate(trace.ranks[index]) if rank), None)
            num_accepted = num_accepted if beside is None else beside
            visible = num_drafted if is_whole else min(num_drafted, num_committed)
            for place in range(min(visible, num_positions)):
                drafted[place] += 1
                reached[place] += place <= num_accepted
                accepted[place] += place < num_accepted
    return PositionCounts(drafted, reached, accepted)


def block_efficiency(traces: Sequence[Trace]) -> float:
    """Tokens committed per target forward over all traces (tau); 0 without rounds."""
    counted = of_lossless(traces)
    rounds = sum(trace.num_rounds for trace in counted)
    return sum(sum(trace.committed) for trace in counted) / rounds if rounds else 0.0


def accepted_fraction(traces: Sequence[Trace]) -> float:
    """Accepted over drafted, from sums; 0 when nothing was drafted."""
    drafted = sum(sum(trace.drafted) for trace in traces)
    return sum(sum(trace.accepted) for trace in traces) / drafted if drafted else 0.0
