"""Rows are taken back to their prompts: whoever came before, an arm decodes what it would alone."""

from __future__ import annotations

from benchmarks import rewound
from benchmarks.rewound import NONE, Rewound, Turn, take_turns
from draftsmith.decoding import FixedLengths, Lengths, Tree
from draftsmith.decoding.trace import block_efficiency
from draftsmith.evaluation.arms import Contestants

LIMIT = Lengths(3, 5)
TREE = Tree((0, 0, 1, 1, 3))


def check_answers(pair, group):
    """Greedy answers hold no trace of lengths or trees."""
    answers = []
    drafting = Rewound(pair, group, tokens=16, limit=LIMIT, max_nodes=TREE.num_nodes)
    plain = Rewound(pair, group, tokens=16, limit=NONE)
    turns = [
        (plain, NONE, None),
        (drafting, NONE, None),
        (drafting, Lengths(3, 0), None),
        (drafting, Lengths(3, 0), TREE),
        (drafting, Lengths(2, 5), None),
        (drafting, Lengths(3, 0), TREE),
        (plain, NONE, None),
    ]
    for rows, lengths, tree in turns:
        rows.rewind(FixedLengths(lengths), tree)
        assert rows.decode() >= 16 * len(group)
        answers.append([row.answer_ids for row in rows._engine._batch.rows])
        rounds = [r for t in rows.traces for r in zip(t.drafted, t.from_text, strict=True)]
        assert max(drafted for drafted, is_copy in rounds if not is_copy) == lengths.draft
        assert any(any(trace.ranks) for trace in rows.traces) == (tree is not None)
    for of_row in zip(*answers, strict=True):
        shortest = min(of_row, key=len)
        assert len(shortest) > 3
        assert {tuple(answer[: len(shortest)]) for answer in of_row} == {tuple(shortest)}


def test_arms_decode_the_same_behind_prompts_that_were_read_once(target, drafts, prompts):
    check_answers(Contestants(target, drafts["student"], ()), [ids for _, ids in prompts[:3]])


def test_turns_alternate_and_the_first_one_is_not_counted(target, drafts, prompts, monkeypatch):
    pair = Contestants(target, drafts["student"], ())
    order = []

    def timed(action):
        order.append(action.__self__)
        return 1.0, action()

    monkeypatch.setattr(rewound, "timed", timed)
    made = []

    def arms(group):
        rows = [Rewound(pair, group, tokens=4, limit=limit) for limit in (NONE, Lengths(2, 0))]
        made.append(rows)
        return {
            name: Turn(one, FixedLengths(lengths))
            for name, one, lengths in zip("ab", rows, (NONE, Lengths(2, 0)), strict=True)
        }

    groups = iter([[ids for _, ids in prompts[:2]], [ids for _, ids in prompts[2:4]]])
    timings, traces = take_turns(arms, groups, turns=1)
    (a, b), (c, d) = made
    assert order == [a, b, b, a, c, d]
    assert timings["a"].seconds == [1.0, 1.0]
    assert block_efficiency(traces["a"]) == 1.0
    assert block_efficiency(traces["b"]) > 1.0
    assert len(traces["b"]) == 4
