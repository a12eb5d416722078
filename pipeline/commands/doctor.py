"""`failslow doctor`: what is missing on this machine, and how to get it."""

import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

import click
from rich.text import Text

from pipeline import subscription
from pipeline.commands.options import command as declare_command
from pipeline.commands.options import examples
from pipeline.terminal import stdout
from pipeline.topics import BrokerUnreachable, partition_counts
from schemas.topics import TOPICS

EXIT_MISSING = 2


class Outcome(Enum):
    """How a finding is shown."""

    GOOD = ("ok", "green")
    OPTIONAL = ("--", "yellow")
    MISSING = ("!!", "bold red")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `remedy` says how to get what is not there."""

    what: str
    outcome: Outcome
    found: str
    remedy: str = ""


@declare_command(
    name="doctor",
    epilog=examples("failslow doctor", "failslow doctor --bootstrap kafka:9092") + "\n\nExit code 2: "
    "something that failslow needs is missing.",
)
@click.option("--bootstrap", envvar="KAFKA_BOOTSTRAP", metavar="HOST:PORT", help="Look at this Kafka broker, too.")
@click.pass_context
def command(ctx: click.Context, bootstrap: str | None) -> None:
    """Look at what failslow needs on this machine, say what is missing, and how to get it."""
    looks: list[Callable[[], Iterator[Finding]]] = [_python, _packages, _loopback, _clock, _terminal_tools, _node]
    if bootstrap is not None:
        looks.append(lambda: _broker(bootstrap))
    findings = [finding for look in looks for finding in look()]
    for finding in findings:
        mark, style = finding.outcome.value
        line = Text.assemble((f"{mark} ", style), f"{finding.what}: {finding.found}")
        if finding.remedy and finding.outcome is not Outcome.GOOD:
            line.append(f"; {finding.remedy}", "dim")
        stdout().print(line, soft_wrap=True)
    if bootstrap is None:
        click.echo("no broker was looked at: give --bootstrap HOST:PORT; `failslow demo` brings its own")
    ctx.exit(EXIT_MISSING if any(f.outcome is Outcome.MISSING for f in findings) else 0)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    is_good = (3, 11) <= sys.version_info < (3, 14)
    outcome = Outcome.GOOD if is_good else Outcome.MISSING
    yield Finding("Python", outcome, version, "failslow runs on 3.11 to 3.13: make setup PYTHON=/path/to/python3.11")


def _packages() -> Iterator[Finding]:
    for requirement in metadata.requires("failslow") or []:
        name = requirement.split(";")[0]
        for mark in "<>=!~ ":
            name = name.split(mark)[0]
        try:
            yield Finding(f"package {name}", Outcome.GOOD, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(f"package {name}", Outcome.MISSING, "not installed", "make setup brings the locked versions")


def _loopback() -> Iterator[Finding]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        remedy = "the embedded broker of `failslow demo` needs it: ip link set lo up"
        yield Finding("loopback interface", Outcome.MISSING, str(error), remedy)
    else:
        yield Finding("loopback interface", Outcome.GOOD, "127.0.0.1")


def _clock() -> Iterator[Finding]:
    before, after = time.clock_getres(time.CLOCK_REALTIME), time.time()
    is_plausible = after > 1.7e9 and before <= 1e-3
    yield Finding(
        "clock",
        Outcome.GOOD if is_plausible else Outcome.MISSING,
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(after)),
        "set the date; onset times are read from it, comparisons between nodes are not",
    )


def _terminal_tools() -> Iterator[Finding]:
    for program, purpose, package in (
        ("java", "for the tests against Apache Kafka", "make tools, or apt-get install openjdk-17-jre-headless"),
        ("mvn", "for the tests against Apache Kafka", "make tools, or apt-get install maven"),
        ("prometheus", "for the test of the dashboard", "make tools, or apt-get install prometheus"),
        ("docker", "for docker-compose.yml, the whole installation on one machine", "docs.docker.com/engine/install"),
    ):
        path = shutil.which(program) or shutil.which(program, path=str(Path(sys.prefix, "debian", "usr", "bin")))
        if path is None:
            yield Finding(program, Outcome.OPTIONAL, f"not found ({purpose})", package)
        else:
            yield Finding(program, Outcome.GOOD, path)


def _node() -> Iterator[Finding]:
    """Look at what an agent on a GPU node wants; a worker or a laptop does without."""
    nvml = Path("/dev/nvidiactl")
    yield Finding(
        "NVIDIA GPU",
        Outcome.GOOD if nvml.exists() else Outcome.OPTIONAL,
        str(nvml) if nvml.exists() else "none on this machine",
        "an agent on a GPU node reads clocks and throttle reasons from the driver",
    )
    btf = Path("/sys/kernel/btf/vmlinux")
    yield Finding(
        "kernel type information",
        Outcome.GOOD if btf.exists() else Outcome.OPTIONAL,
        str(btf) if btf.exists() else "none",
        "an agent's eBPF probes need a kernel built with CONFIG_DEBUG_INFO_BTF",
    )


def _broker(bootstrap: str) -> Iterator[Finding]:
    try:
        partitions = partition_counts(bootstrap, timeout_s=subscription.ANSWER_S)
    except BrokerUnreachable as error:
        yield Finding("broker", Outcome.MISSING, bootstrap, str(error))
        return
    yield Finding("broker", Outcome.GOOD, bootstrap)
    for spec in TOPICS:
        found = partitions.get(spec.name)
        if found is None:
            remedy = f"run `failslow init --bootstrap {bootstrap}`"
            yield Finding(f"topic {spec.name}", Outcome.MISSING, "not declared", remedy)
        else:
            yield Finding(f"topic {spec.name}", Outcome.GOOD, f"{found} partitions")
