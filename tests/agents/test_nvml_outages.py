"""NVML as a whole: absent, refusing, gone and back, updated under the agent's feet, and GPUs that come and go."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.collector import CollectorError, NotAvailable
from agents.nvml import NvmlCollector
from schemas.events import Sensor
from tests.agents.nvml_watch import FAST, SEEN_S_MAX, Opener, Watched, is_lost, is_whole, stub, stubbed
from tests.conftest import REPOSITORY
from tests.testbed.nvml_stub import LIBRARY, StubState


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    with stubbed(tmp_path, monkeypatch) as opener:
        yield opener


def in_a_process(code: str, libraries: Path, state: StubState) -> str:
    """Run a program whose loader finds NVML in a folder, as on a real node; returns what it printed."""
    environment = {**os.environ, **state.environment, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(REPOSITORY)}
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


OPEN_AND_SAY = """
from agents.collector import NotAvailable
from agents.nvml import NvmlCollector
collector = NvmlCollector()
try:
    collector.open()
    print([gpu.uuid for gpu in collector.gpus()])
except NotAvailable as error:
    print(error.reason, "|", error.remedy)
"""


def test_the_loaders_own_library_is_taken(tmp_path: Path) -> None:
    state = StubState(tmp_path / "state", 2)
    assert "GPU-00000000-0000-0000-0000-000000000001" in in_a_process(OPEN_AND_SAY, stub().parent, state)


def test_a_node_without_nvml_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"")  # hides one that the machine may have
    reason, _, remedy = in_a_process(OPEN_AND_SAY, tmp_path, StubState(tmp_path / "state", 2)).partition(" | ")
    assert "NVML Shared Library Not Found" in reason
    assert "libnvidia-ml1" in remedy


def test_a_library_that_is_not_where_the_settings_say_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none.so")
    with pytest.raises(NotAvailable, match=r"none\.so") as error:
        NvmlCollector(path).open()
    assert "libnvidia-ml1" in error.value.remedy


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (9, "Driver Not Loaded", "modprobe nvidia"),
        (18, "version mismatch", "reload its modules or reboot"),
        (4, "Insufficient Permissions", "as root"),
        (999, "Unknown Error", "kernel's log"),
    ],
)
def test_nvml_that_cannot_be_opened_says_why_and_opens_later(
    opened: Opener, code: int, reason: str, remedy: str
) -> None:
    watched = opened(is_open=False)
    watched.state.fail("*", "init", code)
    for _ in range(2):
        with pytest.raises(NotAvailable) as error:
            watched.collector.open()
        assert reason in error.value.reason
        assert f"NVML error {code}" in error.value.reason
        assert remedy in error.value.remedy
    assert watched.collector.sensors == Sensor(0)
    assert watched.collector.limits() == []
    watched.state.remove("*", "init")
    watched.collector.open()
    assert is_whole(watched.row(0))


def test_a_library_that_lacks_a_function_to_begin_with_says_which(opened: Opener, tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nvmlInitWithFlags(unsigned f) { return (int)(f & 0); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "empty.so"), str(source)], check=True)
    with pytest.raises(NotAvailable, match="nvmlDeviceGetCount, NVML error 13") as error:
        NvmlCollector(str(tmp_path / "empty.so")).open()
    assert "update the driver" in error.value.remedy


def test_a_node_without_gpus_is_told(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.put("*", count=0)
    with pytest.raises(NotAvailable, match="NVML finds no GPU"):
        watched.collector.open()


def test_nothing_is_collected_before_opening_and_closing_is_never_wrong(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.collector.close()
    with pytest.raises(CollectorError, match="not open"):
        watched.collector.collect([])
    assert (watched.collector.sensors, watched.collector.gpus(), watched.collector.gpu_by_pid()) == (Sensor(0), [], {})
    watched.collector.open()
    watched.row(1, is_whole)
    watched.collector.close()
    watched.collector.close()
    watched.collector.open()
    watched.row(1, is_whole)


@pytest.mark.parametrize("code", [1, 9, 18])
def test_nvml_that_goes_away_is_an_outage_and_its_return_is_noticed(opened: Opener, code: int) -> None:
    watched = opened()
    watched.row(2, is_whole)
    watched.state.put("*", init=f"E{code}", all=f"E{code}", temperature=59)
    watched.wait(lambda: f"NVML error {code}" in watched.why("all GPUs"))
    watched.next()
    watched.wait(lambda: not watched.collector.sensors)
    for _ in range(3):
        with pytest.raises(CollectorError, match=f"NVML error {code}"):
            watched.collector.collect([])
    assert watched.collector.gpu_by_pid() == {}
    assert f"NVML error {code}" in watched.why("all GPUs")
    watched.state.put("*", temperature=47)
    watched.state.remove("*", "init", "all")
    for gpu in range(3):
        assert watched.row(gpu, is_whole).temperature_c[0] == 47
    assert watched.collector.sensors == Sensor.NVML
    assert watched.collector.limits() == []


def test_nvml_is_opened_again_where_no_gpu_gives_any_value_any_more(opened: Opener) -> None:
    watched = opened()
    watched.row(2, is_whole)
    watched.state.put("*", all="E999", init="E999")
    watched.wait(lambda: "NVML" in watched.why("all GPUs"))
    watched.state.remove("*", "init", "all")
    watched.row(2, is_whole)
    assert not watched.why("all GPUs")


def test_readings_without_a_value_now_and_then_are_no_outage(opened: Opener) -> None:
    watched = opened(replace(FAST, sample_s=0.04))  # time enough to see the first of them
    session = watched.collector._session
    assert session is not None
    readers = session.readers
    for _ in range(23):
        watched.row(0, is_whole)
        n_before = readers[0].n_empty
        watched.state.put("*", all="E999")
        watched.wait(lambda n=n_before: readers[0].n_empty > n)  # type: ignore[misc]
        watched.state.remove("*", "all")
    watched.row(0, is_whole)
    assert session.readers is readers


def test_a_gpu_that_hangs_keeps_nvml_from_being_opened_again_until_its_call_returns(opened: Opener) -> None:
    watched = opened(replace(FAST, late_s=0.05))
    watched.row(1, is_whole)
    watched.state.put(1, hang="power")
    watched.wait(lambda: bool(watched.why("everything of GPU 1")))
    watched.state.put(0, all="E1")
    watched.wait(lambda: "calls about GPU 1 have not returned" in watched.why("all GPUs"))
    watched.state.remove(0, "all")
    watched.state.remove(1, "hang")
    for gpu in range(3):
        watched.row(gpu, is_whole)


def driver_has(watched: Watched, *buses: str) -> None:
    """Let the driver's list of GPUs be this."""
    for entry in watched.driver_gpus.iterdir():
        if entry.name not in buses:
            entry.rmdir()
    for bus in buses:
        (watched.driver_gpus / bus).mkdir(exist_ok=True)


