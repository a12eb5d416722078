"""Whole recordings of a simulated job, replayed by the command: the same alerts, or what differs and why."""

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from agents.simulated import Cluster, load_scenario
from pipeline.__main__ import main
from pipeline.engine import Engine
from pipeline.judge import Judge
from pipeline.record import Record
from pipeline.recording import Header, read_recording, write_recording
from pipeline.replay import count_records, merge, replay
from pipeline.window import Window
from schemas.alerts import Alert
from schemas.codec import decode_alert, encode_alert, encode_events, encode_iterations
from schemas.topics import ALERTS, EVENTS, ITERATIONS, events_key, job_key

SCENARIO = """
title = "a slow GPU in a small job"
seed = 17
iterations = 97
micro_batches = 2
layout = { tp = 1, pp = 1, dp = 6, gpus_per_node = 2 }
faults = [{ kind = "slow_gpu", node = 1, gpu = 0, factor = 1.6, onset = 53, end = 79 }]
agents = { sensors = ["gpu", "sync", "nvml", "marker"], flush_interval_s = 0.1 }
"""
PARTITIONS = 3


@pytest.fixture(scope="session")
def live() -> list[Record]:
    """What the topics of a live pipeline held: events in three partitions, iterations and alerts in one."""
    window, judge = Window(), Judge()
    offsets: dict[tuple[str, int], int] = {}

    def record(topic: str, partition: int, time_ns: int, key: bytes, value: bytes) -> Record:
        offset = offsets[topic, partition] = offsets.get((topic, partition), -1) + 1
        return Record(topic, partition, offset, time_ns, key, value)

    records = []
    for batch in Cluster(load_scenario(SCENARIO)).batches():
        key = events_key(batch.job_id, batch.node)
        event = record(EVENTS, int(batch.node[-1]) % PARTITIONS, batch.flush_ns, key, encode_events(batch))
        records.append(event)
        for answer in window.handle(event):
            job = job_key(answer.job_id)
            iterations = record(ITERATIONS, 1, batch.flush_ns + 1, job, encode_iterations(answer))
            records.append(iterations)
            for alert in judge.handle(iterations):
                records.append(record(ALERTS, 1, batch.flush_ns + 2, job, encode_alert(alert)))  # noqa: PERF401
    return records


def written(path: Path, records: list[Record]) -> Path:
    with write_recording(path, Header(source="a test")) as writer:
        for place, record in enumerate(records):
            writer.write(record)
            if place % 29 == 0:
                writer.flush()
    return path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["replay", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def replayed(path: Path) -> list[Alert]:
    recording = read_recording(path)
    return list(replay(merge(recording, EVENTS, count_records(recording)), Engine()))


def test_the_job_of_these_tests_has_an_incident_that_begins_and_ends(live: list[Record]) -> None:
    alerts = [decode_alert(record.value) for record in live if record.topic == ALERTS]
    assert [alert.kind for alert in alerts][:1] == ["slow_gpu"]
    assert alerts[-1].resolution is not None


@pytest.mark.parametrize("start", ["events", "iterations"])
def test_the_recorded_alerts_come_out_again_and_the_exit_code_says_that_there_are_incidents(
    live: list[Record], tmp_path: Path, start: str
) -> None:
    n_alerts = sum(record.topic == ALERTS for record in live)
    result = run(str(written(tmp_path / "a.fsr", live)), "--from", start, "--compare")
    assert f"identical: {n_alerts} alerts, byte for byte" in result.stderr
    assert result.exit_code == 3
    assert re.search(r"GPU-[0-9a-f]{8} of node1", result.stdout)


def test_partitions_may_be_recorded_one_after_another(live: list[Record], tmp_path: Path) -> None:
    apart = sorted(live, key=lambda record: (record.topic, record.partition, record.offset))
    assert apart != live
    result = run(str(written(tmp_path / "a.fsr", apart)), "--compare")
    assert "identical" in result.stderr


def test_json_is_the_alerts_as_on_the_topic(live: list[Record], tmp_path: Path) -> None:
    result = run(str(written(tmp_path / "a.fsr", live)), "--json")
    assert result.stdout_bytes.splitlines() == [record.value for record in live if record.topic == ALERTS]


def test_without_events_a_replay_begins_with_the_iterations(live: list[Record], tmp_path: Path) -> None:
    path = written(tmp_path / "a.fsr", [record for record in live if record.topic != EVENTS])
    assert "identical" in run(str(path), "--compare").stderr
    result = run(str(path), "--from", "events")
    assert result.exit_code == 2
    assert "has no record of failslow.events" in result.stderr


def test_a_tampered_alert_is_named_with_what_differs(live: list[Record], tmp_path: Path) -> None:
    place = next(i for i, record in enumerate(live) if record.topic == ALERTS)
    alert = msgspec.structs.replace(decode_alert(live[place].value), lost_gpu_s=4711.0)
    tampered = Record(ALERTS, 1, live[place].offset, live[place].time_ns, live[place].key, encode_alert(alert))
    result = run(str(written(tmp_path / "a.fsr", [*live[:place], tampered, *live[place + 1 :]])), "--compare")
    assert result.exit_code == 1
    assert "lost_gpu_s 4711.0 recorded" in result.stderr


def test_events_that_are_missing_in_the_recording_are_the_reason_that_is_named(
    live: list[Record], tmp_path: Path
) -> None:
    onset = next(i for i, record in enumerate(live) if record.topic == ALERTS)
    events = [i for i, record in enumerate(live[:onset]) if record.topic == EVENTS][-9:]
    result = run(str(written(tmp_path / "a.fsr", [r for i, r in enumerate(live) if i not in events])), "--compare")
    assert result.exit_code == 1
    assert re.search(r"iteration \d+: (judged live alone|closed without|other values)", result.stderr)


def test_a_recording_cut_anywhere_gives_a_prefix_of_the_alerts(live: list[Record], tmp_path: Path) -> None:
    whole = written(tmp_path / "a.fsr", [record for record in live if record.topic == EVENTS])
    alerts, content = replayed(whole), whole.read_bytes()
    cut = tmp_path / "cut.fsr"
    counts = []
    for tenths in range(1, 10):
        cut.write_bytes(content[: len(content) * tenths // 10])
        got = replayed(cut)
        assert got == alerts[: len(got)]
        counts.append(len(got))
    assert counts == sorted(counts)
    assert counts[-1] > 0
    result = run(str(cut))
    assert "cut after" in result.stderr
    assert result.exit_code == 3
