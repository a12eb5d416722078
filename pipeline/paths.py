"""Which transfers each link would slow: the hypotheses of the search for slow links."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from pipeline.topology import LARGE_BYTES, Topology
from schemas.alerts import ComponentName, ComponentType
from schemas.table import BoolArray, FloatArray, IntArray


@dataclass(slots=True, eq=False)
class Paths:
    """What each link hypothesis would slow, for one version of the topology."""

    predicted: dict[ComponentName, IntArray] = field(default_factory=dict)
    equals: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # (n_series,) class of equal transfers
    calls: FloatArray = field(default_factory=lambda: np.zeros(0))  # (n_series,) per rank and iteration
    is_large: BoolArray = field(default_factory=lambda: np.zeros(0, bool))  # (n_series,) enough to tell of bandwidth

    @classmethod
    def of(cls, topology: Topology) -> "Paths":
        """Derive the hypotheses from the communicators' rings and send/receive partners."""
        touched: dict[ComponentName, set[int]] = defaultdict(set)
        equals: dict[tuple[object, ...], int] = {}
        numbers = []
        for index, series in enumerate(topology.series):
            pairs = topology.paths(index)
            across = any(a != b for a, b in pairs)
            for a, b in pairs:
                touched[ComponentName(type=ComponentType.LINK, node=a, peer=b)].add(index)
                if across:
                    touched[ComponentName(type=ComponentType.LINK, node=a)].add(index)
                    touched[ComponentName(type=ComponentType.LINK, node=b)].add(index)
            size = topology.size.get(series.key.comm, 0)
            kind = (series.key.op, series.call_bytes, series.is_point_to_point or size, across)
            numbers.append(equals.setdefault(kind, len(equals)))
        predicted = {name: np.array(sorted(indices)) for name, indices in sorted(touched.items())}
        calls = np.array([float(s.calls) for s in topology.series])
        is_large = np.array([s.call_bytes >= LARGE_BYTES for s in topology.series], bool)
        return cls(predicted, np.array(numbers, np.int64), calls, is_large)
