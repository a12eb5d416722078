"""GPUs that hang, are late, get lost or come back, what they say of themselves, and whose processes they run."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.collector import CollectorError, NotAvailable
from agents.nvml_session import place
from schemas.events import GpuSamples, Sensor
from tests.agents.nvml_watch import FAST, N_GPUS, VALUES, Opener, is_lost, is_whole, missing, rows_of, stubbed

PID = 4_000_037


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    with stubbed(tmp_path, monkeypatch) as opener:
        yield opener


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
    assert not rows.is_lost[: at + 1].any()
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
