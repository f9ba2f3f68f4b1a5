"""One target of each family, and a draft's folder."""

from __future__ import annotations

import pytest
import torch

from tests.drafts.small_models import KINDS, make_target, save_small


@pytest.fixture(params=KINDS)
def target(request):
    return make_target(request.param)


@pytest.fixture
def llama():
    return make_target("llama")


@pytest.fixture
def token_ids():
    """A trimmed vocabulary of 12 entries."""
    return torch.tensor([1, 2, 5, 8, 9, 13, 20, 21, 30, 31, 40, 47])


@pytest.fixture
def saved(llama, token_ids, tmp_path):
    """Folder of a saved draft of `llama` with a trimmed vocabulary."""
    save_small(tmp_path / "draft", llama, token_ids)
    return tmp_path / "draft"
