"""A simulated job through a real broker: agents, Faust worker and consumer as separate processes, against a replay."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pipeline.engine import Engine
from pipeline.lookback import to_record
from pipeline.replay import count_records, merge
from pipeline.settings import Driver, Settings
from schemas.alerts import Alert, AlertState
from schemas.codec import encode_alert
from schemas.events import EventBatch
from schemas.topics import EVENTS, ITERATIONS
from tests.integration.apache_kafka import ApacheKafka
from tests.integration.live_tools import (
    REAL,
    REPOSITORY,
    Broker,
    Reader,
    Sender,
    Worker,
    alerts_of,
    dead_letters_of,
)
from tests.pipeline.simulation import event_records, scenario

pytestmark = pytest.mark.broker

SCENARIO = "slow_gpu"
AGENTS = [sys.executable, "-m", "agents", "run", "--simulate", f"scenarios/{SCENARIO}.toml", "--epoch", "scenario"]


def settings(broker: Broker, driver: Driver = Driver.FAUST) -> Settings:
    return Settings(
        bootstrap=broker.bootstrap,
        driver=driver,
        member="the-only-one",
        session_timeout_s=10.0,
        commit_interval_s=0.2,
        metrics_port=0,
    )


@cache
def replayed() -> list[tuple[int, Alert]]:
    """The alerts of the scenario without a broker, each with the number of events that it took."""
    engine = Engine()
    return [
        (n, alert) for n, record in enumerate(event_records(scenario(SCENARIO)), 1) for alert in engine.handle(record)
    ]


def batches() -> list[EventBatch]:
    from agents.simulated import Cluster

    return list(Cluster(scenario(SCENARIO)).batches())


def test_a_scenario_through_a_broker_gives_the_alerts_of_a_replay(broker: Broker, tmp_path: Path) -> None:
    with (
        alerts_of(broker) as alerts,
        dead_letters_of(broker) as dead,
        Reader(broker.bootstrap, EVENTS) as events,
        Worker(settings(broker), tmp_path, REAL) as worker,
    ):
        agents = [*AGENTS, "--bootstrap", broker.bootstrap, "--speed", "0"]
        sent = subprocess.run(agents, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        n_events = int(sent.stderr.split(" batches delivered")[0].split()[-1])
        events.wait_for(n_events)
        records = [to_record(message) for message in events.messages]
        engine = Engine()
        wanted = [alert for one in merge(records, EVENTS, count_records(records)) for alert in engine.handle(one)]
        alerts.wait_for(len(wanted), "alerts")
        assert worker.end() == 0
        assert [message.value() for message in alerts.messages] == [encode_alert(alert) for alert in wanted]
        assert dead.messages == []
    assert wanted == [alert for _, alert in replayed()]
    assert {alert.kind for alert in wanted} == {"slow_gpu"}
    assert wanted[-1].state is AlertState.RESOLVED


@pytest.mark.parametrize("moment", ["before", "at", "after"])
def test_a_worker_killed_around_an_onset_finds_every_incident_once(
    kafka: ApacheKafka, moment: str, tmp_path: Path
) -> None:
    everything = batches()
    first = replayed()[0][0]
    n_before = {"before": first - 60, "at": first, "after": first + 60}[moment]
    n_alerts = sum(n <= n_before for n, _ in replayed())
    sender = Sender(kafka.bootstrap)
    with (
        alerts_of(kafka) as alerts,
        Reader(kafka.bootstrap, ITERATIONS) as iterations,
        Worker(settings(kafka), tmp_path, REAL) as worker,
    ):
        sender.send(everything[:n_before])
        if moment == "after":
            alerts.wait_for(n_alerts, "alerts")
        else:
            iterations.wait_for(n_before - 8)
        worker.kill()
        sender.send(everything[n_before:])
        worker.start()
        alerts.wait_for(len(replayed()), "alerts")
        assert worker.end() == 0
        assert alerts.alerts() == [alert for _, alert in replayed()]


@pytest.mark.parametrize("driver", list(Driver))
def test_a_worker_that_has_a_whole_job_to_catch_up_with_makes_the_alerts_of_a_replay(
    kafka: ApacheKafka, driver: Driver, tmp_path: Path
) -> None:
    """Every partition holds minutes of the job when the worker starts: no node may come out late for it."""
    Sender(kafka.bootstrap).send(batches())
    with alerts_of(kafka) as alerts, Worker(settings(kafka, driver), tmp_path, REAL) as worker:
        alerts.wait_for(len(replayed()), "alerts")
        assert worker.end() == 0
        assert alerts.alerts() == [alert for _, alert in replayed()]
