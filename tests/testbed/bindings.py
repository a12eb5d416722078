"""libnccl.so.2 and libcudart.so.12 as Python functions: the public C interface, by ctypes."""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

INT8, INT32, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = 0, 2, 4, 6, 7, 8, 9
SUM, MAX = 0, 2
SUCCESS, INVALID_ARGUMENT, IN_PROGRESS = 0, 4, 7
UNSET = -(2**31)
_CONFIG_MAGIC = 0xCAFEBEEF
VERSION = 23203


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t up to the communicator's name."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("traffic_class", c_int),
        ("comm_name", c_char_p),
    )


def config(name: str | None = None, *, blocking: bool = True) -> Config:
    """Return a configuration as NCCL_CONFIG_INITIALIZER makes it, with a name."""
    said = name.encode() if name is not None else None
    size = ctypes.sizeof(Config)
    return Config(size, _CONFIG_MAGIC, VERSION, int(blocking), UNSET, UNSET, UNSET, None, UNSET, UNSET, said)


class Grid(ctypes.Structure):
    """dim3."""

    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


_COMM = STREAM = c_void_p
_ONE_BUFFER: list[Any] = [c_void_p, c_size_t, c_int]
_TWO_BUFFERS: list[Any] = [c_void_p, c_void_p, c_size_t, c_int]
_NCCL: dict[str, list[Any]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRank": [POINTER(_COMM), c_int, UniqueId, c_int],
    "ncclCommInitRankConfig": [POINTER(_COMM), c_int, UniqueId, c_int, POINTER(Config)],
    "ncclCommInitRankScalable": [POINTER(_COMM), c_int, c_int, c_int, POINTER(UniqueId), POINTER(Config)],
    "ncclCommSplit": [_COMM, c_int, c_int, POINTER(_COMM), POINTER(Config)],
    "ncclCommCount": [_COMM, POINTER(c_int)],
    "ncclCommUserRank": [_COMM, POINTER(c_int)],
    "ncclCommCuDevice": [_COMM, POINTER(c_int)],
    "ncclCommGetAsyncError": [_COMM, POINTER(c_int)],
    "ncclCommFinalize": [_COMM],
    "ncclCommDestroy": [_COMM],
    "ncclCommAbort": [_COMM],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [*_TWO_BUFFERS, c_int, _COMM, STREAM],
    "ncclReduceScatter": [*_TWO_BUFFERS, c_int, _COMM, STREAM],
    "ncclAllGather": [*_TWO_BUFFERS, _COMM, STREAM],
    "ncclBroadcast": [*_TWO_BUFFERS, c_int, _COMM, STREAM],
    "ncclBcast": [*_ONE_BUFFER, c_int, _COMM, STREAM],
    "ncclReduce": [*_TWO_BUFFERS, c_int, c_int, _COMM, STREAM],
    "ncclSend": [*_ONE_BUFFER, c_int, _COMM, STREAM],
    "ncclRecv": [*_ONE_BUFFER, c_int, _COMM, STREAM],
    "ncclAlltoAll": [*_TWO_BUFFERS, _COMM, STREAM],
    "ncclGather": [*_TWO_BUFFERS, c_int, _COMM, STREAM],
    "ncclScatter": [*_TWO_BUFFERS, c_int, _COMM, STREAM],
}
_CUDA: dict[str, list[Any]] = {
    "cudaSetDevice": [c_int],
    "cudaGetDevice": [POINTER(c_int)],
    "cudaGetDeviceCount": [POINTER(c_int)],
    "cudaStreamCreate": [POINTER(STREAM)],
    "cudaStreamSynchronize": [STREAM],
    "cudaStreamQuery": [STREAM],
    "cudaStreamWaitEvent": [STREAM, c_void_p, c_uint],
    "cudaDeviceSynchronize": [],
    "cudaEventCreate": [POINTER(c_void_p)],
    "cudaEventRecord": [c_void_p, STREAM],
    "cudaEventSynchronize": [c_void_p],
    "cudaEventQuery": [c_void_p],
    "cudaEventElapsedTime": [POINTER(ctypes.c_float), c_void_p, c_void_p],
    "cudaEventDestroy": [c_void_p],
    "cudaLaunchKernel": [c_void_p, Grid, Grid, POINTER(c_void_p), c_size_t, STREAM],
}


def load_nccl(folder: Path) -> ctypes.CDLL:
    """Load libnccl.so.2 from a folder."""
    return _typed(ctypes.CDLL(str(folder / "libnccl.so.2")), _NCCL)


def load_cuda(folder: Path) -> ctypes.CDLL:
    """Load libcudart.so.12 from a folder."""
    return _typed(ctypes.CDLL(str(folder / "libcudart.so.12")), _CUDA)


def _typed(library: ctypes.CDLL, signatures: dict[str, list[Any]]) -> ctypes.CDLL:
    for name, arguments in signatures.items():
        function = getattr(library, name, None)  # the real library of an older version lacks some
        if function is not None:
            function.argtypes = arguments
            function.restype = c_int
    return library


def comm_hash(nccl: ctypes.CDLL, comm: int) -> int:
    """Return a communicator's hash, which the stub tells and the real library does not."""
    function = nccl.stubCommHash
    function.argtypes, function.restype = [_COMM], c_uint64
    return int(function(comm))
