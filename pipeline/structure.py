"""What follows from one version of a job's topology, derived once and not for every frame."""

from dataclasses import dataclass

import numpy as np

from pipeline.groups import Groups
from pipeline.paths import Paths
from pipeline.topology import Topology
from schemas.table import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Peers, stages, paths and places of all ranks; arrays are (world_size,) but for expected, (n_series,).

    host_groups are the peers that a rank's host is compared with: those who do the same work, or, for ranks whose peers
    are all on their own node (is_alone), all ranks of whom that is true. A host launches about as much in every stage.
    """

    version: int
    groups: Groups
    host_groups: Groups
    is_alone: BoolArray
    stages: IntArray
    paths: Paths
    expected: IntArray
    node: tuple[str, ...]
    gpu: tuple[str, ...]
    ranks_by_node: dict[str, IntArray]

    @classmethod
    def of(cls, topology: Topology) -> "Structure":
        """Derive it."""
        node = tuple(topology.node_by_rank)
        names, index = np.unique(np.array(node), return_inverse=True)
        groups = Groups(topology.peers())
        is_alone = _alone(groups, index)
        return cls(
            topology.version,
            groups,
            Groups(np.where(is_alone, groups.of_rank.max(initial=0) + 1, groups.of_rank)),
            is_alone,
            topology.stages(),
            Paths.of(topology),
            topology.expected_reports(),
            node,
            tuple(topology.gpu_by_rank),
            {str(name): np.flatnonzero(index == i) for i, name in enumerate(names) if name},
        )


def _alone(groups: Groups, node: IntArray) -> BoolArray:
    """Return (world_size,) who has all its peers on its own node, if there is more than one such node."""
    if groups.members.size == 0:
        return np.zeros(len(node), bool)
    of_member = np.where(groups.members >= 0, node[groups.members], node[groups.members[:, :1]])
    on_one_node = (of_member == of_member[:, :1]).all(axis=1)
    is_alone: BoolArray = (groups.of_rank >= 0) & on_one_node[groups.of_rank]
    return is_alone if len(np.unique(node[is_alone])) > 1 else np.zeros(len(node), bool)
