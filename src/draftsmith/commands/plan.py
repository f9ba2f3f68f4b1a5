"""The command that says what a distillation takes before it is begun: plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer
from rich.console import Console

from draftsmith.artifacts import read_json
from draftsmith.commands.common import HERE, AsJson, Root, reported, write_json
from draftsmith.config import build, compose
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import CheckpointConfig, RecipeConfig, TrainedConfig
from draftsmith.errors import ConfigError, DraftError
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.report.planned import plan_tables, verdict_lines
from draftsmith.strict import convert
from draftsmith.targets.settings import TargetConfig

if TYPE_CHECKING:
    from draftsmith.planning.corpus import CorpusSize, Expected
    from draftsmith.planning.job import Machine, Rates

T = TypeVar("T")

_SCHEMA = {
    "target": TargetConfig,
    "corpus": CorpusConfig,
    "drafts": RecipeConfig,
    "distill": DistillConfig,
    "evaluation": EvaluationConfig,
}
_BYTES_PER_GB = 1e9
_TARGETS, _CORPUS = Path("models/targets"), Path("data/corpus")

Source = Annotated[
    str | None,
    typer.Argument(help="Folder, config.json or org/name[@revision]; default: the project's."),
]
Recipes = Annotated[
    list[str] | None, typer.Option(help="File of conf/draft/, repeatable; default: params.yaml's.")
]
Dtype = Annotated[str | None, typer.Option(help="Served dtype; default: target.dtype.")]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda", help="Default: what this machine has.")
]
Memory = Annotated[float | None, typer.Option(min=0.001, help="GB (1e9 bytes) of a device.")]
Shards = Annotated[int, typer.Option(min=1, help="Devices that divide the target.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes of a training; default: --shards.")
]
Rows = Annotated[int, typer.Option(min=1, help="Requests that are decoded at once.")]
Context = Annotated[int, typer.Option(min=2, help="Tokens of a request, answer included.")]
Prompts = Annotated[int | None, typer.Option(min=1, help="Prompts of all sources.")]
PromptTokens = Annotated[int | None, typer.Option(min=2, help="Mean tokens of a prompt.")]
ResponseTokens = Annotated[int | None, typer.Option(min=1, help="Mean tokens of a response.")]
RolloutRate = Annotated[float | None, typer.Option(min=0.001, help="As stage corpus logs it.")]
TrainingRate = Annotated[float | None, typer.Option(min=0.001, help="As stage distill logs it.")]
Price = Annotated[float | None, typer.Option(min=0, help="In any currency.")]


@reported
def plan(  # noqa: PLR0913  a command's options
    target: Source = None,
    *,
    recipe: Recipes = None,
    dtype: Dtype = None,
    device: Device = None,
    device_memory: Memory = None,
    shards: Shards = 1,
    processes: Processes = None,
    batch_size: Rows = 1,
    context: Context = 2048,
    prompts: Prompts = None,
    prompt_tokens: PromptTokens = None,
    response_tokens: ResponseTokens = None,
    rollout_tokens_per_s: RolloutRate = None,
    training_tokens_per_s: TrainingRate = None,
    price_per_device_hour: Price = None,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Plan a distillation from a config alone: memory, disk, tokens, hours by given rates."""
    from draftsmith.planning.corpus import Expected  # noqa: PLC0415  torch is slow to import
    from draftsmith.planning.job import Machine, Rates  # noqa: PLC0415

    config = compose(root / "params.yaml", root / "conf", schema=_SCHEMA, recipes=recipe)
    memory = None if device_memory is None else int(device_memory * _BYTES_PER_GB)
    asked = _Asked(
        root,
        config,
        target,
        dtype,
        (batch_size, context),
        Machine(_device_type(device), memory, shards, _processes(processes, shards)),
        Expected(prompts, prompt_tokens, response_tokens),
    )
    rates = Rates(rollout_tokens_per_s, training_tokens_per_s, price_per_device_hour)
    report = asked.report(rates)
    if as_json:
        write_json(report)
        return
    for table in plan_tables(report):
        Console().print(table)
    for line in verdict_lines(report):
        typer.echo(line)


