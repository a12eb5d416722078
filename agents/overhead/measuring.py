"""Measures all probes of the agent, with its own programs and with their settings."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agents.collector import Limit, NotAvailable
from agents.ebpf.tracer import Tracer
from agents.host_programs import HostPrograms
from agents.overhead.costs import Cost, cost
from agents.overhead.specimen import Specimen
from agents.overhead.switching import Pair, switch_costs_ns

# Names of what is hit, as in the tables and in JSON.
CALL_LIKE: Final = "call_like_the_last"
CALL_UNLIKE: Final = "call_unlike_the_last"
GROUP: Final = "group_boundary"
SYNC: Final = "synchronisation"
LAUNCH: Final = "launch"
SWITCH: Final = "switch_of_a_rank"
SWITCH_OTHER: Final = "switch_of_others"

TITLES: Final = {
    CALL_LIKE: "NCCL call like the last one",
    CALL_UNLIKE: "NCCL call unlike the last one",
    GROUP: "start or end of an NCCL group",
    SYNC: "synchronisation with the GPU",
    LAUNCH: "kernel launch (off by default)",
    SWITCH: "context switch of a rank",
    SWITCH_OTHER: "context switch of others",
}

N_ROUNDS: Final = 200
N_ROUNDS_MIN: Final = 5
_CALLS: Final = 500  # in a block
_COLD_CALLS: Final = 50
_POLL_EVERY: Final = 8  # rounds, in which the ring does not fill up
_ROUNDS_PER_SWITCHING: Final = 4  # whose rounds are the longer ones


class _Probe(NamedTuple):
    name: str
    first: str
    second: str
    step: int = 0


_PROBES: Final = (
    _Probe(CALL_LIKE, "ncclAllReduce", "ncclAllReduce"),
    _Probe(CALL_UNLIKE, "ncclAllReduce", "ncclAllReduce", step=1),
    _Probe(GROUP, "ncclGroupStart", "ncclGroupEnd"),
    _Probe(SYNC, "cudaStreamSynchronize", "cudaStreamSynchronize"),
    _Probe(LAUNCH, "cudaLaunchKernel", "cudaLaunchKernel"),
)


@dataclass(slots=True)
class Measured:
    """Costs by the name of what is hit, back to back and with other work in between; and what is missing."""

    hot: dict[str, Cost] = field(default_factory=dict)
    cold: dict[str, Cost] = field(default_factory=dict)  # of context switches there is none
    limits: list[Limit] = field(default_factory=list)
    has_return_probes: bool = True


def measure(
    n_rounds: int,
    *,
    tracer: Tracer | None = None,
    programs: HostPrograms | None = None,
    cpu: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure what this machine allows, on one CPU (by default the last one that is allowed).

    tracer and programs are not open yet; they are opened here, and closed. Raises NotAvailable where nothing can be
    measured at all.
    """
    measured = Measured()
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed) if cpu is None else cpu
    with Specimen() as specimen:
        os.sched_setaffinity(0, {cpu})
        try:
            _try(measured, "calls", lambda: _measure_calls(measured, specimen, tracer or _tracer(), n_rounds, progress))
            _try(
                measured,
                "context switches",
                lambda: _measure_switches(measured, specimen, programs or HostPrograms(), n_rounds, cpu, progress),
            )
        finally:
            os.sched_setaffinity(0, allowed)
    if not measured.hot:
        first = measured.limits[0]
        raise NotAvailable(first.why, first.remedy)
    return measured


def _tracer() -> Tracer:
    return Tracer(count_launches=True)


def _try(measured: Measured, what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except NotAvailable as error:
        measured.limits.append(Limit(f"the cost of {what}", error.reason, error.remedy))


def _measure_calls(
    measured: Measured, specimen: Specimen, tracer: Tracer, n_rounds: int, progress: Callable[[str], None]
) -> None:
    with ExitStack() as stack:
        tracer.open()
        stack.callback(tracer.close)
        measured.has_return_probes = tracer.has_return_probes
        measured.limits += tracer.attach(specimen.library)
        hot: dict[str, list[float]] = {probe.name: [] for probe in _PROBES}
        cold: dict[str, list[float]] = {probe.name: [] for probe in _PROBES}
        n_seen = 0
        for turn in range(n_rounds):
            progress(f"calls: round {turn + 1} of {n_rounds}")
            for name, first, second, step in _PROBES:
                hot[name].append(specimen.difference_ns(first, second, _CALLS, step=step))
                cold[name].append(specimen.difference_ns(first, second, _COLD_CALLS, step=step, cold=True))
            if turn % _POLL_EVERY == 0:
                n_seen += len(tracer.take(flush_open=False).runs)
        if not n_seen:
            raise NotAvailable("the probes were placed and do not fire", "see the kernel's log (dmesg)")
        measured.hot |= {name: cost(samples) for name, samples in hot.items()}
        measured.cold |= {name: cost(samples) for name, samples in cold.items()}


def _measure_switches(
    measured: Measured,
    specimen: Specimen,
    programs: HostPrograms,
    n_rounds: int,
    cpu: int,
    progress: Callable[[str], None],
) -> None:
    with ExitStack() as stack:
        programs.open()
        stack.callback(programs.close)
        measured.limits += programs.limits
        programs.detach()
        pair = stack.enter_context(Pair(specimen, cpu))
        progress("context switches")
        others, ranks = switch_costs_ns(pair, programs, max(N_ROUNDS_MIN, n_rounds // _ROUNDS_PER_SWITCHING))
        measured.hot |= {SWITCH_OTHER: cost(others), SWITCH: cost(ranks)}
