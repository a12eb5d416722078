"""Logging of a worker: one line per change of state, as JSON where nobody is looking, and no floods from clients."""

import logging
import sys
import time

import msgspec

from pipeline.settings import LogLevel

REPEAT_S = 30.0
FOREIGN = ("aiokafka", "faust", "mode", "asyncio", "kafka")
PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_encoder = msgspec.json.Encoder()


class Repeats(logging.Filter):
    """Lets a line of a client library through once in REPEAT_S, then says how many like it were held back.

    Lines are alike that come from the same place in the code: during an outage there are dozens a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}
        self._held_back: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a line is to be written."""
        if not record.name.startswith(FOREIGN):
            return True
        place = (record.pathname, record.lineno)
        now = time.monotonic()
        if now - self._last.get(place, -REPEAT_S) < REPEAT_S:
            self._held_back[place] = self._held_back.get(place, 0) + 1
            return False
        self._last[place] = now
        held_back = self._held_back.pop(place, 0)
        if held_back:
            record.msg, record.args = f"{record.getMessage()} (and {held_back} times before)", ()
        return True


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


def configure(level: LogLevel) -> None:
    """Send this process's log to standard error, for people on a terminal and as JSON elsewhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(PLAIN) if sys.stderr.isatty() else _Json())
    handler.addFilter(Repeats())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    if level is not LogLevel.DEBUG:
        for name in FOREIGN:
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mode.timers").setLevel(logging.ERROR)  # says of every busy second that a timer was late
