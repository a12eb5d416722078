"""NVIDIA Resiliency Extension 0.4.1: its own straggler scores, computed by its own code.

Source: nvidia-resiliency-ext (https://github.com/NVIDIA/nvidia-resiliency-ext), `straggler/reporting.py`. Scores lie
between 0 and 1: *relative* is the least median over the ranks over a rank's own, *individual* a rank's own least median
of any report so far over its present one; below 0.75, a third more time, is a straggler. A report every 60 s, over all
calls since the last.

What runs here is its `ReportGenerator` and `Report.identify_stragglers`, one generator per rank. The package imports
torch for its collectives, half a gigabyte; none of what is called here needs it, so a stand-in takes its place during
the import, and the one collective that scoring wants, the minimum over the ranks, is taken here. It gets computation
time as one GPU kernel (it leaves NCCL's kernels out by itself), and the iteration as one section.

Cannot see: less than a third more time; a fault shorter than a report; pipeline stages that differ for good reason (it
compares all ranks with the fastest); which link. Its individual scores cannot see a job slow from the start, and its
section scores see everybody slow, since a section includes the wait for the slowest.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.quality.baselines.baseline import WARM_UP, Detection, Input, Observed
from benchmarks.quality.baselines.packages import REMEDY, Missing, folder
from schemas.table import BoolArray, FloatArray

_KERNEL, _SECTION = "computation", "iteration"
_PACKAGE = "nvidia_resiliency_ext.straggler"


class Nvrx:
    """Reports on all ranks every `interval_s` seconds of the job; `threshold` is that of all four scores."""

    name = "NVRx straggler scores"
    needs = frozenset({Input.DURATION})
    is_online = True

    def __init__(self, *, interval_s: float = 60.0, threshold: float = 0.75) -> None:
        self.interval_s = interval_s
        self.threshold = threshold

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the ranks below the threshold, once per spell; the job, where only the iteration is."""
        reporting = scoring()
        compute_s = observed.compute_s
        n_ranks = 1 if compute_s is None else compute_s.shape[1]
        generators = [_generator(reporting) for _ in range(n_ranks)]
        flagged, is_job_slow = np.zeros(n_ranks, np.bool_), False
        found = []
        start, elapsed_s = WARM_UP, 0.0
        for at in range(WARM_UP, len(observed.duration_s)):
            elapsed_s += float(np.nan_to_num(observed.duration_s[at]))
            if elapsed_s < self.interval_s:
                continue
            window = slice(start, at + 1)
            report = self._report(
                reporting, generators, observed.duration_s[window], None if compute_s is None else compute_s[window]
            )
            gpus, is_slow = self._accused(report, n_ranks)
            fresh = np.flatnonzero(gpus & ~flagged).tolist()
            found += [Detection(at=at, onset=start, rank=rank) for rank in fresh]
            if is_slow and not is_job_slow and not gpus.any():
                found.append(Detection(at=at, onset=start))
            flagged, is_job_slow = gpus, is_slow
            start, elapsed_s = at + 1, 0.0
        return found

    def _report(
        self, reporting: ModuleType, generators: list[Any], duration_s: FloatArray, compute_s: FloatArray | None
    ) -> Any:
        section = {_SECTION: summary} if (summary := _summary(reporting, duration_s)) else {}
        kernels = [
            {_KERNEL: summary} if compute_s is not None and (summary := _summary(reporting, compute_s[:, rank])) else {}
            for rank in range(len(generators))
        ]
        medians = [k[_KERNEL][reporting.Statistic.MED] for k in kernels if k]
        fastest = {_KERNEL: min(medians, default=float("nan"))}
        relative, individual, sections = {}, {}, {}
        for rank, generator in enumerate(generators):
            generator._update_local_min_times(kernels[rank], section)  # noqa: SLF001  its public call needs torch
            score = generator._compute_gpu_perf_score  # noqa: SLF001
            relative[rank] = score(kernels[rank], fastest)
            individual[rank] = score(kernels[rank], generator.min_local_kernel_times)
            sections[rank] = generator._compute_sections_perf_scores(  # noqa: SLF001
                section, generator.min_local_section_times
            )
        by_section = {_SECTION: {rank: scores[_SECTION] for rank, scores in sections.items() if scores}}
        return reporting.Report(
            gpu_relative_perf_scores=relative,
            section_relative_perf_scores={},
            gpu_individual_perf_scores=individual,
            section_individual_perf_scores=by_section,
            rank_to_node=dict.fromkeys(range(len(generators)), ""),
            local_section_summaries={},
            local_kernel_summaries={},
            generate_report_elapsed_time=0.0,
            gather_on_rank0=True,
            rank=None,
        )

    def _accused(self, report: Any, n_ranks: int) -> tuple[BoolArray, bool]:
        """Return the flags of ranks (n_ranks,) by their GPU scores, and whether a section score is below too."""
        limits = dict.fromkeys(
            ("gpu_rel_threshold", "section_rel_threshold", "gpu_indiv_threshold", "section_indiv_threshold"),
            self.threshold,
        )
        stragglers = report.identify_stragglers(**limits)
        flags = np.zeros(n_ranks, np.bool_)
        for who in stragglers["straggler_gpus_relative"] | stragglers["straggler_gpus_individual"]:
            flags[who.rank] = True
        return flags, bool(stragglers["straggler_sections_individual"])


def _generator(reporting: ModuleType) -> Any:
    return reporting.ReportGenerator(("relative_perf_scores", "individual_perf_scores"))


def _summary(reporting: ModuleType, times_s: FloatArray) -> dict[Any, float]:
    seen = times_s[times_s > 0]  # nor has a kernel that took no time been seen, and scores are divided by it
    if not len(seen):
        return {}
    statistic = reporting.Statistic
    return {statistic.MED: float(np.median(seen)), statistic.AVG: float(seen.mean()), statistic.NUM: len(seen)}


@cache
def scoring() -> ModuleType:
    """Return the package's module of scores. Raises Missing where it is not installed."""
    place = next((p for p in (folder(), *map(Path, sys.path)) if (p / _PACKAGE.replace(".", "/")).is_dir()), None)
    if place is None:
        raise Missing(f"no package nvidia-resiliency-ext for the baseline: {REMEDY}")
    with _stand_ins(place):
        return importlib.import_module(f"{_PACKAGE}.reporting")


@contextmanager
def _stand_ins(place: Path) -> Iterator[None]:
    """Offer torch's names that are mentioned on import, and the package without what its own __init__ imports."""
    torch: Any = ModuleType("torch")
    torch.distributed = SimpleNamespace(ReduceOp=SimpleNamespace(SUM=None, MIN=None), is_available=lambda: False)
    offered = {"torch": torch}
    for name in (_PACKAGE.partition(".")[0], _PACKAGE):
        package = offered[name] = ModuleType(name)
        package.__path__ = [str(place / name.replace(".", "/"))]
    before = {name: sys.modules.get(name) for name in offered}
    sys.modules.update(offered)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
