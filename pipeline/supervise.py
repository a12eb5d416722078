"""Runs a worker as a process of its own and starts it anew when it ends abnormally.

A record that has ended the worker three times is poison: the next worker sets it aside and goes on.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from pipeline.poison import ENDS_MAX, Ledger, held
from pipeline.settings import Settings, override, to_argument
from pipeline.wiring import HAND, LEDGER
from pipeline.worker import EXIT_USAGE

logger = logging.getLogger(__name__)

BACKOFF_S_FIRST = 0.5
BACKOFF_S_MAX = 30.0
HEALTHY_S = 60.0  # a worker that lived this long is started anew without delay
END_S_MAX = 20.0
WORKER = (sys.executable, "-m", "pipeline.worker")


class Supervisor:
    """Keeps one worker running. `command` starts it; the settings are added as its last word.

    The first restart waits for `backoff_s`, each further one twice as long, up to BACKOFF_S_MAX.
    """

    def __init__(
        self, settings: Settings, command: Sequence[str] = WORKER, *, backoff_s: float = BACKOFF_S_FIRST
    ) -> None:
        # A name of its own lets the next worker have its partitions at once: the broker need not wait for the last one.
        named = override(settings, member=settings.member or f"{socket.gethostname()}-{os.getpid()}")
        self._settings = named
        self._command = [*command, to_argument(named)]
        self._backoff_s = backoff_s
        self._ending = threading.Event()
        self._worker: subprocess.Popen[bytes] | None = None
        self.n_restarts = 0

    def run(self) -> int:
        """Run until end() is called or the worker refuses its settings; returns the worker's last exit status."""
        backoff_s = self._backoff_s
        while True:
            started_s = time.monotonic()
            self._worker = subprocess.Popen(self._command)  # noqa: S603 - our own program
            if self._ending.is_set():  # told to end before there was a worker to tell
                self._worker.terminate()
            status = self._worker.wait()
            if self._ending.is_set() or status in {0, EXIT_USAGE}:
                return max(status, 0)
            self._blame(status)
            if time.monotonic() - started_s > HEALTHY_S:
                backoff_s = self._backoff_s
            if self._ending.wait(backoff_s):
                return 0
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
            self.n_restarts += 1

    def end(self) -> None:
        """Tell the worker to end, and run() to return; may be called from a signal handler or another thread."""
        self._ending.set()
        if self._worker is not None and self._worker.poll() is None:
            self._worker.terminate()
            patience = threading.Timer(END_S_MAX, self._worker.kill)
            patience.daemon = True
            patience.start()

    @property
    def pid(self) -> int | None:
        """The worker's process, None before there is one."""
        return None if self._worker is None else self._worker.pid

    def _blame(self, status: int) -> None:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        folder = self._settings.state_folder
        where = held(folder / HAND)
        if where is None:
            logger.error("the worker ended with %s; it is started anew", how)
            return
        ends = Ledger(folder / LEDGER).count(where)
        logger.error(
            "the worker ended with %s while it had %s/%d offset %d in hand, time %d of %d",
            how,
            where.topic,
            where.partition,
            where.offset,
            ends,
            ENDS_MAX,
        )


def run(settings: Settings, command: Sequence[str] = WORKER) -> int:
    """Supervise a worker until SIGTERM or SIGINT; returns the exit status for this process."""
    supervisor = Supervisor(settings, command)

    def end(*_: Any) -> None:
        supervisor.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return supervisor.run()
