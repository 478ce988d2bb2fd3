"""Files go to the disk while they are filled, so that little is left to wait for at the end."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from lowprec.checkpoint import ShardWriter

EVERY = 64 << 20  # bytes written to a file after which it is worth a visit to the disk


class Flusher:
    """One thread that syncs files while others write to them. Small files are left to the sync at the end.

    An error that the disk reports here would not be reported again, so leaving the context raises it.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._written: dict[ShardWriter, int] = {}
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lowprec-flush")

    def __enter__(self) -> Flusher:
        return self

    def wrote(self, writer: ShardWriter, count: int) -> None:
        """`count` more bytes were written to a file."""
        with self._lock:
            self._written[writer] = self._written.get(writer, 0) + count
            if self._written[writer] >= self._every:
                self._written[writer] = 0
                self._futures.append(self._pool.submit(writer.sync))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the sync under way, drop the others. Raises CheckpointError unless something was raised already."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if kind is None:
            for future in self._futures:
                if not future.cancelled():
                    future.result()
