"""What the kernel and the agent's own rights have to offer before anything is loaded, said in words to act on."""

import os
import platform
from pathlib import Path

from agents.collector import NotAvailable

MACHINES = ("x86_64", "aarch64")
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel


def require(status: Path = Path("/proc/self/status"), namespace: Path = Path("/proc/self/ns/pid")) -> None:
    """Raise NotAvailable where programs cannot be loaded, or would speak of processes by other numbers than we do."""
    if platform.machine() not in MACHINES:
        raise NotAvailable(f"the probes do not know {platform.machine()}", f"run the agent on {' or '.join(MACHINES)}")
    effective = next(int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("CapEff:"))
    held = {name for name, bit in _CAPABILITIES.items() if effective >> bit & 1}
    if "CAP_SYS_ADMIN" not in held and not held >= {"CAP_BPF", "CAP_PERFMON"}:
        raise NotAvailable(
            "the agent may not load BPF programs",
            "run it as root, or give it CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE",
        )
    if os.stat(namespace).st_ino != _FIRST_PID_NAMESPACE:
        raise NotAvailable(
            "the agent is in a PID namespace of its own, where processes have other numbers than in the kernel",
            "run its container with the node's PID namespace (docker --pid=host, Kubernetes hostPID: true)",
        )
