"""`make bench` on a tiny pair: every ratio is there; none of its values is judged here."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from benchmarks import decoder, measuring
from tests.tiny_target import write_prompts

SMALL = decoder.Tokens(calibration=5, alone=6, batched=4, many=3)


@pytest.fixture
def questions(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path / "prompts.jsonl"


@pytest.mark.slow
def test_every_ratio_is_measured_printed_and_written(
    checkpoint, draft_folders, questions, tmp_path, capsys
):
    out = tmp_path / "bench.json"
    pair = ("--target", str(checkpoint), "--draft", str(draft_folders["trimmed"]))
    options = ("--prompts", str(questions), "--budget", "8", "--out", str(out))
    assert decoder.main([*pair, *options], SMALL) == 0
    report, text = json.loads(out.read_text()), capsys.readouterr().out
    assert set(report["ratios"]) == set(decoder.GOALS)
    for name, ratio in report["ratios"].items():
        assert 0 < ratio["low"] <= ratio["mean"] <= ratio["high"]
        assert name in text
    shares = report["share_outside_forwards"]
    assert len(shares) == 4
    assert all(0 < share < 1 for share in shares.values())
    assert report["device"]["name"] in text
    assert set(report["parts"]["calibration"]["best"]) == {
        "generate",
        "assisted",
        "lookup",
        "engine",
    }


def test_a_rival_that_raises_is_a_result_and_not_the_end():
    def broken(prompts):
        raise ValueError("no static cache\nand more")

    working, seconds, refused = measuring.usable({"a": len, "b": broken}, [[1]])
    assert list(working) == list(seconds) == ["a"]
    assert refused == {"b": "ValueError: no static cache"}


def test_groups_go_round_until_the_time_is_over_and_are_enough():
    prompts = [[1], [2], [3]]
    past = time.monotonic() - 1
    assert list(measuring.within(prompts, 2, until=past, at_least=2)) == [[[1], [2]], [[3], [1]]]
    endless = measuring.within(prompts, 1, until=past + 1000, at_least=0, at_most=4)
    assert list(itertools.chain(*endless)) == [[1], [2], [3], [1]]


def test_a_budget_shares_out_what_is_left():
    budget = measuring.Budget(100.0)
    assert budget.share(0.5) < budget.share(0.9) <= time.monotonic() + 90.0
    assert measuring.Budget(-5.0).share(0.5) <= time.monotonic()


def test_a_table_lines_up():
    text = measuring.table(("arm", "x"), [["a", "1.0"], ["longer", "10.0"]])
    assert text.splitlines() == ["arm        x", "a        1.0", "longer  10.0"]


@pytest.mark.parametrize("name", ["--target", "--draft"])
def test_half_a_pair_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        decoder.main([name, "somewhere"])
    assert "go together" in capsys.readouterr().err
