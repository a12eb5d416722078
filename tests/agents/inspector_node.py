"""A node of our own: rank processes under a proc file system that is a folder, and the files of their Inspectors."""

import socket
from pathlib import Path

import numpy as np

from agents.clock import Clock
from agents.collector import ProcessKey, RankProcess
from agents.nccl_inspector import InspectorCollector
from schemas.events import Calls, Op
from tests.agents.inspector_lines import COMM, collective, v40

HASH = int(COMM, 16)
SECOND = 1_000_000_000


class Wall(Clock):
    """A clock that is moved by hand."""

    time_ns = 1_790_000_000 * SECOND

    def now_ns(self) -> int:
        return self.time_ns


class Node:
    """A proc file system of our own, and the files of its processes."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.files = folder / "root" / "dumps"
        self.files.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        self.folder = folder

    def rank(self, number: int = 0, pid: int = 4711, inside: int = 11, /, **settings: str) -> RankProcess:
        own = self.proc / str(pid)
        (own / "fd").mkdir(parents=True)
        (own / "root").symlink_to(self.folder / "root")
        (own / "cwd").symlink_to(self.files)
        given = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": "/dumps", "PATH": "/bin"} | settings
        given |= {"NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500000", **settings}
        (own / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in given.items() if v))
        return RankProcess(
            key=ProcessKey(pid, 3),
            job_id="job-7",
            incarnation="a",
            world_size=7,
            rank=number,
            local_rank=number,
            namespace_pid=inside,
            start_ns=Wall.time_ns - SECOND,
        )

    def file(self, pid: int = 11, host: str = socket.gethostname()) -> Path:
        return self.files / f"{host}-pid{pid}.log"


def now_us(clock: Wall) -> int:
    return clock.time_ns // 1000


def host_calls(clock: Wall, n: int, *, first: int = 0) -> Calls:
    start_ns = clock.time_ns - SECOND + (first + np.arange(n)) * 1_000_000
    return Calls.build(
        n,
        rank=0,
        comm=HASH,
        op=int(Op.ALL_REDUCE),
        source=0,
        bytes=8192,
        count=1,
        first_seq=first + np.arange(n),
        seq_known=1,
        start_ns=start_ns,
        end_ns=start_ns + 1000,
        duration_ns=1000,
        duration_min_ns=1000,
    )


def numbers(collector: InspectorCollector, *ranks: RankProcess) -> list[int]:
    return collector.collect(ranks).calls.first_seq.tolist()  # type: ignore[no-any-return]


def verbose(clock: Wall, *ns: int, **header: int) -> bytes:
    bodies = (collective(n, starts_us=[now_us(clock) - 1000 + n]) for n in ns)
    return b"".join(v40(body, dump_us=now_us(clock), **header) for body in bodies)  # type: ignore[arg-type]


def add(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
