"""`data/corpus/`: two Arrow datasets, `train` and `eval`, and `corpus.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets

from draftsmith.artifacts import atomic_directory, read_json, write_json
from draftsmith.corpus.rollouts import Rollout
from draftsmith.errors import CorpusError

SPLITS = ("train", "eval")


def write_corpus(
    directory: Path, splits: Mapping[str, Sequence[Rollout]], facts: Mapping[str, Any]
) -> None:
    """Write both splits and `corpus.json`, all or nothing."""
    datasets.disable_progress_bars()
    features = datasets.Features(
        {
            "prompt_id": datasets.Value("string"),
            "domain": datasets.Value("string"),
            "temperature": datasets.Value("float64"),
            "prompt_ids": datasets.List(datasets.Value("int32")),
            "response_ids": datasets.List(datasets.Value("int32")),
            "finished": datasets.Value("bool"),
        }
    )
    with atomic_directory(directory) as folder:
        for split in SPLITS:
            rows = [asdict(rollout) for rollout in splits[split]]
            data = datasets.Dataset.from_list(rows, features=features)
            data.save_to_disk(str(folder / split))
        write_json(folder / "corpus.json", facts)


def read_split(directory: Path, split: str) -> list[Rollout]:
    """All rows of a split.

    Raises:
        CorpusError: It is missing or unreadable.
    """
    try:
        data = datasets.load_from_disk(str(directory / split))
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"reading the {split} split in {directory}",
            found=str(error),
            expected="a dataset that the corpus stage wrote",
            remedy="rerun `dvc repro corpus`",
        ) from error
    return [Rollout(**row) for row in data.to_list()]


def read_facts(directory: Path) -> dict[str, Any]:
    """`corpus.json`."""
    return read_json(directory / "corpus.json")


def read_corpus(directory: Path) -> tuple[str, dict[str, list[Rollout]]]:
    """The corpus's digest, and the rows of all splits."""
    return read_facts(directory)["digest"], {name: read_split(directory, name) for name in SPLITS}
