from __future__ import annotations

import copy
import dataclasses

import pytest

from draftsmith.errors import EvidenceError
from draftsmith.registry.device_evidence import (
    IMPORTED_FROM,
    evidence_of,
    file_name,
    is_device,
    judged_benchmark,
    served_as,
)
from draftsmith.registry.pair import RegisteredPair
from tests.registry.gate_reports import DRAFT, TARGET, check_of, failing, good_reports, judged
from tests.registry.measurements import measurement
from tests.registry.small_pairs import make_record

RECORD = make_record()
PAIR = RegisteredPair.from_tags("demo", "3", RECORD.tags())
OTHER = RegisteredPair.from_tags("demo", "4", make_record("t2", "d2").tags())


def of_the_good_pair(**facts):
    """A measurement of the pair that `good_reports` is about."""
    record = make_record()
    draft = dataclasses.replace(record.draft, digest=DRAFT)
    return measurement(type(record)({"digest": TARGET, "dtype": "float32"}, draft), **facts)


def chosen(imported, *, wanted):
    reports = good_reports()
    registration = reports["registration"]
    return judged_benchmark(
        reports["benchmark"], imported, registration=registration, wanted=wanted
    )


@pytest.mark.parametrize("wanted", ["any", "cuda", "CUDA", "nvidia h100"])
def test_a_device_is_asked_for_by_kind_or_name(wanted):
    assert is_device({"kind": "cuda", "name": "NVIDIA H100"}, wanted)
    assert is_device({"kind": "cpu", "name": "Some Processor"}, wanted) is (wanted == "any")


def test_the_benchmark_of_this_machine_counts_where_it_fits():
    imported = {"a.json": of_the_good_pair(device="Some Processor", kind="cpu")}
    for wanted in ("any", "cpu", "some processor"):
        assert IMPORTED_FROM not in chosen(imported, wanted=wanted)


def test_otherwise_the_newest_imported_evidence_of_that_device_counts():
    imported = {
        "a.json": of_the_good_pair(day="2026-03-02"),
        "b.json": of_the_good_pair(day="2026-03-01"),
        "c.json": of_the_good_pair(day="2026-03-03", device="NVIDIA L4"),
    }
    assert chosen(imported, wanted="NVIDIA H100")[IMPORTED_FROM] == "a.json"
    assert chosen(imported, wanted="cuda")[IMPORTED_FROM] == "c.json"
    assert IMPORTED_FROM not in chosen(imported, wanted="NVIDIA B200")


@pytest.mark.parametrize("key", ["temperature", "lookup_length"])
def test_speed_of_another_way_of_decoding_does_not_count(key):
    report = of_the_good_pair()
    (entry,) = report["recipes"].values()
    assert IMPORTED_FROM in chosen({"a.json": report}, wanted="cuda")
    entry[key] = 5
    assert IMPORTED_FROM not in chosen({"a.json": report}, wanted="cuda")


def test_a_pair_is_served_as_it_was_measured_nearest_to_the_device():
    own = {"device": {"kind": "cpu", "name": "Some Processor"}, "draft_length": 1}
    reports = [
        of_the_good_pair(day="2026-03-01", device="NVIDIA H100"),
        of_the_good_pair(day="2026-03-02", device="NVIDIA L4"),
        of_the_good_pair(day="2026-03-03", device="Other Processor", kind="cpu"),
    ]
    for length, report in enumerate(reports, start=2):
        (entry,) = report["recipes"].values()
        entry["draft_length"] = length

    def length_on(kind, name, *, own=own):
        return served_as(own, reports, {"kind": kind, "name": name}).get("draft_length")

    assert length_on("cpu", "Some Processor") == 1
    assert length_on("cpu", "Other Processor") == 4
    assert length_on("cpu", "A third") == 1
    assert length_on("cuda", "NVIDIA H100") == 2
    assert length_on("cuda", "NVIDIA B200") == 3
    assert length_on("mps", "Apple") == 1
    assert length_on("mps", "Apple", own={}) is None
    copying = own | {"lookup_length": 5}
    assert length_on("cuda", "NVIDIA H100", own=copying) == 1


def test_the_gate_judges_the_imported_speed_and_names_its_file():
    reports = good_reports()
    assert failing(judged(reports, device="cuda")) == ["device"]
    for speedup, verdict in ((1.5, "promote"), (1.05, "block")):
        imported = {"evidence/x.json": of_the_good_pair(speedup=speedup)}
        benchmark = chosen(imported, wanted="cuda")
        decision = judged({**reports, "benchmark": benchmark}, device="cuda")
        assert decision["verdict"] == verdict
        assert check_of(decision, "speedup")["measured"] == speedup
        assert "imported from evidence/x.json" in check_of(decision, "device")["detail"]


def test_a_measurement_of_the_pair_is_cut_to_its_entry():
    report = measurement(RECORD)
    stranger = measurement(make_record(draft="d2"))["recipes"]["small"]
    report["recipes"]["other"] = stranger
    kept = evidence_of(report, PAIR, dtype="float32", path="speed.json")
    assert list(kept["recipes"]) == ["small"]


def test_another_pair_is_refused_with_both_named():
    with pytest.raises(EvidenceError) as refused:
        evidence_of(measurement(RECORD), OTHER, dtype="bfloat16", path="speed.json")
    message = str(refused.value)
    for digest in (PAIR.pair_digest, PAIR.target_digest, OTHER.draft_digest, OTHER.pair_digest):
        assert digest[:16] in message
    assert "version 4" in message
    assert "--dtype bfloat16" in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("device", {"kind": "cuda"}),
        ("recipes", []),
        ("target_digest", "0" * 64),
        ("provenance", {}),
        ("provenance", {"time_utc": "yesterday"}),
        ("provenance", {"time_utc": "2026-03-01T10:00:00"}),
        ("recipes/small/pair_digest", "0" * 64),
        ("recipes/small/draft_digest", "0" * 64),
        ("recipes/small/speedup", {"mean": 1.0}),
        ("recipes/small/speedup/low", float("nan")),
        ("recipes/small/speedup/high", 0.5),
        ("recipes/small/speedup/num_prompts", 0),
        ("recipes/small/tau", float("inf")),
        ("recipes/small/arms", None),
    ],
)
def test_what_is_no_sound_measurement_is_refused(path, value):
    report = copy.deepcopy(measurement(RECORD))
    *parents, key = path.split("/")
    node = report
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[key]
    else:
        node[key] = value
    with pytest.raises(EvidenceError, match=r"speed\.json.*draftsmith\.evaluation\.speed"):
        evidence_of(report, PAIR, dtype="float32", path="speed.json")


def test_a_name_says_device_and_day_and_belongs_to_one_content():
    name = file_name(measurement(RECORD, device="NVIDIA H100 (80 GB)"))
    assert name.startswith("nvidia-h100-80-gb-2026-03-01-")
    assert name == file_name(measurement(RECORD, device="NVIDIA H100 (80 GB)"))
    assert name != file_name(measurement(RECORD, device="NVIDIA H100 (80 GB)", speedup=1.6))
    assert "/" not in file_name(measurement(RECORD, device="../../etc"))
