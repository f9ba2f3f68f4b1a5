"""Steps of fixed shape give what plain forwards give, whatever was padded and whoever moved."""

from __future__ import annotations

import dataclasses
import random
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    NoProposer,
    Request,
    RequestFaultError,
    SamplingParams,
    SlotModel,
    Tree,
    compiled,
    graphed,
)
from draftsmith.decoding.steps import Inputs, Shape, StaticSteps, bucket
from draftsmith.decoding.tree import tensors_of
from draftsmith.errors import DecodingError
from tests.decoding.arrivals import CONTEXT, live_through, random_requests
from tests.decoding.laws import build_proposer
from tests.decoding.test_engine_limits import BAD_TOKEN, with_nan


class Kernels(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: the operations of an action, their memory, no host value."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        for operation, args, keywords, kept in self.calls:
            fresh = operation(*args, **keywords)
            if isinstance(kept, torch.Tensor) and kept.data_ptr() != fresh.data_ptr():
                kept.copy_(fresh)


def on_cpu(action):
    """A capture."""
    with Kernels() as kernels:
        result = action()
    return kernels.replay, result


def padded(run, shape, _example):
    """No more than fixed shapes."""
    return lambda inputs: run(inputs, shape)


WAYS = {"padded": padded, "captured": graphed(on_cpu)}


def with_steps(models, steps):
    """The same pair with steps of fixed shape."""
    return dataclasses.replace(
        models, target=SlotModel(models.target, steps), draft=SlotModel(models.draft, steps)
    )


def engine_of(models, kind="draft", *, rows=6, draft_length=3):
    proposer = build_proposer(kind, models)
    return Engine(models.target, proposer, max_rows=rows, draft_length=draft_length)


def shapes(slots):
    return set(slots._steps._steps)


# --------------------------------------------------------------------------------- what it rests on


def test_a_capture_knows_no_value_of_the_host_and_reads_its_buffers_again():
    """Otherwise the tests below could not see a value that was frozen."""
    host, buffer = [2], torch.tensor([1, 2, 3])
    replay, result = on_cpu(lambda: (buffer * host[0]).cumsum(0))
    host[0] = 5
    buffer += 1
    replay()
    assert result.tolist() == [4, 10, 18]


def test_buckets_hold_what_they_are_for_and_waste_a_third_at_most():
    sizes = {size: bucket(size) for size in range(1, 200)}
    assert all(size <= found <= max(size, 1.5 * size - 1) for size, found in sizes.items())
    assert sorted(set(sizes.values()))[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]


def test_a_step_gets_padding_in_front_of_the_positions_and_behind_the_rows():
    seen = []

    def run(inputs: Inputs, shape: Shape) -> torch.Tensor:
        seen.append((inputs, shape))
        return inputs.tokens[:, -shape.num_kept :] if shape.num_kept else inputs.tokens

    steps = StaticSteps(run, padded)
    tokens, positions = torch.arange(1, 26).view(5, 5), torch.arange(30, 55).view(5, 5)
    given = Inputs(tokens, positions, positions)
    every = steps(given, scratch=99, num_slots=64)
    last = steps(given, scratch=99, num_slots=64, keep=2)
    assert every.equal(tokens)
    assert last.equal(tokens[:, -2:])
    (inputs, shape), (_, narrow) = seen
    assert (shape, narrow) == (Shape(6, 6, 64, None), Shape(6, 6, 64, 2))
    assert inputs.places[:5, 1:].equal(positions)
    assert set(inputs.places[:, 0].tolist() + inputs.places[5].tolist()) == {99}
    assert not inputs.positions[:, 0].any()
    assert not inputs.positions[5].any()


def test_a_step_of_a_tree_gets_its_padding_behind_the_places():
    seen = []

    def run(inputs: Inputs, shape: Shape) -> torch.Tensor:
        seen.append((inputs, shape))
        return inputs.tokens

    tree = tensors_of(Tree((0, 0, 1, 1)), torch.device("cpu"))
    tokens, starts = torch.arange(1, 26).view(5, 5), torch.arange(30, 35)[:, None]
    given = Inputs(tokens, starts + tree.depths, starts + torch.arange(5), tree.sees)
    assert StaticSteps(run, padded)(given, scratch=99, num_slots=64).equal(tokens)
    ((inputs, shape),) = seen
    assert shape == Shape(6, 6, 64, None, is_tree=True)
    assert inputs.positions[:5, :5].equal(given.positions)
    assert inputs.places[:5, :5].equal(given.places)
    assert set(inputs.places[:, 5].tolist() + inputs.places[5].tolist()) == {99}
    assert inputs.sees[:5, :5].equal(tree.sees)
    assert inputs.sees[:, 5].tolist() == [False] * 6
    assert inputs.sees[5].tolist() == [True] + [False] * 5


# ------------------------------------------------------------------------------ equal to plain ones


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("family_name", "kind"),
    [("llama", "draft"), ("llama", "none"), ("gemma3", "lookup_first"), ("gpt2", "draft")],
)
def test_a_day_of_requests_is_that_of_plain_steps(family, way, family_name, kind):
    """Rows come, go and move at sizes between the buckets; long prompts stand in the last row."""
    models = family(family_name)
    requests = random_requests(30, seed=7)
    plain = engine_of(models, kind)
    alone = {r.request_id: plain.generate([r])[0].token_ids for r in requests}
    fixed = with_steps(models, WAYS[way])
    engine = engine_of(fixed, kind)
    engine.open(CONTEXT, prefill_chunk=7)
    day = live_through(engine, requests, random.Random(3))
    assert day.answers == {name: alone[name] for name in alone if name not in day.aborted}
    assert {1, 2, 3, 4, 6} == {shape.rows for shape in shapes(fixed.target)}


