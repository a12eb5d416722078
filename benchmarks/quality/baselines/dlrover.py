"""DLRover's rule for stragglers: a node that took more than twice the median of all nodes.

Source: DLRover (https://github.com/intelligent-machine-learning/dlrover), master/elastic_training/rdzv_manager.py,
`_detect_stragglers`, of its node check: a matrix product and an all-gather that each node runs before training, and
again when asked. The median of an even number is the mean of the middle two.

Here the computation time of each iteration stands for the time of the check, and the slowest rank of a node for the
node; so it looks at every iteration, which is more than it does by itself.

Cannot see: anything below twice the time; one of two nodes (the median is then the mean of both, so that no factor is
enough); the whole job slower; links, except through the check's own all-gather, which is not in the recordings. It
knows no peers: where pipeline stages differ by a factor of two, a healthy stage is a straggler.
"""

import numpy as np

from benchmarks.quality.baselines.baseline import WARM_UP, Detection, Input, Observed, newly_accused, per_rank
from schemas.table import BoolArray, FloatArray, IntArray


class DlRover:
    """Every iteration, all nodes against the median; `factor` times the median is the limit."""

    name = "DLRover 2x median"
    needs = frozenset({Input.COMPUTE})
    is_online = True

    def __init__(self, *, factor: float = 2.0) -> None:
        self.factor = factor

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the slowest rank of each node that exceeds the limit, once per spell."""
        compute_s = per_rank(observed.compute_s, Input.COMPUTE, self.name)
        node = np.arange(compute_s.shape[1]) if observed.node is None else observed.node
        looks = range(WARM_UP, len(compute_s))
        return list(newly_accused(looks, (self._accused(compute_s[i], node) for i in looks)))

    def _accused(self, compute_s: FloatArray, node: IntArray) -> BoolArray:
        seen = np.nan_to_num(compute_s, nan=-np.inf)
        slowest = np.full(int(node.max()) + 1, -np.inf)
        np.maximum.at(slowest, node, seen)
        known = slowest[np.isfinite(slowest)]
        limit_s = self.factor * float(np.median(known)) if len(known) else np.inf
        accused: BoolArray = (seen > limit_s) & (seen == slowest[node])
        return accused
