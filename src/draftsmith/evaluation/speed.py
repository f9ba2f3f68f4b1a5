"""Measure a pair's speed without the pipeline.

    python -m draftsmith.evaluation.speed --target DIR --draft DIR

Needs torch, Transformers and safetensors only, so it runs on a GPU machine that has neither DVC,
MLflow, Hydra nor datasets. Its JSON carries the digests of what it measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith import provenance
from draftsmith.artifacts import digest_json, write_json
from draftsmith.corpus.chat import Chat, make_chat
from draftsmith.corpus.prompts import Prompt, bundled_prompts, is_eval, read_jsonl
from draftsmith.decoding.trace import position_counts
from draftsmith.drafts.checkpoint import LoadedDraft, load_draft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import DecodingPlan, decode, in_turn
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.benchmark import PairBench
from draftsmith.evaluation.settings import BenchmarkConfig
from draftsmith.targets.compatibility import require_same_tokenizer
from draftsmith.targets.loading import LoadedTarget, load_target

_LOG = logging.getLogger(__name__)
_EXIT_USER_ERROR = 2


def measure(
    target: LoadedTarget, draft: LoadedDraft, prompts: Sequence[Prompt], config: BenchmarkConfig
) -> dict[str, Any]:
    """One recipe's entry of reports/benchmark.json; survival comes from the calibration prompts."""
    chat = make_chat(target.model, target.tokenizer)
    encoded = in_turn([(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in prompts])
    survival = _survival(target, draft, encoded, chat, config)
    contestants = Contestants(target.model, draft, chat.stop_ids)
    entry = PairBench(config, contestants, encoded).run(survival)
    pair = {"target": target.identity.digest, "draft": draft.manifest.digest}
    return {
        **entry,
        "recipe": draft.manifest.recipe,
        "draft_digest": draft.manifest.digest,
        "pair_digest": digest_json(pair),
        "survival": survival,
    }


def _survival(
    target: LoadedTarget,
    draft: LoadedDraft,
    encoded: Sequence[list[int]],
    chat: Chat,
    config: BenchmarkConfig,
) -> list[float]:
    chosen = [(str(i), ids) for i, ids in enumerate(encoded[: config.calibration_prompts * 2])]
    plan = DecodingPlan(
        config.max_draft_length, config.calibration_tokens, len(chosen), chat.stop_ids, config.seed
    )
    results = decode(target.model, draft, chosen, temperature=0.0, plan=plan)
    traces = [result.trace for result in results.values()]
    return position_counts(traces, config.max_draft_length).survival


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the speed of a pair on this machine.")
    parser.add_argument("--target", type=Path, required=True, help="Transformers checkpoint folder")
    parser.add_argument("--draft", type=Path, required=True, help="draft folder (has draft.json)")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--dtype", default="auto", help="dtype the target is served in")
    parser.add_argument("--max-draft-length", type=int, default=4, metavar="N")
    parser.add_argument("--num-prompts", type=int, default=24, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    return parser.parse_args(argv)


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    config = BenchmarkConfig(
        max_draft_length=arguments.max_draft_length,
        calibration_prompts=6,
        calibration_tokens=32,
        prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        assisted_lengths=(1, 2, 3),
        batch_sizes=tuple(arguments.batch_sizes),
        batch_tokens=32,
        repeats=15,
        seed=0,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(arguments.target, dtype=arguments.dtype, device=device)
    # A reused draft stems from another target, so its own digest is no reason to refuse it.
    require_same_tokenizer(target.identity, read_manifest(arguments.draft).tokenizer_digest)
    draft = load_draft(arguments.draft, target.model, target_digest=None)
    if arguments.prompts is None:
        prompts = [p for p in bundled_prompts() if is_eval(p, 1 / 3)]
    else:
        prompts = list(read_jsonl(arguments.prompts, domain="general"))
    return {
        "schema": 1,
        "target_digest": target.identity.digest,
        "device": provenance.device(),
        "recipes": {draft.manifest.recipe: measure(target, draft, prompts, config)},
        "provenance": provenance.collect(config.seed),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = _arguments(argv)
    try:
        report = _report(arguments)
        if arguments.out is None:
            sys.stdout.write(json.dumps(report, indent=2, sort_keys=True) + "\n")
        else:
            write_json(arguments.out, report)
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
