"""Probes come and go without a trace, and one thing that cannot be probed hurts no other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.ebpf import functions, selftest, symbols
from agents.ebpf.libraries import Library
from agents.ebpf.probes import Prober
from agents.ebpf.tracer import Tracer
from tests.agents.probed import PUSHES, Victim, attach, build_library, first_byte, open_tracer, take_all, wait_until
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.kernel

BREAKPOINT = {"x86_64": 0xCC}.get(os.uname().machine)
AGENT = """
import sys
from agents.ebpf.libraries import find_libraries
from agents.ebpf.tracer import Tracer
tracer = Tracer()
tracer.open()
for library in find_libraries([int(sys.argv[1])])[int(sys.argv[1])]:
    tracer.attach(library)
print("attached", flush=True)
sys.stdin.read()
"""

UNPRIVILEGED_AGENT = """
import sys
from agents.ebpf.libraries import LibraryFinder
from agents.ebpf.tracer import Tracer
tracer, finder = Tracer(), LibraryFinder()
tracer.open()
limits = [limit for library in finder.find([int(sys.argv[1])])[int(sys.argv[1])] for limit in tracer.attach(library)]
print(tracer.has_return_probes, len(limits + finder.limits), flush=True)
sys.stdin.read()
tracer.close()
print(tracer.take().runs["count"].sum())
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return build_library(tmp_path)


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    """Each test has a library of its own."""
    tracer = open_tracer()
    yield tracer
    tracer.close()


def is_probed(victim: Victim, library: Library) -> bool:
    symbol = symbols.read_image(library.path, ["ncclAllReduce"]).symbols["ncclAllReduce"]
    byte = first_byte(victim.pid, library, symbol.offset)
    assert byte in {symbol.first[0], BREAKPOINT}
    return byte == BREAKPOINT


def test_an_agent_that_is_killed_leaves_no_probe_behind(library: Path) -> None:
    with Victim(library) as victim:
        found = victim.nccl()
        assert not is_probed(victim, found)
        with subprocess.Popen(
            [sys.executable, "-c", AGENT, str(victim.pid)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"attached\n"
            assert is_probed(victim, found)
            agent.send_signal(signal.SIGKILL)
            agent.wait()
        wait_until(lambda: not is_probed(victim, found), "the kernel removes the probes of a killed agent")
        victim.do("for _ in range(101): me.call('ncclAllReduce')")
        assert {each.result for each in victim.truth()} == {0}


def test_detaching_one_library_leaves_the_others_and_is_quick(tracer: Tracer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = build_library(tmp_path), build_library(tmp_path / "other")
    with Victim(first) as one, Victim(second) as two:
        attach(tracer, one)
        attach(tracer, two)
        library, other = one.nccl(), two.nccl()
        assert is_probed(one, library)
        begin_s = time.monotonic()
        tracer.detach(library)
        assert time.monotonic() - begin_s < 5
        assert not is_probed(one, library)
        assert is_probed(two, other)
        for victim in (one, two):
            victim.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, one).keys) == 0
        assert len(take_all(tracer, two).keys) == 7


def test_after_closing_the_last_calls_can_still_be_taken(library: Path) -> None:
    tracer = open_tracer()
    with Victim(library) as victim:
        attach(tracer, victim)
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        found = victim.nccl()
        tracer.close()
        assert not is_probed(victim, found)
        assert tracer.take().runs["count"].tolist() == [7]
        assert not len(tracer.take().runs)
        tracer.close()


def test_a_tracer_gives_its_descriptors_back(library: Path) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    open_tracer().close()  # loads the compiler for good
    before = n_open()
    with Victim(library) as victim:
        tracer = open_tracer()
        attach(tracer, victim)
        tracer.close()
    assert n_open() <= before


def test_a_library_is_probed_once_whatever_way_it_is_reached(tracer: Tracer, library: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    link = tmp_path / "linked" / "libnccl.so.2"
    os.link(library, link)
    with Victim(library) as victim, Victim(link) as other:
        attach(tracer, victim)
        attach(tracer, other)
        for each in (victim, other):
            each.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, victim).keys) == 7
        assert len(take_all(tracer, other).keys) == 7


def test_a_library_in_another_mount_namespace_is_probed(tracer: Tracer, library: Path, tmp_path: Path) -> None:
    """The path that the process sees does not exist for us."""
    inside = tmp_path / "only-inside"
    inside.mkdir()
    script = f'mount -t tmpfs tmpfs "{inside}" && cp "{library.parent}"/lib* "{inside}/" && exec "$@"'
    with Victim(
        inside / library.name, "unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh"
    ) as victim:
        assert not (inside / library.name).exists()
        attach(tracer, victim)
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, victim).keys) == 7


