"""Where trees of drafts pay: chains and trees of every size, by batch size, on this machine.

`python -m benchmarks.trees --project FOLDER`, where a project's drafts are distilled: its settings
hold, and its eval prompts are decoded. Prints where trees stop paying and writes JSON named after
the machine. Finished parts are kept, so a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import any_pair
from benchmarks.measuring import Budget, table
from benchmarks.tree_sweep import TOKENS, Parts, Sweep
from draftsmith import provenance
from draftsmith.artifacts import digest_json, read_json, short, write_json
from draftsmith.config import load_section
from draftsmith.corpus.dataset import read_facts, read_split
from draftsmith.corpus.rollouts import Rollout
from draftsmith.drafts.manifest import FILE_NAME, read_manifest
from draftsmith.errors import CorpusError, DraftError, DraftsmithError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.any_pair import load_any_draft
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.targets.loading import LoadedTarget, load_by_digest

_SCHEMA = 1  # of what is kept and of the report
_PLACES = ("models/drafts/*", "models/champions/*/draft")


@dataclass(frozen=True)
class Project:
    """What all drafts share.

    Attributes:
        target: In its serving dtype.
        corpus_digest: Whose eval prompts these are.
        counting: How guesses are counted.
        prompts: Token ids, domains in turn.
    """

    target: LoadedTarget
    corpus_digest: str
    counting: EvaluationConfig
    prompts: list[list[int]]

    @classmethod
    def read(cls, folder: Path) -> Project:
        """A folder whose corpus stage has run."""
        counting = load_section(folder / "build/config.yaml", "evaluation", EvaluationConfig)
        digest = read_json(folder / "build/target.json")["digest"]
        target = load_by_digest(folder / "models/targets", digest)
        corpus = folder / "data/corpus"
        prompts = long_enough(read_split(corpus, "eval"), counting)
        return cls(target, read_facts(corpus)["digest"], counting, prompts)

    def sweep(self, folder: Path, *, work: Path, budget_s: float, tokens: int) -> Parts:
        """Everything about the draft in a folder."""
        draft = load_any_draft(self.target, folder)
        facts = [provenance.device(), self.target.identity.digest, draft.manifest.digest]
        settings = [self.corpus_digest, asdict(self.counting), budget_s, tokens]
        kept = work / short(digest_json([_SCHEMA, *facts, *settings]))
        pair = Contestants(self.target.model, draft, ())
        found = Sweep(pair, self.counting, self.prompts, kept, tokens).run(Budget(budget_s))
        manifest = draft.manifest
        named = {"recipe": manifest.recipe, "family": manifest.family, "digest": manifest.digest}
        return named | found


def long_enough(rollouts: Sequence[Rollout], counting: EvaluationConfig) -> list[list[int]]:
    """Prompts whose greedy answers no arm finds the end of.

    Raises:
        CorpusError: Hardly any is.
    """
    found = [
        (rollout.prompt_id, rollout.domain, rollout.prompt_ids)
        for rollout in rollouts
        if rollout.temperature == 0 and len(rollout.response_ids) >= counting.max_new_tokens
    ]
    if len(found) <= counting.guess_prompts:
        raise CorpusError(
            "choosing prompts for trees",
            found=f"{len(found)} eval prompts with greedy answers of {counting.max_new_tokens} "
            "tokens or more",
            expected=f"more than the {counting.guess_prompts} that guesses are counted on",
            remedy="lower evaluation.guess_prompts or evaluation.max_new_tokens",
        )
    return in_turn(found)


def drafts_of(folder: Path, target_digest: str) -> dict[str, Path]:
    """The project's drafts for a target, each once, by recipe.

    Raises:
        DraftError: There is none.
    """
    places = [place for pattern in _PLACES for place in sorted(folder.glob(pattern))]
    found: dict[str, tuple[str, Path]] = {}
    for place in places:
        if not (place / FILE_NAME).is_file():
            continue
        manifest = read_manifest(place)
        is_known = manifest.digest in {digest for digest, _ in found.values()}
        if manifest.target_digest == target_digest and not is_known:
            name = manifest.recipe
            if name in found:
                name = f"{name} {short(manifest.digest)}"
            found[name] = manifest.digest, place
    if not found:
        raise DraftError(
            f"looking for drafts in {folder}",
            found=f"none of the target {target_digest}",
            expected=f"one in {' or '.join(_PLACES)}",
            remedy="run `dvc repro` there, or name drafts with --drafts",
        )
    return {name: place for name, (_, place) in found.items()}


def _trees(batch: Parts) -> list[str]:
    """Names of the arms with trees, the smallest first."""
    return sorted(batch["over_chain"], key=lambda name: int(batch["arms"][name]["nodes"]))


def paying(batch: Parts) -> list[int]:
    """Nodes of the trees that were faster than the best chain."""
    over = batch["over_chain"]
    return [batch["arms"][name]["nodes"] for name in _trees(batch) if over[name]["mean"] > 1]


def verdict(batches: Sequence[Parts]) -> str:
    """At which number of nodes and at which batch size trees stop paying."""
    lines = []
    for batch in batches:
        pay, chain = paying(batch), batch["best_chain"]
        which = f"pay up to {max(pay)} nodes" if pay else "do not pay"
        best = batch["best_tree"]
        told = "" if best is None else f"; {best}: {_text(batch['over_chain'][best])} of it"
        lines.append(f"batch {batch['batch_size']}: trees {which} beside {chain}{told}")
    last = max((batch["batch_size"] for batch in batches if paying(batch)), default=None)
    ends = "at no batch size" if last is None else f"up to batch {last}"
    return "\n".join([*lines, f"trees pay {ends}"])


def _text(ratio: Mapping[str, Any]) -> str:
    return "{mean:.2f} ({low:.2f} to {high:.2f})".format(**ratio)


def shown(name: str, entry: Parts) -> str:
    """One draft: the best chain and every tree by batch size, and where trees stop paying."""
    head = (
        *("batch, drafts", "tau", "expected", "verify ms", "as a tree", "moved"),
        *("predicted", "speedup", "over the chain"),
    )
    rows = [
        [f"{batch['batch_size']}, {drafts}", *_line(batch, drafts)]
        for batch in entry["batches"]
        for drafts in (batch["best_chain"], *_trees(batch))
    ]
    parts = (name, table(head, rows), verdict(entry["batches"]), _of_sampled(entry["sampled"]))
    return "\n".join(parts)


def _line(batch: Parts, drafts: str) -> list[str]:
    """What an arm of a batch size came to, as text."""
    found, over = batch["arms"][drafts], batch["over_chain"].get(drafts)
    alone = found["alone_ms"] or {}
    return [
        f"{found['tau']:.2f}",
        f"{found['expected_tau']:.2f}",
        f"{found['verify_ms']:.1f}",
        *(f"{alone[k] / alone['chain']:.2f}" if alone else "" for k in ("tree", "moved")),
        f"{found['predicted_speedup']:.2f}",
        _text(found["speedup"]),
        _text(over) if over else "",
    ]


def _of_sampled(sampled: Parts) -> str:
    """The tree that samples its guesses, as text."""
    best = sampled["best_tree"]
    if best is None:
        return "no tree was sampled"
    over = _text(sampled["over_chain"][best])
    tau = {arm_name: f"{found['tau']:.2f}" for arm_name, found in sampled["arms"].items()}
    chain = sampled["best_chain"]
    return (
        f"temperature {sampled['temperature']}, batch {sampled['batch_size']}: {best} (tau "
        f"{tau[best]}) is {over} of {chain} (tau {tau[chain]})"
    )


def _named(text: str) -> tuple[str, Path]:
    name, is_named, folder = text.partition("=")
    if not (name and is_named and folder):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=FOLDER")
    return name, Path(folder)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="default: this folder")
    parser.add_argument(
        "--drafts",
        type=_named,
        nargs="+",
        metavar="NAME=FOLDER",
        help=f"default: the target's drafts in {' and '.join(_PLACES)}",
    )
    parser.add_argument("--budget", type=float, default=600.0, help="seconds a draft")
    parser.add_argument("--work", type=Path, default=Path("build/partial/trees"))
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/trees-*.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, tokens: int = TOKENS) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = _arguments(argv)
    device = provenance.device()
    path = chosen.out or any_pair.place("trees", device)
    try:
        project = Project.read(chosen.project)
        digest = project.target.identity.digest
        report: dict[str, Any] = {
            "schema": _SCHEMA,
            "device": device,
            "dtype": str(project.target.model.dtype).removeprefix("torch."),
            "target_digest": digest,
            "corpus_digest": project.corpus_digest,
            "budget_s": chosen.budget,
            "drafts": {},
            "provenance": provenance.collect(0),
        }
        for name, folder in dict(chosen.drafts or drafts_of(chosen.project, digest)).items():
            report["drafts"][name] = project.sweep(
                folder, work=chosen.work, budget_s=chosen.budget, tokens=tokens
            )
            write_json(path, report)
            sys.stdout.write(f"{shown(name, report['drafts'][name])}\n")
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"written: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
