"""The bounds of the window stage: how long it waits for what is late, and how much it remembers."""

import msgspec


class WindowParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per node unless said otherwise; whatever a bound drops is counted through the observer."""

    reorder_batches: int = 3  # batches held for a missing one before it is taken for lost
    gpu_wait_batches: int = 3  # further batches that an iteration waits for its GPU times
    buffer_rows: int = 20_000  # calls per rank that no iteration has taken yet
    fill_iterations: int = 256  # iterations lost in one gap of which something can still be said
    ranks: int = 1024
    keys: int = 1 << 15  # of (rank, communicator, op, peer)
    held_iterations: int = 8192
    nodes: int = 1 << 14  # of all jobs together
    silent_s: float = 1800.0  # after which a node is forgotten

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 0 if name in {"reorder_batches", "gpu_wait_batches"} else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, it is {getattr(self, name)}")


DEFAULTS = WindowParams()
