"""What follows from one version of a job's topology, derived once and not for every frame."""

from dataclasses import dataclass

import numpy as np

from pipeline.groups import Groups
from pipeline.paths import Paths
from pipeline.topology import Topology
from schemas.table import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Peers, stages, paths and places of all ranks; arrays are (world_size,) but for expected, (n_series,)."""

    version: int
    groups: Groups
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
        return cls(
            topology.version,
            Groups(topology.peers()),
            topology.stages(),
            Paths.of(topology),
            topology.expected_reports(),
            node,
            tuple(topology.gpu_by_rank),
            {str(name): np.flatnonzero(index == i) for i, name in enumerate(names) if name},
        )
