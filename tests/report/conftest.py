from __future__ import annotations

import pytest

from draftsmith.report.inputs import ReportInputs
from draftsmith.report.page import render_page

DOMAINS = ("chat", "code", "extraction", "maths", "summarisation", "translation")


def estimate(mean, width=0.02, num_prompts=200):
    return {"mean": mean, "low": mean - width, "high": mean + width, "num_prompts": num_prompts}


def by_temperature(mean, step):
    return {
        key: estimate(mean + shift)
        | {
            "by_domain": {
                name: estimate(mean + shift + step * (index - 2.5), 0.05, 33)
                for index, name in enumerate(DOMAINS)
            }
        }
        for key, shift in (("0.0", 0.0), ("0.7", 0.05))
    }


def comparison(change):
    return {
        "proposed": 0.4123 + change,
        "reference": 0.4123,
        "change": change,
        "low": change - 0.0111,
        "high": change + 0.0111,
        "effect_size": -0.31,
        "num_prompts": 197,
    }


def compared(change):
    return {
        "pooled": comparison(change),
        "by_domain": {
            name: comparison(change + 0.01 * index)
            | {"p_adjusted": 0.0123, "flag": index == 0, "shrunken_change": change}
            for index, name in enumerate(DOMAINS)
        },
    }


def at_temperature(key, change):
    report, tokens = compared(change), compared(1.7 * change)
    predicted = {
        "tau": tokens["pooled"],
        "by_domain": {name: {"tau": part} for name, part in tokens["by_domain"].items()},
    }
    return key, report["pooled"] | {"by_domain": report["by_domain"], "predicted": predicted}


def check(name, verdict="pass", severity="block", remedy=""):
    return {
        "name": name,
        "severity": severity,
        "measured": 1.2345,
        "low": 1.1234,
        "high": 1.3456,
        "requirement": f"requirement of {name}",
        "verdict": verdict,
        "remedy": remedy,
        "detail": f"Detail of {name} with its numbers.",
        "override": None,
    }


def positions(values):
    return [{"survival": estimate(value, 0.013, 64)} for value in values]


def record(mean):
    survival = {"0.0": [0.41, 0.17, 0.07], "0.7": [0.46, 0.21, 0.1]}
    return {
        "recipe": "small",
        "family": "student",
        "draft_digest": "b" * 64,
        "pair_digest": "c" * 64,
        "alpha": by_temperature(mean, 0.02),
        "tau": by_temperature(1.71, 0.05),
        "survival": survival,
        "positions": {key: positions(values) for key, values in survival.items()},
        "position_counts": {"0.0": [12345, 12001, 11876], "0.7": [9001, 8900, 8800]},
        "conditional_acceptance": {"0.0": [0.41, 0.4146, None], "0.7": [0.46, 0.45, 0.48]},
        "accepted_fraction": {"0.0": 0.22, "0.7": 0.26},
        "vocabulary_coverage": 0.9871,
        "prompts": [],
        "losslessness": {
            "holds": True,
            "fp32": {"num_prompts": 8, "num_identical": 8, "num_tokens": 517, "holds": True},
            "bf16": {
                "num_prompts": 8,
                "num_identical": 7,
                "tolerance": 0.1875,
                "divergences": [{"prompt_id": "prompt-31", "position": 17, "gap": 0.0625}],
                "holds": True,
            },
            "control": {"detected": True, "num_identical": 0, "num_prompts": 8},
        },
    }


def benchmark():
    return {
        "recipe": "small",
        "draft_digest": "b" * 64,
        "pair_digest": "c" * 64,
        "draft_length": 2,
        "temperature": 0.0,
        "speedup": estimate(1.274, 0.05, 24),
        "arms": {
            "gamma_0": {"tokens_per_s": 21.43},
            "speculative": {"tokens_per_s": 27.32},
            "transformers_generate": {"tokens_per_s": 21.71},
            "transformers_assisted": {"tokens_per_s": 19.87, "draft_length": 3},
        },
        "ratios": {
            "engine_vs_generate": estimate(0.987, 0.01, 24),
            "speculative_vs_generate": estimate(1.258, 0.05, 24),
            "speculative_vs_assisted": estimate(1.375, 0.06, 24),
        },
        "calibration": [
            {"draft_length": n, "tokens_per_s": 21.4 * s, "speedup": s}
            for n, s in ((1, 1.19), (2, 1.28), (3, 1.22), (4, 1.09), (5, 0.97))
        ],
        "batch": [
            {
                "batch_size": n,
                "draft_length": g,
                "tokens_per_s": 27.3 * n,
                "baseline_tokens_per_s": 21.4 * n,
                "speedup": s,
                **({"adaptive_speedup": 1.04 * s} if n > 1 else {}),
            }
            for n, g, s in ((1, 2, 1.27), (4, 2, 1.11), (16, 1, 0.93))
        ],
        "cost": {
            "target_step_ms": 46.71,
            "draft_step_ms": 7.93,
            "verify_ms": {"1": 46.71, "2": 51.02, "3": 55.48},
            "cost_ratio": 0.1698,
        },
        "predicted_speedup": 1.3062,
        "tau": 1.6834,
        "expected_tau": 1.7123,
    }


