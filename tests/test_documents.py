"""What the documents show must work: configuration, commands, paths."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from dvc.utils.hydra import apply_overrides

from draftsmith.cli import app
from draftsmith.config import compose
from pipeline.compose import SCHEMA

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)


def _blocks(language: str) -> list[tuple[str, str]]:
    """Blocks of a language, each with the name of its document."""
    return [
        (document.name, block)
        for document in DOCUMENTS
        for block in re.findall(
            rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL
        )
    ]


PARAMETERS = [shown for shown in _blocks("yaml") if shown[1].startswith("# params.yaml\n")]


@pytest.mark.parametrize(("document", "shown"), PARAMETERS, ids=[name for name, _ in PARAMETERS])
def test_parameters_that_the_documents_show_compose(tmp_path: Path, document: str, shown: str):
    rest = {"groups": "{target: smollm2}", "recipes": "[student]"}
    lines = [f"{key}: {value}\n" for key, value in rest.items() if f"{key}:" not in shown]
    (tmp_path / "params.yaml").write_text(shown + "".join(lines), encoding="utf-8")
    config = compose(tmp_path / "params.yaml", ROOT / "conf", schema=SCHEMA)
    for section, keys in yaml.safe_load(shown)["override"].items():
        assert set(keys) <= set(config[section]), document


def test_the_readme_shows_prompts_of_ones_own():
    (shown,) = [block for document, block in PARAMETERS if document == "README.md"]
    assert yaml.safe_load(shown)["override"]["corpus"]["sources"][0]["kind"] == "jsonl"


OVERRIDES = sorted(set(re.findall(r"-S '([^']+)'", TEXT)))


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


def test_every_make_target_that_the_documents_name_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = set(re.findall(r"^([a-z-]+):.* ## ", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, flags=re.MULTILINE))
    assert {"repro", "test"} <= named <= made


def test_every_module_and_script_that_the_documents_run_exists():
    modules = set(re.findall(r"python -m ([\w.]+)", TEXT))
    scripts = set(re.findall(r"python ([\w/]+\.py)", TEXT))
    assert modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


COMMANDS = [
    (document, line)
    for document, block in _blocks("bash")
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("draftsmith ")
]


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_every_command_that_the_documents_show_exists_with_its_options(document: str, line: str):
    command, words = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, document


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


@pytest.mark.parametrize(("exit_code", "is_mailed"), [(0, False), (2, False), (3, True), (4, True)])
def test_the_line_for_cron_mails_what_needs_a_look_and_nothing_else(
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
