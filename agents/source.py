"""A collector under care: opened when its source is there, read, and told apart into working, gone and failing.

What changes is logged once, with its remedy; nothing is logged per reading. This is the only place that survives a
collector's failure: whatever one source does, the others go on.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.collector import Collector, CollectorError, NotAvailable, Observations, RankProcess
from schemas.events import Sensor

logger = logging.getLogger(__name__)

RETRY_S_MIN = 5.0
RETRY_S_MAX = 300.0
_NOTHING = Observations()


@dataclass(slots=True)
class Source:
    """One collector and how it is doing."""

    collector: Collector
    is_open: bool = False
    n_failures: int = 0
    unavailable: NotAvailable | None = None
    _retry_s: float = field(default=RETRY_S_MIN)
    _next_try_s: float = 0.0
    _trouble: str = ""

    @property
    def name(self) -> str:
        """What the configuration and the log call it."""
        return self.collector.name

    @property
    def sensors(self) -> Sensor:
        """What it observes at present."""
        return self.collector.sensors if self.is_open and not self._trouble else Sensor(0)

    def try_open(self, now_s: float) -> None:
        """Open the source if it is time to try."""
        if self.is_open or now_s < self._next_try_s:
            return
        try:
            self.collector.open()
        except NotAvailable as error:
            if self.unavailable is None or error.reason != self.unavailable.reason:
                logger.warning("%s is not observed: %s: %s", self.name, error.reason, error.remedy)
            self.unavailable = error
            self._next_try_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
            return
        except Exception:
            logger.exception("%s could not be opened", self.name)
            self._next_try_s = now_s + RETRY_S_MAX
            return
        self.is_open = True
        self.unavailable = None
        self._retry_s = RETRY_S_MIN
        logger.info("%s is observed", self.name)

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Read the source; nothing where it is not open or fails."""
        if not self.is_open:
            return _NOTHING
        try:
            found = self.collector.collect(ranks)
        except CollectorError as error:
            self._fail(str(error))
        except NotAvailable as error:
            self._close()
            self.unavailable = error
            logger.warning("%s is no longer observed: %s: %s", self.name, error.reason, error.remedy)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            logger.debug("%s", self.name, exc_info=True)
        else:
            if self._trouble:
                logger.info("%s is observed again", self.name)
                self._trouble = ""
            return found
        return _NOTHING

    def close(self) -> None:
        """Close the source for good."""
        if self.is_open:
            self._close()

    def _close(self) -> None:
        self.is_open = False
        try:
            self.collector.close()
        except Exception:
            logger.exception("%s could not be closed", self.name)

    def _fail(self, what: str) -> None:
        self.n_failures += 1
        if what != self._trouble:
            logger.error("%s could not be read: %s", self.name, what)
        self._trouble = what
