"""The composition root of a node's agent: from settings to a loop with all its sources."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agents.batches import Assembler
from agents.clock import Clock
from agents.collector import Collector, Limit
from agents.communicators import Registry
from agents.config import AgentConfig
from agents.ebpf.libraries import Library, identify
from agents.ebpf.symbols import NotALibrary, read_image
from agents.ebpf.tracer import Tracer
from agents.host import HostCollector
from agents.host_programs import HostPrograms
from agents.infiniband import Infiniband
from agents.job_identity import Discovery
from agents.late import Late
from agents.loop import Loop, Outlet
from agents.markers import MarkerCollector
from agents.nccl import NcclCollector
from agents.nccl_inspector import InspectorCollector
from agents.nvml import NvmlCollector
from agents.placing import CallTimes
from agents.processes import Processes
from agents.source import Source
from agents.tcp_peers import TcpPeers


def build(config: AgentConfig, publisher: Outlet) -> Loop:
    """Return an agent's loop; nothing is opened yet."""
    node = config.node or socket.gethostname()
    clock = Clock()
    limits: list[Limit] = []
    state = _state_folder(config, limits)
    registry = Registry(None if state is None else state / "communicators.json")
    processes = Processes(config.identity.names)
    call_times = CallTimes()
    late = Late(registry)
    tracer = Tracer(
        aggregate=not config.nccl.raw_calls,
        count_launches=config.nccl.count_launches,
        ring_bytes=config.nccl.ring_bytes,
        probe_dear=config.nccl.probe_dear_functions,
    )
    nccl = NcclCollector(tracer, registry, clock, call_times=call_times, late=late, key_of=processes.key_of)
    nvml = NvmlCollector(config.nvml_library or None, clock=clock)
    collectors: Mapping[str, Callable[[], Collector]] = {
        "nccl": lambda: nccl,
        "host": lambda: HostCollector(clock=clock, programs=HostPrograms()),
        "nvml": lambda: nvml,
        "inspector": lambda: InspectorCollector(
            call_times, clock, state_file=None if state is None else state / "inspector.json"
        ),
        "tcp": lambda: TcpPeers(clock=clock),
        "infiniband": lambda: Infiniband(
            clock=clock, root=Path(config.sysfs), bytes_per_tick=config.rdma_bytes_per_tick or None
        ),
        "markers": lambda: MarkerCollector(config.markers),
    }
    is_on = {name: name not in config.off for name in collectors}
    return Loop(
        sources=[Source(make()) for name, make in collectors.items() if is_on[name]],
        processes=processes,
        discovery=Discovery(config.identity, registry, node, observes_calls=is_on["nccl"]),
        assembler=Assembler(
            node, agent_start_ns=time.time_ns(), flush_interval_ns=round(config.flush_interval_s * 1e9)
        ),
        publisher=publisher,
        clock=clock,
        flush_interval_s=config.flush_interval_s,
        nccl=nccl if is_on["nccl"] else None,
        nvml=nvml if is_on["nvml"] else None,
        libraries=_libraries(config, limits),
        setup_limits=limits,
    )


def _libraries(config: AgentConfig, limits: list[Limit]) -> list[Library]:
    """Return the libraries to observe before any process uses them; adds to `limits` those that cannot be."""
    found = []
    for path in config.nccl.libraries:
        try:
            image = read_image(path, ("ncclAllReduce", "cudaStreamSynchronize"))
            identity = identify(path, image.build_id)
        except (OSError, NotALibrary) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            remedy = "name the right file in [agent.nccl] libraries; it is observed all the same once a process uses it"
            limits.append(Limit(f"{path} before a process uses it", why or type(error).__name__, remedy))
            continue
        kind = "nccl" if "ncclAllReduce" in image.symbols else "cudart"
        found.append(Library(path, identity, kind, name=path))
    return found


def _state_folder(config: AgentConfig, limits: list[Limit]) -> Path | None:
    """Return the folder for what has to survive a restart, made if need be; None, said in `limits`, if it cannot be."""
    path = config.state_path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        what, why = "the communicators of running jobs after a restart of the agent", f"{path} cannot be written"
        limits.append(
            Limit(what, f"{why} ({error.strerror})", "set [agent] state_dir to a folder that the agent may write to")
        )
        return None
    return path
