"""A small target, and `accelerate` without memory of the test before."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState

from tests.drafts.small_models import make_target


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """The precision of a process is fixed by its first accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def target():
    return make_target("llama")
