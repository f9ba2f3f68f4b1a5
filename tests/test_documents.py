"""What the documents show must work: configuration, commands, paths."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from dvc.utils.hydra import apply_overrides
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config import compose
from pipeline.compose import SCHEMA

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_configuration_that_the_readme_shows_composes(tmp_path: Path):
    (shown,) = (block for block in _blocks("yaml") if "params.yaml" in block)
    params = yaml.safe_load(shown) | {"recipes": ["student"]}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    config = compose(tmp_path / "params.yaml", ROOT / "conf", schema=SCHEMA)
    assert config["registry"]["name"] == params["override"]["registry"]["name"]
    assert config["corpus"]["sources"][0]["kind"] == "jsonl"


OVERRIDES = sorted(
    {
        override
        for document in DOCUMENTS
        for override in re.findall(r"-S '([^']+)'", document.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides_of_experiments_that_the_documents_show_compose(tmp_path: Path, override: str):
    params = tmp_path / "params.yaml"
    params.write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    apply_overrides(params, [override])
    compose(params, ROOT / "conf", schema=SCHEMA)


@pytest.mark.parametrize("profile", ["default", "full"])
def test_every_profile_composes_with_the_committed_parameters(tmp_path: Path, profile: str):
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["groups"]["profile"] = profile
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    config = compose(tmp_path / "params.yaml", ROOT / "conf", schema=SCHEMA)
    assert set(config["drafts"]) == set(params["recipes"])
    assert config["benchmark"]["max_draft_length"] <= config["evaluation"]["draft_length"]
    assert set(config["evaluation"]["temperatures"]) <= set(config["corpus"]["eval_temperatures"])
    assert config["drift"]["temperature"] in config["evaluation"]["temperatures"]


def test_every_make_target_that_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)\b", README))
    assert named >= {"repro", "test"}
    assert all(re.search(rf"^{name}:", makefile, flags=re.MULTILINE) for name in named)


def test_every_command_that_the_readme_shows_exists():
    shown = {
        line.split()[1]
        for block in _blocks("bash")
        for line in block.splitlines()
        if line.startswith("draftsmith ")
    }
    assert shown
    for command in shown:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command


def _anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path):
    for link in re.findall(r"\]\(([^):]+)\)", document.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize(("exit_code", "is_mailed"), [(0, False), (2, False), (3, True)])
def test_the_line_for_cron_mails_a_decay_and_nothing_else(
    tmp_path: Path, exit_code: int, is_mailed: bool
):
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\*/30 \* \* \* \*\s+(.*)$", text, flags=re.MULTILINE)
    for name, script in {
        ".venv/bin/draftsmith": f"echo report; exit {exit_code}",
        "mail": "cat > mailed",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "reports").mkdir()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = line.replace("/srv/draftsmith", str(tmp_path))
    subprocess.run(["sh", "-c", command], env={"PATH": path}, check=True)
    assert (tmp_path / "mailed").exists() == is_mailed