def test_a_library_that_was_deleted_while_in_use_is_probed(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        library.unlink()
        found = victim.nccl()
        assert found.name == str(library)
        attach(tracer, victim)
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, victim).keys) == 7


def test_a_library_that_was_replaced_while_in_use_is_not_confused_with_the_new_one(
    tracer: Tracer, library: Path, tmp_path: Path
) -> None:
    with Victim(library) as victim:
        (tmp_path / "new").mkdir()
        build_library(tmp_path / "new").rename(library)
        with Victim(library) as other:
            attach(tracer, victim)
            for each in (victim, other):
                each.do("for _ in range(7): me.call('ncclAllReduce')")
            assert len(take_all(tracer, victim).keys) == 7
            assert len(take_all(tracer, other).keys) == 0


def test_a_library_that_something_was_mounted_over_is_not_confused_with_that(
    tracer: Tracer, library: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    new = build_library(tmp_path / "new")
    with Victim(library, "unshare", "--mount", "--propagation=private") as victim:
        bind = 4096
        assert victim.do(f"answer = ctypes.CDLL(None).mount(b{str(new)!r}, b{str(library)!r}, None, {bind}, None)") == 0
        assert victim.nccl().identity.inode == library.stat().st_ino
        attach(tracer, victim)
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, victim).keys) == 7


def test_functions_that_would_be_single_stepped_are_reported_and_left_alone(tracer: Tracer, tmp_path: Path) -> None:
    protected = build_library(tmp_path, *PUSHES, "-fcf-protection=full")
    with Victim(protected) as victim:
        found = victim.nccl()
        limits = tracer.attach(found)
        assert "ncclAllReduce" in {limit.what.split()[0] for limit in limits}
        assert all("f3 0f 1e fa" in limit.why for limit in limits)
        assert not {"ncclCommInitRank", "ncclBcast"} & {limit.what.split()[0] for limit in limits}
        assert set(limits) <= set(tracer.limits())
        assert not is_probed(victim, found)
        victim.do("comm = me.create(2, 1); me.call('ncclAllReduce', comm=comm)")
        seen = take_all(tracer, victim)
    assert len(seen.runs) == 0
    assert len(seen.communicators) == 1, "rare functions are probed whatever it costs"


def test_functions_that_would_be_single_stepped_are_probed_when_asked_for(tmp_path: Path) -> None:
    protected = build_library(tmp_path, *PUSHES, "-fcf-protection=full")
    tracer = open_tracer(probe_dear=True)
    try:
        with Victim(protected) as victim:
            attach(tracer, victim)
            victim.do("for root in range(7): me.call('ncclBcast', peer=root, count=14)")
            truth = victim.truth()
            assert take_all(tracer, victim).keys == [each.key for each in truth]
    finally:
        tracer.close()


def test_a_file_that_is_no_library_hurts_no_other(tracer: Tracer, library: Path, tmp_path: Path) -> None:
    with Victim(library) as victim:
        found = victim.nccl()
        bad = tmp_path / "libnccl.so.3"
        bad.write_text("no library")
        for path in (str(bad), str(tmp_path / "missing"), "/proc/self/exe"):
            identity = found.identity._replace(inode=hash(path))
            (limit,) = tracer.attach(Library(path, identity, "nccl", (victim.pid,), path))
            assert limit.what == path
        attach(tracer, victim)
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, victim).keys) == 7


