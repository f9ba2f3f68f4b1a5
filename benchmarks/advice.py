"""What `draftsmith advise` says against fixed lengths, on a mixed workload, on this machine.

`python -m benchmarks.advice`, behind `draftsmith advise` on the same pair. Batches of 1 to 8
requests with prompts and answers of several lengths, at every temperature that was advised on, are
decoded in a mixed order: without drafts, at every fixed draft length, and at what is advised on the
workload that is most like the batch. All arms decode a batch before the next one comes, in
alternating order, behind prompts of all domains in turn. Prints tokens/s of every arm and what the
advice gains over it, and writes JSON named after the machine.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from benchmarks import any_pair
from benchmarks.adaptive import deepened
from benchmarks.measuring import Budget, table
from draftsmith import provenance
from draftsmith.artifacts import short, write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.decoding import Tree
from draftsmith.errors import DraftsmithError, EvidenceError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.any_pair import LOOKUP_LENGTH, prompts_of
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.timing import Timings, speed_ratio, timed
from draftsmith.evaluation.trials import arm_of, choice_record
from draftsmith.evaluation.workload import NOTHING, Choice, Workload
from draftsmith.registry.advice_table import ADVICE, is_of_device, nearest_entry, read_advice
from draftsmith.registry.pair import pair_digest

SIZES, CONTEXTS, ANSWERS = (1, 2, 4, 8), (64, 250, 700), (16, 48, 128)
RIVAL = "draft 4"
ADVISED = "as advised"
_FIXED_LENGTHS = (1, 2, 3, 4)
_WARMING_TOKENS = 2
_SEED = 0
_LOG = logging.getLogger(__name__)

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Mix:
    """A pair and the batches that it decodes.

    Attributes:
        pair: Target and draft.
        prompts: Token ids of real prompts, the domains in turn.
        advice: Of the pair on this device.
    """

    pair: Contestants
    prompts: list[list[int]]
    advice: Report

    def workloads(self) -> list[Workload]:
        """In a mixed order, none larger or with longer prompts than any that was advised on."""
        entries = self.advice["workloads"]
        temperatures = sorted({float(entry["temperature"]) for entry in entries})
        largest, longest = (
            max(int(entry[key]) for entry in entries) for key in ("batch_size", "context")
        )
        contexts = [context for context in CONTEXTS if context <= longest] or [longest]
        sizes = [size for size in SIZES if size <= largest]
        cells = itertools.product(sizes, contexts, ANSWERS, temperatures)
        mixed = [Workload(*cell) for cell in cells]
        random.Random(_SEED).shuffle(mixed)
        return mixed

    def choices(self, workload: Workload) -> dict[str, Choice]:
        """What each arm does."""
        most = self.pair.draft.max_draft_length
        fixed = {
            f"draft {n}": Choice(min(n, most), self.pair.lookup_length) for n in _FIXED_LENGTHS
        }
        return {"no drafts": NOTHING, **fixed, ADVISED: advised(self.advice, workload)}

    def decode(self, place: int, workload: Workload) -> dict[str, tuple[float, int]]:
        """Seconds and tokens of every arm on the batch at this place of the order."""
        size, pair = workload.batch_size, replace(self.pair, temperature=workload.temperature)
        first = place * max(SIZES)
        circle = itertools.islice(itertools.cycle(self.prompts), first, first + len(self.prompts))
        group = deepened(list(circle), workload.context)[:size]
        choices = self.choices(workload)
        # Prompts of a new size are slow to read the first time, whoever reads them.
        arm_of(pair, choices[RIVAL], max_new_tokens=_WARMING_TOKENS, batch_size=size)(group)
        found = {}
        for name in list(choices)[:: -1 if place % 2 else 1]:
            arm = arm_of(pair, choices[name], max_new_tokens=workload.new_tokens, batch_size=size)
            found[name] = timed(partial(arm, group))
        return {name: found[name] for name in choices}


def advised(advice: Report, workload: Workload) -> Choice:
    """What was advised on the workload that is most like this one."""
    entry = nearest_entry(
        advice,
        rows=workload.batch_size,
        temperature=workload.temperature,
        context=workload.context,
        new_tokens=workload.new_tokens,
    )
    assert entry is not None  # workloads lie within the advice
    tree = Tree(tuple(entry["tree"])) if entry["tree"] else None
    return Choice(int(entry["draft_length"]), int(entry["copy_length"]), tree)


def advice_for(digest: str) -> dict[str, Any]:
    """The advice on a pair on this device.

    Raises:
        EvidenceError: There is none.
    """
    advice = read_advice(ADVICE, digest)
    if advice is None or not is_of_device(advice, provenance.device()):
        device = provenance.device()
        raise EvidenceError(
            f"reading {ADVICE}",
            found="no advice" if advice is None else f"advice of {advice['device']['name']}",
            expected=f"advice on pair {short(digest)} on {device['name']} with "
            f"{device['threads']} threads",
            remedy="run `draftsmith advise` on this pair here, then this again",
        )
    return advice


def batch_record(mix: Mix, workload: Workload, found: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `batches`."""
    return {
        **asdict(workload),
        "advised": choice_record(advised(mix.advice, workload)),
        "seconds": {name: seconds for name, (seconds, _) in found.items()},
        "tokens": {name: tokens for name, (_, tokens) in found.items()},
    }


