"""What the measuring program writes about a pair, made up."""

from __future__ import annotations


def estimate(mean):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "num_prompts": 24}


def measurement(record, *, device="NVIDIA H100", kind="cuda", day="2026-03-01", speedup=1.5):
    entry = {
        "recipe": record.draft.recipe,
        "draft_digest": record.draft.digest,
        "pair_digest": record.digest,
        "draft_length": 3,
        "temperature": 0.0,
        "speedup": estimate(speedup),
        "calibration": [{"draft_length": 3, "tokens_per_s": 90.0, "speedup": speedup}],
        "arms": {"gamma_0": {"tokens_per_s": 60.0}},
        "ratios": {
            "engine_vs_generate": estimate(1.2),
            "speculative_vs_generate": estimate(1.2),
        },
        "batch": [],
        "cost": {"target_step_ms": 9.0, "draft_step_ms": 1.0, "cost_ratio": 0.1, "verify_ms": {}},
        "tau": 1.9,
        "expected_tau": 1.8,
        "predicted_speedup": speedup,
    }
    return {
        "schema": 1,
        "target_digest": record.target_digest,
        "device": {"kind": kind, "name": device},
        "recipes": {record.draft.recipe: entry},
        "provenance": {"time_utc": f"{day}T10:00:00+00:00"},
    }
