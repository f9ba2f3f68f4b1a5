"""A head on the target's features goes the way of every draft: promoted, served, tested, reused.

Steps of one story, in their order, in a registry of its own behind that of the students.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Project

REGISTRY = {"name": "head-pair", "experiment": "head-pair"}

pytestmark = pytest.mark.slow


def _repro(project: Project, checkpoint: Path) -> None:
    project.configure("eagle", target={"source": str(checkpoint)}, registry=REGISTRY)
    done = project.repro()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_a_head_is_promoted(warm: Project, checkpoints: Path) -> None:
    _repro(warm, checkpoints / "home")
    evaluated = warm.report("reports/evaluation.json")["recipes"]["eagle"]
    assert evaluated["family"] == "eagle"
    assert evaluated["losslessness"]["holds"]
    assert evaluated["alpha"]["0.0"]["mean"] > warm.world.least_alpha
    arms = warm.report("reports/benchmark.json")["recipes"]["eagle"]["arms"]
    assert "transformers_assisted" not in arms
    (pair,) = warm.cli("pairs")
    assert pair["aliases"] == ["challenger", "champion"]


def test_the_registered_head_generates_what_the_target_says(warm: Project) -> None:
    answer = warm.cli("generate", "models:/head-pair@champion", warm.world.question)
    assert answer["text"].startswith(warm.world.answer_start)
    assert answer["block_efficiency"] > 1
    assert warm.cli("verify", "@champion")["holds"]


def test_a_light_update_keeps_the_head(warm: Project, checkpoints: Path) -> None:
    light = checkpoints / "light"
    if not light.exists():
        corpus = warm.root / "data/corpus"
        warm.world.make_update("light", target=checkpoints / "home", corpus=corpus, folder=light)
    _repro(warm, light)
    assert warm.report("reports/incumbent.json")["verdict"] == "matched"
    assert warm.report("build/start.json")["recipes"]["eagle"]["action"] == "reuse"
