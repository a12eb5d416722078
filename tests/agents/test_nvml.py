"""NVML through pynvml's real ABI, against the stub library: each field, each failure, and what is said of it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.collector import CollectorError, NotAvailable
from agents.nvml_library import is_blank
from agents.nvml_session import place
from schemas.events import GpuSamples, Sensor, ThrottleReason
from tests.agents.nvml_watch import FAST, N_GPUS, VALUES, Opener, is_lost, is_whole, missing, rows_of, stub, stubbed

PID = 4_000_037
KEYS = {  # of the stub, and the columns that come from each
    "clock.sm": {"sm_clock_hz"},
    "clock_max.sm": {"sm_clock_max_hz"},
    "reasons": {"throttle_reasons", "throttle_known"},
    "temperature": {"temperature_c"},
    "power": {"power_w"},
    "power_limit": {"power_limit_w"},
    "utilization": {"utilization_ratio"},
    "pcie_generation": {"pcie_generation"},
    "pcie_width": {"pcie_width"},
    "pcie_replays": {"pcie_replays"},
    "ecc_uncorrected": {"ecc_uncorrected"},
    "remapped": {"retired_pages"},
    "field45": {"nvlink_errors"},
    "field165.7": {"nvlinks_down"},
}


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    with stubbed(tmp_path, monkeypatch) as opener:
        yield opener


# ---- fields


def test_each_value_of_each_gpu_arrives_in_base_units(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.put(
        1, clock__sm=1373, clock_max__sm=1987, reasons=0x44, temperature=83, power=431_000, power_limit=697_000,
        utilization=89, pcie_generation=4, pcie_width=8, pcie_replays=13, ecc_uncorrected=3, remapped=5,
        remapped_uncorrected=2, field38=7, field45=11, field52=17, field59=19, field160=23, field165__3=0,
        field165__5=0,
    )  # fmt: skip
    watched.collector.open()
    row = watched.row(1)
    assert row.sm_clock_hz[0] == 1.373e9
    assert row.sm_clock_max_hz[0] == 1.987e9
    assert row.throttle_reasons[0] == ThrottleReason.HW_THERMAL_SLOWDOWN | ThrottleReason.SW_POWER_CAP
    assert row.throttle_known[0] == 1
    assert row.temperature_c[0] == 83
    assert row.power_w[0] == 431
    assert row.power_limit_w[0] == 697
    assert row.utilization_ratio[0] == np.float32(0.89)
    assert (row.pcie_generation[0], row.pcie_width[0], row.pcie_replays[0]) == (4, 8, 13)
    assert row.ecc_uncorrected[0] == 3
    assert row.retired_pages[0] == 5 + 2
    assert row.nvlink_errors[0] == 7 + 11 + 17 + 19 + 23
    assert row.nvlinks_down[0] == 2
    assert not is_lost(row)
    assert np.isnan(row.xid[0])
    assert watched.row(0).sm_clock_hz[0] == 1.95e9
    assert watched.collector.sensors == Sensor.NVML
    assert watched.collector.limits() == []


@pytest.mark.parametrize("code", [3, 4, 13, 999], ids=["not supported", "no permission", "no function", "unknown"])
@pytest.mark.parametrize("key", KEYS)
def test_a_field_that_fails_is_missing_alone_at_once_and_of_one_gpu_alone(opened: Opener, key: str, code: int) -> None:
    watched = opened()
    watched.row(1, is_whole)
    watched.state.fail(1, key, code)
    assert missing(watched.row(1, lambda row: not is_whole(row))) == KEYS[key]
    assert is_whole(watched.row(2))
    if not key.startswith("field"):
        assert f"NVML error {code}" in watched.why("of GPU 1")


ALIKE = {  # keys that only together make a GPU without something
    "field45": [f"field{total}" for total in (38, 45, 52, 59, 160)],
    "field165.7": ["field165", *(f"field165.{link}" for link in range(1, 18))],
}


@pytest.mark.parametrize("key", KEYS)
def test_what_a_gpu_never_had_is_missing_from_the_start_and_said_once(opened: Opener, key: str) -> None:
    watched = opened(is_open=False)
    watched.state.remove("*", *ALIKE.get(key, [key]))
    watched.collector.open()
    for gpu in range(N_GPUS):
        assert missing(watched.row(gpu)) == KEYS[key]
    (limit,) = watched.collector.limits()
    assert limit.what.endswith("of GPU 0, 1, 2")
    assert "NVML error 3" in limit.why
    assert "does not have it" in limit.remedy


def test_what_was_read_before_is_not_said_again(opened: Opener) -> None:
    watched = opened()
    assert watched.row(0).temperature_c[0] == 61
    watched.state.put(0, temperature=67)
    watched.row(0, lambda row: row.temperature_c[0] == 67)
    watched.state.fail(0, "temperature", 999)
    watched.row(0, lambda row: np.isnan(row.temperature_c[0]))
    watched.state.put(0, temperature=71)
    assert watched.row(0, lambda row: not np.isnan(row.temperature_c[0])).temperature_c[0] == 71
    assert watched.collector.limits() == []


def test_what_is_not_supported_is_asked_for_again_only_after_a_while(opened: Opener) -> None:
    soon = opened(replace(FAST, refused_s=0.02))
    soon.state.fail("*", "power", 3)
    soon.row(0, lambda row: np.isnan(row.power_w[0]))
    soon.state.put("*", power=599_000)
    assert soon.row(0, lambda row: not np.isnan(row.power_w[0])).power_w[0] == 599
    soon.collector.close()
    late = opened()  # five minutes
    late.state.fail("*", "power", 3)
    late.row(0, lambda row: np.isnan(row.power_w[0]))
    late.state.put("*", power=599_000)
    for _ in range(7):
        assert missing(late.row(0)) == {"power_w"}


@pytest.mark.parametrize("blank", [2**31 - 16, 2**31 - 15, 2**31 - 14, 2**31 - 13, 2**32 - 1, -1])
@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith("field165")])
def test_a_blank_is_no_value(opened: Opener, key: str, blank: int) -> None:
    watched = opened(is_open=False)
    watched.state.put(2, **{key: blank})
    watched.collector.open()
    if key in {"field45", "reasons"}:  # sums leave out what is blank from the start; reasons have 64 bits
        return
    assert missing(watched.row(2)) == KEYS[key]
    assert is_whole(watched.row(0))


@pytest.mark.parametrize("blank", [2**63 - 16, 2**63 - 15, 2**63 - 14, 2**63 - 13, 2**64 - 1])
@pytest.mark.parametrize("key", ["reasons", "ecc_uncorrected", "field45"])
def test_a_blank_of_64_bits_is_no_value(opened: Opener, key: str, blank: int) -> None:
    watched = opened()
    watched.row(2, is_whole)
    watched.state.put(2, **{key: blank})
    assert missing(watched.row(2, lambda row: not is_whole(row))) == KEYS[key]


def test_what_dcgm_calls_blank_is_no_value_and_its_neighbours_are() -> None:
    blanks = [*range(2**31 - 16, 2**31 - 12), *range(2**63 - 16, 2**63 - 12), *(2.0**47 + n for n in range(4))]
    assert all(is_blank(value) for value in [*blanks, 2**32 - 1, 2**64 - 1, -1])
    neighbours = [2**31 - 17, 2**31 - 12, 2**63 - 17, 2**63 - 12, 2.0**47 - 1, 2.0**47 + 4, 2**32 - 2, 2**32, 0, -2]
    assert not any(is_blank(value) for value in neighbours)


@pytest.mark.parametrize(
    ("key", "value"),
    [("utilization", 101), ("temperature", 255), ("power", 99_000_000), ("pcie_width", 0), ("clock_max.sm", 0)],
)
def test_what_no_gpu_can_have_is_no_value(opened: Opener, key: str, value: int) -> None:
    watched = opened(is_open=False)
    watched.state.put(1, **{key: value})
    watched.collector.open()
    assert missing(watched.row(1)) == KEYS[key]


def test_an_older_driver_is_asked_in_its_own_way(opened: Opener) -> None:
    watched = opened(library=stub(old=True), is_open=False)
    watched.state.remove("*", "remapped", "field91", *ALIKE["field165.7"])
    watched.state.put("*", retired0=3, retired1=4, reasons=0x8, pids=f"{PID}:997")
    watched.state.put(1, nvlink0__state=1, nvlink1__state=0, nvlink2__state=1)
    watched.collector.open()
    row = watched.row(1)
    assert missing(row) == set()
    assert (row.temperature_c[0], row.throttle_reasons[0], row.retired_pages[0]) == (61, 0x8, 7)
    assert row.nvlinks_down[0] == 1
    watched.wait(lambda: PID not in watched.collector.gpu_by_pid())  # on all three alike


def test_links_that_never_ran_are_not_down_and_those_that_did_are(opened: Opener) -> None:
    watched = opened(is_open=False)
    for key in ALIKE["field165.7"]:
        watched.state.put(0, **{key: 0})
    watched.collector.open()
    assert missing(watched.row(0)) == {"nvlinks_down"}
    watched.state.put(0, field165__5=2)  # asleep, which is not down
    watched.row(0, lambda row: row.nvlinks_down[0] == 17)
    watched.state.put(0, field165__5=0)
    watched.row(0, lambda row: row.nvlinks_down[0] == 18)


def test_links_of_the_fifth_generation_are_counted_one_by_one(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.remove("*", *ALIKE["field45"])
    watched.state.put("*", field91=3)
    watched.state.put(2, field208=2, field208__1=3, field208__2=5, field215__2=7)
    watched.collector.open()
    assert watched.row(2).nvlink_errors[0] == 2 + 3 + 5 + 7
    watched.state.put(2, field212=11)  # one that was not there at first would make the sum another one
    for _ in range(5):
        assert watched.row(2).nvlink_errors[0] == 2 + 3 + 5 + 7
    watched.state.remove(2, "field215.2")
    assert missing(watched.row(2, lambda row: not is_whole(row))) == {"nvlink_errors"}


# ---- time


def test_each_reading_is_told_once_and_under_its_own_time(opened: Opener) -> None:
    before_ns = time.time_ns()
    watched = opened()
    table = watched.gather(53)
    after_ns = time.time_ns()
    for gpu in range(N_GPUS):
        times = rows_of(table, gpu).time_ns
        assert np.all(np.diff(times) > 0)
        assert before_ns - 5_000_000 <= times.min() <= times.max() <= after_ns + 5_000_000


def test_a_reading_that_comes_late_is_thrown_away_and_said(opened: Opener) -> None:
    watched = opened(replace(FAST, late_s=0.1))
    watched.row(1, is_whole)
    watched.state.put(1, delay__power=173)
    watched.wait(lambda: "too long" in watched.why("some samples of GPU 1"))
    watched.next()
    for _ in range(3):
        assert set(watched.gather(11).gpu) == {0, 2}
    watched.state.remove(1, "delay.power")
    watched.row(1, is_whole)


@pytest.mark.parametrize("call", ["power", "all", "field45", "pids"])
def test_a_gpu_whose_call_hangs_is_missing_and_holds_up_no_other(opened: Opener, call: str) -> None:
    watched = opened(replace(FAST, late_s=0.1))
    watched.row(1, is_whole)
    watched.state.put(1, hang=call, temperature=73)
    watched.wait(lambda: "has not returned" in watched.why("everything of GPU 1"))
    watched.next()
    for _ in range(5):
        begun_s = time.monotonic()
        watched.next()
        assert time.monotonic() - begun_s < 0.5
        assert set(watched.gather(11).gpu) == {0, 2}
    assert watched.collector.sensors == Sensor.NVML
    hung_ns = time.time_ns()
    watched.state.put(1, temperature=79)
    watched.state.remove(1, "hang")
    row = watched.row(1)  # what was asked before it hung is not told now
    assert row.temperature_c[0] == 79
    assert row.time_ns[0] >= hung_ns - 5_000_000
    assert not watched.why("everything")


def test_where_every_gpu_hangs_nothing_is_observed(opened: Opener) -> None:
    watched = opened(replace(FAST, late_s=0.1))
    watched.row(0)
    watched.state.put("*", hang="clock.sm")
    watched.wait(lambda: not watched.collector.sensors)
    watched.next()
    with pytest.raises(CollectorError, match=r"does not answer.*hung tasks"):
        watched.collector.collect([])
    watched.state.remove("*", "hang")
    watched.row(0, is_whole)
    assert watched.collector.sensors == Sensor.NVML


def test_opening_waits_for_a_hung_driver_only_so_long(opened: Opener) -> None:
    watched = opened(replace(FAST, open_s=0.1), is_open=False)
    watched.state.put("*", hang="init")
    for _ in range(2):
        with pytest.raises(NotAvailable, match="NVML does not answer"):
            watched.collector.open()
    watched.state.remove("*", "hang")
    watched.wait(lambda: bool(watched.collector.gpus()))
    watched.collector.open()
    watched.row(0, is_whole)


def test_what_hangs_is_left_to_itself_at_the_end_and_nvml_not_opened_beside_it(opened: Opener) -> None:
    watched = opened(replace(FAST, late_s=0.1, close_s=0.1))
    watched.row(1)
    watched.state.put(1, hang="power")
    watched.wait(lambda: bool(watched.why("everything of GPU 1")))
    watched.collector.close()
    with pytest.raises(NotAvailable, match="does not answer"):
        watched.collector.open()
    watched.state.remove(1, "hang")

    def is_open() -> bool:
        try:
            watched.collector.open()
        except NotAvailable:
            return False
        return True

    watched.wait(is_open)
    watched.row(1, is_whole)


# ---- lost GPUs and XIDs


def test_a_lost_gpu_is_told_at_every_sample_and_the_others_go_on(opened: Opener) -> None:
    watched = opened()
    watched.row(1, is_whole)
    watched.state.fail(1, "all", 15)
    for _ in range(5):
        row = watched.row(1, is_lost)
        assert missing(row) == VALUES
        assert np.isnan(row.xid[0])
        assert is_whole(watched.row(0))
        assert is_whole(watched.row(2))
    assert "power it off" in watched.why("everything of GPU 1")
    assert [gpu.index for gpu in watched.collector.gpus()] == [0, 1, 2]
    watched.state.remove(1, "all")
    assert not is_lost(watched.row(1, is_whole))
    assert not watched.why("everything")


def test_a_gpu_that_comes_back_is_found_anew_and_nothing_of_before_is_believed(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.put(1, uuid="GPU-before", pids=f"{PID}:5")
    watched.state.fail(1, "power", 3)
    watched.collector.open()
    watched.wait(lambda: PID in watched.collector.gpu_by_pid())
    watched.state.fail(1, "all", 15)
    watched.row(1, is_lost)
    assert PID not in watched.collector.gpu_by_pid()
    watched.state.fail(1, "handle", 15)
    watched.state.remove(1, "all")
    for _ in range(3):
        assert is_lost(watched.row(1))
    watched.state.put(1, uuid="GPU-after", power=577_000)
    watched.state.remove(1, "handle", "pids")
    row = watched.row(1, lambda row: not is_lost(row))
    assert is_whole(row)
    assert row.power_w[0] == 577
    assert watched.collector.gpus()[1].uuid == "GPU-after"


@pytest.mark.parametrize("key", ["power", "field45", "pids", "handle"])
def test_a_gpu_that_is_lost_in_the_middle_of_a_reading_gives_no_half_of_it(opened: Opener, key: str) -> None:
    watched = opened(is_open=False)
    watched.state.fail(1, key, 15)
    watched.collector.open()
    for _ in range(3):
        assert missing(watched.row(1, is_lost)) == VALUES
    assert is_whole(watched.row(2))
    watched.state.remove(1, key)
    assert is_whole(watched.row(1, lambda row: not is_lost(row)))
    assert watched.collector.gpus()[1].uuid.endswith("1")


def test_an_xid_is_told_once_with_the_next_reading(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.put(2, xid="13@1")  # before the agent came
    watched.collector.open()
    assert np.isnan(watched.row(2).xid[0])
    watched.state.put(2, xid="13@1,43@2")
    assert is_whole(watched.row(2, lambda row: row.xid[0] == 43))
    for _ in range(7):
        assert np.isnan(watched.row(2).xid[0])
    watched.state.put(2, xid="31@3,94@4")
    watched.row(2, lambda row: row.xid[0] == 94)
    watched.state.put(2, xid="94@5")
    watched.row(2, lambda row: row.xid[0] == 94)


@pytest.mark.parametrize("call", ["clock.sm", "all"])
@pytest.mark.parametrize("hung", ["clock.sm", "pids"])
def test_the_xid_that_comes_with_a_loss_is_told_before_it(opened: Opener, hung: str, call: str) -> None:
    watched = opened(replace(FAST, late_s=5.0))
    watched.row(1, is_whole)
    watched.state.put(1, hang=hung)  # after the look at events
    watched.state.put(1, **{call: "E15", "xid": "79@1"})
    watched.state.remove(1, "hang")
    seen: list[GpuSamples] = []

    def has_xid() -> bool:
        seen.append(rows_of(watched.next(), 1))
        return bool(np.any(GpuSamples.concatenate(seen).xid[:-1] == 79))

    watched.wait(has_xid)
    rows = GpuSamples.concatenate(seen)
    (at,) = np.flatnonzero(rows.xid == 79)
    assert not rows.is_lost[at]
    assert missing(rows.take(np.array([at]))) == VALUES
    assert rows.is_lost[at + 1]
    assert rows.time_ns[at + 1] == rows.time_ns[at]


def test_a_gpu_without_events_is_sampled_all_the_same(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.fail(0, "events", 3)
    watched.collector.open()
    assert is_whole(watched.row(0))
    assert "NVML error 3" in watched.why("XID errors of GPU 0")


# ---- which GPU, and whose


def test_processes_are_told_by_pid_with_index_and_uuid(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.put(0, pids=f"{PID}:1009,{PID + 1}:13", uuid="GPU-a")
    watched.state.put(1, pids=f"0:7,{PID + 1}:1013,{PID + 2}", uuid="GPU-b")  # 0 is of another PID namespace
    watched.state.put(2, pids=f"{PID + 2}", uuid="GPU-c")  # of two whose memory is not told
    watched.collector.open()
    watched.wait(lambda: len(watched.collector.gpu_by_pid()) > 1)
    watched.wait(lambda: watched.collector.gpu_by_pid() == {PID: (0, "GPU-a"), PID + 1: (1, "GPU-b")})
    watched.state.remove(0, "pids")
    watched.wait(lambda: watched.collector.gpu_by_pid() == {PID + 1: (1, "GPU-b")})
    assert [(gpu.index, gpu.uuid) for gpu in watched.collector.gpus()] == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")]
    assert watched.collector.gpus()[0].name == "NVIDIA H100 80GB HBM3"


def test_processes_of_a_gpu_that_hangs_are_forgotten(opened: Opener) -> None:
    watched = opened(replace(FAST, late_s=0.05), is_open=False)
    watched.state.put(1, pids=f"{PID}:1009")
    watched.state.put(2, pids=f"{PID + 1}:1009")
    watched.collector.open()
    watched.wait(lambda: PID in watched.collector.gpu_by_pid())
    watched.state.put(1, hang="power")
    watched.wait(lambda: PID not in watched.collector.gpu_by_pid())
    watched.wait(lambda: PID + 1 in watched.collector.gpu_by_pid())


@pytest.mark.parametrize("may_see_all", [True, False])
def test_in_mig_mode_the_gpu_is_sampled_and_processes_have_their_device(opened: Opener, *, may_see_all: bool) -> None:
    watched = opened(is_open=False)
    watched.state.fail(1, "utilization", 3)
    watched.state.put(1, mig=1, uuid="GPU-b")
    watched.state.put("1.0", uuid="MIG-x", pids=f"{PID}:997")
    watched.state.put("1.3", uuid="MIG-y", pids=f"{PID + 1}:991")
    if may_see_all:
        watched.state.put(1, pids=f"{PID}:9973@1,{PID + 1}:9973@5,{PID + 2}:5")
    else:
        watched.state.fail(1, "pids", 4)
    watched.collector.open()
    assert missing(watched.row(1)) == {"utilization_ratio"}
    expected = {PID: (1, "MIG-x"), PID + 1: (1, "MIG-y")}
    watched.wait(lambda: watched.collector.gpu_by_pid() == expected | ({PID + 2: (1, "GPU-b")} if may_see_all else {}))


def test_processes_that_may_not_be_listed_are_said(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.fail("*", "pids", 4)
    watched.collector.open()
    assert is_whole(watched.row(0))
    watched.wait(lambda: "run the agent as root" in watched.why("its processes of GPU 0, 1, 2"))
    assert watched.collector.gpu_by_pid() == {}


def test_a_gpu_that_may_not_be_used_is_said_and_the_others_are_sampled(opened: Opener) -> None:
    watched = opened(replace(FAST, refused_s=0.02), is_open=False)
    watched.state.fail(1, "handle", 4)
    watched.collector.open()
    watched.row(2)
    assert set(watched.gather(11).gpu) == {0, 2}
    assert "run the agent as root" in watched.why("the GPU of GPU 1")
    watched.state.remove(1, "handle")
    assert is_whole(watched.row(1))


@pytest.mark.parametrize(
    ("found", "known", "indexes"),
    [
        (["a", "b", "c"], {}, [0, 1, 2]),
        (["a", "c"], {"a": 0, "b": 1, "c": 2}, [0, 2]),  # b has vanished
        (["a", "d", "c"], {"a": 0, "b": 1, "c": 2}, [0, 3, 2]),  # and d has come: b's number stays b's
        (["d", "a", "b"], {"a": 0, "b": 1}, [2, 0, 1]),
        (["a", "b", "d"], {"a": 0, "b": 1}, [0, 1, 2]),
        (["a", None, "c"], {"a": 0, "b": 1, "c": 2}, [0, 1, 2]),  # lost, and likely b
        (["a", None], {"a": 0, "b": 1, "c": 2}, [0, 1]),
        (["b", None], {"a": 0, "b": 1}, [1, 2]),
        ([None, None], {}, [0, 1]),
        (["a", "a"], {"a": 1}, [1, 0]),
    ],
)
def test_a_gpu_keeps_its_number(found: list[str | None], known: dict[str, int], indexes: list[int]) -> None:
    assert place(found, known) == indexes
