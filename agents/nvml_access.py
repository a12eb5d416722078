"""What NVML says of one GPU: its values, errors and processes, and what it refuses, each on its own.

What is refused is not asked for again for a while; what merely fails is, the next time. Only a lost GPU, or NVML gone
as a whole, ends a reading.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from agents.nvml_fields import Field, fields_of_a_gpu
from agents.nvml_library import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    OUTAGES,
    REFUSALS,
    GpuProcess,
    NvmlFailure,
    find_gpu,
    forget_errors,
    new_errors,
    processes,
    watch_errors,
)

logger = logging.getLogger(__name__)


class _Refused(NamedTuple):
    text: str
    remedy: str
    until_s: float  # monotonic; until then it is not asked again


class GpuAccess:
    """One GPU by its place in NVML's list, None for one that is no longer there; for one thread at a time.

    All methods raise NvmlFailure where the GPU is lost or NVML is gone, and for no other reason.
    """

    def __init__(self, nvml_index: int | None, *, refused_s: float) -> None:
        self._nvml_index = nvml_index
        self._refused_s = refused_s
        self._fields: tuple[Field, ...] = ()
        self._way: dict[str, int] = {}  # by column, of the ways that the field has
        self._refused: dict[str, _Refused] = {}  # by what
        self._failing: dict[str, NvmlFailure] = {}  # by what: this time
        self._handle: Any = None
        self._events: Any = None

    @property
    def is_found(self) -> bool:
        """Whether NVML has given a handle of it."""
        return self._handle is not None

    def find(self) -> tuple[str, str] | None:
        """Get its handle; returns UUID and name, None where NVML gives it to nobody or not to us."""
        if self._nvml_index is None:
            raise NvmlFailure(GPU_IS_LOST, "NVML no longer counts the GPU", "nvmlDeviceGetCount")
        found = self._ask("the GPU", partial(find_gpu, self._nvml_index))
        if found is None:
            return None
        self.let_go()
        self._handle, uuid, name = found
        self._fields = fields_of_a_gpu()
        self._way.clear()
        self._refused.clear()
        self._events = self._ask("XID errors", partial(watch_errors, self._handle))
        return uuid, name

    def values(self) -> dict[str, float]:
        """Return what can be read now, by column of GpuSamples."""
        if self._events is None:
            self._events = self._ask("XID errors", partial(watch_errors, self._handle))
        values = {}
        for field in self._fields:
            value = self._ask(field.what, partial(self._value, field))
            if value is not None and field.low <= value <= field.high:
                values[field.column] = value
        if "throttle_reasons" in values:
            values["throttle_known"] = 1
        return values

    def new_errors(self) -> list[int]:
        """Return the XIDs since the last call. A GPU that is lost may still have one to tell."""
        if self._events is None:
            return []
        try:
            return self._ask("XID errors", partial(new_errors, self._events)) or []
        except NvmlFailure as failure:
            if failure.code != GPU_IS_LOST:
                raise
            return []

    def processes(self, uuid: str) -> list[GpuProcess] | None:
        """Return its compute processes; None where NVML does not list them."""
        found: list[GpuProcess] | None = self._ask("its processes", partial(processes, self._handle, uuid))
        return found

    def troubles(self) -> dict[str, tuple[str, str]]:
        """Return what cannot be read: why, and the remedy; from any thread."""
        refused = {what: (refusal.text, refusal.remedy) for what, refusal in self._refused.copy().items()}
        return refused | {what: (str(failure), failure.remedy) for what, failure in self._failing.copy().items()}

    def lose(self) -> None:
        """Take note that the GPU is lost: whatever comes back is found anew. Its errors may still be told."""
        self._failing.clear()
        self._handle = None

    def let_go(self) -> None:
        """End what NVML does for us about this GPU."""
        events, self._events = self._events, None
        if events is None:
            return
        try:
            forget_errors(events)
        except NvmlFailure as failure:
            logger.debug("%s", failure)

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        """Return an answer, or None and remember why."""
        refused = self._refused.get(what)
        if refused is not None and time.monotonic() < refused.until_s:
            return None
        try:
            answer = ask()
        except NvmlFailure as failure:
            if failure.code == GPU_IS_LOST or failure.code in OUTAGES:
                raise
            if failure.code in REFUSALS:
                until_s = time.monotonic() + self._refused_s
                self._refused[what] = _Refused(str(failure), failure.remedy, until_s)
            else:
                self._failing[what] = failure
            return None
        self._refused.pop(what, None)
        self._failing.pop(what, None)
        return answer

    def _value(self, field: Field) -> float | None:
        """Read a field in the way that has worked before, else in the first that does. Raises NvmlFailure."""
        way = self._way.get(field.column)
        if way is not None:
            return field.ways[way](self._handle)
        for place, read in enumerate(field.ways):
            try:
                value = read(self._handle)
            except NvmlFailure as failure:
                is_last = place == len(field.ways) - 1
                if is_last or failure.code not in {FUNCTION_NOT_FOUND, NOT_SUPPORTED}:
                    raise
            else:
                self._way[field.column] = place
                return value
        return None
