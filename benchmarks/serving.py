"""A served pair's speed and latency, beside the same service without drafts and `generate` in turn.

`python -m benchmarks.serving --pair models:/NAME@ALIAS`. Two servers of the pair run in processes
of their own and get groups of requests at once, one group after another, arms in alternating order;
Transformers decodes the same requests one after another. Every answer has the same number of
tokens. Writes JSON named after the machine, after every number of requests.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks import any_pair
from benchmarks.measuring import Budget, Groups, table, within
from benchmarks.service_process import PATIENCE_S, running
from draftsmith import load_pair, provenance
from draftsmith.artifacts import write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.errors import DecodingError, DraftsmithError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.any_pair import prompts_of
from draftsmith.evaluation.timing import Timings, speed_ratio, timed

CONCURRENCY = (1, 4, 16)
DRAFTS, PLAIN, LOOP = "service", "service without drafts", "generate, one after another"
_LEAST_GROUPS, _MOST_GROUPS = 7, 17  # the first one warms up
_SEED = 0
_LOG = logging.getLogger(__name__)


@dataclass
class Latencies:
    """Milliseconds, one entry a request or, for gaps, a piece of an answer.

    Attributes:
        first: From the start of the group to the first piece.
        per_token: Behind the first piece, by token.
        gap: Between two pieces.
    """

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)

    def add(self, start: float, stamps: Sequence[float], num_tokens: int) -> None:
        """Take in when the pieces of an answer came, in seconds of one clock."""
        self.first.append((stamps[0] - start) * 1000)
        self.per_token.append((stamps[-1] - stamps[0]) * 1000 / max(1, num_tokens - 1))
        self.gap += [(b - a) * 1000 for a, b in zip(stamps, stamps[1:], strict=False)]

    def described(self) -> dict[str, dict[str, float]]:
        """Median and 95th percentile of each."""
        return {
            f"{name}_ms": {"median": at(values, 0.5), "p95": at(values, 0.95)}
            for name, values in asdict(self).items()
            if values
        }


def at(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]


class Loop:
    """`generate` of Transformers, a request at a time.

    Args:
        model: With Transformers' own attention.
        num_tokens: Of every answer.
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int) -> None:
        self.latencies = Latencies()
        self._model, self._num_tokens = model, num_tokens
        model.generation_config = GenerationConfig(pad_token_id=0)  # ends nowhere

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]]) -> int:
        """Answer all prompts; returns the number of tokens."""
        start = time.perf_counter()
        for ids in prompts:
            inputs, stamps = torch.tensor([ids], device=self._model.device), _Stamps()
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=self._num_tokens,
                do_sample=False,
                streamer=stamps,
            )
            self.latencies.add(start, stamps.seconds, self._num_tokens)
        return self._num_tokens * len(prompts)


class _Stamps(BaseStreamer):
    """When each token came; the first thing that comes is the prompt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._is_begun = False

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002  Transformers' signature
        if self._is_begun:
            self.seconds.append(time.perf_counter())
        self._is_begun = True

    def end(self) -> None:
        """Nothing is held back."""


class Service:
    """A server that gets all prompts of a group at once.

    Args:
        started: What `draftsmith serve --json` says.
        num_tokens: Of every answer.
    """

    def __init__(self, started: Mapping[str, Any], num_tokens: int) -> None:
        self.latencies = Latencies()
        self._place = urlsplit(started["url"]).netloc
        self._body = {
            "model": started["model"],
            "temperature": 0,
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def __call__(self, prompts: list[list[int]]) -> int:
        """Ask for all answers at once; returns the number of tokens."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as callers:
            answers = list(callers.map(self._answer, prompts))
        for stamps, num_tokens in answers:
            self.latencies.add(start, stamps, num_tokens)
        return sum(num_tokens for _, num_tokens in answers)

    def _answer(self, ids: list[int]) -> tuple[list[float], int]:
        with contextlib.closing(
            http.client.HTTPConnection(self._place, timeout=PATIENCE_S)
        ) as caller:
            body = json.dumps(self._body | {"prompt": ids})
            headers = {"Content-Type": "application/json"}
            caller.request("POST", "/v1/completions", body, headers)
            response = caller.getresponse()
            if response.status != http.client.OK:
                raise _unanswered(f"status {response.status}: {response.read()[:200]!r}")
            return read_events(response)


def read_events(
    lines: Iterable[bytes], now: Callable[[], float] = time.perf_counter
) -> tuple[list[float], int]:
    """When pieces of text came in a stream of completions, and the tokens that its end counts.

    Raises:
        DecodingError: The stream ends with an error, or without an end.
    """
    stamps: list[float] = []
    num_tokens = 0
    for line in lines:
        content = line.removeprefix(b"data: ").strip()
        if content == b"[DONE]":
            return stamps, num_tokens
        if not content:
            continue
        event = json.loads(content)
        if "error" in event:
            raise _unanswered(str(event["error"]))
        if any(choice["text"] for choice in event["choices"]):
            stamps.append(now())
        if event["usage"]:
            num_tokens = event["usage"]["completion_tokens"]
    raise _unanswered("a stream without an end")


