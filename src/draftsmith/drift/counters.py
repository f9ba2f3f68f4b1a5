"""What engines counted between scrapes of their counters, whatever restarted in between. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a window may hold, by the names that vLLM gives its counters.
ROUNDS = "num_drafts"
DRAFT_TOKENS = "num_draft_tokens"
FIRST_ACCEPTED = "num_accepted_tokens_per_pos 0"


@dataclass(frozen=True)
class Engine:
    """What one engine has counted since its process started.

    Attributes:
        counts: By name, and by name and position where a counter has one.
        created: When a counter was created, by the same keys, as far as the server says so.
    """

    counts: Mapping[str, float]
    created: Mapping[str, float]


def counted(scrapes: Sequence[Mapping[str, Engine]]) -> tuple[dict[str, float], int]:
    """Sum what all engines counted from the first scrape to the last, or ever if there is one.

    A counter that starts anew counts from zero; so does an engine that was not there before. As
    the engine's process restarts as a whole, so do its counters here.

    Args:
        scrapes: The engines by name, oldest scrape first.

    Returns:
        Counts by key, and how many restarts were noticed.
    """
    known = dict(scrapes[0]) if len(scrapes) > 1 else {}
    total: dict[str, float] = defaultdict(float)
    num_restarts = 0
    for name, engine in ((n, e) for scrape in (scrapes[1:] or scrapes) for n, e in scrape.items()):
        before = known.get(name)
        if before is not None and _has_restarted(before, engine):
            num_restarts, before = num_restarts + 1, None
        for key, value in engine.counts.items():
            # A counter seen for the first time on a known engine tells nothing of this window.
            total[key] += value - (0.0 if before is None else before.counts.get(key, value))
        earlier = {} if before is None else before.counts
        known[name] = Engine({**earlier, **engine.counts}, engine.created)
    return dict(total), num_restarts


def _has_restarted(before: Engine, after: Engine) -> bool:
    has_fallen = any(after.counts.get(key, was) < was for key, was in before.counts.items())
    is_new = any(after.created.get(key, time) != time for key, time in before.created.items())
    return has_fallen or is_new
