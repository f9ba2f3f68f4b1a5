"""An exported pair in real vLLM, against our engine: `make vllm-check`.

Exports the pair, decodes prompts greedily in vLLM with the draft and without, and holds tokens and
acceptance by position against our own engine's, in float32 unless told otherwise: the engines round
bfloat16 differently. Speed is not measured. Needs an environment with
vLLM, which the make target prepares. Ends with 1 where the two do not agree.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import any_pair
from benchmarks.measuring import table
from draftsmith import load_pair, provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.decoding.near_ties import Prompts, judge_divergences
from draftsmith.decoding.trace import PositionCounts, position_counts
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.evaluation.acceptance import DecodingPlan, decode, in_turn
from draftsmith.evaluation.any_pair import prompts_of
from draftsmith.evaluation.losslessness import SelfTest, greedy
from draftsmith.registry.generation import Pair
from draftsmith.serving.export import export_pair

Decode = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# Largest difference of the survival at a position. Rounds begin at the same tokens on both sides,
# so only near-ties and the last round of a text may differ; a wrong layer or half shows at once.
MARGIN = 0.03
DRIVER = Path(__file__).with_name("vllm_driver.py")
PYTHON = Path("build/vllm-venv/bin/python")
_OUT = Path("build/partial/vllm-check.json")
_ROWS = 8
_SEED = 0
_TIMEOUT_S = 1800
_CACHE_GIB = "2"
_ACCEPTED = "accepted_tokens_per_pos"  # a counter of vLLM
_LOG = logging.getLogger(__name__)


def run_vllm(python: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job of `vllm_driver` with the Python of vLLM's environment.

    Raises:
        ConfigError: There is no such Python, or vLLM failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("job.json", "result.json")]
        write_json(paths[0], job)
        command = [str(python), "-P", str(DRIVER), *map(str, paths)]
        try:
            done = subprocess.run(
                command,
                env=environment(python, Path(folder)),
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except OSError as error:
            raise failed(f"{python}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise failed(f"no end after {_TIMEOUT_S} seconds") from error
        if done.returncode != 0:
            _LOG.error("%s", done.stderr)
            raise failed(f"exit code {done.returncode}, and: {_last_line(done.stderr)}")
        return read_json(paths[1])


def environment(python: Path, home: Path) -> dict[str, str]:
    """Of vLLM's processes; its caches go into the folder `home`."""
    return {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
    }


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]


def failed(found: str) -> ConfigError:
    """The error of an environment in which vLLM does not run."""
    return ConfigError(
        "running vLLM",
        found=found,
        expected="an environment in which vLLM runs",
        remedy="prepare one with `make vllm-check`, or name its Python with --python",
    )


def check(pair: Pair, prompts: Prompts, *, num_tokens: int, vllm: Decode) -> dict[str, Any]:
    """Tokens and acceptance of both engines.

    Args:
        pair: Target and draft in the dtype that both engines decode in.
        prompts: Name and tokens of each.
        num_tokens: Of every answer; none ends earlier.
        vllm: Does a job of `vllm_driver`.
    """
    with tempfile.TemporaryDirectory() as folder:
        export_pair(pair, Path(folder) / "export", to="vllm")
        speculation = read_json(Path(folder) / "export" / "speculative_config.json")
        job = {
            "target": str(pair.target.directory.resolve()),
            "dtype": str(pair.target.model.dtype).removeprefix("torch."),
            "prompts": [ids for _, ids in prompts],
            "num_tokens": num_tokens,
        }
        alone = vllm(job | {"speculation": None})
        _LOG.info("vllm=alone done")
        drafted = vllm(job | {"speculation": speculation})
        _LOG.info("vllm=drafted done")
    length = int(speculation["num_speculative_tokens"])
    target = pair.target.model
    ours = greedy(target, None, prompts, SelfTest(length, 0, num_tokens, ()))
    tokens = {}
    for name, theirs in (("alone", alone), ("drafted", drafted)):
        answers = {p: t for (p, _), t in zip(prompts, theirs["token_ids"], strict=True)}
        judged = judge_divergences(target, prompts, ours, answers, width=length + 1)
        tokens[name] = {
            "num_identical": len(prompts) - len(judged.divergences),
            "holds": judged.holds,
            **asdict(judged),
        }
    counts = _our_counts(pair, prompts, ours, length=length)
    acceptance = compared(counts, drafted["counters"])
    return {
        "speculation": {name: speculation[name] for name in ("method", "num_speculative_tokens")},
        "packages": drafted["packages"],
        "tokens": tokens,
        "acceptance": acceptance,
        "holds": acceptance["holds"] and all(part["holds"] for part in tokens.values()),
    }


