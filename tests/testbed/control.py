"""What the test tells running ranks, and what they tell it: a small file that all of them map into memory."""

import mmap
import os
from pathlib import Path

_CELL = 8
_SHARED_CELLS = 8
_RANK_CELLS = 8
_STOP, _LAST_ITERATION, _PAUSE_AT, _PAUSE_NS = range(4)
_PID, _DONE, _WORK, _STATE = range(4)
_MILLION = 1_000_000

STARTING, TRAINING, ENDED = range(3)


class Control:
    """Numbers of 8 bytes, each written by one process at a time."""

    def __init__(self, path: Path, world_size: int, *, create: bool = False) -> None:
        size = _CELL * (_SHARED_CELLS + _RANK_CELLS * world_size)
        if create:
            path.write_bytes(bytes(size))
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._memory).cast("q")
        if create:
            for rank in range(world_size):
                self.set_work(rank, 1.0)

    def close(self) -> None:
        """Unmap the file."""
        self._cells.release()
        self._memory.close()

    def _of(self, rank: int, cell: int) -> int:
        return _SHARED_CELLS + _RANK_CELLS * rank + cell

    # What the test says.

    def ask_to_stop(self) -> None:
        """Ask for an end soon, the same iteration on all ranks."""
        self._cells[_STOP] = 1

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether an end was asked for."""
        return bool(self._cells[_STOP])

    def pause(self, at_iteration: int, duration_s: float) -> None:
        """Let all ranks stand still before an iteration, as for a checkpoint."""
        self._cells[_PAUSE_NS] = int(duration_s * 1e9)
        self._cells[_PAUSE_AT] = at_iteration

    def pause_s(self, iteration: int) -> float:
        """Return for how long to stand still before this iteration."""
        return self._cells[_PAUSE_NS] / 1e9 if self._cells[_PAUSE_AT] == iteration else 0.0

    def set_work(self, rank: int, share: float) -> None:
        """Let a rank compute this share of what the others do."""
        self._cells[self._of(rank, _WORK)] = round(share * _MILLION)

    def work(self, rank: int) -> float:
        """Return the share of the common work that a rank does."""
        return self._cells[self._of(rank, _WORK)] / _MILLION

    # What the ranks say.

    def set_last(self, iteration: int) -> None:
        """Fix the last iteration: rank 0 does, far enough ahead for all to learn of it in time."""
        self._cells[_LAST_ITERATION] = iteration

    @property
    def last(self) -> int:
        """Number of the last iteration, 0 where it is not fixed; the first is 1."""
        return self._cells[_LAST_ITERATION]

    def set_state(self, rank: int, state: int) -> None:
        """Say what a rank is doing."""
        self._cells[self._of(rank, _STATE)] = state

    def state(self, rank: int) -> int:
        """Return what a rank is doing."""
        return self._cells[self._of(rank, _STATE)]

    def set_done(self, rank: int, iterations: int) -> None:
        """Say how many iterations a rank has finished."""
        self._cells[self._of(rank, _DONE)] = iterations

    def done(self, rank: int) -> int:
        """Return how many iterations a rank has finished."""
        return self._cells[self._of(rank, _DONE)]
