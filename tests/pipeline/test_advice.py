"""Causes that the telemetry supports come before those that are merely common."""

from pipeline.advice import causes
from pipeline.frames import Signal
from pipeline.suspect import CLOCK_EVIDENCE, HOST_EVIDENCE, LEAST_HOST_RATIO
from schemas.alerts import Evidence, Kind
from schemas.events import ThrottleReason


def seen(**ratios: float) -> list[Evidence]:
    return [
        Evidence(what=HOST_EVIDENCE[Signal[name]], value=value, unit="s/s", source="host")
        for name, value in ratios.items()
    ]


def test_without_evidence_the_commonest_cause_is_first() -> None:
    assert causes(Kind.SLOW_HOST, 0, [])[0] == "CPU contention by another process"


def test_the_strongest_evidence_is_first_and_no_cause_is_named_twice() -> None:
    found = causes(Kind.SLOW_HOST, 0, seen(RUN_QUEUE=0.07, BLOCKED=0.31))
    assert found[:2] == ("slow storage or data loading", "CPU contention by another process")
    assert len(set(found)) == len(found)


def test_what_any_process_meets_with_supports_nothing() -> None:
    assert causes(Kind.SLOW_HOST, 0, seen(BLOCKED=LEAST_HOST_RATIO / 2)) == causes(Kind.SLOW_HOST, 0, [])


def test_a_process_out_of_quota_queues_without_contention() -> None:
    found = causes(Kind.SLOW_HOST, 0, seen(RUN_QUEUE=0.59, THROTTLED=0.53))
    assert found[0] == "CPU quota of its container or control group"


def test_a_stopped_process_is_told_from_a_queueing_one() -> None:
    assert "debugger" in causes(Kind.SLOW_HOST, 0, seen(RUN_QUEUE=0.02, STOPPED=0.23))[0]


def test_the_hosts_evidence_explains_no_gpu() -> None:
    thermal = int(ThrottleReason.HW_THERMAL_SLOWDOWN)
    assert causes(Kind.SLOW_GPU, thermal, seen(STOPPED=0.9))[0] == "thermal throttling"
    assert not any("debugger" in cause for cause in causes(Kind.SLOW_GPU, 0, seen(STOPPED=0.9)))


def clock(ratio: float) -> Evidence:
    return Evidence(what=CLOCK_EVIDENCE, value=ratio, unit="ratio", reference=1.0, source="nvml")


def test_a_clock_as_usual_speaks_against_throttling() -> None:
    assert causes(Kind.SLOW_GPU, 0, [])[0] == "thermal throttling"
    assert causes(Kind.SLOW_GPU, 0, [clock(0.6)])[0] == "thermal throttling"
    found = causes(Kind.SLOW_GPU, 0, [clock(1.0)])
    assert found[0] == "degraded memory or PCIe link"
    assert sorted(found) == sorted(causes(Kind.SLOW_GPU, 0, []))


def test_a_throttle_reason_counts_for_more_than_a_clock_sampled_before() -> None:
    thermal = int(ThrottleReason.HW_THERMAL_SLOWDOWN)
    assert causes(Kind.SLOW_GPU, thermal, [clock(1.0)])[0] == "thermal throttling"
