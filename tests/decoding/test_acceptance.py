"""The output law of speculative rounds, enumerated exactly in float64 against the target's.

Two enumerations: one over the pure functions `acceptance` and `residual`, token by token through as
many rounds as needed, and one over `verify` itself, whose verdict is piecewise constant in its
uniforms and is therefore integrated without error.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftsmith.decoding import acceptance as rule_module
from draftsmith.decoding.acceptance import Proposal, acceptance, residual, verify
from draftsmith.decoding.distribution import Dense, OneHot

VOCAB = 4
HORIZON = 4
TRIM = torch.tensor([3, 0, 2])  # entry -> id of the target's vocabulary; id 1 cannot be drafted
TOLERANCE = 1e-12
DETECTED = 0.01
KINDS = ["arbitrary", "equal", "zeros", "one_hot", "trimmed"]

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """p and q after every prefix, float64 over the whole vocabulary."""

    kind: str
    p: dict[Prefix, Tensor]
    q: dict[Prefix, Tensor]


def make_tables(kind: str, seed: int) -> Tables:
    generator = torch.Generator().manual_seed(seed)

    def law() -> Tensor:
        logits = torch.randn(VOCAB, generator=generator, dtype=torch.float64) * 1.5
        return logits.softmax(-1)

    def draft_law(p: Tensor) -> Tensor:
        q = law()
        match kind:
            case "equal":
                return p
            case "zeros":
                q[torch.randint(VOCAB, (1,), generator=generator)] = 0
            case "one_hot":
                q = (torch.arange(VOCAB) == q.argmax()).double()
            case "trimmed":
                q[1] = 0
        return q / q.sum()

    prefixes = [s for n in range(HORIZON) for s in itertools.product(range(VOCAB), repeat=n)]
    p = {prefix: law() for prefix in prefixes}
    if kind == "zeros":
        for prefix in prefixes[::3]:
            p[prefix][0] = 0
            p[prefix] /= p[prefix].sum()
    return Tables(kind, p, {prefix: draft_law(p[prefix]) for prefix in prefixes})


def target_law(tables: Tables) -> Tensor:
    law = torch.ones([VOCAB] * HORIZON, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=HORIZON):
        for place, token in enumerate(tokens):
            law[tokens] *= tables.p[tokens[:place]][token]
    return law


def deviation(law: Tensor, tables: Tables) -> float:
    """Total variation between a law of `HORIZON` tokens and the target's."""
    return float((law - target_law(tables)).abs().sum() / 2)


@dataclass(frozen=True)
class Rule:
    """What a round does with p and q; the defaults are the decoder's."""

    drawn: Callable[[Tensor], Tensor] = lambda q: q
    accept: Callable[[Tensor, Tensor], Tensor] = acceptance
    residual: Callable[[Tensor, Tensor], Tensor] = residual


def output_law(tables: Tables, draft_length: int, rule: Rule) -> Tensor:
    """Law of the first `HORIZON` committed tokens, over as many rounds as that takes."""
    law = torch.zeros([VOCAB] * HORIZON, dtype=torch.float64)

    def walk(prefix: Prefix, place: int, mass: float) -> None:
        if mass == 0:
            return
        if len(prefix) == HORIZON:
            law[prefix] += mass
            return
        p, q = tables.p[prefix], tables.q[prefix]
        if place == draft_length:
            for token in range(VOCAB):
                walk((*prefix, token), 0, mass * float(p[token]))
            return
        drawn = rule.drawn(q)
        kept = torch.where(q > 0, drawn * rule.accept(p, torch.where(q > 0, q, 1.0)), 0.0)
        refused = float((drawn - kept).sum().clamp(min=0))
        rest = rule.residual(p, q)
        for token in range(VOCAB):
            walk((*prefix, token), place + 1, mass * float(kept[token]))
            walk((*prefix, token), 0, mass * refused * float(rest[token]))

    walk((), 0, 1.0)
    return law


def _share_below(ratio: Tensor, *, strict: bool) -> Tensor:
    """Acceptance probability when u is one of 0, 1/8, ... 7/8; exact in eighths if strict."""
    grid = torch.arange(8, dtype=torch.float64)[:, None] / 8
    return (grid < ratio if strict else grid <= ratio).double().mean(0)


def eighths_tables(seed: int) -> Tables:
    """q uniform and p in 32nds with a zero in it, so that every p / q is a multiple of 1/8."""
    generator = torch.Generator().manual_seed(seed)
    tables = make_tables("arbitrary", seed)
    for prefix in tables.p:
        parts = torch.bincount(torch.randint(VOCAB - 1, (32,), generator=generator), minlength=3)
        places = torch.randperm(VOCAB, generator=generator)[: VOCAB - 1]
        tables.p[prefix] = torch.zeros(VOCAB, dtype=torch.float64)
        tables.p[prefix][places] = parts.double() / 32
        tables.q[prefix] = torch.full((VOCAB,), 0.25, dtype=torch.float64)
    return tables


# ------------------------------------------------------------- the same law through `verify`


