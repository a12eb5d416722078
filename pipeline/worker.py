"""The process of one worker: `python -m pipeline.worker SETTINGS`, as the supervisor starts it."""

import ctypes
import logging
import os
import signal
import sys

from pipeline.logs import configure
from pipeline.settings import Driver, InvalidSettings, Settings, from_argument
from pipeline.topics import BrokerUnreachable, TopicsMissing
from pipeline.wiring import Stages

logger = logging.getLogger(__name__)

EXIT_USAGE = 2
EXIT_UNREACHABLE = 69  # EX_UNAVAILABLE of sysexits.h: worth another try
_PR_SET_PDEATHSIG = 1


def run(settings: Settings, stages: Stages | None = None) -> None:
    """Run one worker in this process, under the driver that the settings name, until it is told to end."""
    if settings.driver is Driver.FAUST:
        from pipeline import live as driver  # noqa: PLC0415 - a plain worker does not load Faust, nor the other way round
    else:
        from pipeline import plain as driver  # type: ignore[no-redef] # noqa: PLC0415
    driver.run(settings, stages)


def main(word: str, stages: Stages | None = None) -> int:
    """Run the worker that to_argument() described; returns the exit status."""
    _end_with(os.getppid())
    try:
        settings = from_argument(word)
        configure(settings.log_level)
        run(settings, stages)
    except (InvalidSettings, TopicsMissing) as error:
        logger.error("%s", error)  # noqa: TRY400 - a sentence with its remedy, not a traceback
        return EXIT_USAGE
    except BrokerUnreachable as error:
        logger.error("%s", error)  # noqa: TRY400
        return EXIT_UNREACHABLE
    return 0


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its supervisor is gone, even if that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
