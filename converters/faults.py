"""Collecting what is wrong with a target, from many threads, in an order that does not depend on them."""

from __future__ import annotations

import enum
import threading

from .report import Fault

_LONGEST = 400


class FaultKind(enum.StrEnum):
    """What a fault is about."""

    MANIFEST = "manifest"  # lowprec.json cannot be read, or contradicts itself
    CONTRACT = "contract"  # the digest is not that of the contract
    FILE = "file"  # a file is missing, damaged, or should not be there
    INDEX = "index"
    CONFIG = "config"
    ENGINES = "engines"  # the engines recorded are not those that load the result
    TENSOR = "tensor"  # missing, unexpected, or of another dtype or shape
    CHECKSUM = "checksum"
    SCALE = "scale"
    PARTNERS = "partners"
    SOURCE = "source"  # the source is not the one the target was made from
    BYTES = "bytes"  # what the source gives under the recorded contract is something else


class Faults:
    """A list that threads append to."""

    def __init__(self) -> None:
        self._found: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, kind: FaultKind, where: str, what: str) -> None:
        """One more fault; what a damaged file says at length is cut short."""
        what = what if len(what) <= _LONGEST else f"{what[: _LONGEST - 3]}..."
        with self._lock:
            self._found.append(Fault(kind=str(kind), where=where, what=what))

    def sorted(self) -> tuple[Fault, ...]:
        """All of them: files and configs first, then tensors, each by name."""
        order = [str(kind) for kind in FaultKind]
        return tuple(sorted(self._found, key=lambda fault: (order.index(fault.kind), fault.where, fault.what)))
