"""The agent's unit, user and image, read and not run: they agree with the page about privileges and with each other."""

import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import click
import pytest

from agents.config import AgentConfig
from agents.ebpf.attachments import wanted_functions
from tests.conftest import REPOSITORY, give_up

UNIT = REPOSITORY / "deploy" / "failslow-agent.service"
PAGE = (REPOSITORY / "docs" / "agent-privileges.md").read_text()
DOCKERFILE = (REPOSITORY / "deploy" / "agent.Dockerfile").read_text()
SYSUSERS = (REPOSITORY / "deploy" / "failslow-agent.sysusers.conf").read_text()


def settings() -> dict[str, str]:
    lines = (line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def agent_command(words: list[str]) -> click.Context:
    """Parse a command line of the agent with the real command, without running it; a misspelt option raises."""
    (entry,) = metadata.entry_points(group="console_scripts", name="failslow-agent")
    group = entry.load()
    context = click.Context(group, info_name="failslow-agent")
    command = group.get_command(context, words[0])
    assert command is not None, words[0]
    parsed: click.Context = command.make_context(words[0], words[1:], parent=context)
    return parsed


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        give_up("no systemd-analyze: install Debian's systemd")
    program = shutil.which("true")
    assert program is not None
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={program}", UNIT.read_text(), flags=re.MULTILINE))
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert UNIT.name not in said.stderr
    assert said.returncode == 0, said.stderr


def test_the_unit_starts_a_command_that_there_is() -> None:
    program, *words = settings()["ExecStart"].split()
    assert program == "/opt/failslow/bin/failslow-agent"
    assert agent_command(words).params["config_path"] == Path("/etc/failslow/failslow.toml")


def test_wrong_settings_do_not_start_it_again_and_again() -> None:
    from agents.commands.options import Problem

    assert settings()["RestartPreventExitStatus"] == str(Problem.exit_code)


def test_what_it_may_is_what_it_is_given_and_what_the_page_explains() -> None:
    capabilities = settings()["CapabilityBoundingSet"].split()
    assert settings()["AmbientCapabilities"].split() == capabilities
    assert re.findall(r"^\| `(CAP_\w+)` \|", PAGE, re.MULTILINE) == capabilities
    assert [f"CAP_{name}" for name in re.findall(r"--cap-add (\w+)", PAGE)] == capabilities


def test_what_the_page_says_about_leaving_one_out_is_a_part_of_the_unit() -> None:
    (kept,) = set(re.findall(r"^(?:CapabilityBoundingSet|AmbientCapabilities)=(CAP_.+)$", PAGE, re.MULTILINE))
    assert set(settings()["CapabilityBoundingSet"].split()) - set(kept.split()) == {"CAP_SYS_ADMIN"}


def test_there_are_descriptors_for_the_functions_of_hundreds_of_libraries() -> None:
    """Before Linux 6.6 each probe takes one; systemd gives a service 1,024 by itself."""
    functions = wanted_functions(kind=None, has_returns=True, count_launches=True)
    probes = sum(1 + (function.leave is not None) for function in functions)
    assert int(settings()["LimitNOFILE"]) > 503 * probes


@pytest.mark.parametrize("name", ["ProtectClock", "PrivateTmp", "ProtectProc", "PrivateUsers", "PrivateDevices"])
def test_nothing_that_is_looked_at_is_hidden(name: str) -> None:
    assert name not in settings()
    assert f"`{name}`" in PAGE


def test_its_user_has_a_home_for_state_and_the_socket_for_markers_a_place() -> None:
    assert settings()["User"] == SYSUSERS.splitlines()[-1].split()[1]
    assert f"/run/{settings()['RuntimeDirectory']}" == str(Path(AgentConfig().markers.socket).parent)
    assert settings()["StateDirectory"] == "failslow"
    assert "/var/lib/failslow" in SYSUSERS


def test_the_image_is_built_on_ours_with_bcc_of_one_version() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == [f"failslow:{version}"]
    assert re.search(r"python3-bpfcc=\d", DOCKERFILE)
    assert f"failslow-agent:{version}" in PAGE


def test_the_command_of_the_page_is_understood() -> None:
    (words,) = re.findall(r"^ +failslow-agent:\S+ failslow-agent (run .*)$", PAGE, re.MULTILINE)
    assert agent_command(words.split()).params["bootstrap"] == "kafka:9092"
