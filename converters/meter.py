"""Progress of a run, added up over its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .report import Phase, Progress

OnProgress = Callable[[Progress], None]


class Meter:
    """Adds up what is done and tells a callback, from one thread at a time."""

    def __init__(self, total_bytes: int, callback: OnProgress | None) -> None:
        self._total = total_bytes
        self._callback = callback
        self._lock = threading.Lock()
        self._done = 0

    def report(self, phase: Phase, tensor: str, done_bytes: int) -> None:
        """`done_bytes` more are done."""
        with self._lock:
            self._done += done_bytes
            if self._callback is not None:
                self._callback(Progress(phase=phase, tensor=tensor, done_bytes=self._done, total_bytes=self._total))
