"""What the words of answers.toml stand for in one incarnation of a job, and how unbalanced its own work is."""

import numpy as np

from agents.simulated.benign import LongLastStage, VariableSequenceLength
from agents.simulated.draws import lognormal
from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowLink, SlowNic, SlowRank
from agents.simulated.hypotheses import LinkHypotheses, Suspect, suspect_of
from agents.simulated.layout import Placement, gpu_uuid, node_name
from agents.simulated.scenario import Scenario
from schemas.alerts import ComponentName, ComponentType, Kind

JOB = ComponentName(type=ComponentType.JOB)
_DRAWS = 500


def components(placement: Placement, fault: Fault, component: str, *, has_past: bool) -> list[ComponentName]:
    """Return the components that a word of answers.toml stands for, by whether the job was healthy before."""
    scenario = placement.scenario
    match component, fault:
        case "gpu" | "rank", SlowGpu() | SlowRank():
            rank = fault.rank if isinstance(fault, SlowRank) else placement.first_rank_on(fault.node) + fault.gpu
            node = int(placement.node.ravel()[rank])
            name = node_name(scenario, node)
            if component == "rank":
                return [ComponentName(type=ComponentType.RANK, node=name, rank=rank)]
            uuid = gpu_uuid(scenario, node, int(placement.gpu.ravel()[rank]))
            return [ComponentName(type=ComponentType.GPU, node=name, gpu=uuid)]
        case "host", SlowHost(node=node):
            return [ComponentName(type=ComponentType.HOST, node=node_name(scenario, node))]
        case "links", SlowNic() | SlowLink():
            alike = LinkHypotheses(placement).alike(suspect_of(fault), has_past=has_past)
            return [_link(scenario, one) for one in alike]
        case "job", _:
            return [JOB]
    raise ValueError(f"answers.toml: a {fault.kind} has no {component}")


def has_equals(placement: Placement, fault: Fault) -> bool:
    """Return whether enough transfers of the same kind as a slowed one stay healthy, to compare with."""
    return isinstance(fault, SlowNic | SlowLink) and LinkHypotheses(placement).has_equals(suspect_of(fault))


def workload_ratio(scenario: Scenario, kind: Kind) -> float:
    """Return the computation of the longest stage over the others', or of the slowest replica over the middle one's."""
    stage, lengths = scenario.find(LongLastStage), scenario.find(VariableSequenceLength)
    if kind is Kind.STAGE_IMBALANCE:
        return stage.factor if stage and scenario.layout.pp > 1 else 1.0
    if lengths is None:
        return 1.0
    shape = (_DRAWS, scenario.micro_batches, scenario.layout.dp)
    work = lognormal(np.random.default_rng(0), shape, lengths.cv).sum(axis=1)
    return float(np.median(work.max(axis=1) / np.median(work, axis=1)))


def _link(scenario: Scenario, suspect: Suspect) -> ComponentName:
    if isinstance(suspect, int):
        return ComponentName(type=ComponentType.LINK, node=node_name(scenario, suspect))
    one, other = (node_name(scenario, node) for node in suspect)
    return ComponentName(type=ComponentType.LINK, node=one, peer=other)
