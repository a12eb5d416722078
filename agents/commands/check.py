"""`failslow-agent check`: what will and will not be seen on this node, and why."""

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from rich.console import Console
from rich.text import Text

from agents.collector import Limit, RankProcess
from agents.commands.options import config_option, load_config
from agents.config import SOURCES, AgentConfig
from agents.inspector_advice import advice
from agents.loop import POLL_S, SCAN_S, Loop
from agents.nccl_inspector import InspectorCollector
from agents.source import Source
from agents.wiring import build
from schemas.events import EventBatch
from schemas.topics import EVENTS

EXIT_BLIND = 2
_BROKER_S = 5.0
_GIVES = {
    "nccl": "calls to NCCL, communicators, and waits of the host for its GPU, by eBPF",
    "host": "what the operating system does to rank processes, by eBPF and /proc",
    "nvml": "clocks, throttle reasons, temperatures, power and errors of the GPUs",
    "inspector": "durations on the GPU, from the files of NCCL's Inspector: what it takes to name a slow GPU or link",
    "tcp": "state of TCP connections to each peer",
    "infiniband": "counters of InfiniBand and RoCE ports",
    "markers": "iterations and pauses that training processes tell of themselves",
}


class _Nowhere:
    """Takes batches and forgets them: a check publishes nothing."""

    n_delivered = 0
    n_waiting = 0

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []

    def publish(self, batch: EventBatch) -> None:
        self.batches = [batch]

    def poll(self, timeout_s: float) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Line:
    mark: str
    style: str
    text: str
    remedy: str = ""


@click.command(
    name="check",
    epilog="\b\nExamples:\n  failslow-agent check\n  failslow-agent check --config /etc/failslow/failslow.toml\n\n"
    "Exit code 2: nothing is seen of any rank process, or the broker does not answer.",
)
@config_option
@click.option("--bootstrap", envvar="KAFKA_BOOTSTRAP", metavar="HOST:PORT", help="Look at this Kafka broker, too.")
@click.option(
    "--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.5, max=600), help="How long to look."
)
@click.pass_context
def command(ctx: click.Context, config_path: Path | None, bootstrap: str | None, seconds: float) -> None:
    """Look at this node as an agent would, publish nothing, and say per source what is seen, what is not, and why."""
    logging.basicConfig(level=logging.CRITICAL)
    config = load_config(config_path, bootstrap=bootstrap)
    console = Console(highlight=False)
    loop = build(config, _Nowhere())
    try:
        _look(loop, seconds)
        for line in _findings(loop, config):
            _say(console, line)
        n_blind = sum(source.is_open for source in loop.sources) == 0
    finally:
        loop.close()
    broker = _broker(config) if bootstrap is not None or config_path is not None else None
    if broker is not None:
        _say(console, broker)
    else:
        console.print("no broker was looked at: give --bootstrap HOST:PORT", style="dim")
    ctx.exit(EXIT_BLIND if n_blind or (broker is not None and broker.mark != "ok") else 0)


def _look(loop: Loop, seconds: float) -> None:
    loop.open()  # compiles programs, which takes seconds of its own
    until_s = time.monotonic() + seconds
    next_scan_s = next_flush_s = 0.0
    while (now_s := time.monotonic()) < until_s:
        if now_s >= next_scan_s:
            loop.scan()
            next_scan_s = now_s + SCAN_S
        if loop.nccl is not None:
            loop.nccl.poll()
        if now_s >= next_flush_s:
            loop.flush()
            next_flush_s = now_s + loop.flush_interval_s
        time.sleep(POLL_S)
    loop.scan()
    loop.flush()


def _findings(loop: Loop, config: AgentConfig) -> Iterator[_Line]:
    yield _Line("ok" if os.geteuid() == 0 else "--", "bold", f"this is user {os.geteuid()}", "" if not os.geteuid() else
                "root sees most; docs/agent-privileges.md says which capabilities each source needs")  # fmt: skip
    yield from _rank_lines(loop.ranks)
    by_name = {source.name: source for source in loop.sources}
    for name in SOURCES:
        if name in config.off:
            yield _Line("--", "yellow", f"{name}: switched off", "take it out of [agent] off")
        else:
            yield from _source_lines(by_name[name])
    for limit in loop.setup_limits:
        yield _limit_line("settings", limit)
    for limit in (*loop.processes.limits(), *loop.discovery.limits()):
        yield _limit_line("processes", limit)


def _rank_lines(ranks: list[RankProcess]) -> Iterator[_Line]:
    if not ranks:
        yield _Line("--", "yellow", "no rank processes were found",
                    "start a job, or say in [agent.identity] which processes are ranks")  # fmt: skip
    for rank in ranks:
        gpu = "GPU unknown" if rank.gpu is None else f"GPU {rank.gpu}"
        yield _Line(
            "ok", "green",
            f"rank {rank.rank} of {rank.world_size} of job {rank.job_id} ({rank.incarnation}): "
            f"process {rank.key.pid}, {gpu}",
        )  # fmt: skip


def _source_lines(source: Source) -> Iterator[_Line]:
    gives = _GIVES[source.name]
    if not source.is_open:
        why = source.unavailable
        reason, remedy = (why.reason, why.remedy) if why else ("it cannot be opened", "see the agent's log")
        yield _Line("!!", "bold red", f"{source.name}: not seen ({gives}): {reason}", remedy)
    else:
        yield _Line("ok", "green", f"{source.name}: {gives}")
        for limit in source.collector.limits():
            yield _limit_line(source.name, limit)
    if isinstance(source.collector, InspectorCollector):
        yield from _inspector_lines(source.collector)


def _inspector_lines(collector: InspectorCollector) -> Iterator[_Line]:
    rates = collector.join_rates()
    for rate in rates:
        timed = "" if rate.timed_share is None else f", {rate.timed_share:.0%} of the host's calls have a GPU time"
        placed = "none yet" if rate.placed_share is None else f"{rate.placed_share:.0%} found their place"
        text = f"inspector: job {rate.job_id}, communicator {rate.comm:016x}: {rate.records} records, {placed}{timed}"
        yield _Line("  ", "", text)
    switch_on, raise_rate, cost = advice()
    yield _Line("  ", "dim", f"inspector: {raise_rate if rates else switch_on}")
    yield _Line("  ", "dim", f"inspector: {cost}")


def _limit_line(name: str, limit: Limit) -> _Line:
    return _Line("--", "yellow", f"{name}: not seen: {limit.what}: {limit.why}", limit.remedy)


def _broker(config: AgentConfig) -> _Line:
    admin = AdminClient({"bootstrap.servers": config.bootstrap, "log_level": 0})
    try:
        topics = admin.list_topics(timeout=_BROKER_S).topics
    except KafkaException:
        return _Line("!!", "bold red", f"no broker answers at {config.bootstrap}",
                     "is the address in [agent] bootstrap right, and the broker running?")  # fmt: skip
    if EVENTS not in topics:
        return _Line("!!", "bold red", f"the broker at {config.bootstrap} has no topic {EVENTS}",
                     "run failslow init")  # fmt: skip
    return _Line("ok", "green", f"the broker at {config.bootstrap} answers and has the topic {EVENTS}")


def _say(console: Console, line: _Line) -> None:
    text = Text.assemble((f"{line.mark} ", line.style), (line.text, "dim" if line.style == "dim" else ""))
    if line.remedy:
        text.append(f": {line.remedy}", "dim")
    console.print(text, soft_wrap=True)
