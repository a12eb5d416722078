"""The stub libraries have the interface of the real ones: names, values, first instructions, hashes, streams."""

import ctypes
import re
import subprocess
import time
from collections.abc import Callable
from ctypes import POINTER, addressof, byref, c_int, c_uint64, c_void_p, cast
from pathlib import Path

import pytest

from agents.nccl_hash import child_hash, unique_id_hash
from tests.conftest import give_up
from tests.testbed import bindings, libraries
from tests.testbed.bindings import FLOAT32, INVALID_ARGUMENT, SUCCESS, SUM, Config, Grid, UniqueId
from tests.testbed.truth import FUNCTIONS

NOT_READY = 600
PUSH, ENDBR64 = b"\x55", b"\xf3\x0f\x1e\xfa"
HOT = (*FUNCTIONS, "ncclCommSplit", "ncclCommInitRank", "ncclCommDestroy")
HOT_CUDA = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaLaunchKernel",
    "cudaEventQuery",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return libraries.build()
    except libraries.StubMissing as error:
        give_up(str(error))


@pytest.fixture
def nccl(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setenv("STUB_NCCL_DIR", str(tmp_path))
    return bindings.load_nccl(folder)


@pytest.fixture
def cuda(folder: Path) -> ctypes.CDLL:
    return bindings.load_cuda(folder)


def new_id(nccl: ctypes.CDLL) -> UniqueId:
    unique_id = UniqueId()
    assert nccl.ncclGetUniqueId(byref(unique_id)) == SUCCESS
    return unique_id


def lone(nccl: ctypes.CDLL, unique_id: UniqueId) -> int:
    """A communicator of one rank."""
    comm = c_void_p()
    assert nccl.ncclCommInitRank(byref(comm), 1, unique_id, 0) == SUCCESS
    assert comm.value
    return comm.value


def first_bytes(function: Callable[..., int], size: int) -> bytes:
    address = cast(function, c_void_p).value  # type: ignore[arg-type]
    assert address
    return ctypes.string_at(address, size)


def exported(library: Path) -> dict[str, str]:
    """Symbols and their kinds, as nm says them; the version of a versioned one belongs to its name."""
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {name: kind for kind, name in re.findall(r"^\w+ (\w) (\S+)$", listing, re.MULTILINE)}


def test_every_function_of_nccl_is_weak_and_has_a_strong_alias(folder: Path) -> None:
    symbols = exported(folder / "libnccl.so.2")
    names = {name for name in symbols if name.startswith("nccl")}
    assert names >= {*HOT, "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommAbort", "ncclCommFinalize"}
    assert {symbols[name] for name in names} == {"W"}
    assert {symbols[f"p{name}"] for name in names} == {"T"}


def test_functions_of_cuda_are_versioned_as_in_the_real_runtime(folder: Path) -> None:
    symbols = exported(folder / "libcudart.so.12")
    assert {f"{name}@@libcudart.so.12" for name in HOT_CUDA} <= symbols.keys()


def test_hot_functions_begin_with_a_push_which_a_probe_emulates(nccl: ctypes.CDLL, cuda: ctypes.CDLL) -> None:
    begins = {name: first_bytes(getattr(nccl, name), 1) for name in HOT}
    begins |= {name: first_bytes(getattr(cuda, name), 1) for name in HOT_CUDA}
    assert set(begins.values()) == {PUSH}


def test_the_branch_protected_build_begins_with_endbr64(folder: Path) -> None:
    protected = bindings.load_nccl(libraries.build(branch_protected=True))
    assert {first_bytes(getattr(protected, name), 4) for name in HOT} == {ENDBR64}


def test_the_version_is_said(nccl: ctypes.CDLL) -> None:
    version = c_int()
    assert nccl.ncclGetVersion(byref(version)) == SUCCESS
    assert version.value == 23203


def test_calls_without_a_communicator_are_refused_as_the_real_library_does(nccl: ctypes.CDLL) -> None:
    two, one = (None, None, 7, FLOAT32), (None, 7, FLOAT32)
    results = [
        nccl.ncclAllReduce(*two, SUM, None, None),
        nccl.ncclReduceScatter(*two, SUM, None, None),
        nccl.ncclAllGather(*two, None, None),
        nccl.ncclBroadcast(*two, 0, None, None),
        nccl.ncclBcast(*one, 0, None, None),
        nccl.ncclReduce(*two, SUM, 0, None, None),
        nccl.ncclSend(*one, 0, None, None),
        nccl.ncclRecv(*one, 0, None, None),
        nccl.ncclAlltoAll(*two, None, None),
        nccl.ncclGather(*two, 0, None, None),
        nccl.ncclScatter(*two, 0, None, None),
        nccl.ncclCommSplit(None, 0, 0, None, None),
    ]
    assert results == [INVALID_ARGUMENT] * 12


@pytest.mark.parametrize(("data_type", "root", "expected"), [(11, 0, 0), (12, 0, 4), (FLOAT32, 1, 4), (FLOAT32, -1, 4)])
def test_types_and_roots_beyond_the_last_are_refused(
    nccl: ctypes.CDLL, data_type: int, root: int, expected: int
) -> None:
    comm = lone(nccl, new_id(nccl))
    assert nccl.ncclBroadcast(None, None, 5, data_type, root, comm, None) == expected
    assert nccl.ncclCommDestroy(comm) == SUCCESS


def test_a_communicators_hash_is_nccls_hash_of_its_unique_id(nccl: ctypes.CDLL) -> None:
    unique_id = UniqueId()
    unique_id.internal[:] = [byte * 37 % 256 for byte in range(128)]
    comm = lone(nccl, unique_id)
    assert bindings.comm_hash(nccl, comm) == unique_id_hash(bytes(unique_id))
    nccl.ncclCommDestroy(comm)


def test_a_childs_hash_follows_from_its_parents_the_split_and_the_color(nccl: ctypes.CDLL) -> None:
    parent = lone(nccl, new_id(nccl))
    parent_hash = bindings.comm_hash(nccl, parent)
    child = c_void_p()
    for split, color in ((1, 5), (2, 5), (3, 0)):
        assert nccl.ncclCommSplit(parent, color, 0, byref(child), None) == SUCCESS
        assert bindings.comm_hash(nccl, child.value or 0) == child_hash(parent_hash, split, color)


def test_a_rank_without_a_color_gets_no_communicator(nccl: ctypes.CDLL) -> None:
    child = c_void_p(1)
    assert nccl.ncclCommSplit(lone(nccl, new_id(nccl)), -1, 0, byref(child), None) == SUCCESS
    assert child.value is None


def test_in_a_group_a_new_communicator_is_known_at_once_and_a_split_one_at_the_end(nccl: ctypes.CDLL) -> None:
    parent = lone(nccl, new_id(nccl))
    new, child = c_void_p(), c_void_p(1)
    nccl.ncclGroupStart()
    nccl.ncclCommInitRank(byref(new), 1, new_id(nccl), 0)
    nccl.ncclCommSplit(parent, 3, 0, byref(child), None)
    assert (bool(new.value), child.value) == (True, None)
    assert nccl.ncclGroupEnd() == SUCCESS
    assert child.value


def test_a_communicator_that_blocks_nobody_is_ready_later(nccl: ctypes.CDLL) -> None:
    comm, state = c_void_p(), c_int(bindings.IN_PROGRESS)
    settings: Config = bindings.config("later", blocking=False)
    result = nccl.ncclCommInitRankConfig(byref(comm), 1, new_id(nccl), 0, byref(settings))
    assert result == bindings.IN_PROGRESS
    until_s = time.monotonic() + 5
    while state.value == bindings.IN_PROGRESS and time.monotonic() < until_s:
        assert nccl.ncclCommGetAsyncError(comm, byref(state)) == SUCCESS
    assert state.value == SUCCESS


def launch(cuda: ctypes.CDLL, stream: c_void_p, milliseconds: float) -> None:
    kernel_ns = c_uint64(int(milliseconds * 1e6))
    arguments = (c_void_p * 1)(addressof(kernel_ns))
    one = Grid(1, 1, 1)
    assert cuda.cudaLaunchKernel(None, one, one, cast(arguments, POINTER(c_void_p)), 0, stream) == SUCCESS


def test_a_kernel_takes_its_time_on_its_stream_and_holds_up_nobody_else(cuda: ctypes.CDLL) -> None:
    busy, free = c_void_p(), c_void_p()
    cuda.cudaStreamCreate(byref(busy))
    cuda.cudaStreamCreate(byref(free))
    start_s = time.monotonic()
    for _ in range(3):
        launch(cuda, busy, 50)
    assert cuda.cudaStreamSynchronize(free) == SUCCESS
    assert cuda.cudaStreamQuery(busy) == NOT_READY
    assert cuda.cudaStreamSynchronize(busy) == SUCCESS
    assert 0.15 <= time.monotonic() - start_s < 0.4
    assert cuda.cudaStreamQuery(busy) == SUCCESS


def test_a_stream_waits_for_another_ones_event(cuda: ctypes.CDLL) -> None:
    first, second, event = c_void_p(), c_void_p(), c_void_p()
    cuda.cudaStreamCreate(byref(first))
    cuda.cudaStreamCreate(byref(second))
    cuda.cudaEventCreate(byref(event))
    launch(cuda, first, 60)
    cuda.cudaEventRecord(event, first)
    cuda.cudaStreamWaitEvent(second, event, 0)
    assert cuda.cudaEventQuery(event) == NOT_READY
    cuda.cudaStreamSynchronize(second)
    assert cuda.cudaEventQuery(event) == SUCCESS


def test_the_state_file_slows_down_one_gpu_while_it_works(
    cuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "gpus"
    monkeypatch.setenv("STUB_NVML_STATE", str(state))
    durations_s = []
    for said in ("0 slowdown 1\n", "1 slowdown 9\n* temperature 61\n", "* temperature 61\n0 slowdown 3\n", ""):
        written = tmp_path / "new"
        written.write_text(said)
        written.replace(state)
        start_s = time.monotonic()
        launch(cuda, c_void_p(), 40)
        cuda.cudaDeviceSynchronize()
        durations_s.append(time.monotonic() - start_s)
    assert min(durations_s) >= 0.04
    assert [duration_s >= 0.12 for duration_s in durations_s] == [False, False, True, False]
