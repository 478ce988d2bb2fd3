"""Who runs the tasks of a conversion. Here: threads of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from lowprec.errors import PlanError

T = TypeVar("T")


def count_workers(workers: int | None) -> int:
    """The number of threads to use: as told, else one for each processor we may run on. Raises PlanError."""
    if workers is None:
        return max(1, len(os.sched_getaffinity(0)))
    if type(workers) is not int or workers < 1:
        raise PlanError(f"the number of workers must be at least 1, not {workers!r}")
    return workers


def run_tasks(tasks: Iterable[T], work: Callable[[T], None], workers: int) -> None:
    """Call `work` once for each task, at most `workers` at a time.

    The first exception, KeyboardInterrupt among them, stops it: tasks at work come to their end, no other begins, and
    it is raised here when every thread is idle.
    """
    stopped = threading.Event()

    def guarded(task: T) -> None:
        if stopped.is_set():
            return
        try:
            work(task)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers, thread_name_prefix="lowprec") as pool:
        futures = [pool.submit(guarded, task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
