"""The drivers with predictable stages, on both brokers: order, dead letters, outages, crashes."""

from pathlib import Path

import pytest

from pipeline import dead_letters
from pipeline.settings import Driver, Settings, Stage
from schemas.codec import encode_events
from schemas.topics import EVENTS, events_key
from tests.integration.apache_kafka import ApacheKafka
from tests.integration.fake_stages import batch, expected
from tests.integration.live_tools import Broker, Sender, Worker, alerts_of, dead_letters_of

pytestmark = pytest.mark.broker

N_BATCHES = 43
DRIVERS = pytest.mark.parametrize("driver", list(Driver))


def settings(broker: Broker, driver: Driver = Driver.FAUST, stage: Stage = Stage.BOTH) -> Settings:
    return Settings(
        bootstrap=broker.bootstrap,
        driver=driver,
        stage=stage,
        session_timeout_s=6.0,
        commit_interval_s=0.2,
        metrics_port=0,
    )


@DRIVERS
def test_alerts_leave_a_worker_as_the_stages_make_them(broker: Broker, driver: Driver, tmp_path: Path) -> None:
    jobs = ("job-a", "job-b", "job-c")
    Sender(broker.bootstrap).send(batch(job, seq) for seq in range(N_BATCHES) for job in jobs)
    wanted = {job: expected(job, N_BATCHES) for job in jobs}
    with alerts_of(broker) as reader, Worker(settings(broker, driver), tmp_path) as worker:
        reader.wait_for(sum(map(len, wanted.values())), "alerts")
        assert worker.end() == 0
        assert {job: reader.alerts(job) for job in jobs} == wanted


@DRIVERS
def test_what_cannot_be_read_is_set_aside_and_the_worker_goes_on(
    broker: Broker, driver: Driver, tmp_path: Path
) -> None:
    sender = Sender(broker.bootstrap)
    key = events_key("job-a", "n0")
    sender.send(batch("job-a", seq) for seq in range(5))
    sender.send_raw(EVENTS, key, b"\xc1poison")
    sender.send_raw(EVENTS, key, encode_events(batch("job-a", 5))[:-3])
    sender.send(batch("job-a", seq) for seq in range(5, N_BATCHES))
    wanted = expected("job-a", N_BATCHES)
    with alerts_of(broker) as alerts, dead_letters_of(broker) as dead, Worker(settings(broker, driver), tmp_path):
        alerts.wait_for(len(wanted), "alerts")
        dead.wait_for(2, "dead letters")
        assert alerts.alerts() == wanted
        letters = [dead_letters.decode(message.value() or b"") for message in dead.messages]
    assert [(one.topic, one.offset, one.cause.value) for one in letters] == [
        (EVENTS, 5, "unreadable"),
        (EVENTS, 6, "unreadable"),
    ]
    assert letters[0].partition == letters[1].partition
    assert letters[0].value == b"\xc1poison"
    assert all(one.reason.startswith("not a batch: ") for one in letters)


@pytest.mark.parametrize(("window", "judge"), [(Driver.FAUST, Driver.FAUST), (Driver.PLAIN, Driver.FAUST)])
def test_each_stage_may_have_its_own_worker_in_one_group(
    kafka: ApacheKafka, window: Driver, judge: Driver, tmp_path: Path
) -> None:
    jobs = ("job-a", "job-b", "job-c")
    folders = [tmp_path / name / f"{tmp_path.name}-group" for name in ("window", "judge")]
    for folder in folders:
        folder.mkdir(parents=True)
    wanted = {job: expected(job, N_BATCHES) for job in jobs}
    with (
        alerts_of(kafka) as alerts,
        Worker(settings(kafka, window, Stage.WINDOW), folders[0]) as first,
        Worker(settings(kafka, judge, Stage.JUDGE), folders[1]) as second,
    ):
        first.wait_for_line("window holds 8 partitions")
        second.wait_for_line("judge holds 8 partitions")
        Sender(kafka.bootstrap).send(batch(job, seq) for seq in range(N_BATCHES) for job in jobs)
        alerts.wait_for(sum(map(len, wanted.values())), "alerts")
        assert (first.end(), second.end()) == (0, 0)
        assert {job: alerts.alerts(job) for job in jobs} == wanted
