"""Processes and libraries for the tests of the tracer, and the rules by which its rows are compared with the truth."""

import ast
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from agents.collector import NotAvailable
from agents.ebpf.libraries import Library, find_libraries
from agents.ebpf.records import CommCreated, CommEnded, Records, Rows
from agents.ebpf.tracer import Tracer
from schemas.events import Op
from tests.conftest import give_up

HERE = Path(__file__).resolve().parent
DEADLINE_S = 30.0
# The functions of the real libraries begin with a push, which the kernel emulates.
PUSHES = (
    "-fno-omit-frame-pointer",
    "-fno-shrink-wrap",
    "-fno-schedule-insns2",
    "-fno-optimize-sibling-calls",
)
OPS = {
    "ncclAllReduce": Op.ALL_REDUCE,
    "ncclAllReduceConfig": Op.ALL_REDUCE,
    "ncclAllGather": Op.ALL_GATHER,
    "ncclReduceScatter": Op.REDUCE_SCATTER,
    "ncclBroadcast": Op.BROADCAST,
    "ncclBcast": Op.BROADCAST,
    "ncclReduce": Op.REDUCE,
    "ncclSend": Op.SEND,
    "ncclRecv": Op.RECV,
    "ncclAlltoAll": Op.ALL_TO_ALL,
    "ncclGather": Op.OTHER,
    "ncclScatter": Op.OTHER,
}
SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)  # bytes, by ncclDataType_t
HAVE_PEER = ("ncclBroadcast", "ncclBcast", "ncclReduce", "ncclSend", "ncclRecv", "ncclGather")
# Eleven times each function, with arguments that no other call has.
EVERY_FUNCTION = f"""
    for turn in range(11):
        for place, name in enumerate({[name for name in OPS if name != "ncclScatter"]}):
            peer = turn + 3 if name in {HAVE_PEER} else 0
            me.call(name, count=turn * 1009 + place + 14, type=(turn + place) % 12, peer=peer)
"""


class Truth(NamedTuple):
    """One call, as its caller saw it (tests/agents/probed_victim.py)."""

    function: str
    elements: int
    type: int
    peer: int
    comm: int
    tid: int
    before_ns: int
    after_ns: int
    result: int

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """What a run is made of: op, bytes, communicator, peer, thread."""
        return int(OPS[self.function]), self.elements * SIZES[self.type], self.comm, self.peer, self.tid


def build_library(folder: Path, *flags: str) -> Path:
    """Compile probed_library.c to a libnccl.so.2, which is returned, and a libcudart.so.12 beside it.

    Without flags, all of their functions can be probed cheaply.
    """
    if shutil.which("cc") is None:
        give_up("no C compiler: install Debian's gcc and libc6-dev")
    own = flags or (*PUSHES, *(["-fcf-protection=none"] if platform.machine() == "x86_64" else []))
    command = ["cc", "-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *own]
    source = str(HERE / "probed_library.c")
    subprocess.run([*command, "-DCUDART", "-o", str(folder / "libcudart.so.12"), source], check=True)
    subprocess.run([*command, "-o", str(folder / "libnccl.so.2"), source], check=True)
    return folder / "libnccl.so.2"


class Victim:
    """A process that maps a library and does what it is told."""

    def __init__(self, library: Path, *wrapper: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-I", str(HERE / "probed_victim.py"), str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    def tell(self, source: str) -> None:
        """Make it do something, without waiting for the end."""
        assert self.process.stdin is not None
        self.process.stdin.write(repr(textwrap.dedent(source)) + "\n")
        self.process.stdin.flush()

    def do(self, source: str) -> Any:
        """Make it do something, and return what that left in `answer`."""
        self.tell(source)
        assert self.process.stdout is not None
        return ast.literal_eval(self.process.stdout.readline())

    def truth(self) -> list[Truth]:
        """Return what it knows of its calls."""
        return [Truth(*each) for each in self.do("answer = [tuple(each) for each in me.truth]")]

    def libraries(self) -> list[Library]:
        """Return what the agent finds in it."""
        return find_libraries([self.pid])[self.pid]

    def nccl(self) -> Library:
        """Return the one that is NCCL."""
        (found,) = (library for library in self.libraries() if library.kind == "nccl")
        return found

    def end(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def open_tracer(**choices: Any) -> Tracer:
    """Return an open tracer. Gives the test up where the kernel cannot be observed."""
    tracer = Tracer(**choices)
    try:
        tracer.open()
    except NotAvailable as error:
        give_up(str(error))
    return tracer


def attach(tracer: Tracer, victim: Victim) -> None:
    """Observe the libraries of a process, of which everything can be seen."""
    found = victim.libraries()
    assert found
    for library in found:
        limits = tracer.attach(library)
        assert not limits, limits


class Seen(NamedTuple):
    """What was recorded of one process."""

    runs: Rows
    syncs: Rows
    communicators: list[CommCreated | CommEnded]
    launches: int
    lost_calls: int

    @property
    def keys(self) -> list[tuple[int, int, int, int, int]]:
        """Of every call, what Truth.key says."""
        return [key for run, key in zip(self.runs, self.run_keys, strict=True) for _ in range(int(run["count"]))]

    @property
    def run_keys(self) -> list[tuple[int, int, int, int, int]]:
        """Of every run, the same."""
        columns = (self.runs[name].tolist() for name in ("op", "bytes", "comm", "peer", "tid"))
        return list(zip(*columns, strict=True))


def take(tracer: Tracer, pid: int) -> Seen:
    """Return what has been recorded of a process by now."""
    return _only(tracer.take(flush_open=False), pid)


def take_all(tracer: Tracer, victim: Victim) -> Seen:
    """End a process, and return everything that was recorded of it."""
    victim.end()
    tracer.forget(victim.pid)
    return _only(tracer.take(flush_open=False), victim.pid)


def _only(records: Records, pid: int) -> Seen:
    return Seen(
        records.runs[records.runs["tgid"] == pid],
        records.syncs[records.syncs["tgid"] == pid],
        [each for each in records.communicators if each.tgid == pid],
        records.launches.get(pid, 0),
        records.lost_calls.get(pid, 0),
    )


def check_times(runs: Rows, truth: list[Truth]) -> None:
    """Assert that every run lies within the calls that it is made of, and lasts no longer than they did."""
    ends = np.cumsum(runs["count"].astype("i8"))
    assert int(ends[-1]) == len(truth)
    for run, end in zip(runs, ends.tolist(), strict=True):
        own = truth[end - int(run["count"]) : end]
        assert own[0].before_ns <= run["start_ns"] <= own[0].after_ns
        assert own[-1].before_ns <= run["end_ns"] <= own[-1].after_ns
        lasted = [each.after_ns - each.before_ns for each in own]
        assert run["total_ns"] <= sum(lasted)
        assert run["least_ns"] <= min(lasted)
        assert run["least_ns"] * len(own) <= run["total_ns"]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def first_byte(pid: int, library: Library, offset: int) -> int:
    """Return a byte of a file as it lies in a process's memory: 0xCC is a breakpoint."""
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            start, end = (int(each, 16) for each in fields[0].split("-"))
            begin = int(fields[2], 16)
            if int(fields[4]) == library.identity.inode and begin <= offset < begin + end - start:
                memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
                try:
                    return os.pread(memory, 1, start + offset - begin)[0]
                finally:
                    os.close(memory)
    raise AssertionError(f"{library.name} is not mapped")
