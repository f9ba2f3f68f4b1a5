"""Measure any two checkpoints that share a tokenizer: no pipeline, no registry.

Acceptance on the target's own greedy answers, speed on this device, and a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.artifacts import digest_json
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.prompts import Prompt, bundled_prompts, is_eval, read_jsonl
from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Tree
from draftsmith.decoding.trace import position_counts
from draftsmith.drafts.causal_lm import describe, identify_causal_lm, load_causal_lm
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.manifest import FILE_NAME, read_manifest
from draftsmith.errors import CorpusError
from draftsmith.evaluation.acceptance import (
    DecodingPlan,
    copied_rounds,
    decode,
    estimate_tau,
    in_turn,
    teacher_forced_alpha,
)
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.benchmark import OnPhase, PairBench, silent
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.guesses import NO_GUESSES, Guesses, served_trees
from draftsmith.evaluation.intervals import bootstrap_mean
from draftsmith.evaluation.settings import BenchmarkConfig
from draftsmith.evaluation.timing import timed
from draftsmith.targets.compatibility import require_same_tokenizer
from draftsmith.targets.loading import LoadedTarget

EVAL_FRACTION = 0.33  # of the bundled prompts, as the default corpus holds out
CONFIG = BenchmarkConfig(
    max_draft_length=4,
    max_tree_nodes=16,
    calibration_prompts=6,
    calibration_tokens=32,
    prompts=24,
    max_new_tokens=64,
    assisted_lengths=(1, 2),
    batch_sizes=(1, 4, 16),
    batch_tokens=32,
    repeats=15,
    seed=0,
)
LOOKUP_LENGTH = 5  # as pairs of the default configuration are served
GUESSES = (6, 4, 2, 1)  # likewise, tried at the draft positions
_FEWEST_PROMPTS, _MOST_PROMPTS = 4, 64
_MOST_CALIBRATION = 8
# Cost of the phases in units of one prompt decoded plainly: five arms of which one is slow, and
# warming up, acceptance and batches together.
_UNITS_A_PROMPT, _FIXED_UNITS = 7.0, 20.0


def load_any_draft(target: LoadedTarget, directory: Path) -> LoadedDraft:
    """A draft of ours, or any causal LM with the target's tokenizer and output rows.

    Raises:
        DraftError: Another tokenizer, other output rows, a damaged draft, or a checkpoint that
            cannot be decoded with.
    """
    if (directory / FILE_NAME).is_file():
        require_same_tokenizer(target.identity, read_manifest(directory).tokenizer_digest)
        return load_draft(directory, target.model, target_digest=None)
    identity = identify_causal_lm(directory, target.identity.dtype)
    require_same_tokenizer(target.identity, identity.tokenizer_digest)
    manifest = describe(identity, recipe=directory.resolve().name)
    return LoadedDraft(load_causal_lm(directory, target.model), None, manifest)


def measure(
    target: LoadedTarget,
    draft: LoadedDraft,
    prompts: Sequence[Prompt],
    config: BenchmarkConfig,
    *,
    lookup_length: int = LOOKUP_LENGTH,
    on_phase: OnPhase = silent,
) -> dict[str, Any]:
    """One recipe's entry of reports/benchmark.json, with acceptance and a verdict.

    Args:
        target: The target in its serving dtype.
        draft: Joined to it.
        prompts: The first ones, domains in turn, calibrate; the others confirm.
        config: Budget.
        lookup_length: Tokens copied from the text in the draft's place; 0 never copies.
        on_phase: As in `PairBench`.

    Raises:
        CorpusError: No prompts.
    """
    if not prompts:
        raise CorpusError(
            "measuring a pair",
            found="no prompts",
            expected="at least one",
            remedy="name a file with prompts",
        )
    chat = make_chat(target.model, target.tokenizer)
    encoded = in_turn([(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in prompts])
    acceptance = _acceptance(
        target, draft, encoded, stop_ids=chat.stop_ids, config=config, lookup_length=lookup_length
    )
    contestants = Contestants(target.model, draft, chat.stop_ids, lookup_length)
    apart = _apart(encoded, config.calibration_prompts)
    bench = PairBench(config, contestants, apart, on_phase=on_phase)
    copied = acceptance["copied"]
    survival = Survival(acceptance["survival"], copied["share"], copied["survival"])
    guesses = _guesses(target.model, draft, encoded, contestants, config)
    entry = bench.run(survival, guesses) | acceptance
    pair = {"target": target.identity.digest, "draft": draft.manifest.digest}
    return {
        **entry,
        "recipe": draft.manifest.recipe,
        "family": draft.manifest.family,
        "draft_digest": draft.manifest.digest,
        "pair_digest": digest_json(pair),
        **verdict(entry),
    }


def _apart(encoded: Sequence[list[int]], first: int) -> list[list[int]]:
    """The first prompts, which calibrate, and those that acceptance is not counted on, either.

    Where these would be fewer than calibrate, all behind the first ones confirm.
    """
    rest = 2 * first if len(encoded) >= 3 * first else first
    return [*encoded[:first], *encoded[rest:]]


def _acceptance(
    target: LoadedTarget,
    draft: LoadedDraft,
    encoded: Sequence[list[int]],
    *,
    stop_ids: tuple[int, ...],
    config: BenchmarkConfig,
    lookup_length: int,
) -> dict[str, Any]:
    """Alpha, survival and tau at temperature 0, on twice the calibration prompts."""
    chosen = [(str(i), ids) for i, ids in enumerate(encoded[: config.calibration_prompts * 2])]
    length = config.max_draft_length
    plan = DecodingPlan(
        length, lookup_length, config.max_new_tokens, len(chosen), stop_ids, config.seed
    )
    results = decode(target.model, draft, chosen, temperature=0.0, plan=plan)
    # Speculative greedy answers are the target's own, so alpha needs no answers of its own.
    answers = [
        Rollout(name, "", 0.0, ids, results[name].token_ids, finished=True) for name, ids in chosen
    ]
    alphas = teacher_forced_alpha(target.model, draft, answers, temperature=0.0)
    traces = [result.trace for result in results.values()]
    return {
        "alpha": asdict(bootstrap_mean([a.alpha for a in alphas.values()], seed=config.seed)),
        "block_efficiency": asdict(estimate_tau(traces, seed=config.seed)),
        "survival": position_counts(traces, length).survival,
        "copied": copied_rounds(traces, lookup_length),
    }


def _guesses(
    target: PreTrainedModel,
    draft: LoadedDraft,
    encoded: Sequence[list[int]],
    pair: Contestants,
    config: BenchmarkConfig,
) -> Guesses:
    """How often each guess of a position is right, on the same prompts."""
    chosen = [(str(i), ids) for i, ids in enumerate(encoded[: config.calibration_prompts * 2])]
    comb = Tree.comb(GUESSES[: config.max_draft_length])
    if comb.num_nodes > config.max_tree_nodes:
        return NO_GUESSES
    plan = DecodingPlan(
        comb.depth,
        pair.lookup_length,
        config.max_new_tokens,
        len(chosen),
        pair.stop_ids,
        config.seed,
        served_trees(comb, len(chosen)),
    )
    results = decode(target, draft, chosen, temperature=0.0, plan=plan)
    return Guesses.counted([result.trace for result in results.values()], comb)


def verdict(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Whether to serve with this draft on this device, and why. Pure.

    Returns:
        `verdict`: pays, does not pay, or unclear (the interval holds 1); `reasons`: sentences.
    """
    speedup, lookup = entry["speedup"], entry["ratios"]["speculative_vs_prompt_lookup"]
    word = "pays" if speedup["low"] > 1 else "does not pay" if speedup["high"] < 1 else "unclear"
    nodes = len(entry.get("tree", ()))
    drafts = f"trees of {nodes} tokens" if nodes else f"draft length {entry['draft_length']}"
    reasons = [
        f"At {drafts} it decodes {_interval(speedup)} times as fast as the target alone in the "
        "same engine."
    ]
    if lookup["high"] < 1:
        reasons.append(
            f"Prompt lookup needs no draft and is faster: the ratio is {_interval(lookup)}."
        )
    if word == "unclear":
        reasons.append("The interval holds 1: measure more prompts (a larger budget).")
    return {"verdict": word, "reasons": reasons}