def test_a_place_that_cannot_be_probed_costs_no_other_place(
    tracer: Tracer, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_image = symbols.read_image

    def one_is_wrong(path: str, names: list[str]) -> symbols.Image:
        image = read_image(path, names)
        wrong = image.symbols["ncclGather"]
        beyond = symbols.Symbol(wrong.name, 1 << 30, wrong.first, wrong.machine)
        return symbols.Image({**image.symbols, "ncclGather": beyond}, image.build_id)

    monkeypatch.setattr("agents.ebpf.attachments.read_image", one_is_wrong)
    with Victim(library) as victim:
        found = victim.nccl()
        limits = tracer.attach(found)
        assert {limit.what.split()[0] for limit in limits} == {"ncclGather"}
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        assert len(take_all(tracer, victim).keys) == 7


def test_without_links_of_uprobes_perf_events_do(
    tracer: Tracer, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer._attachments, "_prober", Prober(has_links=False))
    # The kernel takes its time over each event's end.
    monkeypatch.setattr(functions, "NCCL", [each for each in functions.NCCL if each.symbol == "ncclBroadcast"])
    monkeypatch.setattr(functions, "SYNCS", functions.SYNCS[:1])
    with Victim(library) as victim:
        attach(tracer, victim)
        victim.do("for _ in range(7): me.call('ncclBcast')")
        assert len(take_all(tracer, victim).keys) == 7


@pytest.mark.parametrize(("rights", "n_seen"), [("+bpf,+perfmon,+sys_ptrace", 7), ("+bpf,+perfmon", 0)])
def test_three_rights_are_enough_for_everything_and_without_the_third_it_is_said(
    library: Path, rights: str, n_seen: int
) -> None:
    drop = ["setpriv", "--securebits=+noroot", f"--inh-caps=-all,{rights}", f"--ambient-caps=-all,{rights}"]
    with (
        Victim(library) as victim,
        subprocess.Popen(
            [*drop, sys.executable, "-c", UNPRIVILEGED_AGENT, str(victim.pid)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as agent,
    ):
        assert agent.stdin is not None
        assert agent.stdout is not None
        has_returns, n_limits = agent.stdout.readline().split()
        victim.do("for _ in range(7): me.call('ncclAllReduce')")
        victim.end()
        agent.stdin.close()
        assert int(agent.stdout.read()) == n_seen
    assert has_returns == "True"
    assert int(n_limits) == (0 if n_seen else 2)


# ---- return probes, and doing without them


def test_return_probes_are_safe_on_this_kernel_or_not_used(tracer: Tracer) -> None:
    """The child runs under its filter, with the probe in place, and its end is the answer."""
    program = tracer._backend.program_fd("leave_call")
    assert selftest.are_return_probes_safe(Prober(), program) == tracer.has_return_probes


@pytest.mark.parametrize(
    "child",
    ["import os; os.kill(os.getpid(), 31)", "raise SystemExit(3)", "import time; time.sleep(60)", "print('/no')"],
)
def test_a_child_that_dies_or_says_nothing_means_no_return_probes(
    tracer: Tracer, child: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(child)
    monkeypatch.setattr(selftest, "_CHILD", script)
    monkeypatch.setattr(selftest, "TIMEOUT_S", 0.5)
    assert not selftest.are_return_probes_safe(Prober(), tracer._backend.program_fd("leave_call"))


def test_the_child_is_really_killed_by_what_its_filter_forbids(tmp_path: Path) -> None:
    """Otherwise the self-test would pass everywhere; shown with getppid, since a kernel may exempt its probes."""
    script = tmp_path / "child.py"
    source = Path(selftest._CHILD).read_text()
    for old, new in (("(335, 336)", "(110, 336)"), ('    libc.a64l(b"ab")', "    libc.syscall(110)")):
        assert old in source
        source = source.replace(old, new)
    script.write_text(source)
    done = subprocess.run([sys.executable, "-I", "-S", script], input=b"go\n", stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == -signal.SIGSYS


def test_entries_alone_still_tell_what_is_called(library: Path) -> None:
    tracer = open_tracer(return_probes=False)
    try:
        assert not tracer.has_return_probes
        assert any("how long" in limit.what for limit in tracer.limits())
        with Victim(library) as victim:
            attach(tracer, victim)
            made = victim.do("comm = me.create(5, 3); answer = comm")
            victim.do(
                """
                for _ in range(7): me.call("ncclAllReduce", comm=comm)
                for root in range(5): me.call("ncclBcast", peer=root, comm=comm)
                me.cuda.cudaDeviceSynchronize()
                me.library.ncclGroupStart()
                me.call("ncclSend", peer=3, comm=comm)
                me.library.ncclGroupEnd()
                """
            )
            truth = victim.truth()
            seen = take_all(tracer, victim)
    finally:
        tracer.close()
    assert seen.keys == [each.key for each in truth]
    assert seen.runs["depth"].tolist()[-1] == 1
    assert not seen.runs["total_ns"].any()
    assert truth[6].before_ns <= int(seen.runs["end_ns"][0]) <= truth[6].after_ns
    assert len(seen.syncs) == 1
    (created,) = seen.communicators
    assert created.comm == made


def test_a_process_under_a_seccomp_filter_lives_on(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        attach(tracer, victim)
        victim.do(
            f"""
            import sys
            sys.path.insert(0, {str(Path(selftest._CHILD).parent)!r})
            import selftest_child
            selftest_child._forbid(ctypes.CDLL(None))
            for _ in range(101): me.call("ncclAllReduce")
            """
        )
        assert len(take_all(tracer, victim).keys) == 101
        assert victim.process.returncode == 0
