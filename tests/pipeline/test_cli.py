"""Commands do what their help says, say clearly what is wrong, and end with codes that scripts can use."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer

from pipeline.__main__ import COMMANDS, main
from pipeline.broker import EmbeddedBroker
from pipeline.record import Record
from pipeline.recording import Header, read_recording, write_recording
from schemas.alerts import (
    Alert,
    AlertState,
    Component,
    ComponentName,
    ComponentType,
    Kind,
    Resolution,
    Severity,
    fingerprint,
)
from schemas.codec import encode_alert
from schemas.topics import ALERTS, EVENTS, ITERATIONS, TOPICS

DEADLINE_S = 20.0


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(main, list(arguments), env={"KAFKA_BOOTSTRAP": None, **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def alert(revision: int = 1, *, node: str = "node-3", resolution: Resolution | None = None) -> Alert:
    name = ComponentName(type=ComponentType.HOST, node=node)
    component = Component(type=ComponentType.HOST, name=name, candidates=(name,))
    return Alert(
        schema_version=1,
        fingerprint=fingerprint("job", Kind.SLOW_HOST, component),
        revision=revision,
        state=AlertState.FIRING if resolution is None else AlertState.RESOLVED,
        severity=Severity.WARNING,
        job_id="job",
        incarnation="0",
        kind=Kind.SLOW_HOST,
        component=component,
        onset_iteration=101,
        detected_iteration=103,
        as_of_iteration=103 + revision,
        resolved_iteration=None if resolution is None else 103 + revision,
        resolution=resolution,
        onset_time_ns=10**18,
        as_of_time_ns=10**18 + revision,
        slowdown_ratio=1.31,
        lost_gpu_s=17.0,
        confidence=0.97,
        sources=("host",),
        evidence=(),
        causes=(),
        advice="move the job",
    )


def publish(bootstrap: str, *messages: tuple[str, bytes]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    for topic, value in messages:
        producer.produce(topic, value, key=b"job", partition=1)
    assert producer.flush(DEADLINE_S) == 0


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(TOPICS) as started:
        yield started


@contextlib.contextmanager
def started(command: list[str], **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that does not outlive its test, whatever becomes of that."""
    with subprocess.Popen(command, **more) as process:
        try:
            yield process
        finally:
            process.kill()


def n_recorded(path: Path) -> int:
    """How many records a file holds that is being written; it exists for an instant before its header does."""
    return len(list(read_recording(path))) if path.exists() and path.stat().st_size else 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    poll = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        poll.wait(0.05)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    leaves = command.commands.values() if isinstance(command, click.Group) else [command]
    for leaf in leaves:
        assert leaf.help
        assert leaf.epilog or name == "schema"
        if leaf.epilog:
            assert f"failslow {name}" in leaf.epilog


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"  {name} " in result.output


def test_bad_usage_ends_with_2() -> None:
    assert run("bogus").exit_code == 2
    assert run("replay").exit_code == 2
    assert run("alerts", "--bootstrap").exit_code == 2


def test_a_broker_has_to_be_named_by_option_or_environment() -> None:
    result = run("alerts")
    assert result.exit_code == 2
    assert "--bootstrap" in result.output


def test_a_broker_that_does_not_answer_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.subscription.ANSWER_S", 0.3)
    result = run("alerts", env={"KAFKA_BOOTSTRAP": "127.0.0.1:1"})
    assert result.exit_code == 2
    assert result.output.startswith("Error: no Kafka broker answers at 127.0.0.1:1")
    assert len(result.output.splitlines()) == 1


def test_the_schema_is_printed_as_published(repository: Path) -> None:
    assert run("schema", "alert").output == (repository / "schemas" / "alert.schema.json").read_text()


def test_the_doctor_finds_this_interpreter_and_its_packages_in_order() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "ok Python: 3." in result.output
    assert "ok package confluent-kafka" in result.output