def workload(batch_size, context, temperature=0.0, **told):
    return {
        "batch_size": batch_size,
        "context": context,
        "new_tokens": 16,
        "temperature": temperature,
        "verdict": "speculate",
        "instead": None,
        "draft_length": 2,
        "copy_length": 5,
        "tree": [],
        "speedup": 1.4142,
        "tokens_per_s": 31.29,
        "plain_tokens_per_s": 22.13,
        "break_even_alpha": 0.1277,
        "free_positions": 8,
    } | told


def trial():
    return {
        "batch_size": 2,
        "context": 111,
        "new_tokens": 48,
        "temperature": 0.7,
        "draft_length": 1,
        "copy_length": 4,
        "tree": [0],
        "predicted": 1.3721,
        "measured": 1.4567,
        "interval": [1.3345, 1.5678],
        "error": -0.0581,
        "sign_error": True,
        "iid_predicted": 1.6123,
        "iid_error": 0.1068,
        "predicted_tokens_a_round": 1.5123,
        "measured_tokens_a_round": 1.5321,
    }


def costs(batch_size, context, waiting):
    """A measured cell whose forwards wait for memory up to `waiting` positions."""
    step = 38.99 * batch_size**0.1 + context / 256
    return {
        "batch_size": batch_size,
        "context": context,
        "target_step_ms": step,
        "draft_step_ms": 0.079 * step,
        "verify_ms": {str(width): step * (1 + 0.03 * width) for width in range(1, 5)},
        "drafts_at_once": False,
        "prefill_ms": {"target": 93.4 * batch_size, "draft": 4.16 * batch_size},
        "bound": {
            str(width): "memory" if width <= waiting else "arithmetic" for width in range(1, 5)
        },
    }


def alternative(scheme, batch_size, ratio, *, is_served=False):
    return {
        "scheme": scheme,
        "same_greedy_tokens": 0.9464,
        "batch_size": batch_size,
        "draft_length": 1,
        "copy_length": 5,
        "ratio": estimate(ratio, 0.03, 4),
        "reading_ratio": estimate(0.98 * ratio, 0.04, 4),
        "decoding_ratio": estimate(1.02 * ratio, 0.05, 4),
        "ratio_with_drafts": estimate(1.2 * ratio, 0.06, 4),
        "keeps_the_targets_law": is_served,
    }


