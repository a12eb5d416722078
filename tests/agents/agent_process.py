"""A real agent process against a broker, and everything that it said, to compare with what ranks did.

Each agent is told to observe only processes with a word of its run in their environment, and libraries are copies that
only its job maps: whatever else runs on this machine is none of its business.
"""

import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pipeline.record import Record
from pipeline.window import Window
from schemas.codec import decode_events
from schemas.events import EventBatch
from schemas.iterations import IterationBatch, IterationRows
from schemas.topics import EVENTS
from tests.integration.live_tools import REPOSITORY, Reader, wait_until
from tests.testbed import libraries, nvml_stub
from tests.testbed.launch import Testbed
from tests.testbed.truth import RankTruth

RUN_VARIABLE = "FAILSLOW_TEST_RUN"
FLUSH_INTERVAL_S = 0.25
PATIENCE_S = 60.0


class Agent:
    """`failslow-agent run --config`, started on entry and ended on exit, by its number.

    folder: of this agent's own, kept over a restart. wrapper: a command that the agent is started by. tables: lines of
    TOML by the name of their table, in place of or beside those that are set here; `agent` is [agent] itself. patches:
    other values for constants of the agent's modules, such as times that no test wants to wait for.
    """

    def __init__(
        self,
        folder: Path,
        bootstrap: str,
        *,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        branch_protected: bool = False,
        is_to_know_libraries: bool = True,
        is_to_observe: bool = True,
        patches: Mapping[str, object] | None = None,
        **tables: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.libraries = folder / "libraries"
        self.state = folder / "state"
        self.socket = folder / "markers.sock"
        self.environment = {RUN_VARIABLE: uuid.uuid4().hex}
        self.process: subprocess.Popen[bytes] | None = None
        self._wrapper = wrapper
        self._patches = patches or {}
        self._is_to_observe = is_to_observe and is_to_know_libraries
        self._own_environment = environment or {}
        folder.mkdir(exist_ok=True)
        shutil.copytree(libraries.build(branch_protected=branch_protected), self.libraries, dirs_exist_ok=True)
        self.nccl = sorted(str(path) for path in self.libraries.iterdir())
        nvml_stub.StubState(folder / "gpus0", 1)
        self._tables = self._with_defaults(bootstrap, tables, is_to_know_libraries=is_to_know_libraries)

    def _with_defaults(
        self, bootstrap: str, tables: Mapping[str, Mapping[str, str]], *, is_to_know_libraries: bool
    ) -> dict[str, dict[str, str]]:
        paths = ", ".join(f'"{path}"' for path in self.nccl)
        found = {
            "": {
                "bootstrap": f'"{bootstrap}"',
                "node": '"node0"',
                "flush_interval_s": str(FLUSH_INTERVAL_S),
                "state_dir": f'"{self.state}"',
                "nvml_library": f'"{nvml_stub.build()}"',
            },
            "nccl": {"libraries": f"[{paths}]"} if is_to_know_libraries else {},
            "identity": {"select": f'{{ {RUN_VARIABLE} = "{self.environment[RUN_VARIABLE]}" }}'},
            "markers": {"socket": f'"{self.socket}"'},
        }
        for name, lines in tables.items():
            found["" if name == "agent" else name] |= lines
        return found

    @property
    def config(self) -> Path:
        """The settings file, written anew."""
        text = ""
        for name, lines in self._tables.items():
            text += f"[agent{'.' if name else ''}{name}]\n" + "".join(f"{k} = {v}\n" for k, v in lines.items())
        path = self.folder / "failslow.toml"
        path.write_text(text)
        return path

    def command(self, *words: str) -> list[str]:
        """Return a command line of the agent's, with these words and its settings."""
        program = ["-m", "agents"]
        if self._patches:
            modules = ", ".join({name.rpartition(".")[0] for name in self._patches} | {"agents.__main__"})
            values = "; ".join(f"{name} = {value!r}" for name, value in self._patches.items())
            program = ["-c", f"import {modules}; {values}; agents.__main__.main()"]
        return [*self._wrapper, sys.executable, *program, *words, "--config", str(self.config)]

    @property
    def variables(self) -> dict[str, str]:
        """The agent's environment."""
        return {**os.environ, nvml_stub.STATE_VARIABLE: str(self.folder / "gpus0"), **self._own_environment}

    def start(self) -> None:
        """Start it, or start it anew; wait until the libraries are probed, if they are to be."""
        assert self.process is None or self.process.poll() is not None
        self.log = self.folder / f"agent-{uuid.uuid4().hex[:6]}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command("run"),
                cwd=REPOSITORY,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        for path in self.nccl if self._is_to_observe else ():
            self.wait_for(f"{path} is observed")

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Return when it has said something so many times."""
        wait_until(lambda: self.said().count(text) >= times or not self.is_running, f"{text!r}", PATIENCE_S)
        assert self.said().count(text) >= times, f"the agent has not said {text!r}:\n{self.said()}"

    def said(self) -> str:
        """What it has logged since it was started last."""
        return self.log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """End it as SIGKILL does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Tell it to end, and return its status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_running:
            self.kill()
        if error is not None and self.process is not None:
            print(self.said()[-4000:])  # noqa: T201 - pytest shows it with the failure

    def testbed(self, workload: Any, job: str, **choices: Any) -> Testbed:
        """Return a job that this agent observes."""
        environment = {**self.environment, **choices.pop("environment", {})}
        choices = {"library_folder": self.libraries, "gpu_folder": self.folder, **choices}
        return Testbed(workload, job=job, environment=environment, **choices)


class Events:
    """All batches on a broker, by job."""

    def __init__(self, bootstrap: str) -> None:
        self._reader = Reader(bootstrap, EVENTS)
        self._decoded: list[tuple[EventBatch, Record]] = []
        self._lock = threading.Lock()

    def of(self, job: str) -> "JobEvents":
        """Return what has arrived of a job."""
        with self._lock:
            for message in self._reader.messages[len(self._decoded) :]:
                value = message.value() or b""
                time_ns = message.timestamp()[1] * 1_000_000
                record = Record(EVENTS, message.partition(), message.offset(), time_ns, message.key() or b"", value)
                self._decoded.append((decode_events(value), record))
            return JobEvents([(batch, record) for batch, record in self._decoded if batch.job_id == job])

    def wait_for_end(self, job: str) -> "JobEvents":
        """Wait for a job's last batch and return all of them."""
        wait_until(lambda: any(batch.is_last for batch in self.of(job).batches), f"the last batch of {job}", PATIENCE_S)
        return self.of(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()


class JobEvents:
    """The batches of one job, in the order of their arrival."""

    def __init__(self, found: list[tuple[EventBatch, Record]]) -> None:
        self.batches = [batch for batch, _ in found]
        self.records = [record for _, record in found]

    @property
    def lost(self) -> int:
        """Events that the agent knows to have lost."""
        return sum(batch.lost_events for batch in self.batches)

    @property
    def incarnations(self) -> list[str]:
        """What the job's starts were called, the first first."""
        return list(dict.fromkeys(batch.incarnation for batch in self.batches))

    @property
    def ended(self) -> list[str]:
        """Those of them that were ended."""
        return [batch.incarnation for batch in self.batches if batch.is_last]

    def since(self, agent_start_ns: int) -> "JobEvents":
        """Return the batches of one agent."""
        both = zip(self.batches, self.records, strict=True)
        return JobEvents([(batch, record) for batch, record in both if batch.agent_start_ns == agent_start_ns])

    def table(self, name: str, rank: int | None = None) -> Any:
        """Return the rows of a table, of one rank or all, in the order of arrival."""
        parts = [getattr(batch, name) for batch in self.batches]
        table: Any = type(parts[0]).concatenate(parts)
        return table if rank is None else table.take(table.rank == rank)

    @cached_property
    def windows(self) -> list[IterationBatch]:
        """What the window stage makes of them."""
        window = Window()
        return [out for record in self.records for out in window.handle(record)]

    def iterations(self, rank: int) -> IterationRows:
        """Return a rank's iterations."""
        rows = IterationRows.concatenate([out.rows for out in self.windows])
        return rows.take(rows.rank == rank)


def in_epoch(monotonic_ns: Any) -> Any:
    """Return times since the epoch, (n,), by the clock of this machine."""
    import time

    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(11)]
    before, now, after = min(looks, key=lambda look: look[2] - look[0])
    return monotonic_ns.astype(np.int64) + (now - (before + after) // 2)


def steady_rows(truth: RankTruth, first: int) -> Any:
    """Return a rank's iterations from a number on."""
    return truth.iterations[truth.iterations["iteration"] >= first]
