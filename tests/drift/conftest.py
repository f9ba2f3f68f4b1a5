from __future__ import annotations

import numpy as np
import pytest

from draftsmith.drift.evidence import Recorded
from draftsmith.drift.settings import DriftConfig

DOMAINS = ("chat", "code", "extraction", "maths", "summary", "translation")


@pytest.fixture
def config():
    return DriftConfig(
        margin=0.02, confidence=0.95, temperature=0.0, min_prompts=50, on_match="reuse"
    )


@pytest.fixture
def make_record():
    """A RecipeEvaluation with a stated mean; records of one `seed` differ by independent noise."""

    def make(mean=0.5, *, seed=0, draft="d1", pair="p1", num_prompts=200, noise=0.04):
        rng = np.random.default_rng(seed)
        base = np.random.default_rng(99).normal(0, 0.12, size=num_prompts)
        alphas = np.clip(mean + base - base.mean() + rng.normal(0, noise, num_prompts), 0, 1)
        prompts = [
            {
                "prompt_id": f"prompt-{index:04d}",
                "domain": DOMAINS[index % len(DOMAINS)],
                "alpha": {"0.0": float(alpha), "0.7": float(alpha) * 0.9},
                "tau": {"0.0": 1.5, "0.7": 1.4},
                "num_tokens": {"0.0": 100, "0.7": 100},
            }
            for index, alpha in enumerate(alphas)
        ]
        return {"recipe": "small", "draft_digest": draft, "pair_digest": pair, "prompts": prompts}

    return make


@pytest.fixture
def make_pair():
    def make(version="1", *, draft="d1", pair="p1", recipe="small", target="t1", live_drift=False):
        return {
            "name": "demo",
            "version": version,
            "pair_digest": pair,
            "target_digest": target,
            "draft_digest": draft,
            "recipe": recipe,
            "recipe_digest": "r",
            "corpus_digest": "c",
            "live_drift": live_drift,
        }

    return make


@pytest.fixture
def make_recorded(make_record, make_pair):
    def make(mean=0.5, *, seed=0, version="1", benchmark=None, **pair):
        pair = {"draft": "d1", "pair": "p1"} | pair
        record = make_record(mean, seed=seed, draft=pair["draft"], pair=pair["pair"])
        return Recorded(make_pair(version, **pair), record, benchmark)

    return make