def advice():
    """What `draftsmith advise` writes; a test holds its fields against those really written."""
    int8 = {"scheme": "int8 weights", "ratio": {"mean": 1.3131, "low": 1.2731, "high": 1.3531}}
    idle = {"draft_length": 0, "copy_length": 0, "speedup": 1.0, "break_even_alpha": None}
    return {
        "schema": 3,
        "pair_digest": "c" * 64,
        "device": {"kind": "cpu", "name": "Other Processor", "threads": 2},
        "provenance": {"git_revision": "def456", "packages": {"torch": "2.13.0"}, "seed": None},
        "ceilings": {"bytes_per_s": 41992407325.5, "flop_per_s": 397097761491.1},
        "target_size": {
            "parameters": 134515008,
            "weight_bytes": 269030016,
            "cache_bytes": 23040,
            "attention_flop": 69120,
            "expert_bytes": 134515008,
            "expert_share": 0.25,
        },
        "draft_size": {
            "parameters": 9808128,
            "weight_bytes": 19616256,
            "cache_bytes": 768,
            "attention_flop": 2304,
            "expert_bytes": 0,
            "expert_share": 1.0,
        },
        "served_dtype": "bfloat16",
        "measured_costs": [
            costs(1, 64, 4),
            costs(1, 1024, 3),
            costs(4, 64, 1),
            costs(4, 1024, 0),
        ],
        "judging_ms": {"greedy": 0.0621, "sampled": 0.1923},
        "alternatives": [
            alternative("int8", 1, 1.5439),
            alternative("bfloat16", 1, 1.0, is_served=True),
            {"scheme": "float32", "left_out": "no time left of the budget", "late": [4]},
        ],
        "workloads": [
            workload(1, 64),
            workload(4, 64, verdict="about even", speedup=1.0789),
            workload(1, 1024, verdict="do not speculate", **idle),
            workload(4, 1024, verdict="quantise instead", instead=int8, **idle),
            workload(1, 64, 0.7, speedup=2.3456, draft_length=1, tree=[0, 0, 0]),
            workload(4, 64, 0.7, verdict="copies alone", speedup=1.0432, draft_length=0),
        ],
        "trials": [trial()],
        "prediction": {
            "num_trials": 7,
            "median_error": 0.0461,
            "median_signed_error": -0.0123,
            "median_tokens_error": 0.0739,
            "median_iid_error": 0.1579,
            "on_unseen_prompts": True,
            "error_bar": 0.0843,
            "sign_errors": 3,
        },
        "left_out": ["answers of 512 tokens: the models hold too few"],
        "budget_s": 600.0,
        "taken_s": 543.21,
    }


def build_reports():
    failed = check("speedup", "fail", remedy="Try a smaller draft.")
    return {
        "decision": {
            "schema": 2,
            "valid_until": None,
            "verdict": "block",
            "name": "demo-pair",
            "version": "12",
            "pair_digest": "c" * 64,
            "checks": [
                check("losslessness"),
                failed,
                check("engine_ratio", "fail", "warn", remedy="Check the threads."),
                check("drift", "skip") | {"measured": None, "low": None, "high": None},
            ],
            "reasons": [failed["detail"], "A second reason, 0.0421 short."],
        },
        "registration": {
            "name": "demo-pair",
            "version": "12",
            "pair_digest": "c" * 64,
            "recipe": "small",
            "losers": {"large": "its measured speedup was lower"},
        },
        "evaluation": {
            "target_digest": "a" * 64,
            "recipes": {"small": record(0.4123)},
            "provenance": {"git_revision": "abc123", "packages": {"torch": "2.13.0"}, "seed": None},
        },
        "benchmark": {
            "target_digest": "a" * 64,
            "device": {"kind": "cpu", "name": "Some Processor @ 2 GHz", "threads": 2},
            "recipes": {"small": benchmark()},
            "provenance": {"git_revision": "abc123"},
        },
        "drift": {
            "verdict": "drifted",
            "reasons": ["Drift reason one.", "Drift reason two."],
            "reference": {"kind": "champion", "pair_digest": "d" * 64, "version": "11"},
            "pair_digest": "c" * 64,
            "draft_digest": "b" * 64,
            "temperature": "0.0",
            "margin": 0.02,
            "live_drift": False,
        }
        | compared(-0.0321),
        "target": {"digest": "a" * 64, "num_parameters": 134515008, "model_type": "llama"},
        "champion": {
            "name": "demo-pair",
            "version": "11",
            "pair_digest": "d" * 64,
            "target_digest": "f" * 64,
        },
        "champion_record": record(0.4444),
        "incumbent": {
            "verdict": "drifted",
            "reasons": ["Incumbent reason."],
            "changed": ["weights", "chat_template"],
            "incumbent": {"version": "10", "draft_digest": "e" * 64},
        }
        | compared(-0.1234)
        | {"by_temperature": dict(map(at_temperature, ("0.0", "0.7"), (-0.1234, -0.2345)))},
        "manifest": {
            "family": "student",
            "training": {
                "steps": 900,
                "loss": "forward_kl",
                "history": [{"step": 50.0, "loss": 3.8578}, {"step": 100.0, "loss": 3.3834}],
            },
        },
        "advice": advice(),
    }


@pytest.fixture
def reports():
    return build_reports()


@pytest.fixture(scope="session")
def page():
    """The page of the unchanged reports, rendered once."""
    return render_page(ReportInputs(**build_reports()))


@pytest.fixture
def inputs(reports):
    return ReportInputs(**reports)
