"""Brokers for tests: Apache Kafka and the embedded one, each with its topics."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import topics
from pipeline.broker import EmbeddedBroker
from tests.conftest import give_up
from tests.integration.apache_kafka import ApacheKafka, KafkaMissing, jars
from tests.integration.live_tools import Broker


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """Apache Kafka itself, fetched once and kept."""
    try:
        return jars()
    except KafkaMissing as error:
        give_up(str(error))


@pytest.fixture(scope="session")
def running_kafka(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """Apache Kafka, with what earlier tests left on it."""
    with ApacheKafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def bare_kafka(running_kafka: ApacheKafka) -> ApacheKafka:
    """Apache Kafka without topics; groups of earlier tests are still there, so every test names its own."""
    running_kafka.clear()
    return running_kafka


@pytest.fixture
def kafka(bare_kafka: ApacheKafka) -> ApacheKafka:
    """Apache Kafka with the topics declared, and nothing on them."""
    topics.declare(bare_kafka.bootstrap)
    return bare_kafka


@pytest.fixture
def embedded() -> Iterator[EmbeddedBroker]:
    """The embedded broker."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture(params=["embedded", "kafka"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Each kind of broker in turn."""
    made: Broker = request.getfixturevalue(request.param)
    return made
