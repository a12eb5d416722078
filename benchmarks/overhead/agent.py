"""What the agent itself takes: processor time and memory of `failslow-agent run` beside the job, with a broker."""

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from agents.host_files import after_name
from pipeline.broker import EmbeddedBroker
from tests.testbed import nvml_stub
from tests.testbed.launch import REPOSITORY, Testbed
from tests.testbed.workload import Workload

_RUN_VARIABLE = "FAILSLOW_OVERHEAD_RUN"
_PATIENCE_S = 60.0
_SETTLE_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CONFIG = """\
[agent]
bootstrap = "{bootstrap}"
state_dir = "{folder}/state"
nvml_library = "{nvml}"

[agent.nccl]
libraries = [{libraries}]

[agent.identity]
select = {{ {variable} = "{run}" }}

[agent.markers]
socket = ""
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """By one agent, with every source that this machine has."""

    cpu_share: float  # of one core
    start_cpu_s: float  # until the job was observed
    resident_bytes: int
    anonymous_bytes: int  # of those, what is not a file's
    n_ranks: int


def measure_agent(workload: Workload, copies: Path, folder: Path, seconds: float) -> Taken:
    """Run an agent with its defaults beside a job, and a broker for what it sends."""
    run = uuid.uuid4().hex
    nvml_stub.StubState(folder / "gpus0", workload.world_size)
    config, log = folder / "failslow.toml", folder / "agent.log"
    with EmbeddedBroker() as broker:
        config.write_text(
            _CONFIG.format(
                bootstrap=broker.bootstrap,
                folder=folder,
                nvml=nvml_stub.build(),
                libraries=", ".join(f'"{path}"' for path in sorted(copies.iterdir())),
                variable=_RUN_VARIABLE,
                run=run,
            )
        )
        with log.open("wb") as said:
            agent = subprocess.Popen(
                [sys.executable, "-m", "agents", "run", "--config", str(config)],
                cwd=REPOSITORY,
                env=os.environ | {nvml_stub.STATE_VARIABLE: str(folder / "gpus0")},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        try:
            _wait_for(agent, log, [f"{path} is observed" for path in copies.iterdir()])
            environment = {_RUN_VARIABLE: run}
            with Testbed(workload, library_folder=copies, gpu_folder=folder, environment=environment) as testbed:
                _wait_for(agent, log, [f"rank {rank} of" for rank in range(workload.world_size)])
                time.sleep(_SETTLE_S)
                return _watch(agent.pid, seconds, len(testbed.pids))
        finally:
            agent.terminate()
            agent.wait(_PATIENCE_S)


def _watch(pid: int, seconds: float, n_ranks: int) -> Taken:
    start_s, begin_s = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    spent_s, lasted_s = _cpu_s(pid) - start_s, time.monotonic() - begin_s
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, anonymous = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return Taken(spent_s / lasted_s, start_s, resident, anonymous, n_ranks)


def _cpu_s(pid: int) -> float:
    fields = after_name(Path(f"/proc/{pid}/stat").read_text())
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _wait_for(agent: "subprocess.Popen[bytes]", log: Path, words: list[str]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not all(each in (said := log.read_text(errors="replace")) for each in words):
        assert agent.poll() is None, f"the agent has ended:\n{said}"
        assert time.monotonic() < until_s, f"the agent did not say {words}:\n{said}"
        time.sleep(0.1)
