"""Reports of a good pair, and what the gate makes of them."""

from __future__ import annotations

from datetime import date

from draftsmith.registry.gate import GateConfig, GateEvidence, decide
from draftsmith.registry.pair import pair_digest

TARGET, DRAFT = "a" * 64, "b" * 64
PAIR = pair_digest(TARGET, DRAFT)
TODAY = date(2026, 5, 31)


def estimate(mean, low, high, num_prompts=200):
    return {"mean": mean, "low": low, "high": high, "num_prompts": num_prompts}


def comparison(change, low, high):
    return {
        "proposed": 0.4 + change,
        "reference": 0.4,
        "change": change,
        "low": low,
        "high": high,
        "effect_size": 0.1,
        "num_prompts": 200,
    }


def domain(change, flag):
    return comparison(change, change - 0.01, change + 0.01) | {"p_adjusted": 0.01, "flag": flag}


def good_reports():
    """Reports of a pair that is better than its champion in every respect."""
    evaluated = {
        "recipe": "small",
        "draft_digest": DRAFT,
        "pair_digest": PAIR,
        "alpha": {
            key: estimate(mean, mean - 0.02, mean + 0.02)
            | {"by_domain": dict.fromkeys(("chat", "maths"), estimate(mean, 0.3, 0.5))}
            for key, mean in (("0.0", 0.4), ("0.7", 0.45))
        },
        "losslessness": {
            "holds": True,
            "fp32": {"num_prompts": 8, "num_identical": 8, "num_tokens": 512, "holds": True},
            "bf16": {"num_prompts": 8, "num_identical": 7, "holds": True},
            "control": {"detected": True, "num_identical": 0, "num_prompts": 8},
        },
    }
    benchmarked = {
        "recipe": "small",
        "draft_digest": DRAFT,
        "pair_digest": PAIR,
        "speedup": estimate(1.3, 1.2, 1.4, 20),
        "ratios": {
            "engine_vs_generate": estimate(1.0, 0.99, 1.01, 20),
            "speculative_vs_generate": estimate(1.3, 1.2, 1.4, 20),
        },
    }
    return {
        "registration": {"name": "demo", "version": "2", "pair_digest": PAIR, "recipe": "small"},
        "target": {"digest": TARGET},
        "evaluation": {"target_digest": TARGET, "recipes": {"small": evaluated}},
        "benchmark": {
            "target_digest": TARGET,
            "device": {"kind": "cpu", "name": "Some Processor"},
            "recipes": {"small": benchmarked},
        },
        "drift": {
            "verdict": "pass",
            "reasons": ["Compared with the champion it is no worse."],
            "reference": {"kind": "champion", "pair_digest": "c" * 64, "version": "1"},
            "pair_digest": PAIR,
            "margin": 0.02,
            "live_drift": False,
            "pooled": comparison(0.01, 0.0, 0.02),
            "by_domain": {"chat": domain(0.01, False), "maths": domain(0.01, False)},
        },
        "incumbent": {
            "verdict": "matched",
            "reasons": ["It still matches."],
            "pooled": comparison(0.0, -0.01, 0.01),
            "incumbent": {"version": "1", "draft_digest": "d" * 64},
        },
    }


CONFIG = {
    "min_alpha": 0.3,
    "alpha_temperature": 0.0,
    "min_speedup": 1.0,
    "device": "any",
    "require_losslessness": True,
    "min_engine_ratio": 0.97,
}


def judged(reports, *, critical_domains=(), today=TODAY, **settings):
    config = GateConfig(**(CONFIG | settings))
    evidence = GateEvidence(**reports)
    return decide(evidence, config=config, today=today, critical_domains=critical_domains)


def failing(decision):
    return [check["name"] for check in decision["checks"] if check["verdict"] == "fail"]


def check_of(decision, name):
    return next(check for check in decision["checks"] if check["name"] == name)


def set_at(tree, path, value):
    *parents, last = path.split("/")
    for key in parents:
        tree = tree[key]
    tree[last] = value
