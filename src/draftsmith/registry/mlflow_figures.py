"""What a pair measured, where MLflow shows it: metrics, parameters, datasets.

They belong to the run behind a version and, in MLflow 3, to its logged model, so both pages show
them and versions can be compared. They are made of evidence, and nothing reads them back.

A comparison shows of each metric its last step. So what is compared has one value, and curves have
names of their own: `with steps/...` and `train_...`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

from draftsmith.artifacts import digest_json, read_json, short
from draftsmith.drift.prediction import break_even_alpha
from draftsmith.registry.pair import CORPUS_TAG, METRIC_TAGS

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from draftsmith.registry.mlflow_upload import PairFiles

_Point = tuple[str, int, float]
_TRAINED = "train_"
_CURVES = "with steps/"  # a comparison lists by name: behind what has one value
_METRICS_A_CALL = 1000  # MLflow's limit
_FORBIDDEN = re.compile(r"[^\w -]+")  # dots and slashes would make other names of a metric's
_LONGEST_DOMAIN = 150  # of MLflow's 250 characters for a name
_TARGET = ("model_type", "dtype", "num_parameters", "num_layers")
_TRAINING = ("steps", "steps_done", "predicted_tokens", "trained_parameters", "seed")
_FIRST_VERDICT = "first_verdict"


def log_pair(client: MlflowClient, run_id: str, model_id: str, files: PairFiles) -> None:
    """Log all of a new version's figures: one request, but for long trainings.

    Args:
        client: The registry.
        run_id: The run behind the version.
        model_id: Its logged model.
        files: The pair and its evidence.
    """
    points = [*_figures(files), *_curves(_training(files))]
    # An upload that goes on has a run with parameters, which MLflow lets nobody change.
    known = client.get_run(run_id).data.params
    named = {**parameters(files), **_measured_with(files)}
    new = {key: value for key, value in named.items() if key not in known}
    _log(client, run_id, model_id, files, points, new)
    client.log_inputs(run_id, _datasets(files))


def log_news(client: MlflowClient, run_id: str, model_id: str, files: PairFiles) -> None:
    """Log what differs from what was logged last; the same point twice would draw a curve twice.

    A point of a curve that newer evidence no longer has stays: MLflow deletes no metric.
    """
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


def log_verdict(client: MlflowClient, run_id: str, verdict: str) -> None:
    """Log what the gate first said of a pair: a parameter never changes, the newest is a tag."""
    if _FIRST_VERDICT not in client.get_run(run_id).data.params:
        client.log_param(run_id, _FIRST_VERDICT, verdict)


def _measured_with(files: PairFiles) -> dict[str, str]:
    """How a pair was first measured; the tags of its version have the latest."""
    timed = _record(files, "benchmark.json")
    found = {
        "target_digest": short(files.record.target_digest),
        "first_device": files.tags.get("device"),
        "first_draft_length": timed.get("draft_length"),
        "first_tree_tokens": len(timed["tree"]) if timed.get("tree") else None,
        "first_copy_length": timed.get("lookup_length"),
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def _figures(files: PairFiles) -> Iterator[_Point]:
    """Points (name, step, value) of the evidence."""
    for key in METRIC_TAGS:
        if key in files.tags:
            yield key, 0, float(files.tags[key])
    evaluated, timed, drift = (
        _record(files, f"{name}.json") for name in ("evaluation", "benchmark", "drift")
    )
    for key, value in _headlines(evaluated, timed, drift).items():
        if value is not None:
            yield key, 0, float(value)
    yield from _accepted(evaluated)
    yield from _timed(timed)


def _headlines(
    evaluated: Mapping[str, Any], timed: Mapping[str, Any], drift: Mapping[str, Any]
) -> dict[str, float | None]:
    """What tells two versions apart, beside their tags; at the temperature of the benchmark."""
    temperature = str(float(timed.get("temperature", 0.0)))
    survival = evaluated.get("survival", {}).get(temperature) or [None]
    speedup, cost = timed.get("speedup", {}), timed.get("cost", {})
    return {
        "survival_first": survival[0],
        "tau/served": timed.get("tau") if "expected_tau" in timed else None,
        "lossless": evaluated.get("losslessness", {}).get("holds"),
        "speedup/low": speedup.get("low"),
        "speedup/high": speedup.get("high"),
        "speedup/predicted": timed.get("predicted_speedup"),
        "draft_length": timed.get("draft_length"),
        "cost_ratio": cost.get("cost_ratio"),
        "break_even_alpha": break_even_alpha(timed) if "verify_ms" in cost else None,
        "drift_change": (drift.get("pooled") or {}).get("change"),
    }


def _accepted(record: Mapping[str, Any]) -> Iterator[_Point]:
    for name in ("alpha", "tau"):
        for temperature, estimate in record.get(name, {}).items():
            yield f"{name}/{temperature}", 0, estimate["mean"]
            for domain, part in estimate.get("by_domain", {}).items():
                # A comparison lists by name: behind what is told of all domains.
                yield f"within domains/{name}/{temperature}/{_key_of(domain)}", 0, part["mean"]
    for temperature, values in record.get("survival", {}).items():
        for position, value in enumerate(values, start=1):
            yield f"{_CURVES}survival by position/{temperature}", position, value


def _key_of(domain: str) -> str:
    """A domain as a part of a metric's name; one that has to be changed is told by its digest."""
    key = _FORBIDDEN.sub("_", domain)[:_LONGEST_DOMAIN]
    return key if key == domain else f"{key} {short(digest_json(domain))}"


def _timed(record: Mapping[str, Any]) -> Iterator[_Point]:
    for entry in record.get("calibration", ()):
        yield f"{_CURVES}speedup by draft length", entry["draft_length"], entry["speedup"]
    for entry in record.get("batch", ()):
        yield f"{_CURVES}speedup by batch size", entry["batch_size"], entry["speedup"]


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
