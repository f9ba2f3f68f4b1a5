"""Keyed uniform numbers: a draw depends on (seed, request, position, purpose) and on nothing else.

So a request's tokens do not depend on its neighbours in the batch, and a replay repeats them. The
mixer is SplitMix64 (Steele, Lea, Flood 2014), written with torch's wrapping int64 arithmetic.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MANTISSA_BITS = 53
_NUM_PURPOSES = 16  # at most


class Purpose(IntEnum):
    """What a draw decides; two purposes at one position are independent."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3


def request_key(seed: int, request_id: str) -> int:
    """A signed 64-bit key of the request."""
    digest = hashlib.sha256(f"{seed}/{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(keys: Tensor, positions: Tensor, purpose: Purpose, stream: int | Tensor = 0) -> Tensor:
    """Uniform numbers in [0, 1).

    Args:
        keys: int64, any shape that broadcasts with `positions`.
        positions: int64 token positions.
        purpose: What the draw decides.
        stream: Which of several draws of one purpose at a position it is, 0 or more.

    Returns:
        float64 of the broadcast shape.
    """
    bits = _mix(_mix(_mix(keys) ^ positions) ^ (int(purpose) + _NUM_PURPOSES * stream))
    return _shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) * 2.0**-_MANTISSA_BITS
