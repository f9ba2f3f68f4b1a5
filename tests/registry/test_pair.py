from __future__ import annotations

import pytest

from draftsmith.errors import RegistryError
from draftsmith.registry.pair import PairRecord, RegisteredPair, evidence_tags, pair_digest
from tests.registry.small_pairs import digest, make_record


def test_a_pair_is_its_two_models_and_nothing_else():
    assert make_record(recipe="a", corpus="b").digest == make_record(recipe="c").digest
    assert make_record("t1").digest != make_record("t2").digest
    assert make_record(draft="d1").digest != make_record(draft="d2").digest
    assert make_record().digest == pair_digest(digest("t1"), digest("d1"))


def test_a_record_survives_its_file():
    record = make_record()
    assert PairRecord.from_json(record.to_json()) == record


def test_an_edited_record_is_refused():
    data = make_record().to_json()
    data["draft"]["digest"] = digest("another")
    with pytest.raises(RegistryError, match="edited or mixed up"):
        PairRecord.from_json(data)


@pytest.mark.parametrize("part", ["target", "draft", "pair_digest"])
def test_an_incomplete_record_is_refused(part):
    data = make_record().to_json()
    del data[part]
    with pytest.raises(RegistryError, match=part):
        PairRecord.from_json(data)


def test_tags_give_the_registered_pair_back():
    pair = RegisteredPair.from_tags("demo", "3", make_record().tags())
    assert pair.version == "3"
    assert pair.pair_digest == make_record().digest
    assert not pair.live_drift


def test_a_version_without_a_pairs_tags_is_refused():
    with pytest.raises(RegistryError, match="pair_digest"):
        RegisteredPair.from_tags("demo", "3", {})


def test_headline_tags_come_from_the_temperature_of_the_benchmark():
    evaluation = {
        "alpha": {"0.0": {"mean": 0.5}, "0.7": {"mean": 0.4}},
        "tau": {"0.0": {"mean": 1.5}, "0.7": {"mean": 1.4}},
    }
    speedup = {"mean": 1.25, "low": 1.2, "high": 1.3}
    benchmark = {"temperature": 0.7, "draft_length": 3, "speedup": speedup}
    tags = evidence_tags(
        evaluation, benchmark, device="A CPU", drift="pass", corpus_digest="c" * 64
    )
    assert tags["alpha"] == "0.4000"
    assert tags["tau"] == "1.4000"
    assert tags["speedup"] == "1.2500"
    assert (tags["speedup_low"], tags["speedup_high"]) == ("1.2000", "1.3000")
    assert tags["temperature"] == "0.7"