def summary(batches: Sequence[Report]) -> dict[str, Any]:
    """Tokens/s of every arm, and what the advice gains over it: intervals over batches."""
    names = list(batches[0]["seconds"])
    timings = {
        name: Timings([b["seconds"][name] for b in batches], [b["tokens"][name] for b in batches])
        for name in names
    }
    return {
        "tokens_per_s": {name: timing.tokens_per_s for name, timing in timings.items()},
        "advised_over": {
            name: asdict(speed_ratio(timings[ADVISED], timing, seed=_SEED))
            for name, timing in timings.items()
            if name != ADVISED
        },
    }


def shown(report: Report) -> str:
    """The arms as text."""
    rows = [
        [
            name,
            f"{speed:.1f}",
            "{mean:.2f} ({low:.2f} to {high:.2f})".format(**report["advised_over"][name])
            if name != ADVISED
            else "",
        ]
        for name, speed in report["tokens_per_s"].items()
    ]
    device, gain = report["device"], report["advised_over"][RIVAL]["mean"]
    head = f"{device['name']}, {device['threads']} threads, {len(report['batches'])} batches"
    told = "met" if gain > 1 else "missed"
    return (
        f"{head}\n{table(('arm', 'tokens/s', 'as advised over it'), rows)}\n"
        f"more than {RIVAL}: {told}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = any_pair.arguments(
        argv, description=__doc__.partition("\n")[0], kind="advice", budget=600.0
    )
    budget = Budget(chosen.budget)
    try:
        target, draft, _ = any_pair.load(chosen)
        advice = advice_for(pair_digest(target.identity.digest, draft.manifest.digest))
        chat = make_chat(target.model, target.tokenizer)
        asked = prompts_of(chosen.prompts)
        prompts = in_turn([(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in asked])
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    mix = Mix(Contestants(target.model, draft, (), LOOKUP_LENGTH), prompts, advice)
    report: dict[str, Any] = {
        "schema": 1,
        "device": provenance.device(),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "pair": {"target": target.identity.digest, "draft": draft.manifest.digest},
        "advised_utc": advice.get("provenance", {}).get("time_utc"),
        "budget_s": chosen.budget,
        "batches": [],
        "provenance": provenance.collect(_SEED),
    }
    path = chosen.out or any_pair.place("advice", report["device"])
    for place, workload in enumerate(mix.workloads()):
        if report["batches"] and budget.left_s < 0:
            break
        report["batches"].append(batch_record(mix, workload, mix.decode(place, workload)))
        write_json(path, report | summary(report["batches"]))
        _LOG.info("batch=%d left_s=%.0f", place + 1, budget.left_s)
    sys.stdout.write(f"{shown(report | summary(report['batches']))}\nwritten: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
