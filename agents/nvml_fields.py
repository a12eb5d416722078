"""What is sampled of a GPU: for each column of GpuSamples the ways to read it, in base units."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agents.nvml_library import (
    NOT_SUPPORTED,
    REFUSALS,
    NvmlFailure,
    call,
    field_values,
    is_blank,
)

_CLOCK_SM = 1  # nvmlClockType_t
_GPU_SENSOR = 0  # nvmlTemperatureSensors_t
_UNCORRECTED, _VOLATILE = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
_RETIREMENT_CAUSES = (0, 1)  # nvmlPageRetirementCause_t
# Numbered fields of nvml.h. Totals over the links of flow control CRC, data CRC, replay, recovery and ECC errors:
_NVLINK_TOTALS = (38, 45, 52, 59, 160)
# and since NVLink 5 per link: malformed packets, buffer overruns, receive errors, integrity, discards, recoveries.
_NVLINK5_ERRORS = (206, 207, 208, 211, 212, 215)
_NVLINK_COUNT = 91
_NVLINK_STATE = 165
_NVLINK_UP = (1, 2)  # active, or asleep to save power
_NVLINKS_MAX = 36

Reader = Callable[[Any], float | None]  # handle to value; None where NVML has none


@dataclass(frozen=True, slots=True)
class Field:
    """One column: its ways to be read, best first, and the range outside of which a value is no value."""

    column: str
    what: str  # for people; no two alike
    ways: tuple[Reader, ...]
    low: float
    high: float


def fields_of_a_gpu() -> tuple[Field, ...]:
    """Return the fields for one GPU; they remember what its NVLinks have, so each GPU needs its own."""
    links = NvLinks()
    counter_max = 2.0**62
    return (
        Field("sm_clock_hz", "the SM clock", (_scaled("nvmlDeviceGetClockInfo", 1e6, _CLOCK_SM),), 0.0, 1e10),
        Field("sm_clock_max_hz", "the SM clock's maximum", (_max_clock,), 1e6, 1e10),
        Field(
            "throttle_reasons",
            "throttle reasons",
            (
                _scaled("nvmlDeviceGetCurrentClocksEventReasons", 1),
                _scaled("nvmlDeviceGetCurrentClocksThrottleReasons", 1),
            ),
            0,
            2.0**62,
        ),
        Field(
            "temperature_c",
            "the temperature",
            (
                _scaled("nvmlDeviceGetTemperatureV", 1, _GPU_SENSOR),
                _scaled("nvmlDeviceGetTemperature", 1, _GPU_SENSOR),
            ),
            -50.0,
            200.0,
        ),
        Field("power_w", "the power", (_scaled("nvmlDeviceGetPowerUsage", 1e-3),), 0.0, 1e4),
        Field("power_limit_w", "the power limit", (_scaled("nvmlDeviceGetEnforcedPowerLimit", 1e-3),), 1.0, 1e4),
        Field("utilization_ratio", "the utilisation", (_utilization_ratio,), 0.0, 1.0),
        Field(
            "pcie_generation", "the PCIe generation", (_scaled("nvmlDeviceGetCurrPcieLinkGeneration", 1),), 1.0, 16.0
        ),
        Field("pcie_width", "the PCIe width", (_scaled("nvmlDeviceGetCurrPcieLinkWidth", 1),), 1.0, 32.0),
        Field("pcie_replays", "PCIe replays", (_scaled("nvmlDeviceGetPcieReplayCounter", 1),), 0.0, counter_max),
        Field("ecc_uncorrected", "ECC errors", (_ecc_uncorrected,), 0.0, counter_max),
        Field("retired_pages", "retired memory", (_remapped_rows, _retired_pages), 0.0, counter_max),
        Field("nvlink_errors", "NVLink errors", (links.total_errors, links.errors_by_link), 0.0, counter_max),
        Field("nvlinks_down", "NVLinks", (links.down, links.down_one_by_one), 0.0, float(_NVLINKS_MAX)),
    )


class NvLinks:
    """The NVLinks of one GPU.

    A sum means something only beside the last one if both are over the same counters and links. So those that answer
    at first are what is asked for from then on, and without one of them there is no sum.
    """

    def __init__(self) -> None:
        self._n_links: int | None = None
        self._totals: tuple[int, ...] = ()
        self._counters: tuple[tuple[int, int], ...] = ()
        self._links: tuple[int, ...] = ()
        self._were_up = False

    def total_errors(self, handle: Any) -> float | None:
        """Return the errors of all links by the GPU's own totals. Raises NvmlFailure."""
        if self._totals:
            return _sum(field_values(handle, self._totals))
        values = dict(zip(_NVLINK_TOTALS, field_values(handle, _NVLINK_TOTALS), strict=True))
        self._totals = tuple(field for field, value in values.items() if value is not None)
        if not self._totals:
            raise NvmlFailure(NOT_SUPPORTED, "no totals of NVLink errors", "nvmlDeviceGetFieldValues")
        return _sum([value for value in values.values() if value is not None])

    def errors_by_link(self, handle: Any) -> float | None:
        """Return the errors of all links by counters of each link. Raises NvmlFailure."""
        if self._counters:
            return _sum(field_values(handle, self._counters))
        asked = tuple((field, link) for field in _NVLINK5_ERRORS for link in range(self._count(handle)))
        values = dict(zip(asked, field_values(handle, asked), strict=True))
        self._counters = tuple(counter for counter, value in values.items() if value is not None)
        if not self._counters:
            raise NvmlFailure(NOT_SUPPORTED, "no NVLink error counters", "nvmlDeviceGetFieldValues")
        return _sum([value for value in values.values() if value is not None])

    def down(self, handle: Any) -> float | None:
        """Return how many links do not run; None until one has, since none may be connected. Raises NvmlFailure."""
        links = self._links or tuple(range(self._count(handle)))
        states = field_values(handle, [(_NVLINK_STATE, link) for link in links])
        return self._count_down(dict(zip(links, states, strict=True)))

    def down_one_by_one(self, handle: Any) -> float | None:
        """Return the same by a call for each link, as older drivers have it. Raises NvmlFailure."""
        links = self._links or tuple(range(self._count(handle)))
        return self._count_down({link: _link_state(handle, link) for link in links})

    def _count_down(self, states: Mapping[int, float | None]) -> float | None:
        if not self._links:
            self._links = tuple(link for link, state in states.items() if state is not None)
            if not self._links:
                raise NvmlFailure(NOT_SUPPORTED, "no state of any NVLink", "nvmlDeviceGetNvLinkState")
        if any(states[link] is None for link in self._links):
            return None
        n_up = sum(states[link] in _NVLINK_UP for link in self._links)
        self._were_up = self._were_up or n_up > 0
        return float(len(self._links) - n_up) if self._were_up else None

    def _count(self, handle: Any) -> int:
        if self._n_links is None:
            (count,) = field_values(handle, (_NVLINK_COUNT,))
            self._n_links = min(_NVLINKS_MAX, int(count)) if count is not None else _NVLINKS_MAX
        if not self._n_links:
            raise NvmlFailure(NOT_SUPPORTED, "no NVLinks", "nvmlDeviceGetFieldValues")
        return self._n_links


