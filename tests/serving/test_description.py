"""The server answers as /openapi.json says, whatever is sent: drawn from it, and against it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from draftsmith.serving.api import make_app
from tests.serving.service import NAME, is_idle, serving, wait_until

NUM_EXAMPLES = 60  # of an operation, at random; those at the edges of the description besides
CALLS = {"POST /v1/chat/completions", "POST /v1/completions"}
STATUSES = Counter()
DESCRIPTION = make_app(SimpleNamespace(gateway=None)).openapi()  # which answers nothing here

# Its other phase sends lists that are as long as they may be, which takes minutes to draw.
CONFIG = {"phases": {"coverage": {"enabled": False}}}

schema = schemathesis.openapi.from_dict(DESCRIPTION, config=schemathesis.Config.from_dict(CONFIG))


@pytest.fixture(scope="module")
def place(project):
    limits = {"max_rows": 4, "max_queue": 8, "max_context": 48}
    with serving(project.root, limits=limits) as server:
        yield server.url
        wait_until(lambda: is_idle(server))


@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case, place):
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = NAME  # else nearly every answer would be that there is no such model
    # What the description allows may still be too long for this model, or contradict itself.
    unchecked = [positive_data_acceptance]
    response = case.call_and_validate(base_url=place, excluded_checks=unchecked)
    STATUSES[case.operation.label, response.status_code] += 1


def test_both_answers_and_refusals_were_seen():
    if not STATUSES:
        pytest.skip("the test before did not run")
    assert {status for label, status in STATUSES if label in CALLS} >= {200, 400}


def test_refusals_are_described_as_they_are_and_not_as_the_framework_makes_them():
    names = set(DESCRIPTION["components"]["schemas"])
    assert names >= {"Error", "ChatCompletion", "Completion"}
    assert not [name for name in names if "Validation" in name]
