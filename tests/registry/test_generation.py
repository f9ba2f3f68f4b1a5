"""A loaded pair: what text it shows, when, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from transformers import SuppressTokensLogitsProcessor

from draftsmith.decoding import Request, SamplingParams, Tree
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.student import build_student
from draftsmith.errors import DecodingError
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts
from draftsmith.evaluation.profiling import kept_costs
from draftsmith.registry.generation import Pair
from draftsmith.registry.pair import DraftIdentity
from draftsmith.targets.loading import load_target
from tests.registry.tiny_models import save_draft_for, save_target

INCOMPLETE = "\ufffd"
OPTIONS = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3}
MEASURED = {
    "draft_length": 2,
    "tree": [0, 0, 1],
    "chain_length": 1,
    "batch": [{"batch_size": 8, "draft_length": 1, "tree": [], "speedup": 1.1}],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    record = save_draft_for(save_target(folder / "target"), folder / "draft")
    target = load_target(folder / "target", dtype="float32")
    draft = load_draft(folder / "draft", target.model, target_digest=None)
    return Pair(record, {}, target=target, draft=draft, measured={"draft_length": 3}, costs=folder)


@pytest.fixture(scope="module")
def served(pair, tmp_path_factory):
    """The same pair with a measured speed."""
    models = {"target": pair.target, "draft": pair.draft}
    return Pair(pair.record, {}, **models, measured=MEASURED, costs=tmp_path_factory.mktemp("c"))


def test_a_pair_drafts_the_tree_that_was_measured_best_for_its_rows(served):
    assert served.tree_at(1) == Tree(tuple(MEASURED["tree"]))
    assert served.tree_at(8) is None
    assert (served.draft_length, served.chain_length) == (2, 1)
    asked = {"max_new_tokens": 40}
    plain = served.generate("hello", draft_length=0, **asked)
    tree = served.generate("hello", **asked)
    chain = served.generate("hello", draft_length=2, **asked)
    assert tree.token_ids == chain.token_ids == plain.token_ids
    assert any(tree.trace.ranks)
    assert not any(chain.trace.ranks)


def test_engines_of_a_pair_that_take_turns_decode_as_each_does_alone(pair, served):
    """A tree, a chain and the chain of a larger batch, over the same weights."""
    params = SamplingParams(max_new_tokens=40)
    texts = ("hello", "rivers and lakes", "rain")
    requests = [Request(text, pair.encode(text), params) for text in texts]

    def engines():
        return [served.engine(), served.engine(2, max_rows=2), served.engine(max_rows=8)]

    alone = [{r.request_id: r for r in engine.generate(requests)} for engine in engines()]
    together = [{} for _ in alone]
    for turn in itertools.zip_longest(*(engine.stream(requests) for engine in engines())):
        for results, event in zip(together, turn, strict=True):
            if event is not None and event.result is not None:
                results[event.request_id] = event.result
    assert together == alone
    drafted_trees = [any(any(r.trace.ranks) for r in results.values()) for results in alone]
    assert drafted_trees == [True, False, False]


def test_texts_that_are_streamed_in_turn_are_those_of_each_alone(served):
    asked = [("hello", None), ("rain", 2), ("hello", 0)]
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    expected = [served.generate(text, draft_length=n, **options).text for text, n in asked]
    streams = [served.stream(text, draft_length=n, **options) for text, n in asked]
    turns = itertools.zip_longest(*streams, fillvalue="")
    assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == expected


def test_a_named_length_copies_as_was_measured_for_its_rows(pair, tmp_path):
    """Beside three drafts nothing is longer than copies; a size that says nothing takes all."""
    sizes = [{"batch_size": 4}, {"batch_size": 8, "lookup_length": 4}]
    measured = {"draft_length": 2, "lookup_length": 6, "batch": sizes}
    models = {"target": pair.target, "draft": pair.draft}
    copying = Pair(pair.record, {}, **models, measured=measured, costs=tmp_path)
    longest = [copying.engine(3, max_rows=rows).max_draft_length for rows in (1, 4, 8)]
    assert longest == [6, 6, 4]
    assert copying.engine(0, max_rows=8).max_draft_length == 0


EVALUATION = {
    "survival": {"0.0": [0.5, 0.25]},
    "copied": {"0.0": {"share": 0.0, "survival": []}},
    "guesses": {"0.0": {"shares": [[0.5, 0.4], [0.5, 0.3]], "reached": [100, 50]}},
}


def flat_costs(grid):
    """A draft costs a tenth of a target step, and more positions hardly anything."""
    cell = ForwardCosts(1.0, 0.1, {n: 1 + n / 1000 for n in range(1, grid.max_width + 1)})
    cells = itertools.product(grid.rows, grid.contexts)
    return RoundCosts(grid.rows, grid.contexts, dict.fromkeys(cells, cell))


def test_a_length_that_adapts_may_be_a_measured_tree(pair, tmp_path):
    models = {"target": pair.target, "draft": pair.draft}
    evidence = {"evaluation": EVALUATION}
    adapting = Pair(pair.record, evidence, **models, measured=MEASURED, costs=tmp_path)
    kept_costs(tmp_path, adapting._cost_key(1), lambda: flat_costs(adapting._grid(1)))
    assert adapting.has_costs(1)
    asked = {"max_new_tokens": 40}
    answer = adapting.generate("hello", draft_length="adaptive", **asked)
    assert any(answer.trace.ranks)
    assert answer.token_ids == adapting.generate("hello", draft_length=0, **asked).token_ids
    assert not any(adapting.generate("hello", draft_length=2, **asked).trace.ranks)


def test_costs_are_those_of_every_draft_of_this_shape_and_of_no_other(pair, tmp_path):
    """Nothing is measured anew for a draft that was trained further."""
    manifest, target = pair.draft.manifest, pair.target

    def beside(draft, **changes):
        identity = DraftIdentity.from_json(vars(draft.manifest))
        record = dataclasses.replace(pair.record, draft=identity, **changes)
        return Pair(record, {}, target=target, draft=draft, measured={}, costs=tmp_path)

    def like(model, **changes):
        return LoadedDraft(model, None, dataclasses.replace(manifest, **changes))

    kept_costs(tmp_path, pair._cost_key(4), lambda: flat_costs(pair._grid(4)))
    retrained = beside(like(pair.draft.model, digest="c" * 64, weights_digest="d" * 64))
    assert retrained.record.digest != pair.record.digest
    assert retrained.has_costs(4)
    assert not retrained.has_costs(8)
    assert not beside(like(build_student(target.model, (0,), None))).has_costs(4)
    assert not beside(like(pair.draft.model, family="causal-lm")).has_costs(4)
    other = {**pair.record.target, "digest": "e" * 64}
    assert not beside(like(pair.draft.model), target=other).has_costs(4)


@pytest.fixture(scope="module")
def whole(pair):
    """An answer of single bytes, most of them broken characters."""
    answer = pair.generate("hello", **OPTIONS)
    assert (answer.finish_reason, answer.stopped_by) == ("length", None)
    return answer


def stop_strings(text: str) -> list[str]:
    """Texts of one to three characters from all over an answer."""
    pieces = [text[i : i + 1 + i % 3] for i in range(len(text) - 2)]
    return [piece for piece in pieces if INCOMPLETE not in piece]


def test_text_ends_before_a_stop_string_and_token_ids_behind_it(pair, whole):
    strings = stop_strings(whole.text)
    assert len(strings) > 8
    for string in strings:
        answer = pair.generate("hello", **OPTIONS, stop_strings=(string, "nowhere"))
        shown, _, _ = whole.text.partition(string)
        assert answer.text == shown
        assert (answer.finish_reason, answer.stopped_by) == ("stop", string)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert pair.token_text.text(answer.token_ids) == shown + string


def test_a_stream_shows_nothing_of_a_stop_string(pair, whole):
    for string in stop_strings(whole.text):
        shown, _, _ = whole.text.partition(string)
        pieces = list(pair.stream("hello", **OPTIONS, stop_strings=[string]))
        assert "".join(pieces) == shown


def test_a_stream_shows_what_only_began_a_stop_string(pair, whole):
    begun = [string + "\x00 never" for string in stop_strings(whole.text)]
    begun.append(whole.text[-1] + " never")
    assert "".join(pair.stream("hello", **OPTIONS, stop_strings=begun)) == whole.text


def test_stop_token_ids_are_added_to_those_of_the_target(pair, whole):
    stop = whole.token_ids[4]
    answer = pair.generate("hello", **OPTIONS, stop_token_ids=(stop,))
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert answer.stopped_by == stop
    assert set(answer.params.stop_token_ids) == {2, stop}


@pytest.mark.parametrize("name", ["num_beams", "do_sample", "length_penalty", "stop"])
def test_a_parameter_that_is_not_supported_is_refused_by_name_at_the_call(pair, name):
    for call in (pair.generate, pair.stream):
        with pytest.raises(DecodingError, match=f"sampling parameter {name}: .*stop_strings"):
            call("hello", **{name: 1})


def test_a_logits_processor_needs_the_mode_that_can_carry_it(pair, whole):
    banned = SuppressTokensLogitsProcessor([whole.token_ids[0]])
    with pytest.raises(DecodingError, match="SuppressTokensLogitsProcessor"):
        pair.generate("hello", logits_processors=[banned])
    answer = pair.generate("hello", verify="match", logits_processors=[banned], **OPTIONS)
    assert whole.token_ids[0] not in answer.token_ids
    options = {"verify": "match", "logits_processors": [banned], **OPTIONS}
    assert "".join(pair.stream("hello", draft_length=0, **options)) == answer.text


def test_a_pair_is_decoded_losslessly_or_not_at_all(pair):
    for call in (pair.generate, pair.stream, lambda _, verify: pair.engine(verify=verify)):
        with pytest.raises(DecodingError, match=r"with a pair: found verify='typical_lossy'"):
            call("hello", verify="typical_lossy")
