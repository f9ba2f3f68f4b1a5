"""The live verdict on simulated service with measured rates."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.live_calibration import looks, rates_of
from benchmarks.live_service import (
    DIGEST,
    DOMAINS,
    MARGIN,
    RATES,
    evaluation_record,
    monitor_config,
    stream,
)
from draftsmith.drift.detectors import noise, signal_of_drop, threshold
from draftsmith.drift.live import judge_live
from draftsmith.drift.live_reference import registered_rates
from draftsmith.errors import ConfigError, EvidenceError

EASY, HARD = "maths", "summarisation"
NUM_STREAMS = 12


def judged(requests, *, seed=0, record=None, **changes):
    rates = registered_rates(record or evaluation_record(seed))
    config = monitor_config(**changes)
    report = judge_live(requests, rates, pair_digest=DIGEST, config=config, margin=MARGIN)
    json.dumps(report, allow_nan=False)
    return report


def verdicts(make_stream, **changes):
    """Verdicts over streams that differ in traffic and in the noise of the reference."""
    return Counter(
        judged(make_stream(seed), seed=1000 + seed, **changes)["verdict"]
        for seed in range(NUM_STREAMS)
    )


def test_a_stationary_stream_raises_no_alarm():
    assert verdicts(lambda seed: stream(500, seed)) == {"ok": NUM_STREAMS}


@pytest.mark.parametrize("begin", [0, 300], ids=["from the start", "in the middle"])
def test_a_decayed_draft_is_found(begin):
    found = verdicts(lambda seed: stream(900, seed, lost=lambda i: 0.1 * (i >= begin)))
    assert found["draft decay"] >= 0.95 * NUM_STREAMS


def test_looking_again_and_again_raises_no_alarm():
    """Small version of `python -m benchmarks.live_calibration quiet`."""
    for seed in range(6):
        requests, rates = stream(800, seed), rates_of(seed)
        assert {verdict for _, verdict in looks(requests, rates, 80)} <= {
            "not enough requests",
            "ok",
        }


def test_a_look_says_what_all_requests_so_far_say():
    requests, rates = stream(900, 1, lost=lambda i: 0.15 * (i >= 300)), rates_of(1)
    found = dict(looks(requests, rates, 150))
    options = {"pair_digest": DIGEST, "config": monitor_config(), "margin": MARGIN}
    assert found == {end: judge_live(requests[:end], rates, **options)["verdict"] for end in found}
    assert found[900] == "draft decay"


def test_a_decay_names_its_numbers_and_the_detectors():
    report = judged(stream(900, 1, lost=lambda i: 0.12 * (i >= 300)))
    pooled = next(entry for entry in report["strata"] if entry["domain"] == "all domains")
    assert pooled["decayed"]
    assert pooled["change"]["high"] < 0
    assert pooled["earlier"]["high"] < 0
    assert pooled["signal"]["page_hinkley"] > 300
    assert any(f"{pooled['change']['survival']:.3f}" in reason for reason in report["reasons"])
    assert any("Page-Hinkley" in reason for reason in report["reasons"])


def test_a_decay_of_one_domain_is_found_there():
    lost = {HARD: 0.0, EASY: 0.25}
    requests = [
        request
        for domain in (EASY, HARD)
        for request in stream(400, 5, domain=domain, lost=lost[domain])
    ]
    report = judged(requests)
    decayed = {entry["domain"] for entry in report["strata"] if entry["decayed"]}
    assert report["verdict"] == "draft decay"
    assert EASY in decayed
    assert HARD not in decayed


def test_a_drop_within_the_margin_is_no_decay_however_many_requests_say_so():
    record = evaluation_record(0)
    requests = stream(2500, 3, domain="code")
    rate = sum(r.accepted[0] for r in requests) / sum(r.drafted[0] for r in requests)
    level = record["positions"]["0.0"][0]["survival"]["by_domain"]["code"]
    level["mean"] = level["low"] = level["high"] = rate + 0.75 * MARGIN
    assert judged(requests, record=record, window=2000)["verdict"] == "ok"


class TestShiftsAreNoDecay:
    def test_another_domain_mix(self):
        def domain(index):
            return [EASY, EASY, EASY, HARD] if index < 400 else [EASY, HARD, HARD, HARD]

        found = verdicts(lambda seed: stream(800, seed, domain=domain))
        assert found == {"traffic shift": NUM_STREAMS}

    def test_another_domain_mix_that_nobody_labelled(self):
        found = verdicts(
            lambda seed: stream(
                800, seed, domain=lambda i: EASY if i < 400 else HARD, labelled=False
            )
        )
        assert found["draft decay"] == 0

    def test_longer_prompts_that_are_harder(self):
        found = verdicts(
            lambda seed: stream(
                800,
                seed,
                prompt_tokens=lambda i: 50 + i % 90 if i < 400 else 400 + i % 200,
                lost=lambda i: 0.15 * (i >= 400),
            )
        )
        assert found == {"traffic shift": NUM_STREAMS}

    def test_more_of_the_long_prompts_that_are_harder(self):
        def is_long(index):
            return index % 10 < (1 if index < 400 else 7)

        found = verdicts(
            lambda seed: stream(
                800,
                seed,
                prompt_tokens=lambda i: 300 + i % 90 if is_long(i) else 30 + i % 90,
                lost=lambda i: 0.12 * is_long(i),
            )
        )
        assert found == {"traffic shift": NUM_STREAMS}

    @pytest.mark.parametrize("begin", [250, 400])
    def test_another_draft_length_of_the_engine(self, begin):
        found = verdicts(
            lambda seed: stream(800, seed, draft_length=lambda i: 1 if i < begin else 4)
        )
        assert found == {"engine change": NUM_STREAMS}

    def test_more_answers_that_copy_from_their_prompts(self):
        def stream_with_copies(seed):
            requests = stream(800, seed, draft_length=2)
            return [*requests[:400], *(with_copies(r, 2 * r.rounds) for r in requests[400:])]

        assert verdicts(stream_with_copies) == {"ok": NUM_STREAMS}

    def test_a_decay_beside_a_shift_is_still_decay(self):
        def domain(index):
            return [EASY, EASY, HARD] if index < 400 else [EASY, HARD, HARD]

        found = verdicts(
            lambda seed: stream(800, seed, domain=domain, lost=lambda i: 0.13 * (i >= 400))
        )
        assert found["draft decay"] >= 0.8 * NUM_STREAMS


def with_copies(request, num_copied):
    """The request with further rounds whose drafts were copied from the text."""
    lengths = (request.draft_lengths[0] + num_copied, *request.draft_lengths[1:])
    return dataclasses.replace(request, rounds=sum(lengths), draft_lengths=lengths)


def without_draft(request):
    return dataclasses.replace(request, drafted=(), accepted=(), draft_lengths=(request.rounds,))


def test_a_low_of_one_window_is_no_alarm_and_one_of_two_is():
    def low_from_400(num_requests):
        return lambda seed: stream(num_requests, seed, lost=lambda i: 0.12 * (i >= 400))

    assert verdicts(low_from_400(600))["draft decay"] == 0
    assert verdicts(low_from_400(800))["draft decay"] >= 0.9 * NUM_STREAMS


class TestAdaptiveDraftLengths:
    """An engine that drafts less because less is accepted must not hide why."""

    def test_a_length_alone_moves_the_measured_first_position_by_less_than_the_margin(self):
        rates = np.concatenate([*RATES.values()])
        survival = {}
        for length in (1, 8):
            tokens_a_round = (rates[:, None] ** np.arange(length + 1)).sum(axis=1)
            survival[length] = (rates / tokens_a_round).sum() / (1 / tokens_a_round).sum()
        assert survival[1] == pytest.approx(0.3450, abs=5e-5)
        assert survival[8] == pytest.approx(0.3324, abs=5e-5)
        assert survival[1] - survival[8] < MARGIN

    @pytest.mark.parametrize("after", [1, 8])
    def test_the_first_position_is_comparable_across_lengths(self, after):
        found = verdicts(
            lambda seed: stream(
                900,
                seed,
                draft_length=lambda i: 4 if i < 400 else after,
                lost=lambda i: 0.12 * (i >= 400),
            )
        )
        assert found["draft decay"] >= 0.9 * NUM_STREAMS

    def test_a_decay_comes_before_the_change_of_lengths_and_both_are_said(self):
        report = judged(
            stream(
                900,
                3,
                draft_length=lambda i: 4 if i < 400 else 1,
                lost=lambda i: 0.15 * (i >= 400),
            )
        )
        assert report["verdict"] == "draft decay"
        assert any(
            "draft lengths changed from 1 0%, 4 100%" in reason for reason in report["reasons"]
        )

    def test_answers_without_the_draft_are_a_finding_of_their_own(self):
        requests = stream(800, 5)
        idle = [without_draft(r) if i >= 400 and i % 10 < 6 else r for i, r in enumerate(requests)]
        report = judged(idle)
        assert report["verdict"] == "engine change"
        assert "drafted 40%, nothing drafted 60% among the newest" in report["reasons"][0]
        assert report["left_out"]["nothing drafted"] == 240
        assert judged(reversed_times(idle))["verdict"] == "ok"

    def test_an_engine_that_stopped_drafting_is_seen_where_nothing_can_be_judged(self):
        requests = stream(300, 5)
        report = judged([*requests[:90], *map(without_draft, requests[90:])])
        assert report["verdict"] == "engine change"
        assert report["strata"] == []


def reversed_times(requests):
    """The same requests, the last one first."""
    times = [request.time_utc for request in requests]
    return [
        dataclasses.replace(request, time_utc=time)
        for request, time in zip(reversed(requests), times, strict=True)
    ]


def test_unlabelled_requests_below_every_registered_rate_are_decay():
    report = judged(stream(500, 2, labelled=False, lost=0.3))
    assert report["verdict"] == "draft decay"
    assert "lowest registered" in report["reasons"][0]
    assert any("label them" in note for note in report["notes"])


def test_unlabelled_requests_that_fell_but_not_below_every_rate_are_reported_as_what_they_may_be():
    report = judged(stream(500, 2, labelled=False, lost=0.1))
    assert report["verdict"] == "traffic shift"
    assert "or a draft that decayed" in report["reasons"][0]


def test_a_new_domain_without_a_registered_rate_is_a_shift_and_never_decay():
    record = evaluation_record(0)
    del record["positions"]["0.0"][0]["survival"]["by_domain"]["chat"]
    requests = [*stream(300, 2, domain="code"), *later(stream(300, 3, domain="chat", lost=0.3))]
    report = judged(requests, record=record)
    assert report["verdict"] == "traffic shift"
    assert [entry["domain"] for entry in report["strata"]] == ["code"]
    assert any("300 requests are of domains without" in note for note in report["notes"])


def test_a_stream_that_recovered_is_no_alarm_any_more():
    report = judged(stream(900, 4, lost=lambda i: 0.15 * (300 <= i < 600)))
    assert report["verdict"] == "ok"


def test_the_order_of_the_files_does_not_matter():
    requests = stream(500, 6, lost=lambda i: 0.12 * (i >= 250))
    shuffled = random.Random(0).sample(requests, len(requests))
    assert judged(shuffled) == judged(requests)


def test_requests_that_cannot_be_judged_are_counted_and_left_out():
    kept = stream(300, 7)
    foreign = stream(20, 8, digest="another", lost=0.2)
    warm = stream(30, 9, temperature=1.3, lost=0.2)
    report = judged([*kept, *foreign, *warm])
    assert report["left_out"] == {"other pair": 20, "no reference": 30, "nothing drafted": 0}
    assert report["num_requests"] == 300
    assert any("another pair" in note for note in report["notes"])
    alone = judged(kept)
    assert (report["strata"], report["verdict"]) == (alone["strata"], alone["verdict"])


def later(requests):
    """The same requests, a year on."""
    return [
        dataclasses.replace(request, time_utc=request.time_utc.replace("2026", "2027"))
        for request in requests
    ]


class TestSamplingWithoutReference:
    """A service whose clients sample as nothing was registered for is watched by nobody."""

    def test_most_requests_at_another_temperature_are_a_verdict_of_their_own(self):
        report = judged([*stream(90, 1), *stream(310, 2, temperature=1.0, lost=0.3)])
        assert report["verdict"] == "no reference"
        assert "310 of the newest 400 requests" in report["reasons"][0]
        assert "310 at temperature 1.0." in report["reasons"][0]
        assert "Registered is temperature 0.0," in report["reasons"][0]
        assert "add 1.0 to corpus.eval_temperatures" in report["reasons"][1]
        assert report["without_reference"] == [
            {"temperature": "1.0", "shaped_by": [], "num_requests": 310}
        ]

    def test_shaped_requests_are_named_by_what_shaped_them(self):
        shaped = [dataclasses.replace(r, shaped_by=("top_p", "min_p")) for r in stream(120, 3)]
        report = judged(shaped)
        assert report["verdict"] == "no reference"
        assert "120 at temperature 0.0 with top_p and min_p." in report["reasons"][0]
        (remedy,) = report["reasons"][1:]
        assert remedy.startswith("Nothing can be registered for requests that min_p or top_p")

    def test_half_of_them_or_a_few_are_left_out_and_the_rest_is_judged(self):
        half = [*stream(200, 4), *stream(200, 5, temperature=1.0)]
        assert judged(half)["verdict"] == "ok"
        assert judged(stream(99, 5, temperature=1.0))["verdict"] == "not enough requests"

    def test_the_newest_requests_count_and_not_all_that_ever_came(self):
        known, strange = stream(900, 6), stream(400, 7, temperature=1.0)
        assert judged([*known, *later(strange)])["verdict"] == "no reference"
        assert judged([*strange, *later(known)])["verdict"] == "ok"

    def test_a_decay_of_those_that_can_be_judged_comes_first_and_both_are_said(self):
        report = judged([*stream(900, 1, lost=0.15), *later(stream(390, 2, temperature=1.0))])
        assert report["verdict"] == "draft decay"
        assert any("have no registered rate" in reason for reason in report["reasons"])

    def test_any_number_of_temperatures_is_told_in_a_few_words(self):
        report = judged([r for i in range(9) for r in stream(20, i, temperature=1 + i / 10)])
        assert report["verdict"] == "no reference"
        assert "80 in 4 other ways" in report["reasons"][0]
        assert len(report["without_reference"]) == 9


def test_few_requests_are_no_verdict():
    report = judged(stream(99, 1, lost=0.2))
    assert report["verdict"] == "not enough requests"
    assert "99 requests" in report["reasons"][0]
    assert judged([])["verdict"] == "not enough requests"


def test_alpha_stands_in_where_a_record_has_no_survival_and_it_is_said():
    record = evaluation_record(0)
    record["positions"] = {}
    report = judged(stream(500, 1, lost=0.12), record=record)
    assert report["verdict"] == "draft decay"
    assert any("alpha stands in" in note for note in report["notes"])


def test_a_few_decoded_prompts_that_happen_to_agree_are_no_certainty():
    record = evaluation_record(0)
    part = record["positions"]["0.0"][0]["survival"]["by_domain"][HARD]
    part["low"] = part["high"] = part["mean"]
    level = registered_rates(record)["0.0"].levels[HARD]
    spread = np.std(RATES[HARD], ddof=1)
    assert level.error == pytest.approx(spread / math.sqrt(level.num_prompts))


def test_a_record_without_any_rate_is_an_error_that_says_what_to_do():
    with pytest.raises(EvidenceError, match="dvc repro"):
        registered_rates({"alpha": {}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 10},
        {"min_requests": 5},
        {"confidence": 1.0},
        {"requests_per_false_signal": 10},
        {"traffic_shift": 0.0},
        {"engine_shift": 1.5},
    ],
)
def test_settings_under_which_every_verdict_is_meaningless_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"monitor.{next(iter(wrong))}"):
        monitor_config(**wrong)


class TestDetectors:
    def test_unit_noise_passes_the_threshold_as_rarely_as_asked(self):
        rng = random.Random(0)
        count = 0
        for _ in range(40):
            values = [rng.gauss(0, 1) for _ in range(500)]
            signal = signal_of_drop(
                values, [0.0] * 200, margin=1.0, requests_per_false_signal=20_000
            )
            count += signal.page_hinkley is not None
        # 20,000 requests in all: one false signal is expected.
        assert count <= 4

    def test_rarer_false_signals_need_a_higher_threshold(self):
        heights = [threshold(0.1, count) for count in (1_000, 10_000, 100_000)]
        assert heights == sorted(heights)
        assert heights[0] > 10

    def test_a_drop_is_signalled_after_it_and_a_rise_is_not(self):
        rng = random.Random(1)
        steps = [rng.gauss(0, 0.1) for _ in range(400)]
        fallen, risen = (
            [step + sign * 0.2 * (i >= 200) for i, step in enumerate(steps)] for sign in (-1, 1)
        )
        options = {"margin": MARGIN, "requests_per_false_signal": 100_000}
        signal = signal_of_drop(fallen, [0.0] * 100, **options)
        assert 200 < signal.page_hinkley < 330
        assert 200 < signal.adwin < 330
        assert not signal_of_drop(risen, [0.0] * 100, **options).is_given

    def test_noise_ignores_where_the_level_moves(self):
        steps = np.random.default_rng(0).normal(0, 0.1, 2000)
        moved = steps + 5.0 * (np.arange(2000) >= 1000)
        assert noise(moved) == pytest.approx(0.1, rel=0.6)
        assert noise(steps) == pytest.approx(0.1, rel=0.05)


def test_every_registered_domain_has_a_stratum_of_its_own_and_one_together():
    report = judged(stream(800, 11))
    assert [entry["domain"] for entry in report["strata"]] == sorted(["all domains", *DOMAINS])
    assert all(entry["detectable_drop"] >= MARGIN for entry in report["strata"])