def _interval(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['mean']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def prompts_of(path: Path | None) -> list[Prompt]:
    """The prompts of a JSONL file; without one the bundled ones that training leaves out.

    Raises:
        CorpusError: The file is missing or broken.
    """
    if path is None:
        return [prompt for prompt in bundled_prompts() if is_eval(prompt, EVAL_FRACTION)]
    return list(read_jsonl(path, domain="general"))


def budgeted(
    target: LoadedTarget, draft: LoadedDraft, prompt: Prompt, *, seconds: float
) -> BenchmarkConfig:
    """A configuration that takes about `seconds` here, by the time of one prompt without drafts."""
    chat = make_chat(target.model, target.tokenizer)
    tokens = CONFIG.max_new_tokens
    plain = Contestants(target.model, draft, chat.stop_ids).engine(0, max_new_tokens=tokens)
    ids = chat.prompt_ids(prompt)
    plain([ids])  # the first one warms up
    return fitted(CONFIG, seconds=seconds, unit=timed(lambda: plain([ids]))[0])


def fitted(config: BenchmarkConfig, *, seconds: float, unit: float) -> BenchmarkConfig:
    """The configuration with as many prompts as fit into `seconds`. Pure.

    Args:
        config: Everything but the numbers of prompts.
        seconds: Budget.
        unit: Seconds of one prompt decoded plainly.
    """
    fitting = int((seconds / unit - _FIXED_UNITS) / _UNITS_A_PROMPT)
    prompts = min(max(fitting, _FEWEST_PROMPTS), _MOST_PROMPTS)
    calibration = min(max(prompts // 3, 2), _MOST_CALIBRATION)
    return replace(config, prompts=prompts, calibration_prompts=calibration)
