"""A process to be observed: makes the calls that it is told to make, and keeps the truth about each.

Run as a script with the library's path. It reads Python source, one literal string a line, and answers with the
representation of what that source left in `answer`.
"""

import ast
import ctypes
import os
import sys
import threading
import time
from ctypes import byref, c_int, c_long, c_size_t, c_void_p
from typing import Any, NamedTuple


class Id(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t up to the communicator's name."""

    _fields_ = (("size", c_size_t), ("between", ctypes.c_ubyte * 40), ("name", ctypes.c_char_p))


class Truth(NamedTuple):
    """One call, as its caller saw it."""

    function: str
    elements: int
    type: int
    peer: int
    comm: int
    tid: int
    before_ns: int
    after_ns: int
    result: int


_TWO: list[Any] = [c_void_p, c_void_p, c_size_t, c_int]
_ONE: list[Any] = [c_void_p, c_size_t, c_int]
_END: list[Any] = [c_void_p, c_void_p]
SIGNATURES: dict[str, list[Any]] = {
    "ncclAllReduce": [*_TWO, c_int, *_END],
    "ncclAllReduceConfig": [*_TWO, c_int, *_END, c_void_p],
    "ncclReduceScatter": [*_TWO, c_int, *_END],
    "ncclAllGather": [*_TWO, *_END],
    "ncclAlltoAll": [*_TWO, *_END],
    "ncclBroadcast": [*_TWO, c_int, *_END],
    "ncclGather": [*_TWO, c_int, *_END],
    "ncclScatter": [*_TWO, c_int, *_END],
    "ncclBcast": [*_ONE, c_int, *_END],
    "ncclReduce": [*_TWO, c_int, c_int, *_END],
    "ncclSend": [*_ONE, c_int, *_END],
    "ncclRecv": [*_ONE, c_int, *_END],
    "ncclCommInitRank": [c_void_p, c_int, Id, c_int],
    "ncclCommInitRankConfig": [c_void_p, c_int, Id, c_int, c_void_p],
    "ncclCommInitRankScalable": [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p],
    "ncclCommInitAll": [c_void_p, c_int, c_void_p],
    "ncclCommSplit": [c_void_p, c_int, c_int, c_void_p, c_void_p],
    "ncclCommShrink": [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int],
    "ncclCommGrow": [c_void_p, c_int, c_void_p, c_int, c_void_p, c_void_p],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
    "cudaStreamSynchronize": [c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "probed_ns_per_call": [c_long, c_size_t],
}
_ROOT_LAST = {"ncclBroadcast", "ncclGather", "ncclScatter"}
_ONE_BUFFER = {"ncclSend", "ncclRecv", "ncclBcast"}


class Victim:
    """What the sources that come in can use, by the name `me`."""

    def __init__(self, path: str) -> None:
        self.library: Any = ctypes.CDLL(path)
        beside = os.path.join(os.path.dirname(path), "libcudart.so.12")
        self.cuda: Any = ctypes.CDLL(beside) if os.path.exists(beside) else None
        self.truth: list[Truth] = []
        for name, types in SIGNATURES.items():
            for library in (self.library, self.cuda):
                if hasattr(library, name):
                    getattr(library, name).argtypes = types
        if hasattr(self.library, "probed_ns_per_call"):
            self.library.probed_ns_per_call.restype = ctypes.c_double

    def call(self, function: str, count: int = 7, type: int = 7, peer: int = 0, comm: int = 1) -> None:  # noqa: A002
        """Make one call, and keep the truth about it."""
        if function in _ONE_BUFFER:
            arguments: tuple[Any, ...] = None, count, type, peer, comm, None
        elif function in _ROOT_LAST:
            arguments = None, None, count, type, peer, comm, None
        elif function == "ncclReduce":
            arguments = None, None, count, type, 0, peer, comm, None
        elif function in {"ncclAllGather", "ncclAlltoAll"}:
            arguments = None, None, count, type, comm, None
        else:
            arguments = None, None, count, type, 0, comm, None
            arguments += (None,) if function.endswith("Config") else ()
        target = getattr(self.library, function)
        before_ns = time.monotonic_ns()
        result = target(*arguments)
        after_ns = time.monotonic_ns()
        tid = threading.get_native_id()
        self.truth.append(Truth(function, count, type, peer, comm, tid, before_ns, after_ns, result))

    def create(self, n_ranks: int, rank: int, first: int = 0) -> int:
        """Make a communicator; its id's bytes count up from `first`."""
        made = c_void_p()
        self.library.ncclCommInitRank(byref(made), n_ranks, unique_id(first), rank)
        return made.value or 0

    def split(self, comm: int, color: int, key: int) -> c_void_p:
        """Split a communicator; the new one's address comes into what is returned, maybe later."""
        made = c_void_p()
        self.library.ncclCommSplit(comm, color, key, byref(made), None)
        return made


def unique_id(first: int) -> Id:
    """Return an id whose bytes count up."""
    return Id((ctypes.c_ubyte * 128)(*((first + i) % 256 for i in range(128))))


def main() -> None:
    """Do as told until there is nothing more to read."""
    names: dict[str, Any] = {"me": Victim(sys.argv[1]), "ctypes": ctypes, "threading": threading, "time": time}
    names |= {"byref": byref, "c_void_p": c_void_p, "unique_id": unique_id, "Id": Id, "Config": Config}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        names["answer"] = None
        exec(ast.literal_eval(line), names)  # noqa: S102
        sys.stdout.write(repr(names["answer"]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
