from __future__ import annotations

import math
import re

import pytest

from draftsmith.decoding.request import SamplingParams, require_known
from draftsmith.errors import DecodingError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("temperature", -0.1),
        ("temperature", 1e-40),  # logits / temperature would overflow
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("min_new_tokens", -1),
        ("min_new_tokens", 5),
        ("stop_token_ids", (3, -1)),
        ("stop_strings", "END"),  # three stop strings of one letter, were it taken
        ("stop_strings", ("",)),
        ("stop_strings", (3,)),
        ("stop_strings", ("\udcff",)),  # half of a character: no tokens spell it
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(DecodingError, match=rf"{name}: found {re.escape(repr(value))}; expected"):
        SamplingParams(**{"max_new_tokens": 4, name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 1},
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"top_k": 0},
        {"top_k": 1 << 40},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"repetition_penalty": 0.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -2.0},
        {"min_new_tokens": 4},
        {"stop_strings": ["\n", "€"]},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(values):
    assert SamplingParams(**{"max_new_tokens": 4, **values}) is not None


def test_unknown_parameters_are_refused_rather_than_ignored():
    with pytest.raises(TypeError, match="length_penalty"):
        SamplingParams(max_new_tokens=4, length_penalty=1.2)


def test_parameters_that_are_not_supported_are_named_with_those_that_are():
    with pytest.raises(DecodingError, match="num_beams, do_sample.*one of max_new_tokens, temp"):
        require_known({"temperature": 0.3, "num_beams": 2, "do_sample": True})
    require_known({"temperature": 0.3, "stop_strings": ("a",)})


def test_defaults_are_greedy_and_untruncated():
    params = SamplingParams(max_new_tokens=4)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 1.0)
