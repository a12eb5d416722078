"""RDMA ports, on made-up sysfs trees that look like those of real adapters."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from agents import infiniband
from agents.clock import Clock
from agents.collector import NotAvailable, Observations
from agents.infiniband import Infiniband
from schemas.events import Sensor


def port(sysfs: Path, name: str, files: dict[str, object]) -> Path:
    """Make a port such as mlx5_0/1."""
    device, number = name.split("/")
    folder = sysfs / "class/infiniband" / device / "ports" / number
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return folder


def mlx5(sysfs: Path, name: str = "mlx5_0/1", **changed: object) -> Path:
    """Make a port of a ConnectX-6: 64-bit counters, and congestion control for RoCE."""
    counters = {
        "port_xmit_data": 7_000_003,
        "port_rcv_data": 5_000_011,
        "port_xmit_wait": 1_009,
        "symbol_error": 0,
        "link_downed": 2,
    }
    hardware = {
        "rp_cnp_handled": 101,
        "np_cnp_sent": 103,
        "np_ecn_marked_roce_packets": 107,
        "out_of_sequence": 13,
        "packet_seq_err": 17,
        "local_ack_timeout_err": 3,
    }
    files: dict[str, object] = {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)"}
    files |= {f"counters/{what}": value for what, value in counters.items()}
    files |= {f"hw_counters/{what}": value for what, value in hardware.items()}
    return port(sysfs, name, files | {what.replace("__", "/"): value for what, value in changed.items()})


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings are exactly two seconds apart."""
    times = iter(range(10**9, 10**12, 2 * 10**9))
    monkeypatch.setattr("agents.infiniband.time", SimpleNamespace(monotonic_ns=lambda: next(times)))


@pytest.fixture
def ports(tmp_path: Path, second: None) -> Infiniband:
    """Reads the made-up tree."""
    return Infiniband(clock=Clock(offset_ns=7), root=tmp_path)


def values(seen: Observations, row: int = 0) -> dict[str, float]:
    table = seen.port_samples
    return {name: float(getattr(table, name)[row]) for name in table.__slots__}


def test_counters_of_a_port_become_what_happened_in_the_interval(ports: Infiniband, tmp_path: Path) -> None:
    mlx5(tmp_path)
    ports.open()
    assert ports.sensors == Sensor.NETWORK
    first = ports.collect(())
    assert len(first.port_samples) == 0, "nobody knows since when the counters count"
    mlx5(
        tmp_path,
        counters__port_xmit_data=7_000_003 + 1_000_003,
        counters__port_rcv_data=5_000_011 + 503,
        counters__symbol_error=11,
        counters__link_downed=3,
        hw_counters__rp_cnp_handled=101 + 19,
        hw_counters__np_cnp_sent=9_999,
        hw_counters__out_of_sequence=13 + 5,
        hw_counters__local_ack_timeout_err=3 + 2,
    )
    seen = ports.collect(())
    assert seen.ports == ("mlx5_0/1",)
    row = values(seen)
    assert row["time_ns"] == 3 * 10**9 + 7
    assert row["is_active"] == 1
    assert row["rate_bits_per_s"] == 200e9
    assert row["sent_bytes_per_s"] == 4 * 1_000_003 / 2, "ports count words of four bytes"
    assert row["received_bytes_per_s"] == 4 * 503 / 2
    assert row["symbol_errors"] == 11
    assert row["link_downs"] == 1
    assert row["congestion_notifications"] == 19
    assert row["out_of_sequence"] == 5
    assert row["timeouts"] == 2


def test_the_wait_counter_is_a_time_only_where_its_tick_is_known(tmp_path: Path, second: None) -> None:
    unsaid = Infiniband(clock=Clock(), root=tmp_path)
    said = Infiniband(clock=Clock(), root=tmp_path, bytes_per_tick=8)
    mlx5(tmp_path)
    for reader in (unsaid, said):
        reader.open()
        reader.collect(())
    mlx5(tmp_path, counters__port_xmit_wait=1_009 + 3_125_000_000)  # 25 GB of the 2 x 25 GB that the port could send
    assert math.isnan(values(unsaid.collect(()))["send_wait_ratio"])
    assert values(said.collect(()))["send_wait_ratio"] == pytest.approx(0.25, rel=1e-6)  # 4 seconds between readings
    assert any("waited to send" in limit.what for limit in unsaid.limits())
    assert not any("waited to send" in limit.what for limit in said.limits())


