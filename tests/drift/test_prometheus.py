from __future__ import annotations

import http.server
import threading

import numpy as np
import pytest

from benchmarks.live_service import MARGIN, evaluation_record, monitor_config, stream
from draftsmith.drift.live_reference import registered_rates
from draftsmith.drift.prometheus import judge_metrics, parse_metrics, scrape
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


def exposition(requests, draft_length=1):
    rounds = sum(request.rounds for request in requests)
    accepted = np.sum([request.accepted for request in requests], axis=0)
    lines = [
        f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {rounds}',
        f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {rounds * draft_length}',
        *(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            f'{{model_name="m",position="{place}"}} {count}'
            for place, count in enumerate(accepted)
        ),
    ]
    return "\n".join(lines)


def judged(*texts, seed=0):
    snapshots = [parse_metrics(text, "metrics") for text in texts]
    rates = registered_rates(evaluation_record(seed))
    return judge_metrics(snapshots, rates, config=monitor_config(), margin=MARGIN)


def gauges(values):
    return [f'sglang:spec_accept_length{{model_name="m"}} {value}' for value in values]


def test_counters_of_vllm_are_read_by_position():
    found = parse_metrics(VLLM, "metrics")
    assert (found.rounds, found.draft_tokens, found.accepted) == (100.0, 300.0, (30.0, 10.0, 5.0))
    assert found.accept_length is None


def test_engines_of_one_server_are_added_and_busy_ranks_of_a_gauge_averaged():
    two = VLLM + VLLM.replace('engine="0"', 'engine="1"')
    assert parse_metrics(two, "metrics").accepted == (60.0, 20.0, 10.0)
    found = parse_metrics(SGLANG, "metrics")
    assert found.accept_length == pytest.approx(1.5)
    assert found.rounds is None


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
        parse_metrics(f"vllm:spec_decode_num_drafts_total 1\n{line}\n", "metrics")
    assert line[:20] in str(caught.value)


def test_a_server_that_does_not_speculate_or_serves_two_models_is_refused():
    with pytest.raises(EvidenceError, match="no metric of speculative decoding"):
        parse_metrics("process_cpu_seconds_total 3\n", "metrics")
    with pytest.raises(EvidenceError, match="models m, other"):
        parse_metrics(VLLM + VLLM.replace('"m"', '"other"'), "metrics")


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


def test_a_restart_between_the_scrapes_is_noticed():
    report = judged(exposition(stream(400, 0)), exposition(stream(200, 1, lost=0.35)))
    assert report["verdict"] == "draft decay"
    assert "restart" in report["notes"][0]


def test_another_draft_length_is_an_engine_change_and_no_decay():
    before = stream(400, 0, draft_length=1)
    rounds = sum(r.rounds for r in before)
    after = parse_metrics(exposition(stream(400, 1, draft_length=4, lost=0.35), 4), "metrics")
    text = (
        f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {rounds + after.rounds}\n'
        "vllm:spec_decode_num_draft_tokens_total"
        f'{{model_name="m"}} {rounds + after.draft_tokens}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} '
        f"{sum(r.accepted[0] for r in before) + after.accepted[0]}\n"
    )
    report = judged(exposition(before), text)
    assert report["verdict"] == "engine change"
    assert "from 1.0 to 4.0" in report["reasons"][0]


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
        assert scrape(f"http://{address}/metrics") == scrape(str(tmp_path / "metrics"))

    @pytest.mark.parametrize("path", ["/nothing", "/metrics"])
    def test_an_error_never_shows_the_password_of_an_address(self, address, path):
        host = address if path == "/nothing" else "127.0.0.1:1"
        with pytest.raises(EvidenceError) as caught:
            scrape(f"http://user:secret@{host}{path}")
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert host in str(caught.value)

    def test_a_missing_file_is_one_clear_error(self, tmp_path):
        with pytest.raises(EvidenceError, match="none"):
            scrape(str(tmp_path / "none"))
