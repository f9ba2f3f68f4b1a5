"""`python -m benchmarks.advice` on a tiny pair: what is measured, not what it comes to."""

from __future__ import annotations

import json

import pytest

from benchmarks import advice
from draftsmith.artifacts import write_json
from draftsmith.decoding import Tree
from draftsmith.evaluation.workload import Choice, Workload
from draftsmith.provenance import device
from draftsmith.registry.advice_table import SCHEMA
from draftsmith.registry.pair import pair_digest
from tests.tiny_target import write_prompts

ARMS = ["no drafts", "draft 1", "draft 2", "draft 3", "draft 4", advice.ADVISED]


def entry(batch_size, context, temperature=0.0, *, draft=1, copy=0, tree=()):
    return {
        "batch_size": batch_size,
        "context": context,
        "new_tokens": 8,
        "temperature": temperature,
        "draft_length": draft,
        "copy_length": copy,
        "tree": list(tree),
    }


ENTRIES = [
    entry(1, 16, copy=2),
    entry(1, 16, 0.7, draft=0),
    entry(4, 16, draft=1, tree=(0, 0)),
    entry(4, 16, 0.7, draft=0, copy=3),
]


@pytest.fixture
def told(loaded, drafts):
    """Advice on the pair of the tests."""
    digest = pair_digest(loaded.identity.digest, drafts["trimmed"].manifest.digest)
    facts = {"schema": SCHEMA, "pair_digest": digest, "device": device()}
    return facts | {"workloads": ENTRIES}


@pytest.fixture
def run(checkpoint, draft_folders, tmp_path, monkeypatch, told):
    """Run the program with such advice and seconds; returns its status and the JSON's path."""
    monkeypatch.setattr(advice, "ADVICE", tmp_path / "advice.json")
    monkeypatch.setattr(advice, "SIZES", (1, 3))
    monkeypatch.setattr(advice, "CONTEXTS", (12, 40))
    monkeypatch.setattr(advice, "ANSWERS", (5,))
    write_prompts(tmp_path / "prompts.jsonl")

    def call(seconds, content=told):
        out = tmp_path / "out.json"
        if content is not None:
            write_json(tmp_path / "advice.json", content)
        pair = ["--target", str(checkpoint), "--draft", str(draft_folders["trimmed"])]
        files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
        return advice.main([*pair, *files, "--budget", str(seconds)]), out

    return call


@pytest.mark.slow
def test_every_arm_decodes_every_batch_and_is_printed_and_written(run, capsys):
    status, out = run(600)
    assert status == 0
    report, text = json.loads(out.read_text()), capsys.readouterr().out
    cells = {(b["batch_size"], b["context"], b["temperature"]) for b in report["batches"]}
    assert cells == {(size, 12, t) for size in (1, 3) for t in (0.0, 0.7)}
    for batch in report["batches"]:
        assert list(batch["seconds"]) == sorted(ARMS)
        assert set(batch["tokens"].values()) == {5 * batch["batch_size"]}
        assert all(seconds > 0 for seconds in batch["seconds"].values())
    assert set(report["tokens_per_s"]) == set(ARMS)
    assert set(report["advised_over"]) == set(ARMS) - {advice.ADVISED}
    seconds = sum(batch["seconds"]["draft 4"] for batch in report["batches"])
    tokens = sum(batch["tokens"]["draft 4"] for batch in report["batches"])
    assert report["tokens_per_s"]["draft 4"] == pytest.approx(tokens / seconds)
    assert all(name in text for name in ARMS)
    gain = report["advised_over"]["draft 4"]["mean"]
    assert f"more than draft 4: {'met' if gain > 1 else 'missed'}" in text


def test_without_time_one_batch_is_decoded(run):
    status, out = run(0)
    assert status == 0
    assert len(json.loads(out.read_text())["batches"]) == 1


def test_a_batch_is_decoded_as_was_advised_on_what_is_most_like_it(told):
    def found(*workload):
        return advice.advised(told, Workload(*workload))

    assert found(1, 100, 50, 0.0) == Choice(1, 2)
    assert found(2, 10, 50, 0.0) == Choice(1, 0, Tree((0, 0)))
    assert found(3, 10, 50, 0.7) == Choice(0, 3)
    assert found(1, 10, 50, 0.7) == Choice(0, 0)


@pytest.mark.parametrize("change", [None, {"pair_digest": "e" * 64}, {"device": {"name": "other"}}])
def test_without_advice_on_this_pair_here_it_says_what_to_run(run, told, change, capsys):
    status, out = run(1, None if change is None else told | change)
    assert status == 2
    assert "draftsmith advise" in capsys.readouterr().err
    assert not out.exists()
