"""From counters that only grow to what they grew by: the one rule for counters that begin, end, and start again."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
NAN = float("nan")


@dataclass(slots=True)
class Deltas(Generic[KeyT]):
    """Remembers one reading of any number of counters."""

    _before: dict[KeyT, float] = field(default_factory=dict)

    def update(self, readings: Mapping[KeyT, float]) -> dict[KeyT, float]:
        """Return by how much each counter grew since the last reading, and remember this one instead.

        A counter that was not in the last reading, or is smaller than it was there, has no delta: it began, or began
        again, at a moment that nobody saw.
        """
        deltas = {
            key: value - before
            for key, value in readings.items()
            if (before := self._before.get(key, NAN)) <= value  # False for NaN as well
        }
        self._before = dict(readings)
        return deltas
