"""The test that a pair has behind it before it answers."""

from __future__ import annotations

from draftsmith.serving.served_pair import EngineOptions, prepare, self_test
from draftsmith.serving.settings import Limits

NUM_TOKENS = 20


def test_it_pauses_once_a_round_for_all_prompts_together(pair):
    """Whoever is served meanwhile waits for one round at a time, and for no more rounds."""
    limits = Limits(max_rows=4, max_context=256)
    served = prepare(pair, "demo", "1", options=EngineOptions(3), limits=limits)
    num_pauses = sum(1 for _ in self_test(served))
    assert NUM_TOKENS < num_pauses <= 2 * NUM_TOKENS
    assert served.engine.max_context == served.max_tokens
    assert not served.engine.is_busy
