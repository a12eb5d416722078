"""What a rank has its GPU do in one iteration, and the truth about each call that asks for it."""

import threading
import time
from ctypes import POINTER, addressof, byref, c_uint64, c_void_p, cast, create_string_buffer
from pathlib import Path

from tests.testbed.bindings import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT8, INT32, SUCCESS, SUM, Grid, load_cuda
from tests.testbed.communicators import Communicators
from tests.testbed.truth import CALL, FUNCTIONS, SYNC, SYNCS, TYPE_BYTES, TruthWriter
from tests.testbed.workload import RankPlan

_ONE = Grid(1, 1, 1)
_FUNCTION = {name: number for number, name in enumerate(FUNCTIONS)}


class Device:
    """A GPU with a stream to compute on and one for gradients, as frameworks have them."""

    def __init__(self, plan: RankPlan, communicators: Communicators, truth: TruthWriter, local_rank: int) -> None:
        self._workload = plan.workload
        self._comms = communicators
        self._nccl = communicators.nccl
        self._truth = truth
        self._rank = communicators.rank
        self.cuda = load_cuda(Path(plan.libraries))
        self.n_launches = 0
        self._depth = 0
        self._iteration = 0
        self._tid = threading.get_native_id()
        assert self.cuda.cudaSetDevice(local_rank) == SUCCESS, f"no GPU {local_rank}"
        self._compute, self._gradients = c_void_p(), c_void_p()
        self._event, self._end = c_void_p(), c_void_p()
        self.cuda.cudaStreamCreate(byref(self._compute))
        self.cuda.cudaStreamCreate(byref(self._gradients))
        self.cuda.cudaEventCreate(byref(self._event))
        self.cuda.cudaEventCreate(byref(self._end))
        memory = create_string_buffer(64)
        self._memory = addressof(memory)
        self._kept = memory
        self._kernel_ns = c_uint64()
        self._arguments = (c_void_p * 1)(addressof(self._kernel_ns))
        self._share = 1.0

    # ---- one call each ----

    def _kernel(self, milliseconds: float) -> None:
        self._kernel_ns.value = int(milliseconds * self._share * 1e6)
        self.n_launches += 1
        self.cuda.cudaLaunchKernel(None, _ONE, _ONE, cast(self._arguments, POINTER(c_void_p)), 0, self._compute)

    def _call(self, name: str, axis: str | None, count: int, data_type: int, peer: int, *arguments: object) -> None:
        """Call a function of NCCL and write it down."""
        comm = self._comms[axis] if axis else 0
        function = getattr(self._nccl, name)
        start_ns = time.monotonic_ns()
        result = function(*arguments)
        end_ns = time.monotonic_ns()
        number = _FUNCTION[name]
        row = (number, data_type, self._depth, result, self._tid, peer, count, comm, start_ns, end_ns, self._iteration)
        self._truth.add(CALL, *row)
        if result != SUCCESS:
            raise RuntimeError(f"{name} returned {result}")

    def _group(self, *, begins: bool) -> None:
        self._depth += 0 if begins else -1
        self._call("ncclGroupStart" if begins else "ncclGroupEnd", None, 0, 0, 0)
        self._depth += 1 if begins else 0

    def _all_reduce(self, axis: str, count: int, data_type: int, stream: c_void_p) -> None:
        comm, memory = self._comms[axis], self._memory
        self._call("ncclAllReduce", axis, count, data_type, 0, memory, memory, count, data_type, SUM, comm, stream)

    def _peer(self, name: str, n_bytes: int, peer: int) -> None:
        count = n_bytes // TYPE_BYTES[BFLOAT16]
        comm = self._comms["pp"]
        self._call(name, "pp", count, BFLOAT16, peer, self._memory, count, BFLOAT16, peer, comm, self._compute)

    def _synchronize(self, kind: str) -> None:
        number, function, arguments = {
            "stream": (0, self.cuda.cudaStreamSynchronize, (self._compute,)),
            "event": (1, self.cuda.cudaEventSynchronize, (self._end,)),
            "device": (2, self.cuda.cudaDeviceSynchronize, ()),
        }[kind]
        if kind == "event":
            self.cuda.cudaEventRecord(self._end, self._compute)
        start_ns = time.monotonic_ns()
        result = function(*arguments)
        end_ns = time.monotonic_ns()
        assert result == SUCCESS, f"{SYNCS[number]} returned {result}"
        self._truth.add(SYNC, number, 0, 0, result, self._tid, 0, 0, 0, start_ns, end_ns, self._iteration)

    # ---- an iteration ----

    def iterate(self, iteration: int, share: float) -> None:
        """Enqueue forward, backward and optimizer, doing a share of the common computation; wait where it is time."""
        workload = self._workload
        self._iteration, self._share = iteration, share
        for _ in range(workload.micro_batches):
            self._stage(workload.forward_ms, forward=True)
        for _ in range(workload.micro_batches):
            self._stage(2 * workload.forward_ms, forward=False)
        self._reduce_gradients()
        self._kernel(workload.optimizer_ms)
        if workload.rare_every and iteration % workload.rare_every == 0:
            self._rarer()
        self._all_reduce("world", 1, FLOAT32, self._compute)
        if iteration % workload.sync_every == 0:
            self._synchronize(workload.sync_kind)

    def _stage(self, milliseconds: float, *, forward: bool) -> None:
        """Pass one micro-batch through this pipeline stage."""
        workload = self._workload
        place, last = workload.place(self._rank, "pp"), workload.pp - 1
        step = 1 if forward else -1
        source, target = place - step, place + step
        if 0 <= source <= last:
            self._peer("ncclRecv", workload.p2p_bytes, source)
        if workload.tp > 1:
            for _ in range(workload.tp_calls):
                self._kernel(milliseconds / workload.tp_calls)
                self._all_reduce("tp", workload.tp_bytes // 2, BFLOAT16, self._compute)
        else:
            self._kernel(milliseconds)
        if 0 <= target <= last:
            self._peer("ncclSend", workload.p2p_bytes, target)

    def _reduce_gradients(self) -> None:
        """Reduce the buckets on their own stream, after what was computed, and before what is computed next."""
        workload = self._workload
        if workload.dp == 1:
            return
        self.cuda.cudaEventRecord(self._event, self._compute)
        self.cuda.cudaStreamWaitEvent(self._gradients, self._event, 0)
        comm, memory, stream = self._comms["dp"], self._memory, self._gradients
        count = workload.dp_bytes // TYPE_BYTES[FLOAT32]
        for _ in range(workload.dp_calls):
            if workload.dp_kind == "all_reduce":
                self._all_reduce("dp", count, FLOAT32, stream)
                continue
            scattered = (memory, memory, count, FLOAT32, SUM, comm, stream)
            self._call("ncclReduceScatter", "dp", count, FLOAT32, 0, *scattered)
        if workload.dp_kind == "reduce_scatter":
            gathered = (memory, memory, 2 * count, BFLOAT16, comm, stream)
            self._call("ncclAllGather", "dp", 2 * count, BFLOAT16, 0, *gathered)
        self.cuda.cudaEventRecord(self._event, self._gradients)
        self.cuda.cudaStreamWaitEvent(self._compute, self._event, 0)

    def _rarer(self) -> None:
        """Call each of the functions that training seldom needs."""
        comm, memory, stream = self._comms["world"], self._memory, self._compute
        root = self._workload.world_size - 1
        self._call("ncclBroadcast", "world", 101, INT32, root, memory, memory, 101, INT32, root, comm, stream)
        self._call("ncclBcast", "world", 103, FLOAT64, 0, memory, 103, FLOAT64, 0, comm, stream)
        self._call("ncclReduce", "world", 107, FLOAT16, root, memory, memory, 107, FLOAT16, SUM, root, comm, stream)
        self._call("ncclAlltoAll", "world", 109, INT8, 0, memory, memory, 109, INT8, comm, stream)
        self._call("ncclGather", "world", 113, FLOAT32, 0, memory, memory, 113, FLOAT32, 0, comm, stream)
        self._call("ncclScatter", "world", 127, FLOAT32, root, memory, memory, 127, FLOAT32, root, comm, stream)
        self._group(begins=True)
        self._all_reduce("world", 131, FLOAT64, stream)
        self._all_reduce("world", 137, BFLOAT16, stream)
        self._group(begins=False)

    def finish(self) -> None:
        """Wait for everything that is enqueued."""
        self._synchronize("device")
