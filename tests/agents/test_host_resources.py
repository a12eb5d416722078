"""Quotas, memory, block devices and retransmits of real processes, against the kernel's own figures."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import cgroups
from agents.clock import Clock
from agents.host import HostCollector
from agents.host_files import FilesReader
from agents.host_programs import HostPrograms
from agents.host_tracer import HostTracer
from agents.kernel_types import TRACEFS
from tests.agents import host_machine as machine
from tests.conftest import give_up

pytestmark = pytest.mark.kernel

HIERARCHIES = cgroups.mounts(Path("/proc/self/mountinfo").read_text())


@pytest.fixture
def collector() -> Iterator[HostCollector]:
    made = HostCollector(clock=Clock(), programs=HostPrograms())
    made.open()
    for limit in made.limits():
        give_up(f"{limit.what}: {limit.why}")
    yield made
    made.close()


def new_group(controller: str, name: str) -> Path:
    """Return where a group for a test is to be made."""
    mount = HIERARCHIES.get(controller) or HIERARCHIES.get(cgroups.UNIFIED)
    if mount is None:
        give_up(f"no control group hierarchy with {controller}")
    if controller not in HIERARCHIES and controller not in (mount.folder / "cgroup.subtree_control").read_text():
        give_up(f"{controller} is not switched on in {mount.folder}/cgroup.subtree_control")
    return mount.folder / f"failslow-test-{name}-{os.getpid()}"


def quota(share: float) -> dict[str, object]:
    """Return the settings of a group that may use so much of one CPU."""
    if "cpu" in HIERARCHIES:
        return {"cpu__cfs_period_us": 50_000, "cpu__cfs_quota_us": int(50_000 * share)}
    return {"cpu__max": f"{int(50_000 * share)} 50000"}


def test_a_cpu_quota_shows_as_time_throttled_whichever_group_around_the_process_has_it(
    collector: HostCollector,
) -> None:
    outer = new_group("cpu", "quota")
    with (
        machine.group(outer, **quota(0.1)),
        machine.group(outer / "inner") as inner,
        machine.running(machine.BUSY, on=machine.cpu(), group=inner) as busy,
        machine.running(machine.BUSY) as free,
    ):
        ranks = [machine.rank_process(busy.pid), machine.rank_process(free.pid, 1)]
        machine.read(collector, *ranks)
        before_s = cgroups.throttled_s(outer)
        rows = machine.rows_until(collector, ranks, lambda row: row["throttled_ratio"] > 0.4, pause_s=0.5)
        truth_s = cgroups.throttled_s(outer) - before_s
        told_s = rows[-1]["throttled_ratio"] * 0.5
        assert told_s <= truth_s
        assert rows[-1]["throttled_ratio"] < 1.1
        assert rows[-1]["run_queue_ratio"] > 0.3, "a throttled thread is runnable and does not run"
        assert machine.read(collector, *ranks).throttled_ratio[1] == 0


# Writes a file and reads it again, whose pages do not fit into the group.
FILES = """
import os, sys
with open(sys.argv[1], "wb") as file:
    while True:
        file.seek(0)
        for _ in range(48):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
"""


def test_freeing_memory_for_its_own_group_shows_as_reclaim(collector: HostCollector, tmp_path: Path) -> None:
    small = {"memory__limit_in_bytes" if "memory" in HIERARCHIES else "memory__max": 24 << 20}
    with (
        machine.group(new_group("memory", "small"), **small) as group,
        machine.running(FILES, arguments=(str(tmp_path / "file"),), group=group) as writer,
        machine.running(machine.BUSY) as other,
    ):
        ranks = [machine.rank_process(writer.pid), machine.rank_process(other.pid, 1)]
        machine.read(collector, *ranks)
        rows = machine.rows_until(collector, ranks, lambda row: row["reclaim_ratio"] > 0.003)
        assert rows[-1]["reclaim_ratio"] < 1.01
        assert machine.read(collector, *ranks).reclaim_ratio[1] == 0


READS = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
print("ready", flush=True)
for line in sys.stdin:
    for place in range(int(line)):
        os.preadv(fd, [page], 8192 * place)
    print("done", flush=True)
"""


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A file of 512 pages, every second of its places, on a block device."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8192 * 512))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)
    device = os.stat(path).st_dev
    if not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        give_up(f"{tmp_path} is not on a block device: set TMPDIR to a folder that is")
    return path


