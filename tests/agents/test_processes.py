"""Which processes may be ranks is told of real processes: when they map NCCL, end, and give their number to others."""

import contextlib
import ctypes
import errno
import glob
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.processes import Candidate, Processes, _read, read_key
from agents.rank_variables import NAMES
from tests.conftest import give_up

DEADLINE_S = 30.0
# Loads the libraries that it is told to, one a line, and answers each with a line.
PROGRAM = """
import ctypes, os, signal, sys
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "fork":
        if os.fork() == 0:
            print("ready", flush=True)
            signal.pause()
    else:
        ctypes.CDLL(line.strip())
        print("ready", flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that is called as NCCL's is."""
    found = glob.glob("/usr/lib/*-linux-gnu/libutil.so.1") + glob.glob("/lib/*-linux-gnu/libutil.so.1")
    assert found, "every glibc has libutil"
    path = tmp_path_factory.mktemp("lib") / "libnccl.so.2"
    shutil.copy(found[0], path)
    return path


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def run(environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={"PATH": os.environ["PATH"], **(environment or {})},
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(end, process)
            answer(process)
            return process

        yield run


def end(process: subprocess.Popen[str]) -> None:
    """End a process and its children, unless it has been waited for: its number may be another's by now."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)


def answer(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def tell(process: subprocess.Popen[str], text: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
    answer(process)


def scan(processes: Processes, pid: int, until: Callable[[Candidate | None], bool]) -> Candidate | None:
    """Scan, with a clock that runs fast, until the candidate with this number is as wanted."""
    deadline_s = time.monotonic() + DEADLINE_S
    now_ns = time.monotonic_ns()
    while True:
        found = {candidate.key.pid: candidate for candidate in processes.scan(now_ns)}.get(pid)
        if until(found):
            return found
        assert time.monotonic() < deadline_s, f"candidate {pid} is {found}"
        now_ns += 400_000_000


def candidate_of(processes: Processes, pid: int) -> Candidate:
    found = scan(processes, pid, lambda candidate: candidate is not None)
    assert found is not None
    return found


def test_a_process_with_a_rank_is_a_candidate_and_one_without_is_none(start: Start) -> None:
    processes = Processes(NAMES)
    rank, other = start({"RANK": "3", "WORLD_SIZE": "5", "SECRET": "x"}), start()
    found = candidate_of(processes, rank.pid)
    assert found.environment == {"RANK": "3", "WORLD_SIZE": "5"}, "only what was asked for is kept"
    assert not found.maps_nccl
    assert found.parent == os.getpid()
    assert found.key == read_key(rank.pid)
    assert found.namespace_pid == rank.pid
    assert abs(found.start_ns - time.time_ns()) < 60 * 10**9
    assert abs(found.started_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) < 60 * 10**9
    assert scan(processes, other.pid, lambda candidate: candidate is None) is None


def test_a_process_that_maps_nccl_is_a_candidate_without_any_variable(start: Start, library: Path) -> None:
    processes = Processes(NAMES)
    process = start()
    tell(process, library)
    found = candidate_of(processes, process.pid)
    assert found.maps_nccl
    assert [Path(lib.name) for lib in found.libraries] == [library]
    assert found.environment == {}
    assert found.unmapped_ns is None


def test_a_library_that_is_mapped_later_is_noticed_with_the_time_of_the_last_look_without_it(
    start: Start, library: Path
) -> None:
    processes = Processes(NAMES)
    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    before = candidate_of(processes, process.pid)
    assert not before.maps_nccl
    tell(process, library)
    after = scan(processes, process.pid, lambda candidate: candidate is not None and candidate.maps_nccl)
    assert after is not None
    assert after.key == before.key
    assert after.unmapped_ns is not None


def test_a_library_that_is_mapped_by_a_process_without_a_rank_is_noticed(start: Start, library: Path) -> None:
    processes = Processes(NAMES)
    process = start()
    scan(processes, process.pid, lambda candidate: candidate is None)
    tell(process, library)
    assert candidate_of(processes, process.pid).maps_nccl


def test_a_child_that_was_forked_from_a_rank_is_a_candidate_that_descends_from_it(start: Start, library: Path) -> None:
    processes = Processes(NAMES)
    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    tell(process, library)
    tell(process, "fork")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = candidate_of(processes, int(child))
    assert found.parent == process.pid
    assert found.maps_nccl
    assert found.environment == candidate_of(processes, process.pid).environment


def test_an_end_is_noticed_once_and_whose_the_number_was_is_still_known(start: Start) -> None:
    processes = Processes(NAMES)
    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    found = candidate_of(processes, process.pid)
    process.kill()
    process.wait()
    scan(processes, process.pid, lambda candidate: candidate is None)
    assert processes.take_ended() == [found.key]
    assert processes.take_ended() == []
    assert processes.key_of(process.pid) == found.key
    assert read_key(process.pid) is None


def test_a_process_that_nobody_has_buried_has_ended(start: Start) -> None:
    processes = Processes(NAMES)
    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    found = candidate_of(processes, process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert scan(processes, process.pid, lambda candidate: candidate is None) is None
    assert processes.take_ended() == [found.key]


def start_with_number(pid: int, environment: dict[str, str]) -> None:
    """Start a child that has this number, which is free."""

    class Arguments(ctypes.Structure):
        _fields_ = tuple(
            (name, ctypes.c_uint64)
            for name in (
                "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls", "set_tid",
                "set_tid_size",
            )
        )  # fmt: skip

    numbers = (ctypes.c_int32 * 1)(pid)
    arguments = Arguments(exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(numbers), set_tid_size=1)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    made = syscall(435, ctypes.byref(arguments), ctypes.sizeof(arguments))  # clone3
    if made == 0:
        os.execve(shutil.which("sleep") or "", ["sleep", "1000"], environment)  # noqa: S606
    if made < 0:
        give_up(f"a process with a chosen number cannot be made here: {os.strerror(ctypes.get_errno())}")


def test_a_number_that_is_used_again_is_another_process(start: Start) -> None:
    processes = Processes(NAMES)
    first = start({"RANK": "0", "WORLD_SIZE": "1"})
    before = candidate_of(processes, first.pid)
    first.kill()
    first.wait()
    start_with_number(first.pid, {"RANK": "7", "WORLD_SIZE": "11"})
    try:
        found = scan(
            processes,
            first.pid,
            lambda candidate: candidate is not None and candidate.environment.get("RANK") == "7",
        )
        assert found is not None
        assert found.key != before.key
        assert processes.take_ended() == [before.key]
        assert processes.key_of(first.pid) == found.key
    finally:
        os.kill(first.pid, signal.SIGKILL)
        os.waitpid(first.pid, 0)


def test_an_environment_may_hold_anything(start: Start) -> None:
    processes = Processes(NAMES)
    process = subprocess.Popen(
        ["sleep", "1000"],
        env={
            b"RANK": b"1",
            b"WORLD_SIZE": b"2\xff\xfe",
            b"\xffX": b"",
            b"MASTER_ADDR": "käfer".encode(),
            b"BIG": b"x" * 99_991,
        },
    )
    try:
        found = candidate_of(processes, process.pid)
        assert found.environment == {"RANK": "1", "WORLD_SIZE": "2\\xff\\xfe", "MASTER_ADDR": "käfer"}
    finally:
        process.kill()
        process.wait()


def test_a_pod_has_the_name_of_its_namespace(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("team-a\n")
    monkeypatch.setattr("agents.processes._KUBERNETES_NAMESPACE", str(tmp_path / "namespace"))
    processes = Processes(NAMES)
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    pod, other = start(rank | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}), start(rank)
    assert candidate_of(processes, pod.pid).environment == rank | {"KUBERNETES_NAMESPACE": "team-a"}
    assert candidate_of(processes, other.pid).environment == rank


def test_an_environment_is_read_to_a_bound(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr("agents.processes.ENVIRONMENT_BYTES_MAX", 1009)
    processes = Processes(NAMES)
    process = subprocess.Popen(["sleep", "1000"], env={"RANK": "1", "A": "x" * 2003, "WORLD_SIZE": "2"})
    try:
        assert candidate_of(processes, process.pid).environment == {"RANK": "1"}
    finally:
        process.kill()
        process.wait()


def test_what_may_not_be_read_is_said(start: Start) -> None:
    if os.geteuid() != 0:
        give_up("needs root to become somebody else")
    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    program = (
        "import os, sys\n"
        "from agents.processes import Processes\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "processes = Processes({'RANK'})\n"
        "found = processes.scan(0)\n"
        "while processes.n_looks < len(os.listdir('/proc')) // 3: processes.scan(0)\n"
        "print(*(limit.remedy for limit in processes.limits()), sep='\\n')\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "CAP_SYS_PTRACE" in said.stdout
    assert process.poll() is None


def test_a_library_that_cannot_be_read_is_said_until_its_process_ends(
    start: Start, library: Path, tmp_path: Path
) -> None:
    processes = Processes(NAMES)
    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    damaged = tmp_path / "libnccl.so.2"
    shutil.copy(library, damaged)
    tell(process, damaged)
    with damaged.open("r+b") as file:
        file.write(bytes(64))  # nobody reads the header any more, except us
    found = candidate_of(processes, process.pid)
    assert not found.maps_nccl
    assert [str(damaged) in limit.what for limit in processes.limits()].count(True) == 1
    process.kill()
    process.wait()
    scan(processes, process.pid, lambda candidate: candidate is None)
    assert not any(str(damaged) in limit.what for limit in processes.limits())


def test_a_number_that_the_tracer_saw_is_looked_at_in_the_next_scan(start: Start, library: Path) -> None:
    processes = Processes(NAMES)
    process = start()
    now_ns = time.monotonic_ns()
    for _ in range(100):
        processes.scan(now_ns)
    tell(process, library)
    n_looks = processes.n_looks
    assert {c.key.pid for c in processes.scan(now_ns)}.isdisjoint({process.pid}), "its turn has not come yet"
    assert processes.n_looks == n_looks
    assert processes.key_of(process.pid) == read_key(process.pid)
    assert process.pid in {c.key.pid for c in processes.scan(now_ns)}


def test_old_processes_are_looked_at_ever_more_seldom(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, other = start({"RANK": "0", "WORLD_SIZE": "1"}), start()
    looks_s: dict[str, list[int]] = {f"/proc/{process.pid}/stat": [] for process in (rank, other)}
    start_ns, now_s = time.monotonic_ns(), 0

    def read(path: str, n_bytes_max: int) -> bytes:
        if path in looks_s:
            looks_s[path].append(now_s)
        return _read(path, n_bytes_max)

    monkeypatch.setattr("agents.processes._read", read)
    processes = Processes(NAMES)
    for now_s in range(0, 599, 2):
        processes.scan(start_ns + now_s * 1_000_000_000)
    of_rank, of_other = looks_s.values()
    assert len(of_rank) > 290, "a rank that has no NCCL yet is looked at every time"
    gaps_s = [after - before for before, after in itertools.pairwise(of_other)]
    assert gaps_s[0] == 2
    assert max(gaps_s) > 30
    assert len(gaps_s) < 75


def test_when_processes_cannot_be_listed_the_last_ones_stand(
    start: Start, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    process = start({"RANK": "0", "WORLD_SIZE": "1"})
    tell(process, library)
    processes, now_ns = Processes(NAMES), time.monotonic_ns()
    before = processes.scan(now_ns)
    assert process.pid in {candidate.key.pid for candidate in before}
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert processes.scan(now_ns + 2_000_000_000) == before
        assert processes.take_ended() == []
        assert any("open files" in limit.why for limit in processes.limits())
    processes.scan(now_ns + 4_000_000_000)
    assert not any("open files" in limit.why for limit in processes.limits())
