from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.artifacts import read_json
from draftsmith.decoding import SlotModel, Tree
from draftsmith.decoding.features import FeatureStore
from draftsmith.drafts.eagle_start import build_head
from draftsmith.drafts.medusa import HeadShape, build_heads
from draftsmith.evaluation import profiling
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts
from draftsmith.evaluation.profiling import (
    Grid,
    IsolatedForwards,
    cost_key,
    forward_costs,
    kept_costs,
    round_costs,
)

COSTS = RoundCosts(
    (1, 4),
    (64,),
    {
        (1, 64): ForwardCosts(1.0, 0.5, {1: 1.0, 2: 1.5}),
        (4, 64): ForwardCosts(2.0, 0.75, {1: 2.0, 2: 2.5}),
    },
)
KEY = {"pair_digest": "a" * 64, "device": "one"}


@pytest.fixture
def models(target, drafts):
    return target, drafts["trimmed"].model


@pytest.mark.parametrize("batch_size", [1, 3])
def test_costs_cover_every_width_and_the_plain_step(models, batch_size):
    costs = forward_costs(*models, [3, 2], batch_size=batch_size, context=16, repeats=1)
    assert sorted(costs.verify_ms) == [1, 2, 3]
    assert costs.verify_ms[1] == costs.target_step_ms
    assert costs.cost_ratio == costs.draft_step_ms / costs.target_step_ms


def test_round_costs_cover_every_cell_and_every_width(models):
    costs = round_costs(*models, Grid(rows=(1, 3), contexts=(16, 40), max_width=4, repeats=1))
    assert set(costs.cells) == {(1, 16), (1, 40), (3, 16), (3, 40)}
    for cell in costs.cells.values():
        assert list(cell.verify_ms) == [1, 2, 3, 4]
        assert cell.verify_ms[4] > 0
    assert costs.at(rows=2, context=30).round_ms(2) > 0


def test_contexts_that_the_models_cannot_hold_are_cut_to_the_longest_that_they_can(models, target):
    grid = Grid(rows=(1,), contexts=(16, 5000, 9000), max_width=3, repeats=1)
    limit = target.config.max_position_embeddings - 3
    assert round_costs(*models, grid).contexts == (16, limit)


@pytest.mark.parametrize(
    ("max_rows", "rows"), [(1, (1,)), (4, (1, 4)), (10, (1, 4, 10)), (64, (1, 4, 16, 64))]
)
def test_a_grid_covers_all_batch_sizes_up_to_the_largest(max_rows, rows):
    grid = Grid.covering(max_rows, max_width=6)
    assert grid.rows == rows
    assert grid.widths == [1, 2, 3, 5, 6]


class Measuring:
    """Counts how often it is asked."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return COSTS


@pytest.fixture
def measure():
    return Measuring()


def test_costs_are_measured_once_and_then_found(tmp_path, measure):
    for _ in range(3):
        assert kept_costs(tmp_path / "costs", KEY, measure) == COSTS
    assert measure.count == 1
    (path,) = (tmp_path / "costs").iterdir()
    assert read_json(path)["key"] == KEY


def test_costs_of_another_key_are_measured_anew(tmp_path, measure):
    kept_costs(tmp_path, KEY, measure)
    kept_costs(tmp_path, KEY | {"device": "another"}, measure)
    assert measure.count == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "{}", '{"cells": []}', '{"cells": [{"rows": 1}]}', '{"cells": [3]}', "[1]"],
)
def test_a_damaged_file_is_measured_again_and_mended(tmp_path, measure, content):
    kept_costs(tmp_path, KEY, measure)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(content)
    assert kept_costs(tmp_path, KEY, measure) == COSTS
    assert measure.count == 2
    assert path.read_text() == whole


def test_a_folder_that_cannot_be_written_costs_only_the_measurement(tmp_path, measure, caplog):
    (tmp_path / "costs").write_text("a file is in the way")
    assert kept_costs(tmp_path / "costs", KEY, measure) == COSTS
    assert "costs_not_kept" in caplog.text


def test_the_key_names_pair_device_dtype_versions_and_grid(target):
    grid = Grid((1,), (64,), 3)
    key = cost_key("a" * 64, target, grid)
    assert key["pair_digest"] == "a" * 64
    assert key["dtype"] == "float32"
    assert key["device"]
    assert key["threads"] >= 1
    assert key["packages"]["torch"]
    assert key["grid"] == dataclasses.asdict(grid)


@pytest.mark.parametrize("family", ["eagle", "medusa"])
def test_what_a_draft_reads_is_paid_for_in_rounds_without_drafts_too(target, family, monkeypatch):
    """The clock counts how often features are kept."""
    kept = []
    monkeypatch.setattr(FeatureStore, "put", lambda *_, first_row: kept.append(first_row))

    def count(actions, _repeats):
        times = {}
        for name, action in actions.items():
            kept.clear()
            action()
            times[name] = 1.0 + len(kept)
        return times

    monkeypatch.setattr(profiling, "median_ms", count)
    if family == "eagle":
        head = build_head(target, (0, 1, 2), None)
    else:
        head = build_heads(target, HeadShape(2, 1, own_heads=False), None)
    costs = forward_costs(target, head, [1, 3], batch_size=2, context=16, repeats=1)
    assert (costs.target_step_ms, costs.draft_step_ms) == (1.0, 1.0)
    assert costs.verify_ms == {1: 2.0, 3: 2.0}
    assert costs.round_ms(0) == 2.0


@torch.inference_mode()
def test_an_isolated_tree_is_a_forward_of_its_places_behind_the_context(target):
    """What the last place sees is the context and its own path: as a chain of that path."""
    tree = Tree((0, 0, 1, 1))
    seen = {}
    for shape in (tree, Tree((0, 1))):
        forwards = IsolatedForwards(SlotModel(target), rows=2, context=9, width=5)
        forwards.run(shape)
        keys = forwards.model.cache.layers[-1].keys
        seen[shape.num_nodes] = keys[:, :, 9 + shape.num_nodes]
    assert seen[4].shape[0] == 2
    torch.testing.assert_close(seen[4], seen[2])
