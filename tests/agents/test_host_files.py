"""Control groups, counters and the kernel's type information, on made-up files."""

import math
import struct
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import cgroups, host_files
from agents.cgroups import Group, Mount
from agents.collector import ProcessKey
from agents.deltas import Deltas
from agents.host_files import Growth, Readings, after_name
from agents.kernel_types import STRUCT, TYPEDEF, find_type, member_offset, record_offsets

VERSION_1 = """\
22 1 0:20 / /proc rw - proc proc rw
30 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
31 25 0:28 / /sys/fs/cgroup/systemd rw shared:10 - cgroup cgroup rw,name=systemd
32 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
"""
VERSION_2 = "30 25 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
IN_CONTAINER = "30 25 0:27 /kubepods/pod7 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"


def test_the_cpu_quota_is_that_of_version_1_where_version_1_has_the_cpus() -> None:
    hierarchies = cgroups.mounts(VERSION_1)
    membership = "5:name=systemd:/user\n4:cpu,cpuacct:/jobs/seven\n0::/user.slice\n"
    top = Path("/sys/fs/cgroup/cpu,cpuacct")
    found = cgroups.group(membership, "cpu", hierarchies)
    assert found == Group(top / "jobs/seven", top)
    assert list(found.and_above()) == [top / "jobs/seven", top / "jobs", top]
    unified = Path("/sys/fs/cgroup/unified")
    assert cgroups.group(membership, cgroups.UNIFIED, hierarchies) == Group(unified / "user.slice", unified)


def test_the_cpu_quota_is_that_of_version_2_where_there_is_no_other() -> None:
    top = Path("/sys/fs/cgroup")
    assert cgroups.group("0::/a.slice/b.scope\n", "cpu", cgroups.mounts(VERSION_2)) == Group(
        top / "a.slice/b.scope", top
    )
    assert cgroups.group("0::/\n", "cpu", cgroups.mounts(VERSION_2)) == Group(top, top)


def test_a_group_outside_of_what_the_agent_sees_is_unknown() -> None:
    inside = cgroups.mounts(IN_CONTAINER)
    assert inside == {"": Mount(Path("/sys/fs/cgroup"), PurePosixPath("/kubepods/pod7"))}
    found = cgroups.group("0::/kubepods/pod7/rank\n", "cpu", inside)
    assert found is not None
    assert found.folder == Path("/sys/fs/cgroup/rank")
    assert cgroups.group("0::/kubepods/pod8/rank\n", "cpu", inside) is None
    assert cgroups.group("0::/../pod8\n", "cpu", cgroups.mounts(VERSION_2)) is None
    assert cgroups.group("3:memory:/\n", "cpu", cgroups.mounts(VERSION_2)) is None


def test_time_throttled_is_read_in_the_units_of_either_version(tmp_path: Path) -> None:
    stat = tmp_path / "cpu.stat"
    stat.write_text("nr_periods 11\nnr_throttled 7\nthrottled_time 1500000000\n")
    assert cgroups.throttled_s(tmp_path) == 1.5
    stat.write_text("usage_usec 9\nnr_periods 11\nnr_throttled 7\nthrottled_usec 1500000\nburst_usec 0\n")
    assert cgroups.throttled_s(tmp_path) == 1.5
    stat.write_text("usage_usec 9\nuser_usec 9\n")  # the root of version 2
    assert math.isnan(cgroups.throttled_s(tmp_path))
    assert math.isnan(cgroups.throttled_s(tmp_path / "gone"))


