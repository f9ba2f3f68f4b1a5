"""A fault of some requests of a batch: which ones, so that a server can answer their callers."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.decoding.batch import Row
from draftsmith.errors import DecodingError


class RequestFaultError(DecodingError):
    """Requests that cannot go on; they were taken out, and the others are as they were.

    Attributes:
        request_ids: Whom it concerns.
    """

    request_ids: tuple[str, ...] = ()


def not_finite(rows: Sequence[Row]) -> RequestFaultError:
    """The target's logits for these rows are not finite."""
    places = [f"{row.request.request_id}, token {len(row.token_ids)}" for row in rows]
    fault = RequestFaultError(
        f"request {'; request '.join(places)}",
        found="target logits that are NaN or infinite",
        expected="finite logits",
        remedy="check the target's weights and dtype (try float32)",
    )
    fault.request_ids = tuple(row.request.request_id for row in rows)
    return fault