def _device_type(device: str | None) -> Literal["cpu", "cuda"]:
    """The value of `--device`.

    Raises:
        ConfigError: It is another kind of device.
    """
    if device is None:
        import torch  # noqa: PLC0415  slow to import

        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            "reading --device",
            found=repr(device),
            expected="cpu or cuda",
            remedy="pass the kind of device that is to train",
        )
    return cast('Literal["cpu", "cuda"]', device)


def _processes(asked: int | None, shards: int) -> int:
    """The value of `--processes`.

    Raises:
        ConfigError: Only some of the processes would divide the target.
    """
    if asked is None or shards in (1, asked):
        return asked or shards
    raise ConfigError(
        "reading --processes",
        found=f"{asked} beside --shards {shards}",
        expected="in a training all processes divide the target, or none",
        remedy="leave out --processes, or make both equal",
    )


@dataclass(frozen=True)
class _Asked:
    """What was asked for, on the command line and in the project's configuration."""

    root: Path
    config: dict[str, Any]
    target: str | None
    dtype: str | None
    requests: tuple[int, int]
    machine: Machine
    expected: Expected

    def report(self, rates: Rates) -> dict[str, Any]:
        from draftsmith.planning.job import Job  # noqa: PLC0415  torch is slow to import
        from draftsmith.planning.models import CacheShape  # noqa: PLC0415
        from draftsmith.planning.plan import plan as planned  # noqa: PLC0415

        section = self._section("target", TargetConfig)
        rows, context = self.requests
        drafted = self._section("evaluation", EvaluationConfig).draft_length
        job = Job(
            self._folder(section),
            self.dtype or section.dtype,
            self._section("distill", DistillConfig),
            self._corpus(),
            CacheShape(rows, context + drafted + 1),
            self.machine,
            is_copied=section.snapshot == "copy",
        )
        return {**planned(job, self._recipes(), rates), "source": self.target or section.source}

    def _section(self, name: str, cls: type[T]) -> T:
        return build(cls, self.config[name], name)

    def _recipes(self) -> dict[str, TrainedConfig]:
        found = cast(
            "dict[str, RecipeConfig]",
            convert(self.config["drafts"], dict[str, RecipeConfig], "drafts"),
        )
        trained = {
            name: recipe
            for name, recipe in found.items()
            if not isinstance(recipe, CheckpointConfig)
        }
        if not trained:
            raise DraftError(
                f"planning {', '.join(found)}",
                found="no recipe that is trained: a checkpoint is taken over as it is",
                expected="a recipe of family student, eagle or medusa",
                remedy="name one with --recipe",
            )
        return trained

    def _folder(self, section: TargetConfig) -> Path:
        """Where the config is; the snapshot's, where the source itself has none to read."""
        from draftsmith.targets.loading import target_directory  # noqa: PLC0415  as above
        from draftsmith.targets.source import config_folder, has_config  # noqa: PLC0415

        if self.target is not None:
            return config_folder(self.target)
        record, source = self.root / "build/target.json", section.source
        if (self.root / source).exists():  # relative to the project, as for the stages
            source = str(self.root / source)
        if not has_config(source) and record.exists():
            return target_directory(self.root / _TARGETS, str(read_json(record)["digest"]))
        revision = "" if section.revision is None else f"@{section.revision}"
        return config_folder(f"{source}{revision}")

    def _corpus(self) -> CorpusSize:
        """Counted where it is the project's own and nothing else is expected."""
        from draftsmith.planning.corpus import at_most, counted  # noqa: PLC0415  as above

        folder = self.root / _CORPUS
        if self.target is None and not self.expected.is_anything and folder.exists():
            from draftsmith.corpus.dataset import read_corpus  # noqa: PLC0415  as above

            return counted(read_corpus(folder)[1])
        return at_most(self._section("corpus", CorpusConfig), self.expected, root=self.root)
