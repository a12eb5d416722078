"""NVML's functions by way of pynvml, which no other module imports: calls, error codes, GPUs and their processes.

The library is loaded once for the whole process, as pynvml has it. Any thread may call; a call may take long where the
driver is in trouble, and cannot be ended.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pynvml

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIBRARY_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

REFUSALS = frozenset(
    (INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED)
)  # asking again soon would change nothing
OUTAGES = frozenset((UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_MISMATCH))  # of the library as a whole
_EVENTS_MAX = 64  # taken at a time
# What NVML, and DCGM after it, put where there is no value: "blank", "not found", "not supported", "not permitted".
_BLANKS = (
    (-1, -1),
    (2**31 - 16, 2**31 - 13),
    (2**32 - 1, 2**32 - 1),
    (2**47, 2**47 + 3),
    (2**63 - 16, 2**63 - 13),
    (2**64 - 1, 2**64 - 1),
)
_REMEDIES = {
    DRIVER_NOT_LOADED: "load it (modprobe nvidia) or reboot the node; the agent looks again by itself",
    LIBRARY_NOT_FOUND: "install the driver's libnvidia-ml.so.1 (Debian: libnvidia-ml1), give the agent's container "
    "the host's one, or leave this source out on a node without NVIDIA GPUs",
    LIBRARY_MISMATCH: "the driver was updated but not reloaded: reload its modules or reboot the node",
    FUNCTION_NOT_FOUND: "update the driver of this node",
    NOT_SUPPORTED: "nothing: this kind of GPU, or its present mode, does not have it",
    NO_PERMISSION: "run the agent as root, or let it use /dev/nvidiactl and /dev/nvidia*",
    GPU_NOT_FOUND: "look for NVIDIA GPUs in lspci; in a container, pass them into it",
    GPU_IS_LOST: "look for Xid in the kernel's log, drain the node and power it off and on",
}


class NvmlFailure(Exception):
    """A call that NVML did not answer with success; `code` is its nvmlReturn_t."""

    def __init__(self, code: int, text: str, function: str) -> None:
        super().__init__(f"{text} ({function}, NVML error {code})")
        self.code = code
        self.function = function

    @property
    def remedy(self) -> str:
        """What a person can do."""
        return remedy(self.code)


def remedy(code: int) -> str:
    """Return what a person can do about an error code."""
    return _REMEDIES.get(code, "compare with nvidia-smi and look for Xid in the kernel's log")


class GpuProcess(NamedTuple):
    """One process with a compute context on a GPU or a MIG device."""

    pid: int
    memory_bytes: int | None  # on that GPU
    uuid: str  # of the GPU, or of the MIG device


def call(name: str, *arguments: Any) -> Any:
    """Call one of NVML's functions by its name in pynvml. Raises NvmlFailure."""
    function = getattr(pynvml, name, None)
    if function is None:
        raise NvmlFailure(FUNCTION_NOT_FOUND, "this pynvml lacks the function", name)
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlFailure(error.value, str(error), name) from error
    except Exception as error:  # such as a name that is not text: one answer that pynvml cannot take in
        raise NvmlFailure(UNKNOWN, f"{type(error).__name__}: {error}", name) from error


def open_library(path: str | None) -> None:
    """Load the library, from `path` or where the system has it, and initialise it. Raises NvmlFailure."""
    if path is not None and path != getattr(pynvml.nvmlLib, "_name", None):
        unload_library()
        try:
            pynvml.nvmlLib = ctypes.CDLL(path)
        except OSError as error:
            raise NvmlFailure(LIBRARY_NOT_FOUND, f"cannot load {path}: {error}", "dlopen") from error
    try:
        call("nvmlInit")
    except NvmlFailure as failure:
        if failure.code == LIBRARY_MISMATCH:
            unload_library()
        raise


def close_library() -> None:
    """Undo open_library(); no thread may be in a call. Raises NvmlFailure, in an outage at the latest."""
    call("nvmlShutdown")


def unload_library() -> None:
    """Let go of the file, so that what a driver update has put in its place is loaded next."""
    if pynvml.nvmlLib is None:
        return
    handle = pynvml.nvmlLib._handle  # noqa: SLF001 (ctypes offers no other way to unload)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 (it points into the old file)
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


