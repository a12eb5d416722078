"""What is missing is said so that a person can act on it, by `check` and `run`, and the agent starts with the rest."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.broker import EmbeddedBroker
from schemas.events import Sensor
from tests.agents.agent_process import PATIENCE_S, Agent, Events
from tests.agents.probed import open_tracer
from tests.agents.test_agent_truth import check_all
from tests.conftest import give_up
from tests.integration.live_tools import REPOSITORY, wait_until
from tests.testbed.launch import missing
from tests.testbed.workload import Workload

pytestmark = pytest.mark.kernel

# One capability is kept: Python may be in root's home.
NOBODY = (
    "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs",
    *(f"--{which}=-all,+dac_read_search" for which in ("inh-caps", "ambient-caps", "bounding-set")), "env",
)  # fmt: skip
NOWHERE = "127.0.0.1:1"
NO_BCC = {"agents.ebpf.bcc_backend._PLACES": ()}
SOON = {"settle_s": "1.0"}
WORKLOAD = Workload(dp=2, forward_ms=5)


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    reason = missing()
    if reason:
        give_up(reason)
    open_tracer().close()


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as broker:
        yield broker


def check(agent: Agent) -> tuple[int, str]:
    """Return the exit code of `check` and what it says, in one line."""
    done = subprocess.run(
        agent.command("check", "--seconds", "1"),
        cwd=REPOSITORY,
        env=agent.variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stderr == ""
    return done.returncode, re.sub(r"\s+", " ", done.stdout)


def test_where_all_is_well_check_says_what_is_seen(broker: EmbeddedBroker, tmp_path: Path) -> None:
    agent = Agent(tmp_path / "agent", broker.bootstrap)
    with agent.testbed(WORKLOAD, "looked-at", network=False) as testbed:
        testbed.wait_until(3)
        code, said = check(agent)
    assert code == 0
    for source in ("nccl", "host", "nvml", "tcp", "markers"):
        assert f"ok {source}: " in said
    assert "NCCL_INSPECTOR_ENABLE=1" in said
    assert f"the broker at {broker.bootstrap} answers" in said
    assert "processes that call NCCL" in said


def test_each_thing_that_is_missing_is_said_with_its_remedy(tmp_path: Path) -> None:
    no_nccl, no_library = tmp_path / "libnccl.so.2", tmp_path / "nowhere" / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", str(no_nccl)], check=True)
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    agent = Agent(
        tmp_path / "agent",
        NOWHERE,
        agent={
            "nvml_library": f'"{tmp_path}/libnvidia-ml.so.1"',
            "state_dir": f'"{in_the_way}/state"',
            "sysfs": f'"{tmp_path}"',
        },
        nccl={"libraries": f'["{no_nccl}", "{no_library}"]'},
        markers={"socket": f'"{in_the_way}/markers.sock"'},
    )
    code, said = check(agent)
    assert code == 2, "the broker does not answer"
    assert f"no broker answers at {NOWHERE}: is the address in [agent] bootstrap right, and the broker running?" in said
    assert f"{no_library} before a process uses it" in said
    assert f"No such file or directory: '{no_library}': name the right file" in said
    assert f"{no_nccl}: it exports none of the functions that are observed" in said
    assert re.search(rf"!! nvml: not seen .*{tmp_path}/libnvidia-ml.so.1", said)
    assert f"{in_the_way}/state cannot be written (Not a directory): set [agent] state_dir" in said
    assert re.search(r"!! markers: not seen .*markers.sock", said)
    assert "ok nccl: " in said
    assert "ok host: " in said


def test_without_rights_check_names_those_that_are_missing(broker: EmbeddedBroker, tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        give_up("no setpriv: install Debian's util-linux")
    agent = Agent(tmp_path / "agent", broker.bootstrap, wrapper=NOBODY)
    agent.state.mkdir(mode=0o700)
    code, said = check(agent)
    assert code == 0, "TCP connections and NVML can be looked at all the same"
    assert "this is user 65534: root sees most; docs/agent-privileges.md says which capabilities" in said
    assert "the agent may not load BPF programs: run it as root, or give it CAP_BPF, CAP_PERFMON" in said
    assert f"{agent.state} cannot be written (permission denied): set [agent] state_dir" in said
    assert re.search(r"libraries of .* cannot be|run the agent as root, or with CAP_SYS_PTRACE", said)
    assert "Traceback" not in said


def test_without_bcc_the_agent_runs_with_what_it_has(broker: EmbeddedBroker, tmp_path: Path) -> None:
    agent = Agent(tmp_path / "agent", broker.bootstrap, is_to_observe=False, patches=NO_BCC, identity=SOON)
    with Events(broker.bootstrap) as events, agent:
        agent.wait_for("nccl is not observed: the Python package of bcc is not installed: install it with `apt install")
        agent.wait_for("markers is observed")
        with agent.testbed(WORKLOAD, "blind", network=False) as testbed:
            wait_until(lambda: any(len(b.host_samples) for b in events.of("blind").batches), "host signals")
            testbed.stop()
            batches = events.wait_for_end("blind").batches
        assert agent.end() == 0
        assert {rank.rank for batch in batches for rank in batch.ranks} == {0, 1}
        assert not any(batch.sensors & (Sensor.HOST_CALL | Sensor.SYNC) for batch in batches)
        assert all(batch.sensors & Sensor.HOST for batch in batches)
        assert "blocked and stopped time" in agent.said()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one page."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "failslow-test", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_garbage_in_the_state_file_and_a_full_disk_cost_no_event(
    broker: EmbeddedBroker, tmp_path: Path, small_disk: Path
) -> None:
    state = small_disk / "communicators.json"
    state.write_bytes(b"\xff" * 4096)
    agent = Agent(tmp_path / "agent", broker.bootstrap, agent={"state_dir": f'"{small_disk}"'})
    with Events(broker.bootstrap) as events, agent, agent.testbed(WORKLOAD, "full", network=False) as testbed:
        agent.wait_for(f"{state} cannot be used")
        agent.wait_for("the file is written anew")
        testbed.wait_until(31)
        agent.wait_for(f"{state} cannot be written: No space left on device: make room there")
        testbed.stop()
        check_all(events.wait_for_end("full"), testbed)
        assert agent.end() == 0
    assert os.listdir(small_disk) == ["communicators.json"], "no halves of files stay"


def test_an_agent_that_ends_without_its_broker_says_what_was_not_delivered(tmp_path: Path) -> None:
    lean = {"off": '["host", "nvml", "tcp", "infiniband"]'}
    agent = Agent(tmp_path / "agent", NOWHERE, agent=lean, patches={"agents.publisher.CLOSE_S": 1.0})
    with agent, agent.testbed(WORKLOAD, "unheard", network=False) as testbed:
        agent.wait_for("rank 1 of 2 of job unheard")
        testbed.stop()
        assert agent.end() == 1
        assert re.search(rf"\d+ batches were not delivered: does a broker answer at {NOWHERE}\?", agent.said())