def _draw_intervals(p: list[Tensor], q: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Midpoints and lengths of the intervals of the last uniform on which no draw changes."""
    edges = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for place, target in enumerate(p):
        edges.append(target.cumsum(0))
        if place < len(q):
            rest = (target - q[place]).clamp(min=0)
            edges.append((rest / rest.sum().clamp(min=1e-300)).cumsum(0))
    points = torch.cat(edges).clamp(0, 1).unique()
    return (points[1:] + points[:-1]) / 2, points.diff()


def _drawn_from(tables: Tables, drafts: Prefix) -> tuple[Dense | OneHot, Tensor | None]:
    q = torch.stack([tables.q[drafts[:place]] for place in range(len(drafts))])
    match tables.kind:
        case "one_hot":
            return OneHot(q.argmax(-1)[None]), None
        case "trimmed":
            entries = torch.tensor([TRIM.tolist().index(token) for token in drafts])
            return Dense(q[None][..., TRIM], TRIM), entries[None]
    return Dense(q[None]), None


def _expand(distribution: Dense | OneHot, rows: int) -> Dense | OneHot:
    if isinstance(distribution, OneHot):
        return OneHot(distribution.ids.expand(rows, -1))
    return Dense(distribution.probs.expand(rows, -1, -1), distribution.token_ids)


def committed_masses(
    tables: Tables, drafts: Prefix, drawn: Callable[[Tensor], Tensor]
) -> dict[Prefix, float]:
    """Mass of every outcome of `verify` for these drafts, integrated over its uniforms."""
    num_drafts = len(drafts)
    p = [tables.p[drafts[:place]] for place in range(num_drafts + 1)]
    q = [tables.q[drafts[:place]] for place in range(num_drafts)]
    weight = 1.0
    for law, token in zip(q, drafts, strict=True):
        weight *= float(drawn(law)[token])
    if weight == 0:
        return {}
    ratios = [min(1.0, float(p[i][x] / q[i][x])) for i, x in enumerate(drafts)]
    middles, lengths = _draw_intervals(p, q)
    accept_rows, draw_rows, masses = [], [], []
    for outcome in itertools.product([True, False], repeat=num_drafts):
        mass = weight
        for ratio, kept in zip(ratios, outcome, strict=True):
            mass *= ratio if kept else 1 - ratio
        uniforms = [r / 2 if kept else (1 + r) / 2 for r, kept in zip(ratios, outcome, strict=True)]
        accept_rows.append(torch.tensor(uniforms).double().expand(len(middles), num_drafts))
        draw_rows.append(middles[:, None].expand(-1, num_drafts + 1))
        masses.append(mass * lengths)
    accept, draw, mass = torch.cat(accept_rows), torch.cat(draw_rows), torch.cat(masses)
    distribution, entries = _drawn_from(tables, drafts)
    rows = len(mass)
    proposal = Proposal(
        torch.tensor(drafts).expand(rows, -1),
        _expand(distribution, rows),
        torch.full((rows,), num_drafts),
        None if entries is None else entries.expand(rows, -1),
    )
    verdict = verify(Dense(torch.stack(p).expand(rows, -1, -1)), proposal, accept, draw)
    outcomes: dict[Prefix, float] = defaultdict(float)
    for kept, token, share in zip(
        verdict.num_accepted.tolist(), verdict.next_token.tolist(), mass.tolist(), strict=True
    ):
        outcomes[(*drafts[:kept], token)] += share
    return outcomes


def round_law(
    tables: Tables, draft_length: int, drawn: Callable[[Tensor], Tensor] = lambda q: q
) -> Tensor:
    """Law of `HORIZON` tokens: one round through `verify`, then the target itself."""
    outcomes: dict[Prefix, float] = defaultdict(float)
    for drafts in itertools.product(range(VOCAB), repeat=draft_length):
        for committed, mass in committed_masses(tables, drafts, drawn).items():
            outcomes[committed] += mass
    law = torch.zeros([VOCAB] * HORIZON, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=HORIZON):
        tail = 1.0
        for length in range(HORIZON, 0, -1):
            law[tokens] += outcomes.get(tokens[:length], 0.0) * tail
            tail *= float(tables.p[tokens[: length - 1]][tokens[length - 1]])
    return law


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_the_pure_functions_give_the_targets_law_exactly(kind, draft_length):
    for seed in range(2):
        tables = make_tables(kind, seed)
        assert deviation(output_law(tables, draft_length, Rule()), tables) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_verify_gives_the_targets_law_exactly(kind, draft_length):
    tables = make_tables(kind, 7)
    assert deviation(round_law(tables, draft_length), tables) < TOLERANCE


def _argmax_law(q: Tensor) -> Tensor:
    return (torch.arange(VOCAB) == q.argmax()).double()


def _softmax_residual(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0).softmax(-1)


def _target_as_residual(p: Tensor, _q: Tensor) -> Tensor:
    return p


MUTANTS = {
    "argmax draft under a softmax q": Rule(drawn=_argmax_law),
    "resample from p": Rule(residual=_target_as_residual),
    "residual through a softmax": Rule(residual=_softmax_residual),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_the_enumeration_detects_a_wrong_rule(mutant, draft_length):
    tables = make_tables("arbitrary", 0)
    assert deviation(output_law(tables, draft_length, MUTANTS[mutant]), tables) > DETECTED


@pytest.mark.parametrize("wrong", [_target_as_residual, _softmax_residual])
def test_the_enumeration_of_verify_detects_a_wrong_residual(monkeypatch, wrong):
    tables = make_tables("arbitrary", 0)
    monkeypatch.setattr(rule_module, "residual", wrong)
    assert deviation(round_law(tables, 2), tables) > DETECTED


def test_the_enumeration_of_verify_detects_an_argmax_draft_under_a_softmax_q():
    tables = make_tables("arbitrary", 0)
    assert deviation(round_law(tables, 2, _argmax_law), tables) > DETECTED


@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_a_strict_comparison_is_exact_when_u_may_be_zero_and_a_weak_one_is_not(draft_length):
    tables = eighths_tables(0)
    strict = Rule(accept=lambda p, q: _share_below(p / q, strict=True))
    weak = Rule(accept=lambda p, q: _share_below(p / q, strict=False))
    assert deviation(output_law(tables, draft_length, strict), tables) < TOLERANCE
    assert deviation(output_law(tables, draft_length, weak), tables) > DETECTED


def test_verify_keeps_a_draft_for_exactly_the_uniforms_below_the_ratio():
    tables = eighths_tables(1)
    grid = torch.arange(8, dtype=torch.float64)[:, None] / 8
    for p in tables.p.values():
        for token in range(VOCAB):
            drafts = torch.full((8, 1), token)
            proposal = Proposal(
                drafts, Dense(torch.full((8, 1, VOCAB), 0.25)), torch.ones(8).long()
            )
            verdict = verify(Dense(p.expand(8, 2, -1)), proposal, grid, torch.zeros(8, 2))
            assert verdict.num_accepted.sum() == min(8, round(float(p[token]) * 32))


def test_a_token_of_probability_zero_is_not_kept_at_u_zero():
    p = torch.tensor([0.0, 1.0]).expand(1, 2, 2)
    proposal = Proposal(torch.tensor([[0]]), Dense(torch.tensor([[[1.0, 0.0]]])), torch.tensor([1]))
    verdict = verify(Dense(p), proposal, torch.zeros(1, 1), torch.zeros(1, 2))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [1]


def test_padding_behind_a_rows_count_is_never_kept_and_the_bonus_comes_from_p():
    law = torch.tensor([0.25, 0.75])
    proposal = Proposal(
        torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
        Dense(law.expand(3, 3, 2)),
        torch.tensor([3, 1, 0]),
    )
    verdict = verify(Dense(law.expand(3, 4, 2)), proposal, torch.zeros(3, 3), torch.zeros(3, 4))
    assert verdict.num_accepted.tolist() == [3, 1, 0]
    assert verdict.next_token.tolist() == [0, 0, 0]  # u = 0 draws p's first token


def test_a_one_hot_target_keeps_the_longest_agreeing_prefix_and_adds_its_own_token():
    target = OneHot(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]))
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7]])
    proposal = Proposal(drafts, OneHot(drafts), torch.tensor([3, 3, 3]))
    verdict = verify(target, proposal, torch.zeros(3, 3), torch.zeros(3, 4))
    assert verdict.num_accepted.tolist() == [3, 1, 0]
    assert verdict.next_token.tolist() == [8, 6, 5]


def test_without_drafts_the_next_token_comes_from_p():
    proposal = Proposal(
        torch.empty(2, 0).long(), OneHot(torch.empty(2, 0).long()), torch.zeros(2).long()
    )
    p = Dense(torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]))
    verdict = verify(p, proposal, torch.empty(2, 0), torch.tensor([[0.25], [0.75]]))
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [0, 1]


def test_a_draft_law_of_nan_is_refused_and_the_next_token_still_follows_p():
    p = torch.tensor([0.25, 0.75]).expand(1, 2, 2)
    proposal = Proposal(
        torch.tensor([[0]]), Dense(torch.full((1, 1, 2), torch.nan)), torch.tensor([1])
    )
    verdict = verify(Dense(p), proposal, torch.zeros(1, 1), torch.full((1, 2), 0.5))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [1]


def test_the_residual_is_a_law_that_is_zero_where_q_is_not_below_p():
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(200, 9, generator=generator).double().softmax(-1) for _ in range(2))
    rest = residual(p, q)
    torch.testing.assert_close(rest.sum(-1), torch.ones(200, dtype=torch.float64))
    assert bool((rest[q >= p] == 0).all())
    assert bool((rest[q < p] > 0).all())


def test_a_zero_residual_falls_back_to_p():
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    assert residual(p, p).equal(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_pure_functions_keep_the_dtype(dtype):
    p, q = torch.tensor([0.25, 0.75], dtype=dtype), torch.tensor([0.5, 0.5], dtype=dtype)
    assert acceptance(p, q).dtype == residual(p, q).dtype == dtype
    assert acceptance(p, q).tolist() == [0.5, 1.0]
