"""What a baseline says of an episode, as incidents that the same scorer reads.

What is said at the same moment is one incident. One that names nobody says that the job is slower, as ours does where
the component cannot be known, and ends when the baseline says that the job is faster again. One that names ranks
claims no kind (NVRx means GPUs): it may stand for those ranks, their GPUs or their hosts, whichever is right, and ends
with the incarnation, since no baseline says when a rank has recovered. Whoever sees the whole series first
(`is_online` is not true) may date a change a little early; its incidents count as detected that much later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from agents.simulated.layout import Placement, gpu_uuid, incarnations, node_name
from agents.simulated.scenario import Scenario
from benchmarks.quality.answers import Said
from benchmarks.quality.baselines.baseline import Baseline, Detection
from benchmarks.quality.baselines.feed import Series
from benchmarks.quality.components import JOB
from benchmarks.quality.given import first_iterations
from benchmarks.quality.outcome import Opening
from schemas.alerts import ComponentName, ComponentType, Kind, Severity

HINDSIGHT = 10  # iterations that an offline method may be early


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One incarnation as baselines see it, and what its ranks are called."""

    series: Series
    placement: Placement
    first: int  # the job's iteration that its iteration 0 is
    epoch_ns: int

    def said(self, baseline: Baseline, claims: Kind) -> list[Opening]:
        """Return a baseline's incidents; those that name ranks are of the kind `claims`. Raises Unseen."""
        found: list[Opening] = []
        if len(self.series.iteration) == 0:
            return found
        last = self.first + int(self.series.iteration[-1])
        for at, group in groupby(baseline.judges(self.series.observed), key=lambda detection: detection.at):
            detections = list(group)
            ranks = sorted({one.rank for one in detections if one.rank is not None})
            if not ranks and not any(one.is_slower for one in detections):
                for opening in found:
                    opening.resolved = self._number(at) if opening.resolved is None else opening.resolved
                continue
            found.append(self._opening(detections[0], ranks, claims, 0 if baseline.is_online else HINDSIGHT))
        for opening in found:
            opening.resolved = last + 1 if opening.resolved is None else opening.resolved
        return found

    def _opening(self, detection: Detection, ranks: Sequence[int], claims: Kind, later: int) -> Opening:
        at = min(detection.at + later, len(self.series.iteration) - 1)
        readings = list(self._readings(ranks))
        return Opening(
            kind=claims if readings else Kind.SLOW_JOB,
            candidates=readings[0].candidates if readings else frozenset({JOB}),
            severity=Severity.INFO if detection.is_information else Severity.WARNING,
            onset=self._number(detection.at if detection.onset is None else detection.onset),
            detected=self._number(at),
            detected_s=(int(self.series.known_ns[at]) - self.epoch_ns) / 1e9,
            ratio=1.0,
            also=tuple(readings),
        )

    def _readings(self, ranks: Sequence[int]) -> Iterator[Said]:
        if not ranks:
            return
        scenario, nodes, gpus = self.placement.scenario, self.placement.node.ravel(), self.placement.gpu.ravel()
        places = [(rank, int(nodes[rank]), int(gpus[rank])) for rank in ranks]
        by_type = {
            Kind.SLOW_RANK: [
                ComponentName(type=ComponentType.RANK, node=node_name(scenario, node), rank=rank)
                for rank, node, _ in places
            ],
            Kind.SLOW_GPU: [
                ComponentName(type=ComponentType.GPU, node=node_name(scenario, node), gpu=gpu_uuid(scenario, node, gpu))
                for _, node, gpu in places
            ],
            Kind.SLOW_HOST: [
                ComponentName(type=ComponentType.HOST, node=node_name(scenario, node)) for _, node, _ in places
            ],
        }
        for kind, names in by_type.items():
            yield Said(kind=kind, candidates=frozenset(names))

    def _number(self, at: int) -> int:
        return self.first + int(self.series.iteration[at])


def seen(scenario: Scenario, series: dict[str, Series]) -> list[Seen]:
    """Return what was shown of each incarnation that showed anything."""
    placements = {placement.name: placement for placement, _, _ in incarnations(scenario)}
    first = first_iterations(scenario)
    return [Seen(one, placements[name], first[name], scenario.epoch_ns) for name, one in series.items()]
