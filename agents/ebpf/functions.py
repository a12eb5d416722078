"""The functions that are observed, and the program in nccl.bpf.c that observes each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One public function of NCCL or of the CUDA runtime."""

    symbol: str
    entry: str  # program
    leave: str | None = None  # program
    is_hot: bool = True  # called so often that a dear probe would be felt
    is_launch: bool = False
    is_group: bool = False  # has no row of its own


def _calls(entry: str, *symbols: str) -> list[Function]:
    return [Function(symbol=symbol, entry=entry, leave="leave_call") for symbol in symbols]


def _creation(symbol: str, entry: str, leave: str = "leave_creation") -> Function:
    return Function(symbol=symbol, entry=entry, leave=leave, is_hot=False)


NCCL = (
    *_calls("enter_all_reduce", "ncclAllReduce", "ncclAllReduceConfig"),
    *_calls("enter_reduce_scatter", "ncclReduceScatter", "ncclReduceScatterConfig"),
    *_calls("enter_all_gather", "ncclAllGather", "ncclAllGatherConfig"),
    *_calls("enter_all_to_all", "ncclAlltoAll", "ncclAlltoAllConfig"),
    *_calls("enter_broadcast", "ncclBroadcast", "ncclBroadcastConfig"),
    *_calls("enter_reduce", "ncclReduce", "ncclReduceConfig"),
    *_calls("enter_rooted", "ncclGather", "ncclGatherConfig", "ncclScatter", "ncclScatterConfig"),
    *_calls("enter_send", "ncclSend"),
    *_calls("enter_recv", "ncclRecv"),
    Function(symbol="ncclGroupStart", entry="enter_group_start", is_group=True),
    Function(symbol="ncclGroupEnd", entry="enter_group_end", is_group=True),
    Function(symbol="ncclGroupSimulateEnd", entry="enter_group_end", is_group=True),
    _creation("ncclCommInitRank", "enter_init_rank"),
    _creation("ncclCommInitRankConfig", "enter_init_rank_config"),
    _creation("ncclCommInitRankScalable", "enter_init_rank_scalable"),
    _creation("ncclCommInitAll", "enter_init_all", "leave_init_all"),
    _creation("ncclCommSplit", "enter_split"),
    _creation("ncclCommShrink", "enter_shrink"),
    _creation("ncclCommGrow", "enter_grow"),
    Function(symbol="ncclCommDestroy", entry="enter_destroy", is_hot=False),
    Function(symbol="ncclCommAbort", entry="enter_abort", is_hot=False),
)
# It calls ncclBroadcast through the library's own table, so nothing is missed where it is left alone.
BCAST = Function(symbol="ncclBcast", entry="enter_bcast", leave="leave_call")

SYNCS = tuple(
    Function(symbol=symbol + suffix, entry=entry, leave="leave_sync")
    for symbol, entry, suffixes in (
        ("cudaStreamSynchronize", "enter_stream_sync", ("", "_ptsz")),
        ("cudaEventSynchronize", "enter_event_sync", ("",)),
        ("cudaDeviceSynchronize", "enter_device_sync", ("",)),
    )
    for suffix in suffixes
)
LAUNCHES = tuple(
    Function(symbol=symbol + suffix, entry="count_launch", is_launch=True)
    for symbol in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch")
    for suffix in ("", "_ptsz")
)

# By the numbers that nccl.bpf.c gives the functions that make and end communicators.
COMMUNICATOR_FUNCTIONS = (
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommInitRankScalable",
    "ncclCommInitAll",
    "ncclCommSplit",
    "ncclCommShrink",
    "ncclCommGrow",
    "ncclCommDestroy",
    "ncclCommAbort",
)
ENDS = {"ncclCommDestroy", "ncclCommAbort"}
CHILDREN = {"ncclCommSplit", "ncclCommShrink"}
