"""A clock that only tests move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds that pass when somebody says so, and at every look by `step`."""

    now: float = 0.0
    step: float = 0.0

    def __call__(self):
        self.now += self.step
        return self.now

    def passes(self, seconds, result=None):
        """Let time pass; returns what is given."""
        self.now += seconds
        return result
