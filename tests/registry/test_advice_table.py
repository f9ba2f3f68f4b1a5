"""Advice that an engine starts from: whose it is, which workload counts, what is decoded."""

from __future__ import annotations

import pytest

from draftsmith.artifacts import write_json, write_text
from draftsmith.decoding import Lengths, Tree
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.provenance import device
from draftsmith.registry.advice_table import (
    ADVICE,
    SCHEMA,
    is_of_device,
    nearest_entry,
    read_advice,
)
from draftsmith.registry.generation import Pair
from draftsmith.registry.loading import load_directory
from draftsmith.targets.loading import load_target
from tests.registry.tiny_models import save_draft_for, save_target

TREE = [0, 0, 1]
MEASURED = {"draft_length": 3, "lookup_length": 4, "temperature": 0.0}


def workload(batch_size, context, new_tokens, *, temperature=0.0, draft=1, copy=0, tree=()):
    return {
        "batch_size": batch_size,
        "context": context,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "draft_length": draft,
        "copy_length": copy,
        "tree": list(tree),
        "verdict": "speculate",
    }


def advice_of(digest, *workloads, **facts):
    told = {"schema": SCHEMA, "pair_digest": digest, "device": device()}
    told["served_dtype"] = "float32"
    return told | {"prediction": {"error_bar": 0.1}, "workloads": list(workloads)} | facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pair as a registry hands it out."""
    root = tmp_path_factory.mktemp("pair")
    record = save_draft_for(save_target(root / "target"), root / "draft")
    write_json(root / "pair.json", record.to_json())
    write_json(root / "evidence" / "benchmark.json", MEASURED)
    return root, record


@pytest.fixture(scope="module")
def join(folder, tmp_path_factory):
    """`join(advice)`: the pair with that advice."""
    root, record = folder
    target = load_target(root / "target", dtype="float32")
    draft = load_draft(root / "draft", target.model, target_digest=None)
    models = {"target": target, "draft": draft, "measured": MEASURED}
    costs = tmp_path_factory.mktemp("costs")
    return lambda advice: Pair(record, {}, **models, costs=costs, advice=advice)


def test_advice_is_read_for_its_own_pair_and_format_alone(tmp_path):
    path = tmp_path / "advice.json"
    assert read_advice(path, "a" * 64) is None
    advice = advice_of("a" * 64, workload(1, 64, 16))
    write_json(path, advice)
    assert read_advice(path, "a" * 64) == advice
    assert read_advice(path, "b" * 64) is None
    write_json(path, advice | {"schema": SCHEMA - 1})
    assert read_advice(path, "a" * 64) is None


@pytest.mark.parametrize("key", ["kind", "name", "threads"])
def test_advice_holds_on_the_device_that_it_was_measured_on(key):
    advice = advice_of("a" * 64)
    assert is_of_device(advice, device())
    assert not is_of_device(advice, device() | {key: "other"})


def test_the_nearest_workload_counts_and_of_batches_the_next_larger():
    sizes, contexts, answers = (1, 4, 16), (64, 1024), (16, 512)
    advice = advice_of(
        "a" * 64, *(workload(b, c, n) for b in sizes for c in contexts for n in answers)
    )

    def found(rows, context, new_tokens):
        entry = nearest_entry(
            advice, rows=rows, temperature=0.0, context=context, new_tokens=new_tokens
        )
        return entry["batch_size"], entry["context"], entry["new_tokens"]

    assert found(1, 70, 20) == (1, 64, 16)
    assert found(2, 600, 200) == (4, 1024, 512)
    assert found(16, 10, 1000) == (16, 64, 512)
    assert nearest_entry(advice, rows=1, temperature=0.7) is None
    assert nearest_entry(advice, rows=17, temperature=0.0) is None


def test_an_engine_decodes_as_was_advised_and_else_as_was_measured(join):
    advice = advice_of(
        "any", workload(1, 256, 64, draft=2, copy=0), workload(4, 256, 64, draft=2, tree=TREE)
    )
    pair = join(advice)
    assert (pair.lengths_at(1), pair.tree_at(1)) == (Lengths(2, 0), None)
    assert (pair.lengths_at(3), pair.tree_at(3)) == (Lengths(2, 0), Tree(tuple(TREE)))
    assert (pair.draft_length, pair.lookup_length) == (2, 4)
    assert join(None).lengths_at(1) == Lengths(3, 4)
    warm = advice_of("any", workload(1, 256, 64, temperature=0.7))
    assert join(warm).lengths_at(1) == Lengths(3, 4), "the benchmark's temperature counts"
    assert pair.lengths_at(5) == Lengths(3, 4), "of such batches nothing was advised"


@pytest.mark.parametrize(("draft", "copy"), [(0, 0), (0, 3), (2, 3)])
def test_answers_are_the_targets_whatever_was_advised(join, draft, copy):
    pair = join(advice_of("any", workload(1, 256, 64, draft=draft, copy=copy)))
    plain = pair.generate("hello hello hello", draft_length=0, max_new_tokens=40)
    advised = pair.generate("hello hello hello", max_new_tokens=40)
    assert advised.token_ids == plain.token_ids
    assert plain.num_drafted == 0
    assert (advised.num_drafted > 0) == bool(draft or copy)
    if not draft:
        proposed = zip(advised.trace.drafted, advised.trace.from_text, strict=True)
        assert all(is_copy for number, is_copy in proposed if number)


def load(root):
    return load_directory(root, root=root).lengths_at(1)


def test_a_loaded_pair_takes_the_advice_that_lies_in_its_project(folder):
    root, record = folder
    entry = workload(1, 256, 64, draft=1, copy=2)
    assert load(root) == Lengths(3, 4)
    write_json(root / ADVICE, advice_of(record.digest, entry))
    assert load(root) == Lengths(1, 2)
    elsewhere = device() | {"name": "another processor"}
    write_json(root / ADVICE, advice_of(record.digest, entry, device=elsewhere))
    assert load(root) == Lengths(3, 4)
    write_json(root / ADVICE, advice_of(record.digest, entry, served_dtype="bfloat16"))
    assert load(root) == Lengths(3, 4)
    unchecked = {"error_bar": None}
    write_json(root / ADVICE, advice_of(record.digest, entry, prediction=unchecked))
    assert load(root) == Lengths(3, 4), "what was measured counts before what nobody checked"
    write_text(root / ADVICE, "{")
    assert load(root) == Lengths(3, 4), "a service starts though the file is damaged"
    (root / ADVICE).unlink()
