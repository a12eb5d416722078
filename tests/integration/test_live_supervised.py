"""What is around a worker: refusal to start, the supervisor, poison, metrics, several workers of one group."""

import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline import dead_letters, supervise
from pipeline.broker import EmbeddedBroker
from pipeline.settings import Driver, Settings, Stage
from pipeline.worker import EXIT_USAGE
from schemas.topics import EVENTS
from tests.integration.apache_kafka import ApacheKafka
from tests.integration.fake_stages import EXPLOSIVE, batch, expected
from tests.integration.live_tools import FAKE, Sender, Worker, alerts_of, dead_letters_of, wait_until

pytestmark = pytest.mark.broker

N_BATCHES = 43


def settings(bootstrap: str, driver: Driver = Driver.FAUST, stage: Stage = Stage.BOTH) -> Settings:
    return Settings(
        bootstrap=bootstrap, driver=driver, stage=stage, session_timeout_s=6.0, commit_interval_s=0.2, metrics_port=0
    )


@pytest.mark.parametrize("driver", list(Driver))
def test_a_worker_refuses_a_broker_without_topics_and_names_the_remedy(driver: Driver, tmp_path: Path) -> None:
    with EmbeddedBroker(topics=()) as broker, Worker(settings(broker.bootstrap, driver), tmp_path) as worker:
        assert worker.wait() == EXIT_USAGE
        assert any(f"run `failslow init --bootstrap {broker.bootstrap}`" in line for line in worker.lines())


class Supervised:
    """A supervisor in a thread of this process, and its worker."""

    def __init__(self, made: Settings, folder: Path) -> None:
        self.settings = msgspec.structs.replace(made, state_dir=str(folder / "state"), consumer_group=folder.name)
        self.supervisor = supervise.Supervisor(self.settings, FAKE, backoff_s=0.05)
        self.statuses: list[int] = []
        self._thread = threading.Thread(target=lambda: self.statuses.append(self.supervisor.run()))
        self._thread.start()

    def end(self) -> list[int]:
        self.supervisor.end()
        self._thread.join()
        return self.statuses


@pytest.fixture
def supervised(kafka: ApacheKafka, tmp_path: Path) -> Iterator[Supervised]:
    made = Supervised(settings(kafka.bootstrap), tmp_path)
    yield made
    made.end()


def test_a_record_that_ends_the_worker_three_times_is_set_aside_as_poison(
    kafka: ApacheKafka, supervised: Supervised
) -> None:
    sender = Sender(kafka.bootstrap)
    sender.send(batch("job-a", seq) for seq in range(N_BATCHES))
    wanted = expected("job-a", N_BATCHES)
    with alerts_of(kafka) as alerts, dead_letters_of(kafka) as dead:
        sender.send([batch("job-b", 0, node=EXPLOSIVE)])
        alerts.wait_for(len(wanted), "alerts")
        dead.wait_for(1, "dead letters")
        sender.send([batch("job-c", seq) for seq in range(N_BATCHES)])
        alerts.wait_for(2 * len(wanted), "alerts")
        assert supervised.end() == [0]
        assert supervised.supervisor.n_restarts == 3
        assert alerts.alerts("job-a") == wanted
        assert alerts.alerts("job-c") == expected("job-c", N_BATCHES)
        (letter,) = [dead_letters.decode(message.value() or b"") for message in dead.messages]
    assert (letter.topic, letter.cause, letter.key) == (
        EVENTS,
        dead_letters.Cause.POISON,
        f"job-b/{EXPLOSIVE}".encode(),
    )


def test_a_killed_worker_is_started_anew_and_no_record_is_blamed_for_it(
    kafka: ApacheKafka, supervised: Supervised
) -> None:
    sender = Sender(kafka.bootstrap)
    wanted = expected("job-a", N_BATCHES)
    with alerts_of(kafka) as alerts, dead_letters_of(kafka) as dead:
        for kill in range(4):
            sender.send(batch("job-a", seq) for seq in range(kill * 10, kill * 10 + 10))
            alerts.wait_for(len(expected("job-a", kill * 10 + 10)), "alerts")
            pid = supervised.supervisor.pid
            assert pid is not None
            signal.pidfd_send_signal(_pidfd(pid), signal.SIGKILL)
            wait_until(lambda: supervised.supervisor.pid != pid, "another worker")  # noqa: B023 - called at once
        sender.send(batch("job-a", seq) for seq in range(40, N_BATCHES))
        alerts.wait_for(len(wanted), "alerts")
        assert supervised.end() == [0]
        assert alerts.alerts() == wanted
        assert dead.messages == []