def test_each_request_of_a_process_to_a_block_device_is_timed_once(on_disk: Path) -> None:
    programs = HostPrograms()
    programs.open()
    try:
        tracer = HostTracer(programs)
        with (
            machine.talking(READS, arguments=(str(on_disk),)) as reader,
            machine.talking(READS, arguments=(str(on_disk),)) as other,
        ):
            key, its = machine.rank_process(reader.pid).key, machine.rank_process(other.pid).key
            tracer.follow([key])
            tracer.find_threads()
            tracer.read()
            machine.order(other, "97")
            machine.order(reader, "211")
            _, sums = tracer.read()
            assert its not in sums
            assert sums[key].io_requests == 211
            assert 0 < sums[key].io_s <= sums[key].off_cpu_s + 0.05, "it waits for each of them"
            machine.order(other, "211")  # of the same places
            assert tracer.read()[1][key].io_requests == 0
    finally:
        programs.close()


def test_a_throttled_block_device_shows_as_blocked_time(collector: HostCollector, on_disk: Path) -> None:
    device = os.stat(on_disk).st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    numbers = (disk / "dev").read_text().strip()
    is_first_version = "blkio" in HIERARCHIES
    settings = {"blkio__throttle__read_bps_device": f"{numbers} 524288"}
    if not is_first_version:
        settings = {"io__max": f"{numbers} rbps=524288"}
    with (
        machine.group(new_group("blkio" if is_first_version else "io", "slow-disk"), **settings) as group,
        machine.talking(READS, arguments=(str(on_disk),), group=group) as reader,
    ):
        ranks = [machine.rank_process(reader.pid)]
        machine.read(collector, *ranks)
        assert reader.stdin is not None
        reader.stdin.write("499\n")  # two megabytes, for which it will take four seconds
        reader.stdin.flush()
        rows = machine.rows_until(collector, ranks, lambda row: row["blocked_ratio"] > 0.7)
        assert rows[-1]["off_cpu_ratio"] < 1.05


FAULTS = """
import mmap, sys
print("ready", flush=True)
for line in sys.stdin:
    memory = mmap.mmap(-1, 4096 * int(line))
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for place in range(int(line)):
        memory[4096 * place] = 1
    print("done", flush=True)
"""


def test_page_faults_are_counted(collector: HostCollector) -> None:
    with machine.talking(FAULTS) as process:
        ranks = [machine.rank_process(process.pid)]
        machine.read(collector, *ranks)
        machine.order(process, "1009")
        row = machine.rows_until(collector, ranks, lambda row: True)[0]
        assert 1009 <= row["page_faults"] < 1009 + 200


def test_where_a_tracepoint_is_missing_only_what_it_shows_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    for group in TRACEFS.joinpath("events").iterdir():
        if group.is_dir() and group.name not in {"vmscan", "block"}:
            (tmp_path / "events" / group.name).symlink_to(group)
    collector = HostCollector(clock=Clock(), programs=HostPrograms(tracefs=tmp_path))
    collector.open()
    try:
        whats = {limit.what for limit in collector.limits()}
        assert whats == {
            "freeing memory",
            "freeing memory of a control group",
            "what requests to block devices take",
        }
        with machine.running(machine.BUSY, on=machine.cpu()) as busy, machine.running(machine.BUSY, on=machine.cpu()):
            ranks = [machine.rank_process(busy.pid)]
            machine.read(collector, *ranks)
            row = machine.rows_until(collector, ranks, lambda row: row["run_queue_ratio"] > 0.2)[-1]
        missing = {name for name, value in row.items() if math.isnan(value)}
        assert missing - {"memory_pressure_ratio"} == {"reclaim_ratio", "block_io_s"}
    finally:
        collector.close()


def test_a_tracepoint_whose_record_lacks_a_field_is_not_read_at_a_wrong_place(tmp_path: Path) -> None:
    (tmp_path / "events/block").mkdir(parents=True)
    for group in TRACEFS.joinpath("events").iterdir():
        if group.is_dir() and group.name != "block":
            (tmp_path / "events" / group.name).symlink_to(group)
    for event in ("block_io_start", "block_rq_issue", "block_rq_complete"):
        folder = tmp_path / "events/block" / event
        folder.mkdir()
        real = TRACEFS / "events/block" / event
        (folder / "id").write_text((real / "id").read_text())
        (folder / "format").write_text((real / "format").read_text().replace(" sector;", " place;"))
    programs = HostPrograms(tracefs=tmp_path)
    programs.open()
    try:
        assert not programs.has_requests
        assert ["lacks one of sector" in limit.why for limit in programs.limits] == [True]
        assert programs.has_reclaim
    finally:
        programs.close()


def test_soft_interrupts_and_steal_are_those_of_the_cpus_that_a_process_may_run_on(tmp_path: Path) -> None:
    reader = FilesReader(Path("/proc"), HIERARCHIES)
    with machine.running(machine.BUSY, on=machine.cpu()) as busy:
        key = machine.rank_process(busy.pid).key
        assert reader.read([key]).processes[key].cpus == {machine.cpu()}