def test_an_old_adapter_counts_less_and_its_full_counters_are_not_silence(ports: Infiniband, tmp_path: Path) -> None:
    files: dict[str, object] = {
        "state": "4: ACTIVE",
        "rate": "40 Gb/sec (4X QDR)",
        "counters/port_xmit_data": 0xFFFFFFFF,
        "counters/port_rcv_data": 41,
        "counters/symbol_error": 0xFFFF,
        "counters/link_downed": 0xFF,
    }
    port(tmp_path, "mlx4_0/2", files)
    ports.open()
    ports.collect(())
    port(tmp_path, "mlx4_0/2", files | {"counters/port_rcv_data": 43})
    row = values(ports.collect(()))
    assert row["received_bytes_per_s"] == 4
    for column in ("sent_bytes_per_s", "symbol_errors", "link_downs", "timeouts", "congestion_notifications"):
        assert math.isnan(row[column]), column
    assert any("symbol errors" in limit.what for limit in ports.limits())


def test_the_wide_counters_of_old_drivers_are_taken_where_there_are_no_others(
    ports: Infiniband, tmp_path: Path
) -> None:
    port(tmp_path, "mlx4_0/1", {"state": "4: ACTIVE", "counters_ext/port_xmit_data_64": 1 << 40})
    ports.open()
    ports.collect(())
    port(tmp_path, "mlx4_0/1", {"counters_ext/port_xmit_data_64": (1 << 40) + 31})
    row = values(ports.collect(()))
    assert row["sent_bytes_per_s"] == 62
    assert math.isnan(row["rate_bits_per_s"])


def test_a_counter_that_was_reset_says_nothing_once_and_then_goes_on(ports: Infiniband, tmp_path: Path) -> None:
    mlx5(tmp_path)
    ports.open()
    ports.collect(())
    mlx5(tmp_path, counters__port_xmit_data=19)
    row = values(ports.collect(()))
    assert math.isnan(row["sent_bytes_per_s"])
    assert row["received_bytes_per_s"] == 0
    mlx5(tmp_path, counters__port_xmit_data=19 + 37)
    assert values(ports.collect(()))["sent_bytes_per_s"] == 74


def test_a_port_that_is_down_is_a_row_and_one_that_is_new_waits_for_its_second_reading(
    ports: Infiniband, tmp_path: Path
) -> None:
    mlx5(tmp_path, "mlx5_1/1", state="1: DOWN")
    ports.open()
    ports.collect(())
    mlx5(tmp_path, "mlx5_0/1")
    seen = ports.collect(())
    assert seen.ports == ("mlx5_0/1", "mlx5_1/1")
    assert seen.port_samples.port.tolist() == [1]
    assert seen.port_samples.is_active.tolist() == [0]
    assert ports.collect(()).port_samples.is_active.tolist() == [1, 0]


def test_a_file_that_the_adapter_refuses_to_fill_is_missing(ports: Infiniband, tmp_path: Path) -> None:
    folder = mlx5(tmp_path, counters__symbol_error="N/A (no PMA)")
    (folder / "counters/link_downed").unlink()
    (folder / "counters/link_downed").mkdir()  # reading it fails
    ports.open()
    ports.collect(())
    row = values(ports.collect(()))
    assert math.isnan(row["symbol_errors"])
    assert math.isnan(row["link_downs"])
    assert row["timeouts"] == 0


def test_a_node_without_ports_is_told_so_at_once_and_a_lost_driver_when_it_is_lost(
    ports: Infiniband, tmp_path: Path
) -> None:
    with pytest.raises(NotAvailable, match="no InfiniBand or RoCE port"):
        ports.open()
    assert ports.sensors == Sensor(0)
    folder = mlx5(tmp_path)
    ports.open()
    ports.collect(())
    folder.rename(tmp_path / "unloaded")
    with pytest.raises(NotAvailable, match="are gone"):
        ports.collect(())
    ports.close()
    ports.close()
    assert ports.sensors == Sensor(0)


def test_no_more_ports_are_read_than_a_node_may_have(
    ports: Infiniband, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infiniband, "PORTS_MAX", 2)
    for number in (1, 2, 3):
        mlx5(tmp_path, f"mlx5_0/{number}")
    ports.open()
    ports.collect(())
    assert ports.collect(()).ports == ("mlx5_0/1", "mlx5_0/2")
    assert "1 RDMA ports" in [limit.what for limit in ports.limits()]