def versions() -> str:
    """Return the versions of library and driver, for the log."""
    library, driver = call("nvmlSystemGetNVMLVersion"), call("nvmlSystemGetDriverVersion")
    return f"NVML {library}, driver {driver}"


def count_gpus() -> int:
    """Return how many GPUs NVML found when it was initialised, at least one. Raises NvmlFailure."""
    count = int(call("nvmlDeviceGetCount"))
    if not count:
        raise NvmlFailure(GPU_NOT_FOUND, "NVML finds no GPU", "nvmlDeviceGetCount")
    return count


def find_gpu(index: int) -> tuple[Any, str, str]:
    """Return the handle, UUID and name of a GPU by NVML's index. Raises NvmlFailure."""
    handle = call("nvmlDeviceGetHandleByIndex", index)
    return handle, str(call("nvmlDeviceGetUUID", handle)), str(call("nvmlDeviceGetName", handle))


def is_blank(value: float) -> bool:
    """Return whether a value stands for none."""
    return any(low <= value <= high for low, high in _BLANKS)


def field_values(handle: Any, fields: Sequence[int | tuple[int, int]]) -> list[float | None]:
    """Return the values of NVML's numbered fields, or of (field, scope), None where it has none. Raises NvmlFailure."""
    found: list[float | None] = []
    for value in call("nvmlDeviceGetFieldValues", handle, list(fields)):
        if value.nvmlReturn in {*OUTAGES, GPU_IS_LOST}:
            raise NvmlFailure(value.nvmlReturn, str(pynvml.NVMLError(value.nvmlReturn)), "nvmlDeviceGetFieldValues")
        number = getattr(value.value, _MEMBERS.get(value.valueType, "ullVal"))
        found.append(None if value.nvmlReturn or is_blank(number) else number)
    return found


_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}  # by nvmlValueType_t


def processes(handle: Any, uuid: str) -> list[GpuProcess]:
    """Return the compute processes of a GPU, those of its MIG devices by their own UUIDs. Raises NvmlFailure."""
    found = [process for device, name in _mig_devices(handle) for process in _processes(device, name)]
    known = {process.pid for process in found}
    try:
        return found + [process for process in _processes(handle, uuid) if process.pid not in known]
    except NvmlFailure as failure:
        if found and failure.code in REFUSALS:  # as a whole it is not told to everybody in MIG mode
            return found
        raise


def _processes(handle: Any, uuid: str) -> Iterator[GpuProcess]:
    try:
        listed = call("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    except NvmlFailure as failure:
        if failure.code != FUNCTION_NOT_FOUND:
            raise
        listed = call("nvmlDeviceGetComputeRunningProcesses_v2", handle)
    for process in listed:
        if process.pid:  # 0 is a process in a PID namespace that this one does not see
            yield GpuProcess(process.pid, process.usedGpuMemory, uuid)


def _mig_devices(handle: Any) -> Iterator[tuple[Any, str]]:
    """Yield handle and UUID of each MIG device of a GPU."""
    try:
        current, _ = call("nvmlDeviceGetMigMode", handle)
        count = call("nvmlDeviceGetMaxMigDeviceCount", handle) if current else 0
    except NvmlFailure as failure:
        if failure.code in REFUSALS:
            return
        raise
    for index in range(count):
        try:
            device = call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            yield device, str(call("nvmlDeviceGetUUID", device))
        except NvmlFailure as failure:
            if failure.code in {*OUTAGES, GPU_IS_LOST}:
                raise


def watch_errors(handle: Any) -> Any:
    """Begin to collect a GPU's XID errors: an event set for new_errors() and forget_errors(). Raises NvmlFailure."""
    events = call("nvmlEventSetCreate")
    try:
        call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)
    except NvmlFailure:
        forget_errors(events)
        raise
    return events


def new_errors(events: Any) -> list[int]:
    """Return the XIDs since the last call, without waiting for one. Raises NvmlFailure."""
    found: list[int] = []
    while len(found) < _EVENTS_MAX:
        try:
            found.append(int(call("nvmlEventSetWait_v2", events, 0).eventData))
        except NvmlFailure as failure:
            if failure.code == TIMEOUT or found:
                break
            raise
    return found


def forget_errors(events: Any) -> None:
    """End what watch_errors() began. Raises NvmlFailure."""
    call("nvmlEventSetFree", events)
