"""The jobs of the corpus, from 8 to 1,024 ranks; small ones are many, since an episode costs what its ranks cost."""

from dataclasses import dataclass

from agents.simulated.scenario import Parallelism


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism, how often an episode has them, and how many micro-batches an iteration then has."""

    shape: Parallelism
    share: float
    micro_batches: int

    @property
    def n_nodes(self) -> int:
        """How many nodes the job fills."""
        return self.shape.world_size // self.shape.gpus_per_node


def _layout(tp: int, pp: int, dp: int, gpus_per_node: int, share: float, micro_batches: int) -> tuple[str, Layout]:
    shape = Parallelism(tp=tp, pp=pp, dp=dp, gpus_per_node=gpus_per_node)
    return f"tp{tp}-pp{pp}-dp{dp}", Layout(shape, share, micro_batches)


LAYOUTS: dict[str, Layout] = dict(
    [
        _layout(1, 1, 8, 2, 0.15, 4),  # 8 ranks
        _layout(2, 1, 4, 2, 0.10, 4),
        _layout(1, 1, 16, 4, 0.15, 4),  # 16 ranks
        _layout(2, 2, 4, 4, 0.20, 4),
        _layout(1, 2, 8, 4, 0.12, 4),
        _layout(2, 2, 8, 4, 0.12, 4),  # 32 ranks
        _layout(4, 1, 8, 8, 0.06, 4),
        _layout(2, 4, 4, 8, 0.06, 6),
        _layout(4, 2, 8, 8, 0.04, 4),  # 64 ranks
        _layout(8, 2, 4, 8, 0.02, 4),
        _layout(8, 2, 8, 8, 0.01, 3),  # 128 ranks
        _layout(8, 4, 8, 8, 0.005, 4),  # 256 ranks
        _layout(8, 4, 16, 8, 0.0025, 4),  # 512 ranks
        _layout(8, 4, 32, 8, 0.0025, 4),  # 1,024 ranks
    ]
)
