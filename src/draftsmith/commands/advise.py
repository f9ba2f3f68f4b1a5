"""The command that says when to speculate: advise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftsmith import artifacts, provenance
from draftsmith.commands.common import (
    HERE,
    AsJson,
    Root,
    open_store,
    reported,
    seconds_of,
    write_json,
)
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.deadline import Deadline
from draftsmith.registry.advice_table import ADVICE, SCHEMA
from draftsmith.report.terminal import advice_tables, alternatives_table, prediction_line

if TYPE_CHECKING:
    from draftsmith.corpus.rollouts import Rollout
    from draftsmith.evaluation.advice import Plan
    from draftsmith.registry.generation import Pair

_PARTIAL = Path("build/partial/advise")
_CORPUS = Path("data/corpus")
_NEW_TOKENS = (16, 64, 256, 512)
_SHORTEST_CONTEXT = 64
_PARTIAL_SCHEMA = 3  # of kept measurements: since 3 they say how long each took


@reported
def advise(  # noqa: PLR0913  a command's options
    pair: Annotated[
        str | None, typer.Argument(help="models:/<name>@<alias>; default: the champion.")
    ] = None,
    *,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s or 10m.")] = "10m",
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests in flight.")] = 16,
    max_context: Annotated[int, typer.Option(min=16, help="Longest prompt, in tokens.")] = 1024,
    device: str = "cpu",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Say for which workloads speculation pays on this machine, and with which lengths."""
    seconds = seconds_of(budget)
    deadline = Deadline.after(seconds)
    from draftsmith.evaluation.advice import Plan  # noqa: PLC0415  torch is slow to import
    from draftsmith.registry.generation import LONGEST  # noqa: PLC0415
    from draftsmith.registry.loading import load_pair, named_device  # noqa: PLC0415

    uri = pair or f"models:/{open_store(root).name}@champion"
    loaded = load_pair(uri, root=root, device=device)
    plan = Plan(
        batch_sizes=_quadrupled(1, max_batch),
        contexts=_quadrupled(min(_SHORTEST_CONTEXT, max_context), max_context),
        new_tokens=_NEW_TOKENS,
        longest=LONGEST,
        deadline=deadline,
        measured_on=_decoded_prompts(loaded.evidence.get("evaluation", {})),
    )
    report = _report(loaded, plan, root)
    report["device"] = {**provenance.device(), **named_device(device)}
    report |= {"budget_s": seconds, "taken_s": seconds - deadline.left_s}
    artifacts.write_json(root / ADVICE, report)
    if as_json:
        write_json(report)
        return
    for table in (*advice_tables(report), alternatives_table(report)):
        Console().print(table)
    typer.echo(f"{prediction_line(report)} All figures: {ADVICE}")


def _quadrupled(first: int, last: int) -> tuple[int, ...]:
    """1, 4, 16, ... up to `last`, which ends it."""
    points = [first]
    while points[-1] * 4 < last:
        points.append(points[-1] * 4)
    return tuple(sorted({*points, last}))


def _decoded_prompts(evaluated: Mapping[str, Any]) -> frozenset[str]:
    """Prompts that the evaluation decoded, so that survival rests on them."""
    prompts: Sequence[Mapping[str, Any]] = evaluated.get("prompts", ())
    return frozenset(prompt["prompt_id"] for prompt in prompts if prompt.get("num_rounds"))


def _report(pair: Pair, plan: Plan, root: Path) -> dict[str, Any]:
    from draftsmith.console import count_phase  # noqa: PLC0415  torch is slow to import
    from draftsmith.evaluation.advice import advice_report  # noqa: PLC0415
    from draftsmith.evaluation.profiling import Grid, cost_key  # noqa: PLC0415

    digest, rollouts = _greedy_answers(pair, root / _CORPUS)
    survivals = pair.survivals()
    trees = {tree.parents for survived in survivals.values() for tree in survived.trees}
    grid = Grid(plan.batch_sizes, plan.contexts, max(plan.longest) + 1)
    key = cost_key(pair.record.digest, pair.target.model, grid) | {
        "advise_schema": _PARTIAL_SCHEMA,
        "corpus": digest,
        "trees": sorted(trees),
        "measured_on": sorted(plan.measured_on),
    }
    found = advice_report(
        pair.contestants(),
        survivals,
        rollouts,
        plan=plan,
        folder=root / _PARTIAL / artifacts.short(artifacts.digest_json(key)),
        on_phase=count_phase,
    )
    return {
        "schema": SCHEMA,
        "pair_digest": pair.record.digest,
        "provenance": provenance.collect(),
        **found,
    }


def _greedy_answers(pair: Pair, folder: Path) -> tuple[str, list[Rollout]]:
    """The corpus's digest, and the target's own answers to its eval prompts at temperature 0.

    Raises:
        EvidenceError: The corpus is of another target, whose token ids may mean other words.
    """
    from draftsmith.corpus.dataset import read_facts, read_split  # noqa: PLC0415  slow to import

    facts = read_facts(folder)
    if facts["target_digest"] != pair.record.target_digest:
        raise EvidenceError(
            f"reading the prompts in {folder}",
            found=f"a corpus of target {facts['target_digest']}",
            expected=f"the corpus of target {pair.record.target_digest}, the pair's",
            remedy="run `dvc repro` on the pair's target, or advise on a pair of the corpus's: "
            "`draftsmith pairs` lists them",
        )
    rollouts = [row for row in read_split(folder, "eval") if row.temperature == 0]
    return facts["digest"], rollouts
