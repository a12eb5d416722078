"""A rank's communicators, made in the ways that frameworks make them: by unique id, with a name, and by splitting."""

import os
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from pathlib import Path

from tests.testbed.bindings import SUCCESS, UniqueId, comm_hash, config, load_nccl
from tests.testbed.truth import CommunicatorTruth
from tests.testbed.workload import RankPlan

_PATIENCE_S = 60


class Communicators:
    """Creates world, tp, dp and pp (those of more than one member) and keeps the truth about them."""

    def __init__(self, plan: RankPlan, rank: int) -> None:
        self.nccl = load_nccl(Path(plan.libraries))
        self.truths: list[CommunicatorTruth] = []
        self._workload = plan.workload
        self._directory = Path(plan.directory)
        self.rank = rank
        self._pointers: dict[str, int] = {}

    def __getitem__(self, axis: str) -> int:
        """Return the pointer of a communicator."""
        return self._pointers[axis]

    def __contains__(self, axis: str) -> bool:
        return axis in self._pointers

    def create(self) -> None:
        """Create all, in the same order on all ranks."""
        self._by_id("world", list(range(self._workload.world_size)), name=None)
        if self._workload.tp > 1:
            self._by_split("tp")
        if self._workload.dp > 1:
            members = self._workload.group(self.rank, "dp")
            self._by_id("dp", members, name=f"dp_of_{members[0]}")
        if self._workload.pp > 1:
            self._by_split("pp")

    def destroy(self) -> None:
        """Destroy all, the youngest first."""
        for truth in reversed(self.truths):
            _check(self.nccl.ncclCommDestroy(truth.pointer), "ncclCommDestroy")
            truth.ended_ns = time.monotonic_ns()

    def _by_id(self, axis: str, members: list[int], name: str | None) -> None:
        pointer = c_void_p()
        place = members.index(self.rank)
        unique_id = self._share_id(f"{axis}-of-{members[0]}", owns=place == 0)
        if name is None:
            function = "ncclCommInitRank"
            result = self.nccl.ncclCommInitRank(byref(pointer), len(members), unique_id, place)
        else:
            function = "ncclCommInitRankConfig"
            named = config(name)
            result = self.nccl.ncclCommInitRankConfig(byref(pointer), len(members), unique_id, place, byref(named))
        _check(result, function)
        self._note(axis, function, pointer, unique_id=bytes(unique_id).hex(), name=name)

    def _by_split(self, axis: str) -> None:
        """Split the world; the members of a group have its first rank as their color."""
        pointer = c_void_p()
        members = self._workload.group(self.rank, "tp" if axis == "tp" else "pp")
        color, key = members[0], members.index(self.rank)
        parent = self._pointers["world"]
        _check(self.nccl.ncclCommSplit(parent, color, key, byref(pointer), None), "ncclCommSplit")
        self._note(axis, "ncclCommSplit", pointer, parent=parent, color=color, key=key)

    def _note(self, axis: str, function: str, pointer: c_void_p, **fields: object) -> None:
        created_ns = time.monotonic_ns()
        address = pointer.value
        assert address, f"{function} gave no communicator"
        self._pointers[axis] = address
        truth = CommunicatorTruth(
            function=function,
            pointer=address,
            hash=comm_hash(self.nccl, address),
            rank=_ask(self.nccl.ncclCommUserRank, address),
            size=_ask(self.nccl.ncclCommCount, address),
            created_ns=created_ns,
            axis=axis,
            **fields,  # type: ignore[arg-type]
        )
        self.truths.append(truth)

    def _share_id(self, name: str, *, owns: bool) -> UniqueId:
        """Return the unique id that the owner made: over a file, where a framework uses its store."""
        path = self._directory / f"id-{name}"
        if owns:
            unique_id = UniqueId()
            _check(self.nccl.ncclGetUniqueId(byref(unique_id)), "ncclGetUniqueId")
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(bytes(unique_id))
            draft.replace(path)
        until_s = time.monotonic() + _PATIENCE_S
        while not path.exists():
            assert time.monotonic() < until_s, f"nobody made {path}"
            time.sleep(0.002)
        return UniqueId.from_buffer_copy(path.read_bytes())


def _ask(function: Callable[..., int], pointer: int) -> int:
    value = c_int()
    _check(function(pointer, byref(value)), "ncclComm*")
    return value.value


def _check(result: int, function: str) -> None:
    if result != SUCCESS:
        raise RuntimeError(f"{function} returned {result}")
