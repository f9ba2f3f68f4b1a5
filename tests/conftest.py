"""Order of the tests, and which target the story of a pair's life is told with."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--world",
        choices=("tiny", "smollm2"),
        default="tiny",
        help="target of tests/end_to_end: tiny (minutes), or smollm2 (an hour)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules first, so that parallel workers end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
