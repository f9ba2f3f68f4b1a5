"""One small fitted target for all tests of this folder."""

from __future__ import annotations

import pytest

from draftsmith.corpus.chat import make_chat
from tests.corpus.small_target import fitted_model
from tests.tiny_target import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def target(tokenizer):
    return fitted_model(tokenizer)


@pytest.fixture(scope="session")
def chat(target, tokenizer):
    return make_chat(target, tokenizer)
