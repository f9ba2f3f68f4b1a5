"""Reading prompts in pieces, and judging drafts: timed as the engine does them."""

from __future__ import annotations

import pytest

from draftsmith.evaluation import side_costs
from draftsmith.evaluation.side_costs import judging_ms, reading_ms


@pytest.fixture
def forwards(target):
    """Shapes of the target's forwards."""
    shapes = []

    def note(_module, _given, named):
        shapes.append(tuple(named["input_ids"].shape))

    hook = target.register_forward_pre_hook(note, with_kwargs=True)
    yield shapes
    hook.remove()


@pytest.fixture
def small_chunks(monkeypatch):
    """An engine that reads 16 positions a step."""
    whole = side_costs.Reading.of
    monkeypatch.setattr(side_costs, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(side_costs.Reading, "of", lambda *sizes: whole(*sizes, chunk=16))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("rows", "context", "widths"),
    [(3, 5, [(3, 4)]), (8, 5, [(4, 4)]), (2, 36, [(1, 16), (1, 16), (1, 3)]), (2, 1, [])],
)
def test_prompts_are_read_in_the_engines_pieces(target, drafts, forwards, rows, context, widths):
    costs = reading_ms(target, drafts["trimmed"], rows=rows, context=context)
    repeats = 1 + side_costs._REPEATS
    assert forwards == widths * repeats
    assert costs.target >= 0


def test_a_position_is_judged_at_both_kinds_of_temperature(target):
    costs = judging_ms(target, rows=2)
    assert costs.at(0.0) == costs.greedy > 0
    assert costs.at(0.7) == costs.sampled > 0
