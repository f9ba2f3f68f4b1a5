"""A server under load for minutes, while its pair is replaced again and again.

`python -m benchmarks.soak --minutes 15 [models:/NAME@ALIAS or a folder]`. The pair, the champion
unless another is named, is registered in a project of its own beside a second one of the same
target, and served under `--verify match`, so that every answer has one right text. Callers send
streamed and plain requests without a pause and give up a tenth of them; the second pair is promoted
and rolled back in turn, by `draftsmith rollback`. At the end SIGTERM comes in the middle of some
answers. Writes JSON; the exit status is 1 where a request failed that asked for nothing wrong, the
server did not drain, a move was followed late or not at all, or memory grew beyond a limit. In
another dtype than float32 texts may part at near-ties; they are counted only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks import any_pair
from benchmarks.service_process import ServiceProcess, running
from benchmarks.soak_load import (
    PATIENCE_S,
    Answer,
    Load,
    Wanted,
    WrongAnswerError,
    asked,
    drawn,
    read_stream,
)
from benchmarks.soak_pairs import (
    NAME,
    PROMOTION,
    Move,
    Project,
    folder_of,
    make_project,
    tiny_folder,
)
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.corpus.prompts import Prompt, user_prompt
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.evaluation.any_pair import prompts_of
from draftsmith.registry.generation import Pair

_MAX_CONTEXT = 1024
_MOST_PROMPT_TOKENS = 128
_NUM_REQUESTS = 48  # different ones
_NUM_LAST = 4  # streams that the signal interrupts
_LAST_TOKENS = 96
_WARM_UP = 0.25  # of the time, left out of the growth
# Beyond these it fails: from a move to the first request of the other pair, at the poll that
# services have by default; and memory. A slope of a few minutes is noise.
_MOST_SWAP_S = 10.0
_MOST_A_MINUTE_MIB, _MOST_GROWTH_MIB = 4.0, 64.0  # behind the warm-up
_LEAST_MINUTES = 5.0
_TICK_S = 0.25
_MOST_SHOWN = 1000  # characters of a log
_SEED = 0
_LOG = logging.getLogger(__name__)


class Sample(NamedTuple):
    """The server's memory at a moment.

    Attributes:
        seconds: Since the start.
        mib: Resident.
        is_other: Whether it serves the second pair, the one that is promoted.
    """

    seconds: float
    mib: float
    is_other: bool


class Soak:
    """One run.

    Args:
        service: The server.
        project: What it follows.
        load: Asks it.
        swap_s: Seconds between two moves of the alias.
    """

    def __init__(
        self, service: ServiceProcess, project: Project, load: Load, *, swap_s: float
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._moves: list[Move] = []  # that were followed
        self._service, self._project, self._load, self._swap_s = service, project, load, swap_s
        self._process = psutil.Process(service.process.pid)
        self.memory = [self._sample(0.0)]

    def go_on(self, seconds: float) -> bool:
        """Move the alias every now and then while the callers ask; a move is waited for.

        A machine that is so busy that it has not moved there and back goes on, up to four times as
        long.

        Returns:
            Whether the server lives.
        """
        start = last = time.monotonic()
        while (now := time.monotonic()) < start + seconds * (1 if len(self._moves) > 1 else 4):
            if self._service.process.poll() is not None or not self._process.is_running():
                self.failures[f"the server ended: {self._log()}"] += 1
                return False
            self.memory.append(self._sample(now - start))
            if now >= last + self._swap_s:
                self._swap()
                last = now
            time.sleep(_TICK_S)
        return True

    def _sample(self, seconds: float) -> Sample:
        is_other = bool(self._moves) and self._moves[-1].kind == PROMOTION
        return Sample(seconds, float(self._process.memory_info().rss) / 2**20, is_other)

    def _swap(self) -> None:
        move = self._project.move()
        end, fingerprint = time.monotonic() + PATIENCE_S, _shown(move)
        while not self._load.answers_of(fingerprint, move.since_s):
            if time.monotonic() > end:
                self.failures[f"a {move.kind} that no answer shows"] += 1
                return
            time.sleep(_TICK_S / 10)
        self._moves.append(move)
        _LOG.info("event=swapped kind=%s s=%.2f", move.kind, time.monotonic() - move.since_s)

    @property
    def swaps(self) -> list[dict[str, Any]]:
        """Every move, and how soon the other pair took a request and had answered one."""
        return [
            {"kind": move.kind, **first_of(self._load.answers_of(_shown(move), move.since_s), move)}
            for move in self._moves
        ]

    def require_idle(self) -> None:
        """See that nobody who went away has kept a place."""
        url, end = f"{self._service.facts['url']}/health", time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
                health = json.load(response)
            if health["running"] == health["waiting"] == 0:
                return
            time.sleep(_TICK_S)
        self.failures["places that nobody gave back"] += 1

    def drain(self, wanted: Wanted) -> None:
        """Send the signal in the middle of some streams; they must end as if there were none."""
        sizes = {"max_tokens": _LAST_TOKENS, "min_tokens": _LAST_TOKENS, "stop": []}
        body = {**wanted.body, **sizes, "model": NAME, "stream": True}
        place = urlsplit(self._service.facts["url"]).netloc
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(asked(place, body)) for _ in range(_NUM_LAST)]
            streams = [stack.enter_context(caller.getresponse()) for caller in callers]
            begun = [stream.readline() for stream in streams]
            self._service.process.send_signal(signal.SIGTERM)
            for first, stream in zip(begun, streams, strict=True):
                try:
                    read_stream(first + stream.read())
                except (OSError, WrongAnswerError) as error:
                    self.failures[f"not drained: {error}"] += 1
        status = self._service.process.wait(PATIENCE_S)
        if status != 0 or "Traceback" in self._service.logged():
            self.failures[f"an end with status {status}: {self._log()}"] += 1

    def _log(self) -> str:
        return self._service.logged()[-_MOST_SHOWN:]


def _shown(move: Move) -> str:
    """The fingerprint that answers bear behind it."""
    return f"pair-{move.digest[:16]}"


def first_of(answers: Sequence[Answer], move: Move) -> dict[str, float]:
    """Seconds from a move to the first request that the other pair took, and to a whole answer.

    A request that the other pair took need not be the first one that it has answered.
    """
    moments = {
        "request": min(answer.asked_s for answer in answers),
        "answer": min(answer.whole_s for answer in answers),
    }
    return {f"s_to_first_{of}": round(at - move.since_s, 2) for of, at in moments.items()}


def memory(samples: Sequence[Sample]) -> dict[str, float]:
    """MiB at start, end and most; and growth behind the warm-up, a minute and on the whole.

    The whole growth is from the median of the first quarter behind the warm-up to that of the last
    one: while a pair takes over two of them are in memory.

    Args:
        samples: In order; two at least.
    """
    columns = np.array([(sample.seconds, sample.mib, sample.is_other) for sample in samples])
    seconds, mib = columns[:, 0], columns[:, 1]
    late = columns[seconds >= _WARM_UP * seconds[-1]]
    quarter = math.ceil(len(late) / 4)
    growth = np.median(late[-quarter:, 1]) - np.median(late[:quarter, 1])
    found = {"start": mib[0], "end": mib[-1], "most": mib.max()}
    found |= {"growth_a_minute": 60 * _slope(late), "growth": growth}
    return {f"{name}_mib": round(float(value), 2) for name, value in found.items()}


def _slope(columns: npt.NDArray[np.float64]) -> float:
    """MiB a second of a line that has a level for each of the two pairs.

    They need different memory; with one level for both a line through an odd number of their turns
    leans towards the pair that was served more often.

    Args:
        columns: Seconds, MiB, and whether the other pair was served.
    """
    seconds, mib, is_other = columns.T
    terms = np.stack([seconds - seconds.mean(), 1 - is_other, is_other], axis=1)
    return float(np.linalg.lstsq(terms, mib)[0][0])


def exceeded(report: Mapping[str, Any]) -> list[str]:
    """The limits that a run did not keep, and by what."""
    found = []
    for swap in report["swaps"]:
        if swap["s_to_first_request"] > _MOST_SWAP_S:
            found.append(
                f"a {swap['kind']} was followed after {swap['s_to_first_request']} s, "
                f"later than {_MOST_SWAP_S:g}"
            )
    whole, slope = report["memory"]["growth_mib"], report["memory"]["growth_a_minute_mib"]
    if whole > _MOST_GROWTH_MIB:
        found.append(f"memory grew by {whole} MiB, by more than {_MOST_GROWTH_MIB:g}")
    if slope > _MOST_A_MINUTE_MIB and report["minutes"] >= _LEAST_MINUTES:
        found.append(f"memory grew by {slope} MiB a minute, by more than {_MOST_A_MINUTE_MIB:g}")
    return found


def _chats(pair: Pair, chosen: argparse.Namespace) -> list[list[dict[str, str]]]:
    prompts = _tiny_prompts() if chosen.tiny else prompts_of(chosen.prompts)
    chats = [prompt.as_messages() for prompt in prompts]
    short = [chat for chat in chats if len(pair.encode(chat)) <= _MOST_PROMPT_TOKENS]
    if short:
        return short
    raise ConfigError(
        "choosing prompts",
        found="longer ones alone",
        expected=f"prompts of at most {_MOST_PROMPT_TOKENS} tokens",
        remedy="name others with --prompts",
    )


def _tiny_prompts() -> list[Prompt]:
    from tests.tiny_target import conversations  # noqa: PLC0415  as the tiny pair itself

    return [user_prompt(question, domain) for domain, question, _ in conversations("home")]


def _project(chosen: argparse.Namespace, scratch: Path) -> Project:
    if chosen.tiny:
        folder = tiny_folder(scratch / "tiny")
    else:
        folder = folder_of(chosen.pair or any_pair.champion())
    return make_project(folder, scratch / "project")


def _soaked(project: Project, chosen: argparse.Namespace) -> tuple[Load, Soak]:
    pair = project.pair
    wanted = drawn(_chats(pair, chosen), pair, num=_NUM_REQUESTS, seed=_SEED)
    _LOG.info("event=prepared requests=%d", len(wanted))
    options = ("--root", str(project.root), "--verify", "match")
    context = ("--max-context", str(_MAX_CONTEXT))
    with running(f"models:/{NAME}@champion", *options, *context) as service:
        is_exact = _dtype(pair) == "float32"
        load = Load(service.facts["url"], NAME, wanted, callers=chosen.callers, is_exact=is_exact)
        soak = Soak(service, project, load, swap_s=chosen.swap_every)
        with load:
            is_alive = soak.go_on(60 * chosen.minutes)
        if is_alive:
            soak.require_idle()
            soak.drain(wanted[0])
    return load, soak


def _dtype(pair: Pair) -> str:
    return str(pair.target.model.dtype).removeprefix("torch.")


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Soak; the report is on disk when it is over."""
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        project = _project(chosen, Path(scratch))
        load, soak = _soaked(project, chosen)
    pair, device = project.pair, provenance.device()
    report: dict[str, Any] = {
        "schema": 4,
        "device": device,
        "dtype": _dtype(pair),
        "pair": {"target": pair.record.target_digest, "draft": pair.draft.manifest.digest},
        "minutes": chosen.minutes,
        "callers": chosen.callers,
        "requests": dict(load.counts),
        "failures": dict(load.failures + soak.failures),
        "memory": memory(soak.memory),
        "swaps": soak.swaps,
        "limits": {
            "s_to_first_request": _MOST_SWAP_S,
            "growth_a_minute_mib": _MOST_A_MINUTE_MIB,
            "growth_mib": _MOST_GROWTH_MIB,
        },
        "provenance": provenance.collect(_SEED),
    }
    report["exceeded"] = exceeded(report)
    out = chosen.out or any_pair.place("soak", device)
    write_json(out, report)
    sys.stdout.write(f"{shown(report)}\nwritten: {out}\n")
    return report


def shown(report: Mapping[str, Any]) -> str:
    """The report as text."""
    longest = [
        max((swap[f"s_to_first_{of}"] for swap in report["swaps"]), default=0.0)
        for of in ("request", "answer")
    ]
    lines = [
        ", ".join(f"{count} {what}" for what, count in report["requests"].items()),
        ", ".join(f"{name} {value}" for name, value in report["memory"].items()),
        f"{len(report['swaps'])} swaps, {longest[0]:.1f} s at most to the first request that the "
        f"other pair took, {longest[1]:.1f} s to its first answer",
        *(f"FAILED {count} times: {reason}" for reason, count in report["failures"].items()),
        *(f"EXCEEDED: {what}" for what in report["exceeded"]),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pair", nargs="?", help="models:/NAME@ALIAS or a folder; else the champion")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, made on the spot")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--swap-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--callers", type=int, default=8, metavar="N")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/soak-*.json")
    try:
        report = run(parser.parse_args(argv))
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 1 if report["failures"] or report["exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
