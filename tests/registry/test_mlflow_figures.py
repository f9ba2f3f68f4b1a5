"""What a reader finds in MLflow: figures with steps, parameters, datasets, descriptions."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient

from draftsmith.artifacts import digest_json, short, write_json, write_text
from draftsmith.registry import description
from tests.registry.small_pairs import SOURCE, TAGS, digest, make_files, make_record

LONG = "d" * 400
EVALUATION = {
    "alpha": {
        "0.0": {
            "mean": 0.4,
            "num_prompts": 7,
            "by_domain": {
                "chat": {"mean": 0.3},
                "a/b..": {"mean": 0.5},
                "a.b/": {"mean": 0.6},
                LONG: {"mean": 0.7},
            },
        }
    },
    "tau": {"0.0": {"mean": 1.5}},
    "survival": {"0.0": [0.4, 0.2, 0.1]},
    "losslessness": {"holds": True},
}
DRIFT = {"verdict": "pass", "pooled": {"change": -0.05}}


def benchmark(speedup):
    return {
        "draft_length": 2,
        "speedup": {"mean": speedup, "low": speedup - 0.1, "high": speedup + 0.1},
        "predicted_speedup": 1.3,
        "tau": 1.55,
        "expected_tau": 1.6,
        "lookup_length": 5,
        "tree": [0, 0, 0],
        "chain_length": 1,
        "cost": {
            "target_step_ms": 40.0,
            "draft_step_ms": 4.0,
            "verify_ms": {"1": 40.0, "2": 44.0},
            "cost_ratio": 0.1,
        },
        "calibration": [{"draft_length": 1, "speedup": 1.1}, {"draft_length": 2, "speedup": 1.2}],
        "batch": [{"batch_size": 1, "speedup": 1.2}, {"batch_size": 4, "speedup": 0.9}],
    }


@pytest.fixture
def registered(root, store, tmp_path):
    """Registers a measured pair; returns its version and the client."""

    def call(speedup=1.2, tags=TAGS):
        draft_dir, evidence = make_files(tmp_path / "files")
        training = {"steps": 2, "seed": 0, "history": [{"step": 1.0, "loss": 5.0, "alpha": 0.1}]}
        write_json(draft_dir / "draft.json", {"training": training})
        records = {"evaluation": EVALUATION, "benchmark": benchmark(speedup), "drift": DRIFT}
        for name, record in records.items():
            evidence[f"{name}.json"] = tmp_path / "files" / f"{name}.json"
            write_json(evidence[f"{name}.json"], record)
        version = store.register(
            make_record(), draft_dir, evidence=evidence, tags=tags, target_source=SOURCE
        )
        client = MlflowClient(f"sqlite:///{root}/mlflow.db")
        return client.get_model_version("demo", version), client

    return call


def curve(client, run_id, key):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, key)]


def test_figures_have_steps_that_mean_something(registered):
    version, client = registered()
    survival = curve(client, version.run_id, "with steps/survival by position/0.0")
    assert survival == [(1, 0.4), (2, 0.2), (3, 0.1)]
    speedup = curve(client, version.run_id, "with steps/speedup by draft length")
    assert speedup == [(1, 1.1), (2, 1.2)]
    speedup = curve(client, version.run_id, "with steps/speedup by batch size")
    assert speedup == [(1, 1.2), (4, 0.9)]
    assert curve(client, version.run_id, "train_loss") == [(1, 5.0)]
    figures = client.get_run(version.run_id).data.metrics
    assert (figures["alpha"], figures["speedup"]) == (0.4, 1.2)
    assert figures["within domains/alpha/0.0/chat"] == 0.3
    for domain, key, value in (
        ("a/b..", "a_b_", 0.5),
        ("a.b/", "a_b_", 0.6),
        (LONG, "d" * 150, 0.7),
    ):
        assert figures[f"within domains/alpha/0.0/{key} {short(digest_json(domain))}"] == value
    assert figures["speedup/predicted"] == 1.3


def test_what_two_versions_are_compared_by_has_one_value_and_no_step(registered):
    version, client = registered()
    figures = client.get_run(version.run_id).data.metrics
    headlines = {
        "alpha": 0.4,
        "alpha/0.0": 0.4,
        "tau": 1.5,
        "tau/served": 1.55,
        "speedup": 1.2,
        "speedup/predicted": 1.3,
        "survival_first": 0.4,
        "draft_length": 2.0,
        "cost_ratio": 0.1,
        "break_even_alpha": pytest.approx(0.2, abs=1e-5),
        "lossless": 1.0,
        "drift_change": -0.05,
    }
    assert {key: figures[key] for key in headlines} == headlines
    steps = {key: [step for step, _ in curve(client, version.run_id, key)] for key in figures}
    assert {key for key, found in steps.items() if found != [0]} == {
        "with steps/survival by position/0.0",
        "with steps/speedup by draft length",
        "with steps/speedup by batch size",
        "train_loss",
        "train_alpha",
    }


def test_the_logged_model_carries_them_too(registered):
    version, client = registered()
    model = client.get_logged_model(version.source.removeprefix("models:/"))
    logged = {(metric.key, metric.step, metric.value) for metric in model.metrics}
    assert ("within domains/alpha/0.0/chat", 0, 0.3) in logged
    assert ("with steps/survival by position/0.0", 3, 0.1) in logged
    assert model.params["recipe"] == "small"
    assert '"version": "1"' in model.tags["mlflow.modelVersions"]
    data = {metric.key: metric.dataset_name for metric in model.metrics}
    assert (data["alpha"], data["train_loss"]) == ("held-out rollouts", "rollouts for training")


def test_parameters_say_what_the_pair_was_made_of(registered):
    version, client = registered()
    assert client.get_run(version.run_id).data.params == {
        "recipe": "small",
        "family": "student",
        "target_dtype": "float32",
        "target_num_parameters": "1",
        "training_steps": "2",
        "training_seed": "0",
        "target_digest": short(digest("t1")),
        "first_device": "A CPU",
        "first_draft_length": "2",
        "first_tree_tokens": "3",
        "first_copy_length": "5",
    }


def test_the_first_verdict_is_a_parameter_and_the_newest_one_a_tag(store, registered, tmp_path):
    version, client = registered()
    for verdict in ("block", "promote", "promote"):
        write_json(tmp_path / "decision.json", {"verdict": verdict, "reasons": []})
        store.attach_decision(version.version, tmp_path / "decision.json")
    assert client.get_run(version.run_id).data.params["first_verdict"] == "block"
    tag = client.get_model_version("demo", version.version).tags["decision"]
    assert '"verdict": "promote"' in tag


def test_both_corpora_are_linked_by_their_digests(registered):
    version, client = registered(tags={**TAGS, "evaluated_corpus_digest": digest("c2")})
    inputs = client.get_run(version.run_id).inputs.dataset_inputs
    found = {found.tags[0].value: found.dataset for found in inputs}
    assert found["training"].digest == short(digest("c1"))
    assert found["evaluation"].digest == short(digest("c2"))
    assert '"num_rows": 7' in found["evaluation"].profile


def test_measuring_again_adds_what_changed_and_repeats_nothing(registered):
    registered()
    version, client = registered(1.4, {**TAGS, "speedup": "1.4000"})
    assert str(version.version) == "1"
    survival = curve(client, version.run_id, "with steps/survival by position/0.0")
    assert survival == [(1, 0.4), (2, 0.2), (3, 0.1)]
    assert curve(client, version.run_id, "speedup") == [(0, 1.2), (0, 1.4)]
    assert client.get_run(version.run_id).data.metrics["speedup/low"] == pytest.approx(1.3)
    version, client = registered(1.2)
    assert client.get_run(version.run_id).data.metrics["speedup"] == 1.2


def test_model_and_version_say_what_they_are_from_the_first_moment(registered):
    version, client = registered()
    assert "models:/demo@champion" in client.get_registered_model("demo").description
    assert version.description.startswith("Not judged yet. Recipe small")
    assert "alpha 0.4000, tau 1.5000, speedup 1.2000 on A CPU" in version.description


def test_the_gates_report_becomes_the_description(root, store, registered, tmp_path):
    version, client = registered()
    decision, report = tmp_path / "decision.json", tmp_path / "report.md"
    write_json(decision, {"verdict": "promote", "reasons": ["faster"]})
    write_text(report, "## Promote: demo version 1\n")
    store.attach_decision(version.version, decision, report)
    told = client.get_model_version("demo", version.version).description
    assert told == "Promote: demo version 1\n"
    assert [path.name for path in (root / "mlartifacts").rglob("decision/*.md")] == ["report.md"]


def test_a_long_report_is_cut_behind_a_whole_line():
    report = "".join(f"| row {number} | of a table |\n" for number in range(1000))
    told = description.of_report(report)
    assert len(told) <= 5000
    rows, _, hint = told.partition("\n\n")
    assert report.startswith(f"{rows}\n")
    assert "decision/report.md" in hint
    assert description.of_report("short\n") == "short\n"
