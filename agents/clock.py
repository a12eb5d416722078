"""The node's clocks: from the kernel's monotonic time to time since the epoch, and how far that may be off."""

import ctypes
import time
from dataclasses import dataclass, field

from schemas.table import AnyArray, IntArray

_STEP_NS = 1_000_000  # both clocks are slewed alike, so a larger difference is a step that somebody made
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC in sys/timex.h
_ERROR = 5  # TIME_ERROR


def _offset_ns() -> int:
    """Return what to add to monotonic time; of several looks the one that took least time."""
    looks = []
    for _ in range(5):
        before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        looks.append((after - before, now - (before + after) // 2))
    return min(looks)[1]


@dataclass(slots=True)
class Clock:
    """One offset for as long as nobody sets the clock, so that differences stay exact."""

    offset_ns: int = field(default_factory=_offset_ns)

    def check(self) -> bool:
        """Take note of a clock that was set; returns whether it was."""
        offset_ns = _offset_ns()
        if abs(offset_ns - self.offset_ns) < _STEP_NS:
            return False
        self.offset_ns = offset_ns
        return True

    def now_ns(self) -> int:
        """Return the time since the epoch, in step with converted times."""
        return time.monotonic_ns() + self.offset_ns

    def to_epoch_ns(self, monotonic_ns: AnyArray) -> IntArray:
        """Return times since the epoch, (n,), from CLOCK_MONOTONIC, which is what bpf_ktime_get_ns() reads."""
        return monotonic_ns.astype("i8") + self.offset_ns


class _Timex(ctypes.Structure):
    """struct timex of sys/timex.h, as far as it is read here; the rest is room for the kernel to write."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock_error_ns() -> int | None:
    """Return the kernel's bound on the clock's error; None where nothing disciplines the clock."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0 or state == _ERROR or timex.status & _UNSYNCHRONISED:
        return None
    return int(timex.maxerror) * 1000
