from __future__ import annotations

from draftsmith.report import tables


def test_missing_values_are_a_dash_in_every_format():
    formats = (
        tables.number, tables.count, tables.signed, tables.percent, tables.times, tables.interval,
        tables.change, tables.digest,
    )  # fmt: skip
    assert {function(None) for function in formats} == {tables.MISSING}


def test_numbers_read_as_people_write_them():
    assert tables.number(1234.5678, 1) == "1,234.6"
    assert tables.number("7/8 identical") == "7/8 identical"
    assert tables.count(134515008) == "134,515,008"
    assert tables.signed(0.02) == "+0.020"
    assert tables.percent(0.9871) == "98.7 %"
    assert tables.times(1.274) == "1.27×"
    assert tables.interval({"mean": 0.5, "low": 0.4, "high": 0.6}) == "0.500 (0.400 to 0.600)"


def test_nested_facts_become_dotted_rows_and_curves_are_left_out():
    curves = {"e": [{"f": 1}], "g": [[0.5, 0.25]]}
    rows = dict(tables.facts({"a": {"b": 1, "c": None}, "d": [1, 2], **curves}))
    assert rows == {"a.b": "1", "a.c": tables.MISSING, "d": "1, 2"}


def test_large_quantities_have_a_prefix_and_none_below_a_thousand():
    shown = [tables.scaled(value, "B") for value in (768, 23040, 269030016, 41992407325.5, 3e15)]
    assert shown == ["768 B", "23.040 kB", "269.030 MB", "41.992 GB", "3,000.000 TB"]


def test_a_measured_cell_tells_what_its_forwards_wait_for():
    def cell(waiting):
        return {"bound": {str(n): "memory" if n <= waiting else "arithmetic" for n in (1, 2, 10)}}

    assert [tables.waits_for(cell(waiting)) for waiting in (0, 2, 10)] == [
        "arithmetic",
        "memory up to 2, then arithmetic",
        "memory",
    ]


def test_caches_are_told_of_the_largest_batch_that_was_measured(reports):
    sizes = tables.memory(reports["advice"])
    assert sizes["target"]["largest"] == 4 * 1024 * 23040
    assert sizes["draft"]["largest"] == 4 * 1024 * 768
