"""Artifacts: a reader sees the old content or the new one, and digests follow the content alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from draftsmith import artifacts
from draftsmith.errors import ArtifactError
from tests.full_disk import files_up_to

SRC = Path(__file__).resolve().parents[1] / "src"


@dataclass(frozen=True)
class Facts:
    zeta: int
    alpha: tuple[float, ...]


def by_python(path):
    path.write_bytes(bytes(4096))


def by_safetensors(path):
    save_file({"weights": torch.zeros(1024)}, path)


def by_tokenizers(path):
    Tokenizer(WordLevel({str(number): number for number in range(512)})).save(str(path))


def by_torch(path):
    torch.save({"weights": torch.zeros(1024)}, path)


def in_atomic_directory(path):
    """A process that has written half of `path` and waits for a line before it goes on."""
    code = """
import sys
from pathlib import Path
from draftsmith.artifacts import atomic_directory

with atomic_directory(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print("ready", flush=True)
    sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, path],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


class TestJson:
    def test_written_sorted_and_read_back(self, tmp_path):
        path = tmp_path / "deep" / "er" / "a.json"
        artifacts.write_json(path, {"b": 1, "a": {"d": None, "c": "ä"}})
        assert artifacts.read_json(path) == {"a": {"c": "ä", "d": None}, "b": 1}
        assert path.read_text().index('"a"') < path.read_text().index('"b"')
        assert path.read_text().endswith("}\n")

    def test_dataclasses_are_written_at_any_depth(self, tmp_path):
        facts = Facts(zeta=1, alpha=(0.5,))
        expected = {"alpha": [0.5], "zeta": 1}
        artifacts.write_json(tmp_path / "a.json", facts)
        assert artifacts.read_json(tmp_path / "a.json") == expected
        artifacts.write_json(tmp_path / "b.json", {"list": [facts]})
        assert artifacts.read_json(tmp_path / "b.json") == {"list": [expected]}

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_no_json_number_is_refused_and_the_old_file_kept(self, tmp_path, value):
        path = tmp_path / "a.json"
        artifacts.write_json(path, {"a": 1})
        with pytest.raises(ValueError, match="JSON compliant"):
            artifacts.write_json(path, {"a": value})
        assert artifacts.read_json(path) == {"a": 1}

    def test_an_object_of_another_kind_is_refused(self, tmp_path):
        with pytest.raises(TypeError, match="set"):
            artifacts.write_json(tmp_path / "a.json", {"a": {1, 2}})
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("text", "found"), [(None, "No such file"), ("{", "no JSON"), ("[1]", "list")]
    )
    def test_an_unreadable_file_is_named_with_the_remedy(self, tmp_path, text, found):
        path = tmp_path / "a.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ArtifactError) as raised:
            artifacts.read_json(path)
        assert str(path) in str(raised.value)
        assert found in raised.value.found
        assert "dvc repro" in raised.value.remedy


