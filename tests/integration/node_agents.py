"""One real agent process for each node of a testbed: `failslow-agent run --config`, observing real processes.

All nodes of a testbed are on this machine, so each agent is told to observe only the processes whose environment has
its node's name and a word of this run: other people's jobs, and other runs of these tests, are none of its business.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.live_tools import REPOSITORY, wait_until
from tests.testbed import libraries, nvml_stub

RUN_VARIABLE = "FAILSLOW_TEST_RUN"
NODE_VARIABLE = "STUB_NCCL_NODE"  # as the testbed says it
FLUSH_INTERVAL_S = 0.5
PATIENCE_S = 120.0  # four compile their programs at once

_CONFIG = """\
[agent]
bootstrap = "{bootstrap}"
node = "{node}"
flush_interval_s = {flush_interval_s}
state_dir = "{folder}/state"
nvml_library = "{nvml}"

[agent.nccl]
libraries = [{libraries}]

[agent.identity]
select = {{ {run_variable} = "{run}", {node_variable} = "{node}" }}

[agent.markers]
socket = ""
"""


class NodeAgents:
    """The agents of some nodes, started on entry and ended on exit, each by its pid.

    Jobs to observe are started with `environment` in that of their ranks, and with the GPUs' state in `gpu_folder`.
    """

    def __init__(self, nodes: Sequence[str], bootstrap: str, folder: Path) -> None:
        self.gpu_folder = folder
        self.environment = {RUN_VARIABLE: uuid.uuid4().hex}
        self._bootstrap = bootstrap
        self._folders = {node: folder / node for node in nodes}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._nccl = sorted(libraries.build().iterdir())
        self._nvml = nvml_stub.build()
        with ExitStack() as stack:
            stack.callback(self._kill)
            for number, node in enumerate(self._folders):
                nvml_stub.StubState(self.gpu_folder / f"gpus{number}", 1)
                self._start(node, number)
            for node in self._folders:
                self._wait_until_it_observes(node)
            self._stack = stack.pop_all()
        return self

    def _start(self, node: str, number: int) -> None:
        folder = self._folders[node]
        folder.mkdir()
        config = folder / "failslow.toml"
        config.write_text(
            _CONFIG.format(
                bootstrap=self._bootstrap,
                node=node,
                flush_interval_s=FLUSH_INTERVAL_S,
                folder=folder,
                nvml=self._nvml,
                libraries=", ".join(f'"{path}"' for path in self._nccl),
                run_variable=RUN_VARIABLE,
                run=self.environment[RUN_VARIABLE],
                node_variable=NODE_VARIABLE,
            )
        )
        with self._log(node).open("wb") as log:
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", "agents", "run", "--config", str(config)],
                cwd=REPOSITORY,
                env=os.environ | {nvml_stub.STATE_VARIABLE: str(self.gpu_folder / f"gpus{number}")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_until_it_observes(self, node: str) -> None:
        """Wait until the libraries are probed, so that the agent sees communicators from their creation on."""

        def is_ready() -> bool:
            assert self._processes[node].poll() is None, f"the agent of {node} has ended:\n{self.said(node)}"
            return all(f"{path} is observed" in self.said(node) for path in self._nccl)

        wait_until(is_ready, f"the agent of {node} to observe NCCL and CUDA", PATIENCE_S)

    def _log(self, node: str) -> Path:
        return self._folders[node] / "agent.log"

    def said(self, node: str) -> str:
        """What an agent has logged so far."""
        return self._log(node).read_text(errors="replace")

    def end(self) -> None:
        """Tell all agents to end, and wait until they have."""
        for process in self._processes.values():
            process.terminate()
        for node, process in self._processes.items():
            status = process.wait(PATIENCE_S)
            assert status == 0, f"the agent of {node} ended badly:\n{self.said(node)[-4000:]}"

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self.end()
