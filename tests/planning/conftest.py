"""Targets of which only the config is there."""

from __future__ import annotations

import pytest

from tests.drafts.small_models import make_config


@pytest.fixture
def config_of(tmp_path):
    """Writes the config of a small target and returns its folder."""

    def write(kind="llama", **options):
        folder = tmp_path / f"{kind}-config"
        make_config(kind, **options).save_pretrained(folder)
        return folder

    return write
