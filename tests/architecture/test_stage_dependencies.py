"""Each stage of dvc.yaml lists every file that its script imports: a changed module reruns it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.corpus.settings import CorpusConfig
from tests.architecture.import_closure import import_closure

ROOT = Path(__file__).resolve().parents[2]
MAX_SCRIPT_LINES = 40
STAGES = (
    "compose",
    "resolve_target",
    "resolve_prompts",
    "resolve_device",
    "resolve_champion",
    "corpus",
    "incumbent",
    "start",
    "distill",
    "evaluate",
    "benchmark",
    "drift",
    "register",
    "gate",
    "promote",
)


def read_stages(path: Path) -> dict[str, dict[str, Any]]:
    """Stage definitions by name; those of `foreach` and `matrix` stages once, unexpanded."""
    if not path.is_file():
        return {}
    stages = yaml.safe_load(path.read_text())["stages"]
    return {name: stage.get("do", stage) for name, stage in stages.items()}


def declared_paths(stage: dict[str, Any]) -> list[str]:
    """Paths under `deps`, whose entries are a path or a mapping of a path to options."""
    entries = stage.get("deps", [])
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def missing_dependencies(stage: dict[str, Any], closure: set[str]) -> list[str]:
    """Files of `closure` that no entry of `deps` names or holds."""
    covers = [Path(path) for path in declared_paths(stage)]
    return sorted(
        file for file in closure if not any(Path(file).is_relative_to(path) for path in covers)
    )


def paste(files: list[str]) -> str:
    """Lines for the `deps:` of a stage."""
    return "\n".join(f"      - {file}" for file in files)


DEFINED = read_stages(ROOT / "dvc.yaml")


def test_the_stages_are_those_of_the_design():
    assert sorted(DEFINED) == sorted(STAGES)


def test_every_script_is_a_stage():
    scripts = {path.stem for path in (ROOT / "pipeline").glob("*.py")} - {"__init__"}
    assert sorted(scripts) == sorted(DEFINED)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_the_script_of_its_name(name):
    command = f"python -m pipeline.{name}"
    if name == "distill":  # by sh: other shells split no words of a variable
        command = "sh -c 'exec \\${DISTILL_LAUNCH:-python} -m pipeline.distill ${item.recipe}'"
    assert DEFINED[name]["cmd"] == command


@pytest.mark.parametrize("name", STAGES)
def test_a_script_is_short(name):
    num_lines = len((ROOT / "pipeline" / f"{name}.py").read_text().splitlines())
    assert num_lines <= MAX_SCRIPT_LINES


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_all_that_it_imports(name):
    closure = import_closure(ROOT / "pipeline" / f"{name}.py", ROOT)
    missing = missing_dependencies(DEFINED[name], closure)
    assert not missing, f"add to deps of {name} in dvc.yaml:\n{paste(missing)}"


@pytest.mark.parametrize("name", STAGES)
def test_every_declared_code_dependency_exists(name):
    paths = [
        path for path in declared_paths(DEFINED[name]) if path.startswith(("src/", "pipeline/"))
    ]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", STAGES)
def test_a_failing_stage_keeps_what_it_wrote_before(name):
    stage = DEFINED[name]
    entries = [*stage["outs"], *stage.get("metrics", [])]
    lost = [
        entry
        for entry in entries
        if isinstance(entry, str) or not all(flags.get("persist") for flags in entry.values())
    ]
    in_run_cache = {"corpus": ["data/corpus"], "distill": ["models/drafts/${item.recipe}"]}
    assert lost == in_run_cache.get(name, [])


def test_the_corpus_depends_on_what_its_sources_hold_and_not_on_where_they_or_endpoints_lie():
    stage = DEFINED["corpus"]
    (keys,) = [entry["build/config.yaml"] for entry in stage["params"]]
    elsewhere = {"sources", "endpoints", "endpoint_model", "endpoint_timeout_s"}
    expected = {f"corpus.{f.name}" for f in fields(CorpusConfig) if f.name not in elsewhere}
    assert set(keys) == expected
    assert "build/prompts.json" in declared_paths(stage)


class TestClosure:
    @pytest.fixture
    def tree(self, tmp_path):
        files = {
            "pipeline/stage.py": (
                "import json\nfrom draftsmith.low.one import x\n"
                "def main():\n    from draftsmith import late\n"
            ),
            "src/draftsmith/__init__.py": (
                "def __getattr__(name):\n    from draftsmith import unused\n"
            ),
            "src/draftsmith/unused.py": "",
            "src/draftsmith/late.py": (
                "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    import draftsmith.typed\n"
                "else:\n    import draftsmith.untyped\n"
            ),
            "src/draftsmith/typed.py": "",
            "src/draftsmith/untyped.py": "",
            "src/draftsmith/low/__init__.py": "from .. import always\n",
            "src/draftsmith/low/one.py": "from . import two\nfrom .three import y\n",
            "src/draftsmith/low/two.py": "import draftsmith.low.one\n",
            "src/draftsmith/low/three.py": "",
            "src/draftsmith/always.py": "",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    def test_follows_functions_packages_and_circles_but_not_types(self, tree):
        assert import_closure(tree / "pipeline/stage.py", tree) == {
            "pipeline/stage.py",
            "src/draftsmith/low/__init__.py",
            "src/draftsmith/always.py",
            "src/draftsmith/low/one.py",
            "src/draftsmith/low/two.py",
            "src/draftsmith/low/three.py",
            "src/draftsmith/late.py",
            "src/draftsmith/untyped.py",
        }

    def test_a_name_of_a_package_brings_what_the_package_imports_late(self, tree):
        (tree / "pipeline/stage.py").write_text("from draftsmith import load\n")
        assert import_closure(tree / "pipeline/stage.py", tree) == {
            "pipeline/stage.py",
            "src/draftsmith/__init__.py",
            "src/draftsmith/unused.py",
        }

    def test_a_folder_covers_its_files_and_options_are_read(self):
        stage = {"deps": ["src/draftsmith/low", {"pipeline/stage.py": {"cache": False}}]}
        closure = {"src/draftsmith/low/one.py", "src/draftsmith/lower.py", "pipeline/stage.py"}
        assert missing_dependencies(stage, closure) == ["src/draftsmith/lower.py"]

    def test_foreach_and_matrix_stages_are_read(self, tmp_path):
        (tmp_path / "dvc.yaml").write_text(
            "stages:\n  a:\n    foreach: [1]\n    do: {cmd: x, deps: [b]}\n"
            "  c:\n    matrix: {recipe: [s]}\n    cmd: y\n"
        )
        stages = read_stages(tmp_path / "dvc.yaml")
        assert declared_paths(stages["a"]) == ["b"]
        assert stages["c"]["cmd"] == "y"
