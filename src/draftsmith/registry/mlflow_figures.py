"""What a pair measured, where MLflow shows it: metrics with steps, parameters, datasets.

They belong to the run behind a version and, in MLflow 3, to its logged model, so both pages show
them and versions can be compared. They are made of evidence, and nothing reads them back.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

from draftsmith.artifacts import digest_json, read_json, short
from draftsmith.registry.pair import CORPUS_TAG, METRIC_TAGS

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from draftsmith.registry.mlflow_upload import PairFiles

_Point = tuple[str, int, float]
_TRAINED = "train_"
_METRICS_A_CALL = 1000  # MLflow's limit
_FORBIDDEN = re.compile(r"[^\w -]+")  # dots and slashes would make other names of a metric's
_LONGEST_DOMAIN = 150  # of MLflow's 250 characters for a name
_TARGET = ("model_type", "dtype", "num_parameters", "num_layers")
_TRAINING = ("steps", "steps_done", "predicted_tokens", "trained_parameters", "seed")


def log_pair(client: MlflowClient, run_id: str, model_id: str, files: PairFiles) -> None:
    """Log all of a new version's figures: one request, but for long trainings.

    Args:
        client: The registry.
        run_id: The run behind the version.
        model_id: Its logged model.
        files: The pair and its evidence.
    """
    points = [*_figures(files), *_curves(_training(files))]
    _log(client, run_id, model_id, files, points, parameters(files))
    client.log_inputs(run_id, _datasets(files))


def log_news(client: MlflowClient, run_id: str, model_id: str, files: PairFiles) -> None:
    """Log what differs from what was logged last; the same point twice would draw a curve twice."""
    news: list[_Point] = []
    known: dict[str, dict[int, float]] = {}
    for key, step, value in _figures(files):
        if key not in known:
            history = client.get_metric_history(run_id, key)
            known[key] = {m.step: m.value for m in sorted(history, key=lambda m: int(m.timestamp))}
        if known[key].get(step) != value:
            news.append((key, step, value))
    _log(client, run_id, model_id, files, news, {})


def parameters(files: PairFiles) -> dict[str, str]:
    """What a pair was made of, as far as it is known: nothing that another device changes."""
    draft, target, training = files.record.draft, files.record.target, _training(files)
    return {
        "recipe": draft.recipe,
        "family": draft.family,
        **{f"target_{key}": str(target[key]) for key in _TARGET if key in target},
        **{f"training_{key}": str(training[key]) for key in _TRAINING if key in training},
    }


def _figures(files: PairFiles) -> Iterator[_Point]:
    """Points (name, step, value) of the evidence."""
    for key in METRIC_TAGS:
        if key in files.tags:
            yield key, 0, float(files.tags[key])
    yield from _accepted(_record(files, "evaluation.json"))
    yield from _timed(_record(files, "benchmark.json"))


def _accepted(record: Mapping[str, Any]) -> Iterator[_Point]:
    for name in ("alpha", "tau"):
        for temperature, estimate in record.get(name, {}).items():
            yield f"{name}/{temperature}", 0, estimate["mean"]
            for domain, part in estimate.get("by_domain", {}).items():
                yield f"{name}/{temperature}/{_key_of(domain)}", 0, part["mean"]
    for temperature, values in record.get("survival", {}).items():
        for position, value in enumerate(values, start=1):
            yield f"survival/{temperature}", position, value


def _key_of(domain: str) -> str:
    """A domain as a part of a metric's name; one that has to be changed is told by its digest."""
    key = _FORBIDDEN.sub("_", domain)[:_LONGEST_DOMAIN]
    return key if key == domain else f"{key} {short(digest_json(domain))}"


def _timed(record: Mapping[str, Any]) -> Iterator[_Point]:
    for bound in ("low", "high"):
        if bound in record.get("speedup", {}):
            yield f"speedup/{bound}", 0, record["speedup"][bound]
    if "predicted_speedup" in record:
        yield "speedup/predicted", 0, record["predicted_speedup"]
    for entry in record.get("calibration", ()):
        yield "speedup/by draft length", entry["draft_length"], entry["speedup"]
    for entry in record.get("batch", ()):
        yield "speedup/by batch size", entry["batch_size"], entry["speedup"]


def _training(files: PairFiles) -> Mapping[str, Any]:
    training: Mapping[str, Any] = read_json(files.draft_dir / "draft.json").get("training", {})
    return training


def _curves(training: Mapping[str, Any]) -> Iterator[_Point]:
    """The training's history, kept in the manifest."""
    for entry in training.get("history", ()):
        for name in ("loss", "alpha"):
            yield f"{_TRAINED}{name}", int(entry["step"]), entry[name]


def _record(files: PairFiles, name: str) -> Mapping[str, Any]:
    path = files.evidence.get(name)
    return {} if path is None else read_json(path)


def _log(
    client: MlflowClient,
    run_id: str,
    model_id: str,
    files: PairFiles,
    points: list[_Point],
    params: Mapping[str, str],
) -> None:
    now_ms = time.time_ns() // 1_000_000
    trained, held_out = (found.dataset for found in _datasets(files))
    metrics = []
    for key, step, value in points:
        data = trained if key.startswith(_TRAINED) else held_out
        metrics.append(Metric(key, value, now_ms, step, model_id, data.name, data.digest))
    named = [Param(key, value) for key, value in params.items()]
    for start in range(0, len(metrics), _METRICS_A_CALL):
        client.log_batch(run_id, metrics[start : start + _METRICS_A_CALL], named)
        named = []


def _datasets(files: PairFiles) -> list[DatasetInput]:
    """The corpora that the draft was distilled from and evaluated on, by their digests."""
    draft, record = files.record.draft, _record(files, "evaluation.json")
    num_prompts = max((e["num_prompts"] for e in record.get("alpha", {}).values()), default=None)
    found = {
        "training": ("rollouts for training", draft.corpus_digest, None),
        "evaluation": (
            "held-out rollouts", files.tags.get(CORPUS_TAG, draft.corpus_digest), num_prompts
        ),
    }  # fmt: skip
    return [
        DatasetInput(
            Dataset(
                name=name,
                digest=short(digest),
                source_type="local",
                source=json.dumps({"uri": "data/corpus"}),
                profile=None if rows is None else json.dumps({"num_rows": rows}),
            ),
            [InputTag("mlflow.data.context", context)],
        )
        for context, (name, digest, rows) in found.items()
    ]