def test_pressure_counts_while_any_thread_waits(tmp_path: Path) -> None:
    pressure = tmp_path / "memory"
    pressure.write_text(
        "some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    )
    assert cgroups.stalled_s(pressure) == 2.5
    pressure.write_text("")
    assert math.isnan(cgroups.stalled_s(pressure))
    assert math.isnan(cgroups.stalled_s(tmp_path / "gone"))


@given(st.lists(st.dictionaries(st.integers(0, 3), st.one_of(st.integers(0, 9), st.just(math.nan)))))
def test_a_delta_is_never_negative_never_unknown_and_never_from_before_the_last_reading(
    readings: list[dict[int, float]],
) -> None:
    deltas: Deltas[int] = Deltas()
    before: dict[int, float] = {}
    for reading in readings:
        found = deltas.update(reading)
        for key, value in reading.items():
            grew = value - before.get(key, math.nan)
            assert (key in found) == (grew >= 0)
            assert found.get(key, grew) == grew or math.isnan(grew) or grew < 0
        assert found.keys() <= reading.keys()
        before = reading


def test_shares_of_cpus_are_means_over_those_that_a_process_may_run_on(tmp_path: Path) -> None:
    lines = "cpu  0 0 0 0 0 0 {all} {all} 0 0\ncpu0 1 2 3 4 5 6 {a} {b} 9 10\ncpu10 1 2 3 4 5 6 {c} 0 9 10\nintr 5\n"
    growth = Growth()
    key = ProcessKey(11, 13)
    files = host_files.ProcessFiles(
        page_faults=7, cpus=frozenset({0, 10}), network=1, quotas=(Path("a"), Path("b")), pressure=Path("p")
    )

    def reading(faults: float, softirq: tuple[int, int], steal: int, throttled: tuple[float, float]) -> Readings:
        text = lines.format(all=999, a=softirq[0], b=steal, c=softirq[1])
        return Readings(
            processes={key: files},
            retransmits={1: faults},
            throttled_s={Path("a"): throttled[0], Path("b"): throttled[1]},
            stalled_s={Path("p"): math.nan},
            cpus=host_files._cpu_times(text),
        )

    growth.update(reading(3, (100, 200), 50, (1.0, 5.0)))
    grown = growth.update(reading(5, (130, 220), 54, (1.5, 5.25)))
    row = grown.columns(key, files, interval_s=2)
    ticks = host_files._TICKS_PER_S
    assert row["softirq_ratio"] == pytest.approx((30 + 20) / 2 / ticks / 2)
    assert row["steal_ratio"] == pytest.approx((4 + 0) / 2 / ticks / 2)
    assert row["throttled_ratio"] == 0.25
    assert row["tcp_retransmits"] == 2
    assert row["page_faults"] == 0
    assert math.isnan(row["memory_pressure_ratio"])


def test_a_process_may_be_called_anything() -> None:
    assert after_name("17 (a ) (b) R S) D 1 2") == ["D", "1", "2"]


def btf(kind: int, is_packed: int) -> bytes:
    """Return type information: an integer, an enumeration, and a struct with two members."""
    names = b"\0int\0color\0red\0thing\0first\0pid\0"
    where = {
        name: names.index(b"\0" + name.encode() + b"\0") + 1
        for name in ("int", "color", "red", "thing", "first", "pid")
    }
    types = struct.pack("<III", where["int"], 1 << 24, 4) + struct.pack("<I", 32)
    types += struct.pack("<III", where["color"], 6 << 24 | 1, 4) + struct.pack("<Ii", where["red"], 7)
    types += struct.pack("<III", where["thing"], is_packed << 31 | kind << 24 | 2, 99)
    size = 5 << 24 if is_packed else 0  # of a bit field, beside its offset in bits
    types += struct.pack("<III", where["first"], 1, 0) + struct.pack("<III", where["pid"], 1, size | 8 * 53)
    return struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(names)) + types + names


@pytest.mark.parametrize("is_packed", [0, 1])
def test_a_member_is_found_in_the_kernels_type_information(is_packed: int) -> None:
    content = btf(4, is_packed)
    assert member_offset("thing", "pid", content) == 53
    assert member_offset("thing", "first", content) == 0
    assert member_offset("thing", "last", content) is None
    assert member_offset("other", "pid", content) is None
    assert member_offset("thing", "pid", btf(5, is_packed)) is None, "a union is not a struct"
    assert member_offset("thing", "pid", b"") is None


def test_the_record_of_a_tracepoint_is_read_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "events/sched/sched_switch"
    folder.mkdir(parents=True)
    (folder / "format").write_text(
        "name: sched_switch\nID: 7\nformat:\n"
        "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n"
        "\tfield:char prev_comm[16];\toffset:8;\tsize:16;\tsigned:0;\n"
        "\tfield:__data_loc char[] cmd;\toffset:28;\tsize:4;\tsigned:0;\n"
        "\tfield:pid_t prev_pid;\toffset:24;\tsize:4;\tsigned:1;\n"
        '\nprint fmt: "prev_pid=%d", REC->prev_pid\n'
    )
    assert record_offsets("sched", "sched_switch", tmp_path) == {
        "common_type": 0,
        "prev_comm": 8,
        "cmd": 28,
        "prev_pid": 24,
    }
    assert record_offsets("sched", "sched_nothing", tmp_path) == {}


def test_types_are_numbered_as_the_kernel_numbers_them() -> None:
    content = btf(4, 0)
    numbers = [found.number for found in (find_type("int", 1, content), find_type("thing", STRUCT, content)) if found]
    assert numbers == [1, 3]
    assert find_type("thing", TYPEDEF, content) is None
