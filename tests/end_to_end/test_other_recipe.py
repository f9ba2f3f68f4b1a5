"""Other drafts go the way of every draft: heads on the target's states, and one from elsewhere.

Steps of one story a recipe, in their order, in a registry of its own behind that of the students.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Project

# Of a student's least alpha; Medusa heads do not read the token before the one that they predict.
SHARE = {"eagle": 1.0, "medusa": 0.6}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["eagle", "medusa"])
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _repro(project: Project, recipe: str, checkpoint: Path) -> None:
    registry = {"name": f"{recipe}-pair", "experiment": f"{recipe}-pair"}
    project.configure(recipe, target={"source": str(checkpoint)}, registry=registry)
    done = project.repro()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def _light(project: Project, checkpoints: Path) -> Path:
    """The checkpoint of a light update of the target."""
    folder = checkpoints / "light"
    if not folder.exists():
        corpus = project.root / "data/corpus"
        home = checkpoints / "home"
        project.world.make_update("light", target=home, corpus=corpus, folder=folder)
    return folder


def test_a_head_is_promoted(warm: Project, recipe: str, checkpoints: Path) -> None:
    _repro(warm, recipe, checkpoints / "home")
    evaluated = warm.report("reports/evaluation.json")["recipes"][recipe]
    assert evaluated["family"] == recipe
    assert evaluated["losslessness"]["holds"]
    assert evaluated["alpha"]["0.0"]["mean"] > SHARE[recipe] * warm.world.least_alpha
    arms = warm.report("reports/benchmark.json")["recipes"][recipe]["arms"]
    assert "transformers_assisted" not in arms
    (pair,) = warm.cli("pairs")
    assert pair["aliases"] == ["challenger", "champion"]


def test_the_registered_head_generates_what_the_target_says(warm: Project, recipe: str) -> None:
    answer = warm.cli("generate", f"models:/{recipe}-pair@champion", warm.world.question)
    assert answer["text"].startswith(warm.world.answer_start)
    assert answer["block_efficiency"] > 1
    assert warm.cli("verify", "@champion")["holds"]


def test_a_light_update_keeps_the_head(warm: Project, recipe: str, checkpoints: Path) -> None:
    _repro(warm, recipe, _light(warm, checkpoints))
    assert warm.report("reports/incumbent.json")["verdict"] == "matched"
    assert warm.report("build/start.json")["recipes"][recipe]["action"] == "reuse"


def test_the_faster_of_two_recipes_is_promoted(warm: Project, checkpoints: Path) -> None:
    """Both are distilled and measured in one run, and the report says why one of them lost."""
    registry = {"name": "both-pair", "experiment": "both-pair"}
    source = {"source": str(checkpoints / "home")}
    warm.configure("eagle", "medusa", target=source, registry=registry)
    done = warm.repro()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    measured = warm.report("reports/benchmark.json")["recipes"]
    speeds = {name: entry["speedup"]["mean"] for name, entry in measured.items()}
    slower, faster = sorted(speeds, key=lambda name: speeds[name])
    registered = warm.report("reports/registration.json")
    assert registered["recipe"] == faster
    assert registered["losers"] == {
        slower: f"measured speedup {speeds[slower]:.3f}, below {speeds[faster]:.3f} of {faster}"
    }
    assert registered["losers"][slower] in (warm.root / "reports/report.html").read_text()
    (pair,) = warm.cli("pairs")
    assert pair["aliases"] == ["challenger", "champion"]


def test_a_draft_that_was_trained_elsewhere_is_promoted(warm: Project, checkpoints: Path) -> None:
    """A fine-tune of the target stands for what another trainer made."""
    folder = _light(warm, checkpoints)
    imported = warm.cli("import-draft", str(folder), "--name", "sibling")
    assert imported["fits_target"]
    _repro(warm, "sibling", checkpoints / "home")
    assert "phase=distil" not in warm.said[-1]
    evaluated = warm.report("reports/evaluation.json")["recipes"]["sibling"]
    assert evaluated["family"] == "causal-lm"
    assert evaluated["losslessness"]["holds"]
    assert evaluated["alpha"]["0.0"]["mean"] > warm.world.least_alpha
    (pair,) = warm.cli("pairs")
    assert (pair["recipe"], pair["aliases"]) == ("sibling", ["challenger", "champion"])
    answer = warm.cli("generate", "models:/sibling-pair@champion", warm.world.question)
    assert answer["text"].startswith(warm.world.answer_start)
