"""What is asked of a broker beside consuming: topics, partitions, acknowledgements, looking back."""

import asyncio
import random
import re
import time
from pathlib import Path

import pytest
import yaml
from aiokafka import AIOKafkaProducer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from pipeline import topics
from pipeline.broker import BrokerError, EmbeddedBroker
from pipeline.lookback import Lookback
from pipeline.publisher import Publisher, PublishError
from schemas.topics import ALERTS, DEAD_LETTERS, EVENTS, MAX_MESSAGE_BYTES, TOPICS, TopicSpec
from tests.integration import apache_kafka
from tests.integration.apache_kafka import ApacheKafka
from tests.integration.live_tools import Broker, Reader, wait_until

pytestmark = pytest.mark.broker

NOWHERE = "127.0.0.1:1"


def test_declaring_topics_creates_them_once_and_says_so(bare_kafka: ApacheKafka) -> None:
    with pytest.raises(topics.TopicsMissing, match=rf"run `failslow init --bootstrap {bare_kafka.bootstrap}`"):
        topics.check(bare_kafka.bootstrap)
    assert len(topics.declare(bare_kafka.bootstrap)) == len(TOPICS)
    assert topics.declare(bare_kafka.bootstrap) == []
    counts = topics.check(bare_kafka.bootstrap)
    assert {spec.name: counts[spec.name] for spec in TOPICS} == {spec.name: spec.partitions for spec in TOPICS}


def test_declared_topics_have_their_retention_and_a_change_is_brought_in_line(kafka: ApacheKafka) -> None:
    def shown(name: str) -> dict[str, str]:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        resource = ConfigResource(ResourceType.TOPIC, name)
        (future,) = admin.describe_configs([resource]).values()
        return {key: entry.value for key, entry in future.result().items()}

    for spec in TOPICS:
        assert shown(spec.name)["retention.ms"] == str(spec.retention_ms)
        assert shown(spec.name)["cleanup.policy"] == "delete"
    shorter = TopicSpec(ALERTS, partitions=11, retention_ms=3_600_000)
    changes = topics.declare(kafka.bootstrap, [shorter])
    assert changes == [f"grew {ALERTS} from 8 to 11 partitions", f"set retention.ms of {ALERTS} to 3600000"]
    wait_until(lambda: shown(ALERTS)["retention.ms"] == "3600000", "the new retention")
    assert topics.declare(kafka.bootstrap, [TopicSpec(ALERTS, partitions=5, retention_ms=3_600_000)]) == []
    assert topics.check(kafka.bootstrap)[ALERTS] == 11


def test_an_address_where_nobody_listens_is_named() -> None:
    with pytest.raises(topics.BrokerUnreachable, match=NOWHERE):
        topics.partition_counts(NOWHERE, timeout_s=0.5)


def test_the_embedded_broker_has_its_topics_and_refuses_one_twice(embedded: EmbeddedBroker) -> None:
    counts = topics.check(embedded.bootstrap)
    assert counts == {spec.name: spec.partitions for spec in TOPICS}
    embedded.create_topic("more", 3)
    assert topics.partition_counts(embedded.bootstrap)["more"] == 3
    with pytest.raises(BrokerError, match="'more'"):
        embedded.create_topic("more", 3)
    embedded.close()
    embedded.close()


def test_both_clients_put_a_key_on_the_same_partition(broker: Broker) -> None:
    """Faust brings aiokafka, whose default is Java's; agents and stages publish with librdkafka."""
    keys = [f"job-{number}/node-{number % 5}".encode() for number in range(89)]

    async def send_with_aiokafka() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        await producer.start()
        for key in keys:
            await producer.send_and_wait(EVENTS, b"aiokafka", key=key)
        await producer.stop()

    with Publisher(broker.bootstrap) as publisher:
        for published in [publisher.publish(EVENTS, key, b"librdkafka") for key in keys]:
            published.result(10)
    asyncio.run(send_with_aiokafka())
    with Reader(broker.bootstrap, EVENTS) as reader:
        reader.wait_for(2 * len(keys))
        places = {
            name: {one.key(): one.partition() for one in reader.messages if one.value() == name}
            for name in (b"librdkafka", b"aiokafka")
        }
    assert places[b"librdkafka"] == places[b"aiokafka"]
    assert len(set(places[b"aiokafka"].values())) == 8


def test_what_is_published_during_an_outage_is_acknowledged_after_it(embedded: EmbeddedBroker) -> None:
    with Publisher(embedded.bootstrap) as publisher:
        publisher.publish(ALERTS, b"k", b"0").result(10)
        embedded.down()
        waiting = [publisher.publish(ALERTS, b"k", str(number).encode()) for number in range(1, 23)]
        with pytest.raises(TimeoutError):
            waiting[0].result(1.0)
        assert not any(one.done() for one in waiting)
        embedded.up()
        for one in waiting:
            one.result(20)
    with Reader(embedded.bootstrap, ALERTS) as reader:
        reader.wait_for(23)
        assert [int(one.value() or b"") for one in reader.messages] == list(range(23))


def test_what_is_refused_for_good_is_an_error(bare_kafka: ApacheKafka) -> None:
    admin = AdminClient({"bootstrap.servers": bare_kafka.bootstrap})
    (created,) = admin.create_topics([NewTopic("narrow", 1, config={"max.message.bytes": "997"})]).values()
    created.result()
    incompressible = random.Random(5).randbytes(5003)
    with Publisher(bare_kafka.bootstrap) as publisher:
        with pytest.raises(PublishError, match="narrow"):
            publisher.publish("narrow", b"k", incompressible).result(30)
        with pytest.raises(PublishError, match="narrow"):
            publisher.publish("narrow", b"k", b"0" * (MAX_MESSAGE_BYTES + 1))
        publisher.publish("narrow", b"k", b"v").result(30)


def test_looking_back_finds_offsets_by_time_or_says_that_the_broker_cannot(broker: Broker) -> None:
    partition = (DEAD_LETTERS, 0)
    with Publisher(broker.bootstrap) as publisher, Lookback(broker.bootstrap) as lookback:
        assert lookback.bounds(partition) == (0, 0)
        assert list(lookback.read({partition: (0, 0)})) == []
        for number in range(31):
            publisher.publish(DEAD_LETTERS, b"k", str(number).encode()).result(10)
            time.sleep(0.002)  # for every record to have a time of its own
        assert lookback.bounds(partition) == (0, 31)
        records = list(lookback.read({partition: (7, 29)}))
        assert [record.offset for record in records] == list(range(7, 29))
        assert lookback.times({partition: 11}) == {partition: records[4].time_ns}
        found = lookback.offsets({partition: records[4].time_ns})
        late = lookback.offsets({partition: records[-1].time_ns + 10**12})
    assert found == {partition: 11 if isinstance(broker, ApacheKafka) else None}
    assert late == {partition: None}


def test_the_tests_run_the_kafka_that_is_deployed(repository: Path) -> None:
    services = yaml.safe_load((repository / "docker-compose.yml").read_text())["services"]
    assert services["kafka"]["image"] == f"apache/kafka:{apache_kafka.VERSION}"
    assert re.fullmatch(r"4\.\d+\.\d+", apache_kafka.VERSION)
