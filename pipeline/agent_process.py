"""Starts `failslow-agent` as a process: the pipeline never imports the agents, it only hears what they say."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from schemas.alerts import ComponentName, Kind, Severity
from schemas.framing import Deframer

_PIECE_BYTES = 1 << 16


class AgentProblem(RuntimeError):
    """The agent's process ended with an error; the message is its own."""


class Simulated(msgspec.Struct, frozen=True, array_like=True):
    """One batch of a simulated agent as it would reach the broker."""

    time_ns: int
    key: bytes
    value: bytes


class ExpectedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario makes right: which set of components is to be named, from which iteration to which."""

    kind: Kind
    candidates: frozenset[ComponentName]
    onset_iteration: int
    end_iteration: int | None  # None: the job ends first
    onset_s: float  # when the first faulty iteration began, after the scenario's epoch
    end_s: float | None  # when the first healthy one began again
    is_visible: bool  # whether anybody could see it and should say so
    severity: Severity
    slowdown_ratio: float


def agent_command(*arguments: str) -> list[str]:
    """Return the command line of `failslow-agent` of this very installation."""
    return [sys.executable, "-m", "agents", *arguments]


def simulated(scenario: Path) -> Iterator[Simulated]:
    """Yield the batches of a scenario as fast as they are made. Raises AgentProblem."""
    decoder = msgspec.msgpack.Decoder(Simulated)
    deframer = Deframer()
    with tempfile.TemporaryFile() as said:
        # Our own program, without a shell; its errors go to a file, as a full pipe would stop it.
        process = subprocess.Popen(  # noqa: S603
            agent_command("simulate", str(scenario)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        )
        with process:
            try:
                while process.stdout is not None and (piece := process.stdout.read(_PIECE_BYTES)):
                    for message in deframer.feed(piece):
                        yield decoder.decode(message)
            except BaseException:
                process.kill()
                raise
        said.seek(0)
        _refuse_failure(process.returncode, said.read())


def expected_incidents(scenario: Path) -> list[ExpectedIncident]:
    """Return the right answers of a scenario. Raises AgentProblem."""
    command = agent_command("simulate", str(scenario), "--labels")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603
    _refuse_failure(done.returncode, done.stderr)
    return msgspec.json.decode(done.stdout, type=list[ExpectedIncident])


def _refuse_failure(exit_code: int, said: bytes) -> None:
    if exit_code:
        lines = said.decode(errors="replace").strip().splitlines()
        raise AgentProblem((lines or [f"the agent ended with {exit_code}"])[-1].removeprefix("Error: "))
