"""Brokers that go away and workers that die: every incident once, nothing given up, nothing set aside for it."""

import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from pipeline.broker import EmbeddedBroker
from pipeline.settings import Driver, Settings
from pipeline.wiring import EXIT_ABNORMAL
from tests.integration.apache_kafka import ApacheKafka
from tests.integration.fake_stages import END, ONSET, batch, expected
from tests.integration.live_tools import (
    Broker,
    Sender,
    Worker,
    alerts_of,
    dead_letters_of,
    wait_until,
)

pytestmark = pytest.mark.broker

N_BATCHES = 43
OUTAGE_S = 2.0
NEVER_S = 3600.0


def settings(broker: Broker, driver: Driver = Driver.FAUST, commit_interval_s: float = 0.2) -> Settings:
    return Settings(
        bootstrap=broker.bootstrap,
        driver=driver,
        member="the-only-one",
        session_timeout_s=10.0,
        commit_interval_s=commit_interval_s,
        metrics_port=0,
    )


def stop(broker: Broker) -> None:
    if isinstance(broker, EmbeddedBroker):
        broker.down()
    else:
        assert isinstance(broker, ApacheKafka)
        broker.kill()


def start(broker: Broker) -> None:
    if isinstance(broker, EmbeddedBroker):
        broker.up()
    else:
        assert isinstance(broker, ApacheKafka)
        broker.start()


@pytest.mark.parametrize(
    ("kind", "driver"), [("kafka", Driver.FAUST), ("embedded", Driver.FAUST), ("embedded", Driver.PLAIN)]
)
def test_an_alert_that_meets_a_dead_broker_arrives_once_it_is_back(
    request: pytest.FixtureRequest, kind: str, driver: Driver, tmp_path: Path
) -> None:
    broker: Broker = request.getfixturevalue(kind)
    Sender(broker.bootstrap).send(batch("job-a", seq) for seq in range(N_BATCHES))
    wanted = expected("job-a", N_BATCHES)
    with Worker(settings(broker, driver), tmp_path, stop_before=ONSET) as worker:
        worker.wait_for_stop(ONSET)
        stop(broker)
        worker.go_on(ONSET)
        worker.wait_for_line("does not answer; what is to be published waits")
        time.sleep(OUTAGE_S)  # long enough for whatever gives up early to have given up
        assert worker.process is not None
        assert worker.process.poll() is None
        start(broker)
        with alerts_of(broker) as alerts, dead_letters_of(broker) as dead:
            alerts.wait_for(len(wanted), "alerts")
            assert worker.end() == 0
            assert alerts.alerts() == wanted
            assert dead.messages == []


def test_an_alert_that_meets_a_broker_that_hangs_arrives_once_it_goes_on(kafka: ApacheKafka, tmp_path: Path) -> None:
    Sender(kafka.bootstrap).send(batch("job-a", seq) for seq in range(N_BATCHES))
    wanted = expected("job-a", N_BATCHES)
    with (
        alerts_of(kafka) as alerts,
        dead_letters_of(kafka) as dead,
        Worker(settings(kafka), tmp_path, stop_before=ONSET) as worker,
    ):
        worker.wait_for_stop(ONSET)
        kafka.pause()
        worker.go_on(ONSET)
        time.sleep(OUTAGE_S)
        assert alerts.messages == []
        kafka.go_on()
        alerts.wait_for(len(wanted), "alerts")
        assert worker.end() == 0
        assert alerts.alerts() == wanted
        assert dead.messages == []