class TestAtomicWrites:
    def test_text_replaces_text_and_leaves_nothing_beside_it(self, tmp_path):
        path = tmp_path / "a.txt"
        artifacts.write_text(path, "one")
        artifacts.write_text(path, "two")
        assert path.read_text() == "two"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_refused_text_is_an_artifact_error(self, tmp_path):
        (tmp_path / "file").write_text("old")
        with pytest.raises(ArtifactError, match="nothing was changed"):
            artifacts.write_text(tmp_path / "file" / "a.txt", "new")
        assert (tmp_path / "file").read_text() == "old"

    def test_a_write_that_fails_half_way_keeps_the_old_text(self, tmp_path, monkeypatch):
        path = tmp_path / "a.txt"
        artifacts.write_text(path, "old")

        def full(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(artifacts.os, "fsync", full)
        with pytest.raises(ArtifactError, match="No space left"):
            artifacts.write_text(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_directory_appears_whole(self, tmp_path):
        path = tmp_path / "made" / "folder"
        with artifacts.atomic_directory(path) as partial:
            (partial / "a").write_text("1")
            assert not path.exists()
        assert (path / "a").read_text() == "1"
        assert list(path.parent.iterdir()) == [path]

    def test_a_directory_replaces_the_old_one(self, tmp_path):
        path = tmp_path / "folder"
        path.mkdir()
        (path / "old").write_text("1")
        with artifacts.atomic_directory(path) as partial:
            (partial / "new").write_text("2")
        assert [file.name for file in path.iterdir()] == ["new"]

    def test_a_failed_block_leaves_the_old_directory_and_nothing_else(self, tmp_path):
        path = tmp_path / "folder"
        path.mkdir()
        (path / "old").write_text("1")

        def interrupted():
            with artifacts.atomic_directory(path) as partial:
                (partial / "new").write_text("2")
                raise KeyError("interrupted")

        with pytest.raises(KeyError):
            interrupted()
        assert [file.name for file in path.iterdir()] == ["old"]
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("write", [by_python, by_safetensors, by_tokenizers, by_torch])
    def test_a_full_disk_in_the_block_is_an_artifact_error_whoever_writes(self, tmp_path, write):
        path = tmp_path / "folder"
        path.mkdir()
        (path / "old").write_text("1")
        with (
            files_up_to(100),
            pytest.raises(ArtifactError, match=r"writing .*folder: found .*free disk space"),
            artifacts.atomic_directory(path) as partial,
        ):
            write(partial / "new")
        assert [file.name for file in path.iterdir()] == ["old"]
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("num_bytes", [0, 100, 2_000, 4_400])
    def test_torch_is_understood_wherever_in_its_file_the_room_ends(self, tmp_path, num_bytes):
        with files_up_to(num_bytes), pytest.raises(ArtifactError), artifacts.writing(tmp_path):
            by_torch(tmp_path / "new")

    def test_a_fault_of_the_code_in_the_block_stays_what_it_is(self, tmp_path):
        with pytest.raises(RuntimeError, match="a fault"), artifacts.writing(tmp_path):
            raise RuntimeError("a fault")


class TestScratchDirectories:
    def test_what_a_killed_process_left_goes_with_the_next_one(self, tmp_path):
        killed = in_atomic_directory(tmp_path / "folder")
        (left_over,) = tmp_path.iterdir()
        killed.kill()
        killed.wait()
        assert (left_over / "new" / "half").exists()
        with artifacts.atomic_directory(tmp_path / "folder") as partial:
            assert list(tmp_path.iterdir()) == [partial.parent]
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]

    def test_what_a_living_process_holds_stays(self, tmp_path):
        living = in_atomic_directory(tmp_path / "folder")
        (held,) = tmp_path.iterdir()
        with artifacts.atomic_directory(tmp_path / "folder") as partial:
            (partial / "ours").write_text("1")
        assert {path.name for path in tmp_path.iterdir()} == {"folder", held.name}
        living.communicate("go on\n")
        assert living.returncode == 0
        assert [path.name for path in tmp_path.rglob("*")] == ["folder", "half"]

    def test_the_folders_of_other_destinations_stay(self, tmp_path):
        killed = in_atomic_directory(tmp_path / "folder")
        killed.kill()
        killed.wait()
        (tmp_path / ".other.partial").mkdir()
        before = set(tmp_path.iterdir())
        with artifacts.atomic_directory(tmp_path / "other"):
            pass
        assert set(tmp_path.iterdir()) == {*before, tmp_path / "other"}

    def test_many_at_once_never_lose_one(self, tmp_path):
        def use(number):
            with artifacts.scratch_directory(tmp_path, "name") as folder:
                (folder / "mine").write_text(str(number))
                time.sleep(0.001)
                return (folder / "mine").read_text() == str(number)

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(use, range(400)))
        assert list(tmp_path.iterdir()) == []

    def test_only_one_folder_is_kept(self, tmp_path):
        for name in ("old", "current", ".hidden"):
            (tmp_path / name).mkdir()
        artifacts.keep_only(tmp_path, "current")
        assert [path.name for path in tmp_path.iterdir()] == ["current"]
        artifacts.keep_only(tmp_path / "absent", "current")


class TestDigests:
    def test_bytes_are_sha256(self):
        assert artifacts.digest_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()

    def test_json_ignores_order_and_spacing_but_not_values(self):
        one = artifacts.digest_json({"a": 1, "b": [1, 2]})
        assert one == artifacts.digest_json(json.loads('{"b":[1,  2], "a":1}'))
        assert one != artifacts.digest_json({"a": 1, "b": [2, 1]})
        assert len(one) == 64

    def test_a_file_larger_than_a_chunk(self, tmp_path, monkeypatch):
        monkeypatch.setattr(artifacts, "_CHUNK_BYTES", 3)
        (tmp_path / "a").write_bytes(b"0123456789")
        assert artifacts.digest_file(tmp_path / "a") == artifacts.digest_bytes(b"0123456789")

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ArtifactError, match="absent"):
            artifacts.digest_file(tmp_path / "absent")

    def test_a_directory_by_names_and_content_not_by_place(self, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name / "sub").mkdir(parents=True)
            (tmp_path / name / "sub" / "a").write_text("1")
        digest = artifacts.digest_directory(tmp_path / "one")
        assert digest == artifacts.digest_directory(tmp_path / "two")
        (tmp_path / "two" / "b").write_text("extra")
        assert digest != artifacts.digest_directory(tmp_path / "two")
        assert digest == artifacts.digest_directory(tmp_path / "two", exclude=("b",))
        (tmp_path / "one" / "sub" / "a").rename(tmp_path / "one" / "sub" / "c")
        assert digest != artifacts.digest_directory(tmp_path / "one")

    def test_short_is_a_prefix_of_sixteen(self):
        digest = artifacts.digest_bytes(b"abc")
        assert artifacts.short(digest) == digest[:16]
