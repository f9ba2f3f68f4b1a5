from __future__ import annotations

import http.server
import json
import threading

import numpy as np
import pytest

from benchmarks.live_service import DIGEST, MARGIN, evaluation_record, monitor_config, stream
from draftsmith.drift.counters import FIRST_ACCEPTED, ROUNDS, Engine, counted
from draftsmith.drift.export import exposition as exported
from draftsmith.drift.exposition import parse_metrics, scrape
from draftsmith.drift.live_reference import registered_rates
from draftsmith.drift.prometheus import judge_metrics
from draftsmith.errors import EvidenceError

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 45.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 10.0
vllm:request_success_total{finished_reason="stop, \\"}\\" seen",model_name="m"} 7 1770000000000

process_cpu_seconds_total NaN
"""
SGLANG = """\
sglang:spec_accept_length{dp_rank="0",model_name="m",tp_rank="0"} 1.4
sglang:spec_accept_length{dp_rank="1",model_name="m",tp_rank="0"} 1.6
sglang:spec_accept_length{dp_rank="2",model_name="m",tp_rank="0"} 0.0
"""


def exposition(requests, draft_length=1, created=None):
    rounds = sum(request.rounds for request in requests)
    accepted = np.sum([request.accepted for request in requests], axis=0).tolist()
    return counters(rounds, *accepted, draft_tokens=rounds * draft_length, created=created)


def counters(rounds, *accepted, draft_tokens=None, created=None):
    name = "vllm:spec_decode_num"
    lines = [
        f'{name}_drafts_total{{model_name="m"}} {rounds}',
        f'{name}_draft_tokens_total{{model_name="m"}} {draft_tokens or rounds}',
        *(
            f'{name}_accepted_tokens_per_pos_total{{model_name="m",position="{place}"}} {count}'
            for place, count in enumerate(accepted)
        ),
    ]
    if created is not None:
        lines.append(f'{name}_drafts_created{{model_name="m"}} {created}')
    return "\n".join(lines)


def parsed(text):
    return parse_metrics(text, "metrics", pair_digest=DIGEST)


def judged(*texts, seed=0):
    rates = registered_rates(evaluation_record(seed))
    snapshots = [parsed(text) for text in texts]
    report = judge_metrics(snapshots, rates, config=monitor_config(), margin=MARGIN)
    json.dumps(report, allow_nan=False)
    return report


def gauges(values):
    return [f'sglang:spec_accept_length{{model_name="m"}} {value}' for value in values]


def test_counters_of_vllm_are_read_by_position():
    found = parsed(VLLM)
    (engine,) = found.engines.values()
    assert engine.counts == {
        "num_drafts": 100.0,
        "num_draft_tokens": 300.0,
        "num_accepted_tokens_per_pos 0": 30.0,
        "num_accepted_tokens_per_pos 1": 10.0,
        "num_accepted_tokens_per_pos 2": 5.0,
    }
    assert engine.created == {"num_drafts": 1.7e9}
    assert found.accept_length is None


def test_engines_of_one_server_are_added_and_busy_ranks_of_a_gauge_averaged():
    two = parsed(VLLM + VLLM.replace('engine="0"', 'engine="1"'))
    assert len(two.engines) == 2
    window, _ = counted([two.engines])
    assert (window[ROUNDS], window[FIRST_ACCEPTED]) == (200.0, 60.0)
    found = parsed(SGLANG)
    assert found.accept_length == pytest.approx(1.5)
    assert not found.engines


def test_what_openmetrics_adds_to_a_sample_is_passed_over():
    name = "vllm:spec_decode_num_drafts_total"
    text = (
        f'{name}{{engine="0"}} 3 # {{trace_id="a}} # b"}} 1.0 1700000000.123\n'
        f'{name}{{engine="1"}} 4 1700000000.123 # {{trace_id="c"}} 1\n'
        f"{name} 5 # {{}} 1\n# EOF\n"
    )
    window, _ = counted([parsed(text).engines])
    assert window == {ROUNDS: 12.0}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_sample_that_is_no_finite_number_is_left_out_and_said(value):
    text = counters(20_000, 9000).replace(" 9000", f" {value}")
    found = parsed(text)
    assert "per_pos_total is no finite number" in found.notes[0]
    report = judged(text)
    assert report["notes"][:-1] == list(found.notes)
    assert "no accepted tokens by position" in report["reasons"][0]


def test_rounds_without_counts_by_position_have_a_sentence_of_their_own():
    report = judged(counters(20_000))
    assert report["verdict"] == "not enough requests"
    assert report["reasons"] == [
        "20000 rounds, but no accepted tokens by position, which are judged."
    ]


@pytest.mark.parametrize(
    "line",
    [
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_drafts_total{} many",
        'vllm:spec_decode_num_drafts_total{engine="0} 3',
        "vllm:spec_decode_num_drafts_total{engine=0} 3",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"} 3',
        "<html>not found</html>",
    ],
)
def test_a_malformed_line_is_named(line):
    with pytest.raises(EvidenceError, match="metrics:2") as caught:
        parsed(f"vllm:spec_decode_num_drafts_total 1\n{line}\n")
    assert line[:20] in str(caught.value)


def test_a_server_that_does_not_speculate_or_serves_two_models_is_refused():
    with pytest.raises(EvidenceError, match="no metric of speculative decoding"):
        parsed("process_cpu_seconds_total 3\n")
    with pytest.raises(EvidenceError, match="models m, other"):
        parsed(VLLM + VLLM.replace('"m"', '"other"'))


def test_counters_that_fell_below_every_registered_rate_are_decay_and_others_are_not():
    usual = [judged(exposition(stream(400, seed)), seed=seed) for seed in range(15)]
    assert {report["verdict"] for report in usual} == {"ok"}
    fallen = [judged(exposition(stream(400, seed, lost=0.35)), seed=seed) for seed in range(15)]
    assert {report["verdict"] for report in fallen} == {"draft decay"}
    assert "no mix of the domains" in fallen[0]["reasons"][0]


def test_a_mix_of_the_hardest_domain_alone_is_no_decay():
    reports = [
        judged(exposition(stream(400, seed, domain="translation")), seed=seed) for seed in range(15)
    ]
    assert {report["verdict"] for report in reports} <= {"ok", "traffic shift"}


def test_a_drop_that_a_harder_mix_explains_is_shown_as_such():
    report = judged(exposition(stream(400, 2, lost=0.1)))
    assert report["verdict"] == "traffic shift"
    assert "or a draft that decayed" in report["reasons"][0]


def test_two_scrapes_judge_what_lies_between_them():
    before = stream(400, 0, lost=0.35)
    after = before + stream(400, 1)
    assert judged(exposition(before))["verdict"] == "draft decay"
    assert judged(exposition(before), exposition(after))["verdict"] == "ok"


def test_counters_and_gauges_say_that_they_pool_all_temperatures():
    for text in (counters(20_000, 9000), SGLANG):
        assert "registered is temperature 0.0 alone" in judged(text)["notes"][-1]


def test_a_restart_between_the_scrapes_is_noticed():
    report = judged(exposition(stream(400, 0)), exposition(stream(200, 1, lost=0.35)))
    assert report["verdict"] == "draft decay"
    assert "started anew" in report["notes"][0]


class TestWindows:
    """Counts between scrapes are what was counted, whatever restarted in between."""

    @pytest.mark.parametrize(
        ("scrapes", "rounds", "accepted", "num_restarts"),
        [
            ([(100, 30)], 100, 30, 0),
            ([(100, 30), (150, 50)], 50, 20, 0),
            ([(100, 30), (40, 10), (90, 20)], 90, 20, 1),
            # Only the accepted ones fell: the rounds have already passed what they were.
            ([(10_000, 3000), (11_000, 2970)], 11_000, 2970, 1),
            ([(10_000, 9000), (11_000, 3000)], 11_000, 3000, 1),
            # The middle scrape shows a restart that first and last do not.
            ([(100, 30), (20, 5), (200, 60)], 200, 60, 1),
            ([(100, 30), (20, 5), (10, 4)], 30, 9, 2),
        ],
    )
    def test_each_step_between_scrapes_counts(self, scrapes, rounds, accepted, num_restarts):
        engines = [parsed(counters(*scrape)).engines for scrape in scrapes]
        window, found = counted(engines)
        assert (window[ROUNDS], window[FIRST_ACCEPTED], found) == (rounds, accepted, num_restarts)

    def test_a_later_position_or_the_draft_tokens_show_a_restart_too(self):
        for before, after in (
            (counters(100, 30, 9), counters(150, 40, 8)),
            (counters(100, 30, draft_tokens=400), counters(150, 40, draft_tokens=150)),
        ):
            window, found = counted([parsed(before).engines, parsed(after).engines])
            assert (window[ROUNDS], found) == (150, 1)

    def test_the_time_of_creation_shows_a_restart_that_no_count_shows(self):
        texts = (counters(100, 30, created=1.7e9), counters(150, 50, created=1.8e9))
        window, found = counted([parsed(text).engines for text in texts])
        assert (window[ROUNDS], window[FIRST_ACCEPTED], found) == (150, 50, 1)

    def test_one_engine_may_restart_or_join_beside_another(self):
        scrapes = (
            {"a": Engine({ROUNDS: 100}, {}), "b": Engine({ROUNDS: 100}, {})},
            {"a": Engine({ROUNDS: 180}, {}), "b": Engine({ROUNDS: 30}, {})},
            {"a": Engine({ROUNDS: 190}, {}), "c": Engine({ROUNDS: 7}, {})},
        )
        assert counted(scrapes) == ({ROUNDS: 80 + 30 + 10 + 7}, 1)

    def test_a_count_that_one_scrape_lacks_is_not_counted_twice(self):
        whole, partly = {ROUNDS: 100, FIRST_ACCEPTED: 30}, {ROUNDS: 150}
        last = {ROUNDS: 200, FIRST_ACCEPTED: 50}
        for middle in (partly, {}):
            scrapes = [{"a": Engine(counts, {})} for counts in (whole, middle, last)]
            assert counted(scrapes) == ({ROUNDS: 100, FIRST_ACCEPTED: 20}, 0)
        scrapes = [{"a": Engine(counts, {})} for counts in (partly, last)]
        assert counted(scrapes) == ({ROUNDS: 50, FIRST_ACCEPTED: 0}, 0)

    @pytest.mark.parametrize("texts", [("10000 3900", "11000 3800"), ("10000 9000", "11000 3800")])
    def test_a_restart_is_neither_decay_nor_an_error(self, texts):
        report = judged(*(counters(*map(int, text.split())) for text in texts))
        assert report["verdict"] == "ok"

    def test_more_accepted_than_drafted_is_refused(self):
        with pytest.raises(EvidenceError, match="12000 accepted first positions of 10000 rounds"):
            judged(counters(10_000, 12_000))


def one_after_the_other(before, then):
    """Scrapes of a server that served `before`, and then `then` too; each (requests, length)."""
    rounds, accepted, tokens, texts = 0, 0, 0, []
    for requests, length in (before, then):
        rounds += sum(r.rounds for r in requests)
        accepted += sum(r.accepted[0] for r in requests)
        tokens += sum(r.rounds for r in requests) * length
        texts.append(counters(rounds, accepted, draft_tokens=tokens))
    return texts


def test_another_draft_length_alone_is_an_engine_change():
    sides = [(stream(400, seed, draft_length=n), n) for seed, n in ((0, 1), (1, 4))]
    report = judged(*one_after_the_other(*sides))
    assert report["verdict"] == "engine change"
    assert "from 1.0 to 4.0" in report["reasons"][0]


def test_another_draft_length_hides_no_decay_of_the_first_position():
    before, then = (stream(400, 0, draft_length=4), 4), (stream(400, 1, lost=0.35), 1)
    report = judged(*one_after_the_other(before, then))
    assert report["verdict"] == "draft decay"
    assert "from 4.0 to 1.0" in report["reasons"][-1]


def test_our_own_counters_are_read_back_as_what_was_served():
    requests = [*stream(300, 0, draft_length=3), *stream(100, 1, draft_length=1)]
    others = stream(50, 2, digest='odd "name"', lost=0.35)
    text = exported([*requests, *others])
    window, _ = counted([parsed(text).engines])
    assert window[ROUNDS] == sum(r.rounds for r in requests)
    assert window["num_draft_tokens"] == sum(sum(r.drafted) for r in requests)
    assert window["num_accepted_tokens_per_pos 2"] == sum(r.accepted[2] for r in requests[:300])
    assert judged(text)["verdict"] == "ok"
    other = parse_metrics(text, "metrics", pair_digest='odd "name"')
    assert counted([other.engines])[0][ROUNDS] == sum(r.rounds for r in others)


def test_our_own_counters_say_how_often_each_position_was_drafted():
    requests = [*stream(3, 0, draft_length=3), *stream(1, 1, draft_length=1)]
    lines = exported(requests).splitlines()
    drafted = [sum(r.rounds for r in requests), *[sum(r.rounds for r in requests[:3])] * 2]
    label = f'pair_digest="{DIGEST}"'
    for place, count in enumerate(drafted):
        name = "draftsmith_spec_decode_num_draft_tokens_per_pos_total"
        assert f'{name}{{{label},position="{place}"}} {count}' in lines
    for name in (line.split()[2] for line in lines if line.startswith("# TYPE")):
        assert any(line.startswith(f"{name}{{") for line in lines)


def test_few_rounds_are_no_verdict():
    report = judged(VLLM)
    assert report["verdict"] == "not enough requests"
    assert "100 rounds" in report["reasons"][0]


def test_gauges_are_judged_by_the_bound_that_holds_for_every_draft_length():
    rng = np.random.default_rng(0)
    usual, fallen = (gauges(1 + level + rng.normal(0, 0.02, 12)) for level in (0.36, 0.05))
    assert judged(*usual)["verdict"] == "ok"
    assert judged(*fallen)["verdict"] == "draft decay"
    assert judged(*fallen[:3])["verdict"] == "not enough requests"


def test_a_gauge_that_was_not_set_between_two_scrapes_is_one_observation():
    report = judged(*gauges([1.05] * 8))
    assert report["verdict"] == "not enough requests"
    assert "1 different values" in report["reasons"][0]
    repeated = [1 + 0.05 + step / 1000 for step in range(8) for _ in range(3)]
    assert judged(*gauges(repeated))["verdict"] == "draft decay"


class TestScrape:
    @pytest.fixture
    def address(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                known = self.path == "/metrics"
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(VLLM.encode() if known else b"")

            def log_message(self, *arguments):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()

    def test_an_address_and_a_file_are_read_alike(self, address, tmp_path):
        (tmp_path / "metrics").write_text(VLLM, encoding="utf-8")
        fetched, read = (
            scrape(source, pair_digest=DIGEST)
            for source in (f"http://{address}/metrics", str(tmp_path / "metrics"))
        )
        assert fetched == read

    @pytest.mark.parametrize("path", ["/nothing", "/metrics"])
    def test_an_error_never_shows_the_password_of_an_address(self, address, path):
        host = address if path == "/nothing" else "127.0.0.1:1"
        with pytest.raises(EvidenceError) as caught:
            scrape(f"http://user:secret@{host}{path}", pair_digest=DIGEST)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert host in str(caught.value)

    def test_a_missing_file_is_one_clear_error(self, tmp_path):
        with pytest.raises(EvidenceError, match="none"):
            scrape(str(tmp_path / "none"), pair_digest=DIGEST)