@pytest.mark.parametrize(
    ("driver", "moment", "commit_interval_s"),
    [
        pytest.param(Driver.FAUST, ONSET - 3, 0.2, id="before the onset"),
        pytest.param(Driver.FAUST, ONSET, 0.2, id="the alert made and not published"),
        pytest.param(Driver.FAUST, ONSET, NEVER_S, id="the alert made and not published, nothing committed"),
        pytest.param(Driver.FAUST, ONSET + 1, NEVER_S, id="the alert published and not committed"),
        pytest.param(Driver.FAUST, END - 1, 0.2, id="the incident open for long"),
        pytest.param(Driver.PLAIN, ONSET, 0.2, id="plain, the alert made and not published"),
        pytest.param(Driver.PLAIN, ONSET + 1, NEVER_S, id="plain, the alert published and not committed"),
    ],
)
def test_a_worker_killed_around_an_onset_loses_and_repeats_nothing(
    kafka: ApacheKafka, driver: Driver, moment: int, commit_interval_s: float, tmp_path: Path
) -> None:
    sender = Sender(kafka.bootstrap)
    wanted = expected("job-a", N_BATCHES)
    stop_before = ONSET if moment == ONSET else None
    made = settings(kafka, driver, commit_interval_s)
    with alerts_of(kafka) as alerts, Worker(made, tmp_path, stop_before=stop_before) as worker:
        if moment == ONSET:
            sender.send(batch("job-a", seq) for seq in range(N_BATCHES))
            worker.wait_for_stop(ONSET)
            worker.kill()
            worker.go_on(ONSET)
        else:
            sender.send(batch("job-a", seq) for seq in range(moment + 1))
            alerts.wait_for(len(expected("job-a", moment + 1)), "alerts")
            worker.wait_for_line("holds")
            worker.kill()
            sender.send(batch("job-a", seq) for seq in range(moment + 1, N_BATCHES))
        worker.start()
        alerts.wait_for(len(wanted), "alerts")
        assert worker.end() == 0
        assert alerts.alerts() == wanted


def test_a_plain_worker_that_a_heartbeat_finds_fenced_ends_and_the_next_one_goes_on(
    kafka: ApacheKafka, tmp_path: Path
) -> None:
    """Nothing has come yet, so there is nothing to commit, and no commit that would be refused."""
    wanted = expected("job-a", N_BATCHES)
    with (
        alerts_of(kafka) as alerts,
        dead_letters_of(kafka) as dead,
        Worker(settings(kafka, Driver.PLAIN), tmp_path) as worker,
    ):
        worker.wait_for_line("holds 16 partitions")
        join_in_place_of(worker)
        assert worker.wait() == EXIT_ABNORMAL
        Sender(kafka.bootstrap).send(batch("job-a", seq) for seq in range(N_BATCHES))
        worker.start()
        alerts.wait_for(len(wanted), "alerts")
        assert worker.end() == 0
        assert alerts.alerts() == wanted
        assert dead.messages == []


def join_in_place_of(worker: Worker) -> None:
    """Join the worker's group under its member name, and go without a word, as members with a name do."""
    joined: list[bool] = []
    consumer = Consumer(
        {
            "bootstrap.servers": worker.settings.bootstrap,
            "group.id": worker.settings.consumer_group,
            "group.instance.id": worker.settings.member,
            "partition.assignment.strategy": "roundrobin",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe(list(worker.settings.stage.topics), on_assign=lambda *_: joined.append(True))

    def has_joined() -> bool:
        consumer.consume(1, 0.0)
        return bool(joined)

    wait_until(has_joined, "a place in the group")
    consumer.close()


def test_a_plain_worker_fenced_in_an_outage_ends_and_the_next_one_goes_on(kafka: ApacheKafka, tmp_path: Path) -> None:
    """With a record in hand it lets its client neither give up its partitions nor join, but heartbeats are sent.

    They no longer carry the member's id, which the client forgets with the session, and so the broker fences it.
    """
    sender = Sender(kafka.bootstrap)
    sender.send(batch("job-a", seq) for seq in range(23))
    wanted = expected("job-a", N_BATCHES)
    made = settings(kafka, Driver.PLAIN)
    with (
        alerts_of(kafka) as alerts,
        dead_letters_of(kafka) as dead,
        Worker(made, tmp_path, stop_before=ONSET) as worker,
    ):
        worker.wait_for_stop(ONSET)
        kafka.kill()
        time.sleep(made.session_timeout_s + OUTAGE_S)
        kafka.start()
        worker.wait_for_line("Static consumer fenced")  # librdkafka says so whatever its log level
        worker.go_on(ONSET)
        assert worker.wait() == EXIT_ABNORMAL
        sender.send(batch("job-a", seq) for seq in range(23, N_BATCHES))
        worker.start()
        alerts.wait_for(len(wanted), "alerts")
        assert worker.end() == 0
        assert alerts.alerts() == wanted
        assert dead.messages == []