def _link_state(handle: Any, link: int) -> float | None:
    try:
        return float(call("nvmlDeviceGetNvLinkState", handle, link))
    except NvmlFailure as failure:
        if failure.code in REFUSALS:
            return None
        raise


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) if len(known) == len(values) else None


def _scaled(function: str, scale: float, *arguments: Any) -> Reader:
    def read(handle: Any) -> float | None:
        value = call(function, handle, *arguments)
        return None if is_blank(value) else value * scale

    return read


_max_clock = _scaled("nvmlDeviceGetMaxClockInfo", 1e6, _CLOCK_SM)


def _utilization_ratio(handle: Any) -> float | None:
    percent = call("nvmlDeviceGetUtilizationRates", handle).gpu
    return None if is_blank(percent) else percent / 100


def _ecc_uncorrected(handle: Any) -> float | None:
    errors = call("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE)
    return None if is_blank(errors) else float(errors)


def _remapped_rows(handle: Any) -> float | None:
    corrected, uncorrected, *_ = call("nvmlDeviceGetRemappedRows", handle)
    return _sum([None if is_blank(rows) else float(rows) for rows in (corrected, uncorrected)])


def _retired_pages(handle: Any) -> float | None:
    return float(sum(len(call("nvmlDeviceGetRetiredPages", handle, cause)) for cause in _RETIREMENT_CAUSES))
