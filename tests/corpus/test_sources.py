from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from draftsmith.config import write_config
from draftsmith.corpus.settings import SourceConfig
from draftsmith.corpus.sources import identity, read_source
from draftsmith.errors import CorpusError

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": "name a river"}, {"prompt": "name a lake", "domain": "lakes"}]


def jsonl(path, rows=ROWS, **settings):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SourceConfig(kind="jsonl", path=str(path), **settings)


@pytest.fixture
def source(tmp_path):
    return jsonl(tmp_path / "prompts.jsonl")


class TestIdentity:
    def test_it_names_no_place(self, source, tmp_path):
        moved = jsonl(tmp_path / "elsewhere" / "other.jsonl")
        assert identity(moved) == identity(source)
        assert set(identity(source)) == {"kind", "num_prompts", "digest"}

    def test_an_edit_that_says_the_same_changes_nothing(self, source, tmp_path):
        before = identity(source)
        lines = [
            '{"messages": [{"content": "name a river", "role": "user"}]}',
            "",
            '{"domain":"lakes",   "prompt":"name a lake", "note":"unread"}',
        ]
        Path(source.path).write_text("\n".join(lines), encoding="utf-8")
        assert identity(source) == before

    @pytest.mark.parametrize(
        "rows",
        [
            ROWS[::-1],
            ROWS[:1],
            [*ROWS, {"prompt": "name a sea"}],
            [ROWS[0], {"prompt": "name a lake", "domain": "seas"}],
            [ROWS[0], {"prompt": "name a pond", "domain": "lakes"}],
        ],
    )
    def test_whatever_reaches_the_corpus_changes_it(self, source, tmp_path, rows):
        assert identity(jsonl(tmp_path / "changed.jsonl", rows)) != identity(source)

    def test_prompts_behind_the_count_do_not_matter(self, tmp_path):
        one = jsonl(tmp_path / "one.jsonl", ROWS[:1])
        assert identity(jsonl(tmp_path / "two.jsonl", count=1)) == identity(one)

    def test_a_saved_dataset_is_known_by_its_prompts(self, source, tmp_path):
        datasets.disable_progress_bars()
        data = datasets.Dataset.from_list([{"domain": None, **row} for row in ROWS])
        data.save_to_disk(str(tmp_path / "saved"))
        saved = identity(SourceConfig(kind="dataset", path=str(tmp_path / "saved")))
        assert saved == {**identity(source), "kind": "dataset"}

    def test_bundled_prompts_are_counted(self):
        assert identity(SourceConfig(kind="bundled"))["num_prompts"] >= 300
        assert identity(SourceConfig(kind="bundled", count=7))["num_prompts"] == 7

    def test_self_written_prompts_are_known_by_how_they_are_sampled(self):
        source = SourceConfig(kind="self", count=5, temperature=0.6)
        assert identity(source) == {"kind": "self", "count": 5, "temperature": 0.6}
        with pytest.raises(ValueError, match="sampled"):
            read_source(source)


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_a_source_that_is_not_there_is_refused_by_name(tmp_path, kind):
    missing = tmp_path / "missing"
    missing.mkdir()
    with pytest.raises(CorpusError, match="missing"):
        identity(SourceConfig(kind=kind, path=str(missing)))


class TestStage:
    """The script itself, in a folder of its own."""

    @pytest.fixture
    def run(self, tmp_path):
        def resolve(*sources):
            entries = [{"kind": source.kind, "path": source.path} for source in sources]
            write_config(tmp_path / "build/config.yaml", {"corpus": {"sources": entries}})
            environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
            return subprocess.run(
                [sys.executable, "-m", "pipeline.resolve_prompts"],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )

        return resolve

    @pytest.mark.parametrize("broken", ["", '{"prompt": "fine"}\n{"prompt": 3}\n'])
    def test_a_bad_file_fails_by_name_and_the_last_result_stays(
        self, run, source, tmp_path, broken
    ):
        bundled = SourceConfig(kind="bundled")
        assert run(bundled, source).returncode == 0
        written = (tmp_path / "build/prompts.json").read_text()
        assert json.loads(written) == {"sources": [identity(bundled), identity(source)]}
        Path(source.path).write_text(broken, encoding="utf-8")
        done = run(bundled, source)
        assert done.returncode == 2
        assert "prompts.jsonl" in done.stderr
        assert "Traceback" not in done.stderr
        assert (tmp_path / "build/prompts.json").read_text() == written
        assert sorted(path.name for path in (tmp_path / "build").iterdir()) == [
            "config.yaml",
            "prompts.json",
        ]

    def test_it_loads_no_library_of_models_or_datasets(self):
        heavy = ["torch", "transformers", "datasets"]
        code = (
            "import sys, pipeline.resolve_prompts;"
            f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules))"
        )
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.strip() == ""
