"""What NVML and the kernel say about one node about once a second, consistent with the faults unless told otherwise."""

from collections.abc import Callable

import numpy as np

from agents.simulated.benign import ThrottleReports
from agents.simulated.draws import lognormal
from agents.simulated.faults import SlowGpu, SlowHost
from agents.simulated.scenario import Scenario
from schemas.events import GpuSamples, HostSamples, ThrottleReason
from schemas.table import FloatArray, IntArray

_SM_CLOCK_MAX_HZ = 1.98e9
_POWER_LIMIT_W = 700.0
_THERMAL_S = 2.0  # time constant of a card's temperature
_SAMPLES, _REPORTS = 5, 10  # purposes of random numbers


class NodeSampler:
    """Samples one node's GPUs and rank processes; `iteration_at` tells which iteration ran at a true time."""

    def __init__(self, scenario: Scenario, incarnation: int, node: int, iteration_at: Callable[[float], int]) -> None:
        self._random = np.random.default_rng([scenario.seed, _SAMPLES, incarnation, node])
        self._iteration_at = iteration_at
        self._n_gpus = scenario.layout.gpus_per_node
        self._slow_gpus = [f for f in scenario.faults if isinstance(f, SlowGpu) and f.node == node and f.telemetry]
        self._slow_hosts = [f for f in scenario.faults if isinstance(f, SlowHost) and f.node == node and f.telemetry]
        self._reports = scenario.find(ThrottleReports)
        self._report_random = np.random.default_rng([scenario.seed, _REPORTS, incarnation, node])
        self._reporting = np.zeros(self._n_gpus, bool)
        if self._reports:
            self._reporting = self._report_random.random(self._n_gpus) < self._reports.share
        self._base_c = self._random.normal(62.0, 2.0, self._n_gpus)
        self._excess_c = np.zeros(self._n_gpus)
        self._last_s: float | None = None

    def gpus(self, time_s: float, time_ns: int) -> GpuSamples:
        """Return one sample of each GPU at a true time, which the node's clock calls time_ns."""
        iteration = self._iteration_at(time_s)
        thermal, power = np.ones(self._n_gpus), np.ones(self._n_gpus)
        for fault in self._slow_gpus:
            (thermal if fault.cause == "thermal" else power)[fault.gpu] *= fault.factor_at(iteration)
        self._warm(time_s, 24.0 * (1 - 1 / thermal**2))
        healthy = np.minimum(self._random.normal(0.985, 0.003, self._n_gpus), 1.0)
        reasons = np.where(thermal > 1, int(ThrottleReason.HW_THERMAL_SLOWDOWN | ThrottleReason.HW_SLOWDOWN), 0)
        reasons |= np.where(power > 1, int(ThrottleReason.SW_POWER_CAP), 0)
        if self._reports:
            is_now = self._reporting & (self._report_random.random(self._n_gpus) < self._reports.probability)
            reasons |= np.where(is_now, int(ThrottleReason.SW_POWER_CAP), 0)
        limit_w = _POWER_LIMIT_W / power
        return GpuSamples.build(
            self._n_gpus,
            gpu=np.arange(self._n_gpus),
            time_ns=time_ns,
            sm_clock_hz=_SM_CLOCK_MAX_HZ * healthy / (thermal * power),
            sm_clock_max_hz=_SM_CLOCK_MAX_HZ,
            throttle_reasons=reasons,
            throttle_known=1,
            temperature_c=self._base_c + self._excess_c + self._random.normal(0, 0.5, self._n_gpus),
            power_w=np.minimum(self._random.normal(0.85, 0.02, self._n_gpus) * _POWER_LIMIT_W / thermal, limit_w),
            power_limit_w=limit_w,
            utilization_ratio=np.clip(self._random.normal(0.97, 0.01, self._n_gpus), 0, 1),
            ecc_uncorrected=0.0,
        )

    def ranks(self, time_s: float, time_ns: int, ranks: IntArray) -> HostSamples:
        """Return one sample of each rank process."""
        iteration = self._iteration_at(time_s)
        factor = float(np.prod([fault.factor_at(iteration) for fault in self._slow_hosts]))
        n = len(ranks)
        waits = 0.012 * lognormal(self._random, (n,), 0.4) + (1 - 1 / factor) * self._random.uniform(0.85, 0.95, n)
        return HostSamples.build(
            n,
            rank=ranks,
            time_ns=time_ns,
            run_queue_ratio=np.minimum(waits, 1.0),
            blocked_ratio=0.004 * lognormal(self._random, (n,), 0.5),
            softirq_ratio=0.01 * lognormal(self._random, (n,), 0.3),
            steal_ratio=0.0,
            memory_pressure_ratio=0.0,
            tcp_retransmits=float(self._random.poisson(0.2)),  # RDMA does not go through TCP: a slow link leaves it
        )

    def _warm(self, time_s: float, target_c: FloatArray) -> None:
        # A fault from the start has warmed the card up already.
        share = 1.0 if self._last_s is None else 1 - np.exp(-(time_s - self._last_s) / _THERMAL_S)
        self._excess_c += share * (target_c - self._excess_c)
        self._last_s = time_s