def _unanswered(found: str) -> DecodingError:
    return DecodingError(
        "asking the service",
        found=found,
        expected="an answer",
        remedy="try the request by hand with `draftsmith serve`",
    )


def measure(arms: Mapping[str, Loop | Service], groups: Groups) -> dict[str, Any]:
    """All arms on every group of prompts, in alternating order; the first group warms up."""
    timings = {name: Timings() for name in arms}
    for index, group in enumerate(groups):
        for name in list(arms)[:: 1 if index % 2 else -1]:
            seconds, num_tokens = timed(partial(arms[name], group))
            if index == 0:
                arms[name].latencies = Latencies()
                continue
            timings[name].seconds.append(seconds)
            timings[name].tokens.append(num_tokens)
    ours = timings[DRAFTS]
    return {
        "groups": len(ours.seconds),
        "arms": {
            name: {
                "median_tokens_per_s": timing.median_tokens_per_s,
                **arms[name].latencies.described(),
            }
            for name, timing in timings.items()
        },
        "ratios": {
            f"{DRAFTS} over {name}": asdict(speed_ratio(ours, timings[name], seed=_SEED))
            for name in arms
            if name != DRAFTS
        },
    }


def shown(report: Mapping[str, Any]) -> str:
    """The cells as text."""
    rows = []
    for cell in report["cells"]:
        for name, arm in cell["arms"].items():
            ratio = cell["ratios"].get(f"{DRAFTS} over {name}")
            rows.append(
                [
                    f"{cell['concurrency']} at once, {name}",
                    f"{arm['median_tokens_per_s']:.1f}",
                    f"{arm['first_ms']['median']:.0f}",
                    f"{arm['per_token_ms']['median']:.1f}",
                    f"{arm['gap_ms']['p95']:.0f}",
                    "{mean:.2f} ({low:.2f} to {high:.2f})".format(**ratio) if ratio else "",
                ]
            )
    head = ("requests", "tokens/s", "first ms", "ms a token", "gap p95 ms", f"{DRAFTS} over it")
    device = report["device"]
    return f"{device['name']}, {device['threads']} threads, {report['dtype']}\n{table(head, rows)}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", help="models:/NAME@ALIAS or a folder; default: the champion")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--draft-length", default="adaptive", metavar="N|adaptive")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, metavar="N")
    parser.add_argument("--num-tokens", type=int, default=64, metavar="N", help="of an answer")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/serving-*.json")
    return parser.parse_args(argv)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure cell by cell; the report so far is on disk after each."""
    uri = chosen.pair or any_pair.champion()
    pair = load_pair(uri)
    chat = make_chat(pair.target.model, pair.target.tokenizer)
    asked = prompts_of(chosen.prompts)
    prompts = in_turn([(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in asked])
    report: dict[str, Any] = {
        "schema": 1,
        "device": provenance.device(),
        "dtype": str(pair.target.model.dtype).removeprefix("torch."),
        "pair": {"target": pair.record.target_digest, "draft": pair.draft.manifest.digest},
        "draft_length": chosen.draft_length,
        "num_tokens": chosen.num_tokens,
        "budget_s": chosen.budget,
        "cells": [],
        "provenance": provenance.collect(_SEED),
    }
    out = chosen.out or any_pair.place("serving", report["device"])
    rows = ("--max-rows", str(max(chosen.concurrency)))
    with contextlib.ExitStack() as stack:
        arms: dict[str, Loop | Service] = {}
        for name, length in ((DRAFTS, chosen.draft_length), (PLAIN, "0")):
            options = ("--poll", "0", "--draft-length", length, *rows)
            process = stack.enter_context(running(uri, *options))
            arms[name] = Service(process.facts, chosen.num_tokens)
        arms[LOOP] = Loop(pair.target.model, chosen.num_tokens)
        budget = Budget(chosen.budget)
        for index, concurrency in enumerate(chosen.concurrency):
            until = budget.share(1 / (len(chosen.concurrency) - index))
            limits = {"at_least": _LEAST_GROUPS, "at_most": _MOST_GROUPS}
            groups = within(prompts, concurrency, until=until, **limits)
            report["cells"].append({"concurrency": concurrency, **measure(arms, groups)})
            write_json(out, report)
            _LOG.info("concurrency=%d left_s=%.0f", concurrency, budget.left_s)
    sys.stdout.write(f"{shown(report)}\nwritten: {out}\n")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run(_arguments(argv))
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