def test_the_doctor_names_the_remedy_for_a_silent_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.subscription.ANSWER_S", 0.3)
    result = run("doctor", "--bootstrap", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "!! broker: 127.0.0.1:1; no Kafka broker answers" in result.output


@pytest.mark.broker
def test_the_doctor_tells_missing_topics_from_a_silent_broker() -> None:
    with EmbeddedBroker(TOPICS[:1]) as broker:
        result = run("doctor", "--bootstrap", broker.bootstrap)
    assert result.exit_code == 2
    assert "ok broker" in result.output
    assert f"ok topic {EVENTS}: 8 partitions" in result.output
    assert f"!! topic {ALERTS}: not declared; run `failslow init --bootstrap {broker.bootstrap}`" in result.output


@pytest.mark.broker
def test_alerts_are_shown_once_each_in_one_line(broker: EmbeddedBroker) -> None:
    first, second = alert(1), alert(2, resolution=Resolution.RECOVERED)
    publish(broker.bootstrap, *((ALERTS, content) for content in map(encode_alert, (first, first, second, first))))
    result = run("alerts", "--bootstrap", broker.bootstrap)
    assert result.exit_code == 0
    firing, resolved = result.output.splitlines()
    assert "FIRING" in firing
    assert "slow_host job job: host node-3, 1.31x slower since iteration 101 (detected at 103)" in firing
    assert "RESOLVED" in resolved
    assert "recovered at 105" in resolved


@pytest.mark.broker
def test_alerts_as_json_are_the_bytes_of_the_topic_and_garbage_is_passed_over(broker: EmbeddedBroker) -> None:
    content = encode_alert(alert(1))
    publish(broker.bootstrap, (ALERTS, b"garbage"), (ALERTS, content))
    result = run("alerts", "--json", env={"KAFKA_BOOTSTRAP": broker.bootstrap})
    assert result.exit_code == 0
    assert result.stdout_bytes == content + b"\n"
    assert "passed over offset 0 of partition 1: not an alert" in result.stderr


@pytest.mark.broker
def test_names_cannot_steer_the_terminal(broker: EmbeddedBroker) -> None:
    publish(broker.bootstrap, (ALERTS, encode_alert(alert(node="\x1b[31m[bold]evil\n"))))
    (line,) = run("alerts", "--bootstrap", broker.bootstrap).output.splitlines()
    assert "\x1b" not in line
    assert "[31m[bold]evil" in line


@pytest.mark.broker
def test_following_shows_alerts_as_they_come_and_ends_with_ctrl_c(broker: EmbeddedBroker) -> None:
    publish(broker.bootstrap, (ALERTS, encode_alert(alert(1))))
    command = [sys.executable, "-m", "pipeline", "alerts", "--follow", "--json", "--bootstrap", broker.bootstrap]
    with started(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == encode_alert(alert(1)) + b"\n"
        publish(broker.bootstrap, (ALERTS, encode_alert(alert(2))))
        assert process.stdout.readline() == encode_alert(alert(2)) + b"\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.broker
def test_a_recording_holds_what_the_topics_held(broker: EmbeddedBroker, tmp_path: Path) -> None:
    publish(broker.bootstrap, (EVENTS, b"one"), (ITERATIONS, b"two"), (EVENTS, b"three"), (ALERTS, b"four"))
    out = tmp_path / "a.fsr"
    result = run(
        "record", "--bootstrap", broker.bootstrap, "--out", str(out), "--from-beginning", "--until-idle", "0.3"
    )
    assert result.exit_code == 0
    assert f"{out}: 4 records" in result.output
    recording = read_recording(out)
    records = sorted(recording, key=lambda r: (r.topic, r.offset))
    assert [(r.topic, r.partition, r.offset, r.key, r.value) for r in records] == [
        (ALERTS, 1, 0, b"job", b"four"),
        (EVENTS, 1, 0, b"job", b"one"),
        (EVENTS, 1, 1, b"job", b"three"),
        (ITERATIONS, 1, 0, b"job", b"two"),
    ]
    assert all(abs(r.time_ns / 1e9 - time.time()) < DEADLINE_S for r in records)
    assert recording.truncated is None
    assert recording.header.source == f"broker {broker.bootstrap}"


@pytest.mark.broker
def test_a_recorder_that_is_asked_to_end_completes_its_file(broker: EmbeddedBroker, tmp_path: Path) -> None:
    out = tmp_path / "a.fsr"
    command = [sys.executable, "-m", "pipeline", "record", "--from-beginning", "--out", str(out)]
    with started(command, env={**os.environ, "KAFKA_BOOTSTRAP": broker.bootstrap}) as process:
        publish(broker.bootstrap, (EVENTS, b"one"))
        wait_until(lambda: n_recorded(out) == 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    recording = read_recording(out)
    assert [record.value for record in recording] == [b"one"]
    assert recording.truncated is None


@pytest.mark.broker
def test_a_recorder_killed_at_any_time_leaves_what_it_had_a_second_before(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    out = tmp_path / "a.fsr"
    command = [sys.executable, "-m", "pipeline", "record", "--from-beginning", "--out", str(out)]
    with started(command, env={**os.environ, "KAFKA_BOOTSTRAP": broker.bootstrap}) as process:
        publish(broker.bootstrap, (EVENTS, b"one"))
        wait_until(lambda: n_recorded(out) == 1)
        process.kill()
        process.wait()
    recording = read_recording(out)
    assert [record.value for record in recording] == [b"one"]
    assert recording.truncated is not None


@pytest.mark.broker
def test_recording_without_topics_names_the_remedy(tmp_path: Path) -> None:
    with EmbeddedBroker(TOPICS[:1]) as broker:
        result = run("record", "--bootstrap", broker.bootstrap, "--out", str(tmp_path / "a.fsr"))
    assert result.exit_code == 2
    assert "run `failslow init" in result.output
    assert not (tmp_path / "a.fsr").exists()


def trace(folder: Path) -> Path:
    path = folder / "trace-XY.parquet"
    row = {"dp_rank": 0, "stage": 0, "rank": 0, "step": 3, "start_ts": 0.0, "duration": 0.5, "mb_id": 0}
    pq.write_table(pa.Table.from_pylist([{**row, "optype": "forward-compute"}, {**row, "optype": "nap"}]), path)
    return path


def test_an_import_writes_a_recording_and_says_what_it_left_out(tmp_path: Path) -> None:
    out = tmp_path / "a.fsr"
    result = run("import", "straggler-analysis", str(trace(tmp_path)), "--out", str(out))
    assert result.exit_code == 0
    assert "left out: 1 operations of unknown kind 'nap'" in result.stderr
    assert f"{out}: 1 batches of 1 ranks" in result.output
    (record,) = read_recording(out)
    assert (record.topic, record.key) == (EVENTS, b"trace-XY/rank-0")


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "a.fsr"
    out.write_bytes(b"precious")
    arguments = ("import", "straggler-analysis", str(trace(tmp_path)), "--out", str(out))
    result = run(*arguments)
    assert result.exit_code == 2
    assert "--force" in result.output
    assert out.read_bytes() == b"precious"
    assert run(*arguments, "--force").exit_code == 0
    assert len(list(read_recording(out))) == 1


def test_importing_something_else_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"something else")
    result = run("import", "straggler-analysis", str(path), "--out", str(tmp_path / "a.fsr"))
    assert result.exit_code == 2
    assert "cannot be read as Parquet" in result.output
    assert not (tmp_path / "a.fsr").exists()


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_replaying_something_else_is_one_clear_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.fsr"
    path.write_bytes(content)
    result = run("replay", str(path))
    assert result.exit_code == 2
    assert "is not a recording; `failslow record`" in result.output


def test_replaying_a_recording_without_events_or_iterations_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    with write_recording(path, Header()) as writer:
        writer.write(Record(ALERTS, 0, 0, 0, b"", b""))
    result = run("replay", str(path))
    assert result.exit_code == 2
    assert "it holds failslow.alerts" in result.output


def test_a_replay_reports_garbage_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    with write_recording(path, Header()) as writer:
        writer.write(Record(EVENTS, 5, 7, 0, b"", b"garbage"))
        writer.write(Record(EVENTS, 5, 8, 0, b"", b"garbage"))
    result = run("replay", str(path))
    assert result.exit_code == 0
    assert result.stderr.count("passed over failslow.events partition 5 offset ") == 2
    assert "no incident" in result.stdout


SCENARIO = """
title = "a small job with a slow GPU"
seed = 5
iterations = 23
layout = { tp = 1, pp = 1, dp = 4, gpus_per_node = 2 }
faults = [{ kind = "slow_gpu", node = 1, gpu = 0, factor = 1.5, onset = 13 }]
"""


def test_a_simulated_recording_is_the_same_every_time_and_holds_no_answer(tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO)
    first = run("simulate", str(scenario), "--out", str(tmp_path / "a.fsr"))
    assert first.exit_code == 0
    second = run("simulate", str(scenario), "--out", str(tmp_path / "b.fsr"), "--json-truth")
    (truth,) = msgspec.json.decode(second.stdout)
    assert (truth["kind"], truth["onset_iteration"]) == ("slow_gpu", 13)
    assert (tmp_path / "a.fsr").read_bytes() == (tmp_path / "b.fsr").read_bytes()
    recording = read_recording(tmp_path / "a.fsr")
    assert {record.topic for record in recording} == {EVENTS}
    assert recording.truncated is None
    assert not any(b"slow" in record.value + record.key for record in recording)


def test_a_scenario_that_cannot_be_simulated_is_one_clear_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    scenario = tmp_path / "wrong.toml"
    scenario.write_text(SCENARIO + "mood = 'cheerful'\n")
    result = run("simulate", str(scenario), "--out", str(tmp_path / "a.fsr"))
    assert result.exit_code == 2
    assert "mood" in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "a.fsr").exists()
