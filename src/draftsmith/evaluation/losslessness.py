"""The losslessness self-test: speculative output against the target's own, and a failing control.

In float32 greedy output must equal Transformers' token for token. In the target's serving dtype a
forward over one position and one over several round differently, so an argmax may flip at a
near-tie: there the outputs must be equal, or the target's own margin between the two tokens at the
first difference must lie within the measured rounding difference of the two forwards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding import (
    Engine,
    NoProposer,
    Proposer,
    Request,
    SamplingParams,
    Tree,
    with_lookup,
)
from draftsmith.decoding.acceptance import Proposal, Verdict, Verify
from draftsmith.decoding.distribution import Distribution, draw
from draftsmith.decoding.near_ties import ROWS, Prompts, judge_divergences
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.evaluation.guesses import served_trees


@dataclass(frozen=True)
class SelfTest:
    """Size of the test.

    Attributes:
        draft_length: Tokens proposed in a round.
        lookup_length: Tokens copied from the text in the place of a draft; 0 never copies.
        num_tokens: Tokens of a prompt.
        stop_ids: Ids that end a response.
        tree: Drafted too, beside chains; None leaves trees out.
    """

    draft_length: int
    lookup_length: int
    num_tokens: int
    stop_ids: tuple[int, ...]
    tree: Tree | None = None

    @property
    def shapes(self) -> list[Tree | None]:
        """What is drafted in turn; None is a chain."""
        return [None] if self.tree is None else [None, self.tree]

    def width(self, tree: Tree | None) -> int:
        """Positions of the widest verification: a row that copies lengthens the tree of others."""
        if tree is None:
            return max(self.draft_length, self.lookup_length) + 1
        return tree.num_nodes_with(self.lookup_length) + 1


def exact_equality(
    target: PreTrainedModel, draft: LoadedDraft, prompts: Prompts, test: SelfTest
) -> dict[str, Any]:
    """Greedy speculative output against `generate` of Transformers; both models in float32."""
    # Transformers' own attention: a fault of the engine's must not be in both outputs. The engine
    # switches it back.
    target.set_attn_implementation("sdpa")
    reference = {name: transformers_greedy(target, ids, test) for name, ids in prompts}
    outputs = [greedy(target, draft, prompts, test, tree=tree) for tree in test.shapes]
    identical = sum(all(o[name] == reference[name] for o in outputs) for name, _ in prompts)
    return {
        "num_prompts": len(prompts),
        "num_identical": identical,
        "num_tokens": sum(map(len, reference.values())),
        "num_tree_nodes": 0 if test.tree is None else test.tree.num_nodes,
        "holds": identical == len(prompts),
    }


def near_ties(
    target: PreTrainedModel, draft: LoadedDraft, prompts: Prompts, test: SelfTest
) -> dict[str, Any]:
    """Greedy speculative output against the engine without drafts, both in the target's dtype."""
    plain = greedy(target, None, prompts, test)
    judged = []
    for tree in test.shapes:
        speculative = greedy(target, draft, prompts, test, tree=tree)
        width = test.width(tree)
        judged.append(judge_divergences(target, prompts, plain, speculative, width=width))
    differing = {divergence.prompt_id for one in judged for divergence in one.divergences}
    return {
        "num_prompts": len(prompts),
        "num_identical": len(prompts) - len(differing),
        "tolerance": max(one.tolerance for one in judged),
        "divergences": [asdict(divergence) for one in judged for divergence in one.divergences],
        "holds": all(one.holds for one in judged),
    }


def corrupted_control(
    target: PreTrainedModel, draft: LoadedDraft, prompts: Prompts, test: SelfTest
) -> dict[str, Any]:
    """The comparison with an acceptance rule that keeps every draft; it must be noticed.

    Both models in float32: rounding must not pass for detection.
    """
    corrupted = greedy(target, draft, prompts, test, verify=_accept_everything)
    plain = greedy(target, None, prompts, test)
    identical = sum(corrupted[name] == plain[name] for name, _ in prompts)
    return {
        "detected": identical < len(prompts),
        "num_identical": identical,
        "num_prompts": len(prompts),
    }


def _accept_everything(
    p: Distribution, proposal: Proposal, _accept: Tensor, uniforms: Tensor
) -> Verdict:
    """Keep every draft, and take the bonus token one position too early.

    The second fault is there for drafts that never err on the test's prompts: keeping all of their
    tokens would be right.
    """
    early = (proposal.counts - 1).clamp(min=0)
    next_tokens = draw(p, uniforms).gather(1, early[:, None]).squeeze(1)
    return Verdict(proposal.counts, next_tokens)


def greedy(
    target: PreTrainedModel,
    draft: LoadedDraft | None,
    prompts: Prompts,
    test: SelfTest,
    *,
    verify: Verify | None = None,
    tree: Tree | None = None,
) -> dict[str, list[int]]:
    """Greedy tokens of the engine by prompt, with a draft or without."""
    proposer: Proposer = NoProposer()
    length = 0
    if draft is not None:
        drafter = draft.proposer(trees=served_trees(tree, ROWS))
        proposer, length = with_lookup(drafter, test.draft_length, test.lookup_length)
    engine = Engine(target, proposer, max_rows=ROWS, draft_length=length)
    if verify is not None:
        engine.verify = verify
    params = SamplingParams(max_new_tokens=test.num_tokens, stop_token_ids=test.stop_ids)
    results = engine.generate([Request(name, ids, params) for name, ids in prompts])
    return {result.request_id: result.token_ids for result in results}


@torch.inference_mode()
def transformers_greedy(
    target: PreTrainedModel, prompt_ids: list[int], test: SelfTest
) -> list[int]:
    """Greedy tokens of Transformers' `generate`."""
    inputs = torch.tensor([prompt_ids], device=target.device)
    output = target.generate(  # type: ignore[operator]  # of GenerationMixin
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=test.num_tokens,
        do_sample=False,
        eos_token_id=list(test.stop_ids) or None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt_ids) :].tolist()
    return tokens