class InTurn:
    """Two trees of one width, in every round the other one."""

    is_sampled, max_nodes = False, 5

    def __init__(self):
        self.turn = 0

    def choose(self, _rows, depth):
        self.turn += 1
        return (Tree((0, 0, 1, 1, 2)), Tree.comb([3, 2]))[self.turn % 2].up_to(depth)


def with_trees(models, **options):
    draft = DraftModelProposer(models.draft, trees=InTurn())
    return Engine(models.target, draft, draft_length=3, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family_name", ["gemma3", "gpt2", "llama"])
def test_trees_of_a_width_share_a_step_and_give_the_tokens_of_the_target(family, way, family_name):
    models, requests = family(family_name), random_requests(30, seed=7)
    plain = Engine(models.target, NoProposer(), max_rows=1, draft_length=0, verify="match")
    alone = {r.request_id: plain.generate([r])[0].token_ids for r in requests}
    fixed = with_steps(models, WAYS[way])
    engine = with_trees(fixed, max_rows=6)
    engine.open(CONTEXT, prefill_chunk=7)
    day = live_through(engine, requests, random.Random(3))
    assert day.answers == {name: alone[name] for name in alone if name not in day.aborted}
    assert {1, 2, 3, 4, 6} == {s.rows for s in shapes(fixed.target) if s.is_tree and s.width == 6}


def test_rounds_of_fixed_steps_keep_of_their_trees_what_plain_ones_keep(llama):
    requests = random_requests(12, seed=8)
    expected = with_trees(llama, max_rows=3).generate(requests)
    assert any(rank for r in expected for path in r.trace.ranks for rank in path)
    fixed = with_steps(llama, WAYS["captured"])
    assert with_trees(fixed, max_rows=3).generate(requests) == expected


def test_a_step_writes_its_own_rows_and_scratch_alone(llama):
    slots = SlotModel(llama.target, padded)
    slots.reserve(rows=6, slots=20)
    tokens = torch.randint(64, (6, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(6, 12)
    slots.forward(tokens, positions, span=12, keep=0)
    before = [layer.keys.clone() for layer in slots.cache.layers]
    slots.forward(tokens[:5, :5], positions[:5, 3:8], span=8)
    for old, layer in zip(before, slots.cache.layers, strict=True):
        changed = (old != layer.keys).any(-1).any(1)
        assert changed[:5, 3:8].all()
        changed[:5, 3:8] = False
        changed[:, -1] = False  # scratch
        assert not changed.any()


def test_a_prompt_that_makes_nan_spoils_no_row_beside_which_it_is_read(llama, continue_greedily):
    """Five rows are padded to six; the sixth is where the prompt is being read."""
    broken = SlotModel(with_nan(llama.reference, "embedding", BAD_TOKEN), padded)
    engine = Engine(broken, build_proposer("draft", llama), max_rows=6, draft_length=2)
    engine.open(64, prefill_chunk=8)
    params = SamplingParams(max_new_tokens=30)
    prompts = {str(index): [index + 1, 7, 5] for index in range(5)}
    engine.submit([Request(name, prompt, params) for name, prompt in prompts.items()])
    engine.step()
    engine.submit([Request("bad", [BAD_TOKEN] + [1] * 20, params)])
    prompts |= {"after": [(7 * place) % 60 for place in range(30)]}
    engine.submit([Request("after", prompts["after"], params)])
    engine.step()
    engine.step()
    with pytest.raises(RequestFaultError, match="request bad, token 21"):
        engine.step()
    answers = {}
    while engine.is_busy:
        answers |= {e.request_id: e.result.token_ids for e in engine.step() if e.result}
    want = {n: continue_greedily(llama.reference, p, 30) for n, p in prompts.items()}
    assert answers == want


@pytest.mark.parametrize("way", WAYS)
def test_steps_on_a_cache_that_was_outgrown_are_built_anew(llama, way):
    plain, fixed = engine_of(llama), engine_of(with_steps(llama, WAYS[way]))
    for length in (4, 90, 4):
        requests = [
            Request(str(index), [3, 1, 4, 1, 5][: index + 1], SamplingParams(max_new_tokens=length))
            for index in range(3)
        ]
        assert fixed.generate(requests) == plain.generate(requests)


# ----------------------------------------------------------------------------------------- compiled


def few_requests(count):
    """As many rows, then fewer; greedy and sampled."""
    kinds = [([3, 9, 4, 1], 3, 0.0), ([7], 5, 0.8), ([2, 2, 5, 8, 8], 7, 0.0)]
    return [
        Request(str(index), prompt, SamplingParams(max_new_tokens=num, temperature=temperature))
        for index, (prompt, num, temperature) in enumerate(kinds[:count])
    ]


def assert_compiled_is_plain(models, backend, kind, *, draft_length, count):
    requests = few_requests(count)
    plain = engine_of(models, kind, draft_length=draft_length)
    fixed = with_steps(models, compiled(backend))
    engine = engine_of(fixed, kind, draft_length=draft_length)
    want = [result.token_ids for result in plain.generate(requests)]
    assert [result.token_ids for result in engine.generate(requests)] == want
    assert {shape.rows for shape in shapes(fixed.target)} == set(range(1, count + 1))


def test_compiled_steps_give_the_tokens_of_plain_ones(family):
    assert_compiled_is_plain(family("gemma3"), "eager", "none", draft_length=0, count=3)


def test_compiled_steps_of_trees_give_the_tokens_of_plain_ones(llama):
    fixed = dataclasses.replace(with_steps(llama, compiled("eager")), draft=llama.draft)
    plain = Engine(llama.target, NoProposer(), max_rows=1, draft_length=0)
    (want,), (found,) = (
        engine.generate(few_requests(1)) for engine in (plain, with_trees(fixed, max_rows=1))
    )
    assert found.token_ids == want.token_ids
    assert any(shape.is_tree for shape in shapes(fixed.target))


@pytest.mark.slow
def test_compiled_steps_of_target_and_draft_give_the_tokens_of_plain_ones(llama):
    assert_compiled_is_plain(llama, "aot_eager", "draft", draft_length=2, count=2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_gives_the_tokens_of_plain_steps(llama):
    assert_compiled_is_plain(llama, "inductor", "none", draft_length=0, count=1)


# -------------------------------------------------------------------------------------- on a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("steps", [graphed, compiled])
def test_on_a_device_steps_give_the_tokens_of_plain_ones(family, steps):
    models = family("llama")
    moved = dataclasses.replace(
        models, target=models.target.cuda(), draft=models.draft.cuda(), reference=models.reference
    )
    requests = random_requests(30, seed=7)
    want = engine_of(moved).generate(requests)
    assert engine_of(with_steps(moved, steps())).generate(requests) == want


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_action_that_waits_cannot_be_captured():
    numbers = torch.arange(4, device="cuda")
    step = graphed()
    with pytest.raises(DecodingError, match="capturing a step as a CUDA graph"):
        step(lambda *_: numbers * int(numbers.sum()), Shape(1, 1, 64, None), Inputs(*[numbers] * 3))