def _our_counts(
    pair: Pair, prompts: Prompts, answers: Mapping[str, list[int]], *, length: int
) -> PositionCounts:
    """Of our engine, behind the first token: vLLM's prefill commits it before anything is drafted.

    Ours begins to draft at the end of the prompt, so that token is part of the prompt here.
    """
    begun = [(name, ids + answers[name][:1]) for name, ids in prompts]
    longest = max(len(answers[name]) for name, _ in prompts) - 1
    plan = DecodingPlan(length, 0, longest, _ROWS, (), _SEED)
    results = decode(pair.target.model, pair.draft, begun, temperature=0.0, plan=plan)
    return position_counts([result.trace for result in results.values()], length)


def compared(ours: PositionCounts, counters: Mapping[str, Any]) -> dict[str, Any]:
    """Survival by position of both engines. Pure.

    Args:
        ours: Rounds of our engine.
        counters: As `vllm_driver` gives them.
    """
    rounds = int(counters["drafts"])
    theirs = [accepted / rounds if rounds else 0.0 for accepted in counters[_ACCEPTED]]
    differences = [abs(a - b) for a, b in zip(ours.survival, theirs, strict=True)]
    return {
        "ours": {"drafted": ours.drafted, "accepted": ours.accepted, "survival": ours.survival},
        "vllm": {"rounds": rounds, "accepted": counters[_ACCEPTED], "survival": theirs},
        "largest_difference": max(differences),
        "margin": MARGIN,
        "holds": rounds > 0 and max(differences) <= MARGIN,
    }


def shown(report: Mapping[str, Any]) -> str:
    """The report as text."""
    acceptance, num = report["acceptance"], report["num_prompts"]
    rows = [
        [str(place), f"{a:.3f}", f"{b:.3f}"]
        for place, (a, b) in enumerate(
            zip(acceptance["ours"]["survival"], acceptance["vllm"]["survival"], strict=True)
        )
    ]
    lines = [
        f"vLLM {name}: {part['num_identical']} of {num} answers are ours, "
        f"the others are near-ties: {'yes' if part['holds'] else 'no'}"
        for name, part in report["tokens"].items()
    ]
    verdict = "agree" if report["holds"] else "do not agree"
    heading = f"{report['speculation']['method']} in {report['dtype']}: the engines {verdict}"
    return "\n".join([heading, *lines, table(("accepted at position", "ours", "vLLM"), rows)])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", help="models:/NAME@ALIAS or a folder; default: the champion")
    parser.add_argument("--dtype", default="float32", help="of both engines (default: float32)")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--num-prompts", type=int, default=24, metavar="N")
    parser.add_argument("--num-tokens", type=int, default=64, metavar="N", help="of an answer")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of vLLM's environment")
    parser.add_argument("--out", type=Path, default=_OUT, help="JSON")
    return parser.parse_args(argv)


def _prompts(pair: Pair, chosen: argparse.Namespace) -> list[tuple[str, list[int]]]:
    chat = make_chat(pair.target.model, pair.target.tokenizer)
    asked = prompts_of(chosen.prompts)
    named = in_turn([(p.prompt_id, p.domain, (p.prompt_id, chat.prompt_ids(p))) for p in asked])
    return named[: chosen.num_prompts]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = _arguments(argv)
    try:
        pair = load_pair(chosen.pair or any_pair.champion(), dtype=chosen.dtype)
        prompts = _prompts(pair, chosen)
        vllm = partial(run_vllm, chosen.python)
        found = check(pair, prompts, num_tokens=chosen.num_tokens, vllm=vllm)
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = {
        "schema": 1,
        "device": provenance.device(),
        "dtype": str(pair.target.model.dtype).removeprefix("torch."),
        "pair": {"target": pair.record.target_digest, "draft": pair.draft.manifest.digest},
        "family": pair.draft.manifest.family,
        "num_prompts": len(prompts),
        "num_tokens": chosen.num_tokens,
        **found,
        "provenance": provenance.collect(_SEED),
    }
    write_json(chosen.out, report)
    sys.stdout.write(f"{shown(report)}\nwritten: {chosen.out}\n")
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