@pytest.mark.parametrize("driver", list(Driver))
def test_an_outage_longer_than_the_session_delays_and_changes_nothing(
    kafka: ApacheKafka, driver: Driver, tmp_path: Path
) -> None:
    sender = Sender(kafka.bootstrap)
    wanted = expected("job-a", N_BATCHES)
    supervised = Supervised(settings(kafka.bootstrap, driver), tmp_path)
    try:
        with alerts_of(kafka) as alerts, dead_letters_of(kafka) as dead:
            sender.send(batch("job-a", seq) for seq in range(23))
            alerts.wait_for(len(expected("job-a", 23)), "alerts")
            kafka.kill()
            time.sleep(supervised.settings.session_timeout_s + 2)
            kafka.start()
            sender.send(batch("job-a", seq) for seq in range(23, N_BATCHES))
            alerts.wait_for(len(wanted), "alerts")
            assert supervised.end() == [0]
            assert alerts.alerts() == wanted
            assert dead.messages == []
    finally:
        supervised.end()


def _pidfd(pid: int) -> int:
    import os

    return os.pidfd_open(pid)


def test_partitions_move_between_workers_without_loss_or_repetition(kafka: ApacheKafka, tmp_path: Path) -> None:
    """One worker, then two, then the other one alone: each job's alerts stay those of one judge."""
    jobs = [f"job-{number}" for number in range(7)]
    sender = Sender(kafka.bootstrap)
    for name in "ab":
        (tmp_path / name / "group").mkdir(parents=True)
    wanted = {job: expected(job, N_BATCHES) for job in jobs}
    with alerts_of(kafka) as alerts, Worker(settings(kafka.bootstrap), tmp_path / "a" / "group") as first:
        sender.send(batch(job, seq) for seq in range(13) for job in jobs)
        alerts.wait_for(len(jobs) * len(expected("x", 13)), "alerts")
        with Worker(settings(kafka.bootstrap), tmp_path / "b" / "group") as second:
            second.wait_for_line("holds 8 partitions")
            sender.send(batch(job, seq) for seq in range(13, 29) for job in jobs)
            alerts.wait_for(len(jobs) * len(expected("x", 29)), "alerts")
            assert first.end() == 0
            second.wait_for_line("holds 16 partitions")
            sender.send(batch(job, seq) for seq in range(29, N_BATCHES) for job in jobs)
            alerts.wait_for(sum(map(len, wanted.values())), "alerts")
            assert second.end() == 0
        assert {job: alerts.alerts(job) for job in jobs} == wanted


@pytest.mark.parametrize("driver", list(Driver))
def test_metrics_tell_what_was_handled_published_and_set_aside(
    embedded: EmbeddedBroker, driver: Driver, tmp_path: Path
) -> None:
    sender = Sender(embedded.bootstrap)
    sender.send(batch("job-a", seq) for seq in range(23))
    sender.send_raw(EVENTS, b"job-a/n0", b"?")
    sender.flush()
    wanted = expected("job-a", 23)
    with (
        alerts_of(embedded) as alerts,
        dead_letters_of(embedded) as dead,
        Worker(settings(embedded.bootstrap, driver), tmp_path) as worker,
    ):
        alerts.wait_for(len(wanted), "alerts")
        dead.wait_for(1, "dead letters")
        worker.wait_for_line("metrics on ")
        (line,) = [line for line in worker.lines() if "metrics on " in line]
        address = line.split("metrics on ")[1].split('"')[0]
        lines = (
            'failslow_records_total{topic="failslow.events"} 24.0',
            'failslow_records_total{topic="failslow.iterations"} 23.0',
            f'failslow_published_total{{topic="failslow.alerts"}} {float(len(wanted))}',
            f'failslow_alerts_total{{kind="slow_host",state="firing"}} {float(len(wanted))}',
            'failslow_alerts_firing{job_id="job-a",kind="slow_host"} 1.0',
            'failslow_dead_letters_total{reason="unreadable",topic="failslow.events"} 1.0',
            'failslow_partitions_assigned{topic="failslow.events"} 8.0',
        )

        def shown() -> list[str]:
            with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310 - our own address
                return str(answer.read(), "utf-8").splitlines()

        wait_until(lambda: all(one in shown() for one in lines), f"these metrics: {lines}")
        wait_until(lambda: any(one.startswith("failslow_lag_records{") for one in shown()), "the lag")


def test_the_supervisor_ends_when_the_worker_refuses_its_settings(tmp_path: Path) -> None:
    with EmbeddedBroker(topics=()) as broker:
        made = msgspec.structs.replace(settings(broker.bootstrap), state_dir=str(tmp_path))
        assert supervise.Supervisor(made, [sys.executable, "-m", "pipeline.worker"]).run() == EXIT_USAGE
