"""The most memory that a process holds in each phase of its work, without what files stand behind.

Linux and the GNU C library alone. That library keeps much of what is freed for what comes next, as
it sees fit; `RETURNING` in the environment of a process makes it give back all that matters here.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

# Blocks from this size on are taken from the system one by one, and given back when they are freed.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_PAUSE_S = 0.0005


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Free what nobody holds, and let the C library give it back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


class Growth:
    """How far the process grows within the block, above what it held at its begin.

    Attributes:
        peaks: Bytes by phase.
        base: Bytes that it held at its begin.
    """

    def __init__(self, phase: str) -> None:
        self.peaks = {phase: 0}
        self._phase, self._is_over = phase, threading.Event()
        self.base = 0
        self._reader = threading.Thread(target=self._read)

    def begin(self, phase: str) -> None:
        """From now on it is this phase."""
        give_back()
        self.peaks[phase], self._phase = 0, phase

    def __enter__(self) -> Self:
        """Begin to read."""
        give_back()
        self.base = anonymous_bytes()
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Read no more."""
        self._is_over.set()
        self._reader.join()

    def _read(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            grown = anonymous_bytes() - self.base
            self.peaks[self._phase] = max(self.peaks[self._phase], grown)
