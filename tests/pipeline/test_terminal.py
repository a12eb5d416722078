"""Alerts and incidents read as an operator would say them; progress shows itself only where somebody waits."""

import io
import itertools
import sys

import pytest
from rich.console import Console

from pipeline.replay import incidents
from pipeline.terminal import (
    accused_text,
    alert_line,
    component_text,
    incident_table,
    printable,
    progress,
)
from schemas.alerts import (
    Alert,
    AlertState,
    Component,
    ComponentName,
    ComponentType,
    Kind,
    Resolution,
    Severity,
)


def gpu(number: int) -> ComponentName:
    return ComponentName(type=ComponentType.GPU, node="node-3", gpu=f"GPU-{number:08x}-4800-039d-a949-c131ebdbb2bc")


def alert(*candidates: ComponentName, resolution: Resolution | None = None, revision: int = 1) -> Alert:
    names = candidates or (gpu(5),)
    return Alert(
        schema_version=1,
        fingerprint="f00d",
        revision=revision,
        state=AlertState.FIRING if resolution is None else AlertState.RESOLVED,
        severity=Severity.CRITICAL,
        job_id="pretrain",
        incarnation="0",
        kind=Kind.SLOW_GPU,
        component=Component(type=names[0].type, name=names[0], candidates=names),
        onset_iteration=101,
        detected_iteration=104,
        as_of_iteration=107,
        resolved_iteration=None if resolution is None else 211,
        resolution=resolution,
        onset_time_ns=1_700_000_000 * 10**9,
        as_of_time_ns=1_700_000_023 * 10**9,
        slowdown_ratio=1.314,
        lost_gpu_s=12345.6,
        confidence=0.971,
        sources=("gpu",),
        evidence=(),
        causes=(),
        advice="replace the node",
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (gpu(0xFEE4C083), "GPU-fee4c083 of node-3"),
        (ComponentName(type=ComponentType.GPU, node="node-3", gpu="5"), "GPU 5 of node-3"),
        (ComponentName(type=ComponentType.HOST, node="node-3"), "host node-3"),
        (ComponentName(type=ComponentType.RANK, rank=0), "rank 0"),
        (ComponentName(type=ComponentType.RANK, rank=29, node="node-3"), "rank 29 on node-3"),
        (ComponentName(type=ComponentType.LINK, node="node-1", peer="node-2"), "link node-1 - node-2"),
        (ComponentName(type=ComponentType.LINK, node="node-1"), "network interface of node-1"),
        (ComponentName(type=ComponentType.LINK, node="node-1", peer="node-1"), "GPU interconnect of node-1"),
        (ComponentName(type=ComponentType.STAGE, stage=0), "pipeline stage 0"),
        (ComponentName(type=ComponentType.JOB), "the whole job"),
    ],
)
def test_a_component_is_said_in_words(name: ComponentName, text: str) -> None:
    assert component_text(name) == text


def test_candidates_that_cannot_be_told_apart_are_all_named_up_to_a_few() -> None:
    assert accused_text(alert(gpu(1), gpu(2))) == "GPU-00000001 of node-3 or GPU-00000002 of node-3"
    assert accused_text(alert(*(gpu(n) for n in range(7)))).endswith("GPU-00000003 of node-3 or 3 more")


def test_an_alert_is_one_line_with_who_how_much_and_since_when() -> None:
    line = alert_line(alert()).plain
    assert line == (
        "22:13:43 FIRING   critical slow_gpu job pretrain: GPU-00000005 of node-3, 1.31x slower "
        "since iteration 101 (detected at 104), 12,346 GPU-seconds lost, confidence 0.97"
    )
    assert ", job ended at 211," in alert_line(alert(resolution=Resolution.JOB_ENDED)).plain


def test_text_from_the_network_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[31m\r\n\x00\u202eb ü") == "a\ufffd[31m\ufffd\ufffd\ufffd\ufffdb ü"


@pytest.mark.parametrize("resolution", list(Resolution))
def test_a_line_says_why_an_incident_ended(resolution: Resolution) -> None:
    assert f"{resolution.replace('_', ' ')} at 211" in alert_line(alert(resolution=resolution)).plain


def test_incidents_stand_in_a_table_one_row_each() -> None:
    out = io.StringIO()
    alerts = [alert(), alert(revision=2, resolution=Resolution.RECOVERED)]
    Console(file=out, width=200).print(incident_table(incidents(alerts)))
    (row,) = [line for line in out.getvalue().splitlines() if "pretrain" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        "1",
        "pretrain",
        "GPU-00000005 of node-3",
        "slow_gpu",
        "critical",
        "1.31x",
        "101",
        "104",
        "3",
        "211 recovered",
        "12,346",
        "replace the node",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds_an_item", "is_shown"), [(0.01, False), (0.5, True)])
def test_progress_is_shown_once_it_takes_longer_than_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
    seconds_an_item: float,
    is_shown: bool,  # noqa: FBT001
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("pipeline.terminal.time.monotonic", lambda: next(clock) * seconds_an_item)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(progress(range(23), doing="judging", total=23)) == list(range(23))
    assert ("judging" in terminal.getvalue()) is is_shown


def test_progress_says_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("pipeline.terminal.time.monotonic", lambda: next(clock) * 10.0)
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    assert list(progress(range(23), doing="judging")) == list(range(23))
    assert out.getvalue() == ""
