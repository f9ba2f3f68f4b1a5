"""A round waits for the device once: when the committed tokens are copied to the host.

A wait would be an operation whose result the host must know (a number, a truth value, the places of
a mask), a copy to the host, or a copy to the device that is not asynchronous. All are seen on a CPU
as well, where they cost nothing.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import draftsmith.decoding
from draftsmith.decoding import Engine, Request, SamplingParams
from tests.decoding.laws import build_proposer
from tests.decoding.test_engine_greedy import KINDS

COPIES = ("tolist", "numpy", "cpu")
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "bincount")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Waits(TorchDispatchMode):
    """Names of what would wait for the device, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in COPIES:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name))

    def _counted(self, name: str):
        original = getattr(torch.Tensor, name)

        def copy(tensor, *args, **keywords):
            self.found.append(name)
            return original(tensor, *args, **keywords)

        return copy

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        places = args[1] if name in _INDEXING else ()
        is_mask = any(place is not None and place.dtype == torch.bool for place in places)
        if name in _WAITS or is_mask:
            self.found.append(name)
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    return Waits(monkeypatch)


PLAIN = SamplingParams(max_new_tokens=20)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.8)
EVERYTHING = SamplingParams(
    max_new_tokens=20,
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((4, 1.0),),
    bad_words_ids=((7,), (1, 50, 3)),
    min_new_tokens=9,
    stop_token_ids=(3, 5),
)
REPEATING = [3, 9, 4, 1, 50, 3, 9, 4]


@pytest.mark.parametrize("kind", ["none", "draft", "lookup", "lookup_first"])
@pytest.mark.parametrize("params", [[PLAIN] * 3, [SAMPLED] * 3, [PLAIN, SAMPLED, EVERYTHING]])
def test_a_step_copies_to_the_host_once(llama, waits, kind, params):
    length = 0 if kind == "none" else 3
    engine = Engine(llama.target, build_proposer(kind, llama), max_rows=3, draft_length=length)
    engine.open(64, prefill_chunk=4)
    prompts = [REPEATING, [1, 2, 3], [7]]
    requests = [
        Request(str(index), prompt, values)
        for index, (prompt, values) in enumerate(zip(prompts, params, strict=True))
    ]
    engine.submit(requests)
    num_rounds = 0
    with waits:
        while engine.is_busy and num_rounds < 5:  # a piece of a prompt, arrivals, plain rounds
            num_rounds += bool(engine.step())
    assert waits.found == ["tolist"] * num_rounds


@pytest.mark.parametrize("kind", KINDS)
def test_no_familys_forward_waits(family, waits, kind):
    models = family(kind)
    engine = Engine(models.target, build_proposer("draft", models), max_rows=1, draft_length=2)
    engine.open(64)
    engine.submit([Request("a", REPEATING, PLAIN)])
    with waits:
        engine.step()
    assert waits.found == ["tolist"]


def _index(rows: torch.Tensor) -> None:
    rows[rows > 1]


def _assign(rows: torch.Tensor) -> None:
    rows[rows > 1] = 0


@pytest.mark.parametrize(
    "wait",
    [
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        torch.Tensor.numpy,
        torch.Tensor.nonzero,
        lambda rows: rows.sum().item(),
        lambda rows: bool(rows.any()),
        lambda rows: int(rows[0]),
        lambda rows: torch.arange(9)[: rows[0]],
        _index,
        _assign,
    ],
)
def test_every_kind_of_wait_is_seen(waits, wait):
    rows = torch.arange(3)
    name = getattr(wait, "__name__", "")
    with waits:
        (getattr(rows, name)() if name in COPIES else wait(rows))
    assert waits.found


def test_values_reach_the_device_by_the_one_function_that_does_not_wait():
    """`torch.tensor(values, device=...)` waits for the copy and for all that was asked before."""
    calls = []
    for path in Path(draftsmith.decoding.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.tensor":
                calls += [path.name for keyword in node.keywords if keyword.arg == "device"]
    assert calls == []