def test_a_gpu_that_appears_later_is_sampled(opened: Opener) -> None:
    watched = opened(is_open=False)
    watched.state.put("*", count=2)
    driver_has(watched, "0000:01:00.0", "0000:02:00.0")
    watched.collector.open()
    watched.row(1, is_whole)
    watched.state.put("*", count=3)
    driver_has(watched, "0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
    assert is_whole(watched.row(2))
    assert [gpu.index for gpu in watched.collector.gpus()] == [0, 1, 2]
    assert watched.collector.limits() == []


def test_a_gpu_that_vanishes_is_lost_and_no_other_takes_its_number(opened: Opener) -> None:
    watched = opened(is_open=False)
    driver_has(watched, "0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
    for gpu in range(3):
        watched.state.put(gpu, uuid=f"GPU-{gpu}", temperature=41 + gpu)
    watched.collector.open()
    watched.row(1, is_whole)
    watched.state.put("*", count=2)
    watched.state.put(1, uuid="GPU-2", temperature=43, pids="4000037:5")
    driver_has(watched, "0000:01:00.0", "0000:03:00.0")
    watched.row(1, is_lost)
    assert watched.row(0, is_whole).temperature_c[0] == 41
    assert watched.row(2, is_whole).temperature_c[0] == 43
    watched.row(1, is_lost)
    assert [(gpu.index, gpu.uuid) for gpu in watched.collector.gpus()] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")]
    watched.wait(lambda: watched.collector.gpu_by_pid() == {4000037: (2, "GPU-2")})
    assert "go by the UUIDs" in watched.why("nvidia-smi's numbers")

    # The driver loaded anew counts anew.
    watched.state.put("*", init="E9", all="E9")
    watched.wait(lambda: "NVML error 9" in watched.why("all GPUs"))
    watched.state.remove("*", "init", "all")
    assert watched.row(1, is_whole).temperature_c[0] == 43
    assert [(gpu.index, gpu.uuid) for gpu in watched.collector.gpus()] == [(0, "GPU-0"), (1, "GPU-2")]
    assert watched.collector.limits() == []


def test_a_gpu_that_is_lost_when_nvml_is_opened_again_keeps_its_number_and_name(opened: Opener) -> None:
    watched = opened(is_open=False)
    driver_has(watched, "0000:01:00.0", "0000:02:00.0")
    watched.state.put(1, uuid="GPU-b")
    watched.collector.open()
    watched.row(1, is_whole)
    session = watched.collector._session
    assert session is not None
    before = session.readers
    watched.state.fail(1, "handle", 15)
    watched.state.fail(1, "all", 15)
    driver_has(watched, "0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
    watched.wait(lambda: session.readers not in (before, ()))
    watched.row(1, is_lost)
    watched.row(2, is_whole)
    watched.wait(lambda: [gpu.uuid for gpu in watched.collector.gpus()][1:2] == ["GPU-b"])
    watched.state.remove(1, "handle", "all")
    watched.row(1, is_whole)
    assert watched.collector.gpus()[1].uuid == "GPU-b"
    watched.row(1, is_whole)
    assert not watched.gather(31).is_lost.any()


def test_a_gpu_that_turns_out_to_be_another_than_was_thought_gets_its_number_back(opened: Opener) -> None:
    watched = opened(is_open=False)
    driver_has(watched, "0000:01:00.0", "0000:02:00.0")
    for gpu, name in enumerate("abc"):
        watched.state.put(gpu, uuid=f"GPU-{name}", temperature=41 + gpu)
    watched.collector.open()
    watched.row(2, is_whole)
    watched.state.put(2, uuid="GPU-b", temperature=42)
    watched.state.put(1, uuid="GPU-c", temperature=43, handle="E15")
    driver_has(watched, "0000:01:00.0")
    watched.row(3, is_lost)  # who it is cannot be told
    watched.state.remove(1, "handle")
    assert watched.row(2, is_whole).temperature_c[0] == 43
    assert watched.row(1, is_whole).temperature_c[0] == 42
    assert set(watched.gather(31).gpu) == {0, 1, 2}


def test_what_was_read_just_before_an_outage_is_told(opened: Opener) -> None:
    watched = opened(replace(FAST, sample_s=0.05))
    watched.row(1, is_whole)
    watched.state.put(1, xid="79@1")
    session = watched.collector._session
    assert session is not None
    reader = session.readers[1]

    def has_xid() -> bool:
        return any("xid" in reading.values for reading in reader._readings.copy())

    deadline_s = time.monotonic() + SEEN_S_MAX
    while not has_xid():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    watched.state.put("*", init="E9", all="E9")
    while session.failure is None or session.readers:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    assert 79 in watched.until(lambda new: len(new) > 0).xid


def test_a_driver_update_is_taken_in_without_a_restart_of_the_agent(tmp_path: Path) -> None:
    libraries = tmp_path / "lib"
    libraries.mkdir()
    shutil.copy(stub(old=True), libraries / LIBRARY)
    shutil.copy(stub(), tmp_path / "new")
    state = StubState(tmp_path / "state", 2)
    code = f"""
import os
import pynvml
from pathlib import Path
from agents.collector import NotAvailable
from agents.nvml import NvmlCollector
from tests.agents.nvml_watch import FAST, Watched, is_whole
from tests.testbed.nvml_stub import StubState
state = StubState(Path({str(tmp_path / "state")!r}), 2)
watched = Watched(NvmlCollector(pace=FAST), state, Path("/nonexistent"))
watched.collector.open()
watched.row(1, is_whole)
print(hasattr(pynvml.nvmlLib, "nvmlDeviceGetTemperatureV"))
state.put("*", init="E18", all="E18")
watched.wait(lambda: "NVML error 18" in watched.why("all GPUs"))
os.replace({str(tmp_path / "new")!r}, {str(libraries / LIBRARY)!r})
state.remove("*", "init", "all")
watched.wait(lambda: not watched.why("all GPUs"))
watched.row(1, is_whole)
print(hasattr(pynvml.nvmlLib, "nvmlDeviceGetTemperatureV"))
watched.collector.close()
"""
    assert in_a_process(code, libraries, state).split() == ["False", "True"]
