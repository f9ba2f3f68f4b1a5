"""`python -m benchmarks.adaptive` on a tiny pair: what is measured, not what it comes to."""

from __future__ import annotations

import json

import pytest

from benchmarks import adaptive
from tests.tiny_target import write_prompts


@pytest.mark.slow
def test_every_cell_is_measured_printed_and_written(
    checkpoint, draft_folders, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(adaptive, "CELLS", ((1, adaptive.SHORT), (3, 40)))
    write_prompts(tmp_path / "prompts.jsonl")
    out = tmp_path / "adaptive.json"
    pair = ("--target", str(checkpoint), "--draft", str(draft_folders["trimmed"]))
    options = ("--prompts", str(tmp_path / "prompts.jsonl"), "--budget", "0", "--out", str(out))
    assert adaptive.main([*pair, *options], tokens=6) == 0
    report, text = json.loads(out.read_text()), capsys.readouterr().out
    assert [cell["rows"] for cell in report["cells"]] == [1, 3]
    assert report["cells"][1]["context"] == 43
    for cell in report["cells"]:
        assert set(cell["tokens_per_s"]) == {
            adaptive.ADAPTIVE,
            *map(adaptive.named, adaptive.FIXED),
        }
        assert cell["tokens_per_s"][cell["best_fixed"]] == max(
            cell["tokens_per_s"][adaptive.named(each)] for each in adaptive.FIXED
        )
        assert cell["adaptive_over_best_fixed"]["mean"] > 0
        assert 0 <= cell["share_proposing_nothing"] <= 1
        assert cell["best_fixed"] in text


def test_a_context_is_filled_with_the_prompts_before():
    prompts = [[1, 2], [3, 4, 5], [6]]
    assert adaptive.deepened(prompts, adaptive.SHORT) == prompts
    assert adaptive.deepened(prompts, 4) == [
        [4, 5, 6, 1, 2][-4:],
        [1, 2, 3, 4, 5][-4:],
        [3, 4, 5, 6],
    ]
