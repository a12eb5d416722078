"""With the capabilities of the systemd unit, and without each of them: what is seen of another user's process."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.probed import Victim, build_library
from tests.conftest import REPOSITORY, give_up

pytestmark = pytest.mark.kernel

UNIT = (REPOSITORY / "deploy" / "failslow-agent.service").read_text()
HERE = Path(__file__).resolve().parent
NOBODY = "65534"
N_CALLS = 1009


def setting(name: str) -> list[str]:
    """The words of a setting of the unit."""
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(found).split()


CAPABILITIES = {name.removeprefix("CAP_").lower() for name in setting("CapabilityBoundingSet")}


@pytest.fixture(scope="module")
def library() -> Iterator[Path]:
    if os.geteuid() != 0:
        give_up("only root can give a process some of its capabilities")
    missing = [tool for tool in ("setpriv", "unshare") if shutil.which(tool) is None]
    if missing:
        give_up(f"no {missing}: install Debian's util-linux")
    with tempfile.TemporaryDirectory(prefix="failslow-") as folder:  # pytest's own folders are private
        Path(folder).chmod(0o755)
        yield build_library(Path(folder))


def look(library: Path, capabilities: set[str], *wrapper: str, without: tuple[int, ...] = ()) -> dict[str, Any]:
    """Look at a process of root in a network namespace of its own, as nobody with these capabilities."""
    some = ",".join(["-all", *(f"+{name}" for name in sorted(capabilities))])
    confine = [
        "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs",
        f"--inh-caps={some}", f"--ambient-caps={some}", f"--bounding-set={some}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    with Victim(library, "unshare", "--net") as victim:
        # env is where everybody may run it, and from there on the capabilities count: Python may be in root's home.
        program = ["env", sys.executable, str(HERE / "confined.py"), str(victim.pid), *map(str, without)]
        with subprocess.Popen(
            [*wrapper, *confine, *program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "ready\n"
            victim.do(f"for _ in range({N_CALLS}): me.call('ncclAllReduce')\nanswer = 0")
            out, _ = agent.communicate("go\n", timeout=60)
    assert agent.returncode == 0
    found = ast.literal_eval(out)
    assert isinstance(found, dict)
    return found


EVERYTHING = {
    "user": int(NOBODY),
    "tracer": None,
    "libraries": ["cudart", "nccl"],
    "returns": True,
    "attached": [],
    "calls": N_CALLS,
    "environment": True,
    "host": [],
    "connections": True,
    "mapped file": True,
    "clock": True,
}


def test_the_units_capabilities_are_enough_for_every_source(library: Path) -> None:
    assert look(library, CAPABILITIES) == EVERYTHING


def test_the_units_filter_of_system_calls_lets_every_source_work(library: Path) -> None:
    numbers = ",".join(map(str, sorted(allowed_calls())))
    wrapper = [sys.executable, str(HERE / "allow_calls.py"), numbers]
    assert look(library, CAPABILITIES, *wrapper) == EVERYTHING


def test_a_system_call_that_the_filter_leaves_out_is_refused(library: Path) -> None:
    numbers = ",".join(map(str, sorted(allowed_calls() - {number_of_calls()["bpf"]})))
    wrapper = [sys.executable, str(HERE / "allow_calls.py"), numbers]
    assert look(library, CAPABILITIES, *wrapper)["tracer"] == "NotAvailable"


@pytest.mark.parametrize(
    ("capability", "lost"),
    [
        ("sys_admin", {"connections": "PermissionError", "mapped file": "PermissionError"}),
        ("sys_ptrace", {"libraries": [], "calls": 0}),
    ],
)
def test_without_one_of_them_only_what_it_is_for_is_lost(library: Path, capability: str, lost: dict[str, Any]) -> None:
    found = look(library, CAPABILITIES - {capability})
    assert {name: found[name] for name in lost} == lost
    kept = {"tracer", "returns", "libraries", "calls", "environment", "host", "clock"} - lost.keys()
    assert {name: found[name] for name in kept} == {name: EVERYTHING[name] for name in kept}


def test_without_the_right_to_read_what_is_private_calls_are_still_seen(library: Path) -> None:
    found = look(library, CAPABILITIES, without=(2,))  # CAP_DAC_READ_SEARCH
    assert found["environment"] == "PermissionError"
    assert (found["tracer"], found["calls"]) == (None, N_CALLS)


@pytest.mark.parametrize("capability", ["bpf", "perfmon"])
def test_without_the_right_to_load_programs_that_is_said(library: Path, capability: str) -> None:
    found = look(library, CAPABILITIES - {capability, "sys_admin"})  # which includes both
    assert found["tracer"] == "NotAvailable"
    assert found["environment"] is True


def number_of_calls() -> dict[str, int]:
    """The numbers of system calls on this machine, from the C library's header."""
    if shutil.which("cc") is None:
        give_up("no C compiler: install Debian's gcc and libc6-dev")
    said = subprocess.run(
        ["cc", "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", "/dev/null"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {name: int(number) for name, number in re.findall(r"^#define __NR_(\w+) (\d+)$", said.stdout, re.MULTILINE)}


def allowed_calls() -> set[int]:
    """The numbers of what the unit's SystemCallFilter lets through."""
    if shutil.which("systemd-analyze") is None:
        give_up("no systemd-analyze: install Debian's systemd")
    numbers = number_of_calls()
    pending, names = setting("SystemCallFilter"), set()
    while pending:
        word = pending.pop()
        if not word.startswith("@"):
            names.add(word)
            continue
        said = subprocess.run(["systemd-analyze", "syscall-filter", word], check=True, capture_output=True, text=True)
        lines = (line.strip() for line in said.stdout.splitlines()[1:])
        pending += [line for line in lines if line and not line.startswith("#")]
    return {numbers[name] for name in names if name in numbers}
