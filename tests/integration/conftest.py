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


@pytest.fixture
def bare_kafka(kafka_jars: Path, tmp_path: Path) -> Iterator[ApacheKafka]:
    """Apache Kafka without topics."""
    folder = tmp_path / "kafka"
    folder.mkdir()
    with ApacheKafka(folder) as broker:
        yield broker


@pytest.fixture
def kafka(bare_kafka: ApacheKafka) -> ApacheKafka:
    """Apache Kafka with the topics declared."""
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
