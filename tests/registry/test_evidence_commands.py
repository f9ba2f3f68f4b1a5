"""Evidence of devices on a real registry, from the command line to the gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.artifacts import read_json, write_json, write_text
from draftsmith.cli import app
from draftsmith.errors import EvidenceError
from draftsmith.registry.evidence_files import EVIDENCE, benchmark_for_gate, imported
from tests.registry.measurements import measurement
from tests.registry.small_pairs import make_record

SECTION = "registry:\n  name: demo\n  experiment: draftsmith\n  include_target: false\n"
RECORD = make_record("t2", "d2")


@pytest.fixture
def project(root, store, register):
    """Two versions; the second is the challenger."""
    write_text(root / "build" / "config.yaml", SECTION)
    register("t1", "d1")
    store.set_challenger(register("t2", "d2"))
    return root


def run(*arguments, root):
    return CliRunner().invoke(app, ["evidence", *arguments, "--root", str(root)])


def run_json(*arguments, root):
    done = run(*arguments, "--json", root=root)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def bring(root, **facts):
    write_json(root / "speed.json", measurement(RECORD, **facts))
    return run_json("import", str(root / "speed.json"), root=root)


def files(root):
    return sorted(path.relative_to(root).as_posix() for path in (root / EVIDENCE).rglob("*.json"))


def reports_of(record, benchmark):
    registration = {"pair_digest": record.digest, "recipe": "best"}
    return {"registration": registration, "benchmark": benchmark}


def test_imported_evidence_is_in_the_registry_in_the_project_and_before_the_gate(project):
    done = bring(project)
    assert (done["version"], done["device"], done["speedup"]["mean"]) == ("2", "NVIDIA H100", 1.5)
    assert files(project) == [done["file"]]
    assert done["file"].startswith(f"evidence/{RECORD.digest[:16]}/nvidia-h100-2026-03-01-")
    listed = run_json("list", root=project)
    assert [entry["origin"] for entry in listed] == ["imported", "pipeline"]
    local = measurement(RECORD, device="A CPU", kind="cpu")
    local["recipes"] = {"best": local["recipes"].pop(RECORD.draft.recipe)}
    reports = reports_of(RECORD, local)
    judged = benchmark_for_gate(reports, device="cuda", root=project)
    assert judged["device"]["name"] == "NVIDIA H100"
    assert judged["recipes"]["best"]["pair_digest"] == RECORD.digest
    assert judged["imported_from"] == done["file"]
    assert benchmark_for_gate(reports, device="cpu", root=project) is local


def test_imported_evidence_comes_with_its_pair(project, store, tmp_path):
    done = bring(project)
    for _ in range(2):
        folder = store.fetch(store.resolve("2").pair, tmp_path / "fetched") / "device_evidence"
        assert [path.name for path in folder.iterdir()] == [Path(done["file"]).name]
    assert read_json(folder / Path(done["file"]).name) == measurement(RECORD)


def test_the_same_file_twice_is_one_piece_of_evidence(project):
    assert bring(project) == bring(project)
    assert len(files(project)) == 1
    assert len(run_json("list", root=project)) == 2


def test_older_evidence_stays_and_other_versions_have_none_of_it(project):
    bring(project, day="2026-03-05", speedup=1.4)
    bring(project, day="2026-03-01")
    bring(project, day="2026-03-01", speedup=1.6)
    bring(project, day="2026-03-02", device="NVIDIA L4")
    times = [entry["time_utc"][:10] for entry in run_json("list", root=project)]
    assert times[:4] == ["2026-03-01", "2026-03-01", "2026-03-02", "2026-03-05"]
    assert len(files(project)) == 4
    assert len(run_json("list", "--version", "1", root=project)) == 1
    shown = run("list", root=project).stdout
    assert "NVIDIA L4" in shown
    assert "1.40 (1.30 to 1.50)" in shown


def test_evidence_of_another_pair_is_refused_and_leaves_nothing(project):
    write_json(project / "speed.json", measurement(make_record("t1", "d1")))
    done = run("import", str(project / "speed.json"), root=project)
    assert done.exit_code == 2
    assert RECORD.digest[:16] in done.stderr
    assert files(project) == []
    assert len(run_json("list", root=project)) == 1
    version = ("--version", "1")
    assert run_json("import", str(project / "speed.json"), *version, root=project)["version"] == "1"


@pytest.mark.parametrize("content", [None, "no json", "[]"])
def test_what_is_no_measurement_is_one_message(tmp_path, content):
    path = tmp_path / "speed.json"
    if content is not None:
        path.write_text(content)
    done = run("import", str(path), "--json", root=tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "draftsmith.evaluation.speed" in done.stderr


def test_a_file_that_was_put_into_the_folder_of_another_pair_is_refused(tmp_path):
    write_json(tmp_path / EVIDENCE / RECORD.digest[:16] / "x.json", measurement(make_record()))
    with pytest.raises(EvidenceError, match=RECORD.digest[:16]):
        imported(RECORD.digest, root=tmp_path)
