"""NVML through pynvml's real ABI, against the stub library: each field, each failure, and what is said of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.nvml_library import is_blank
from schemas.events import Sensor, ThrottleReason
from tests.agents.nvml_watch import FAST, N_GPUS, Opener, is_lost, is_whole, missing, stub, stubbed

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
