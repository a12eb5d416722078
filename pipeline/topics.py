"""Declares the topics on a broker, and checks that they are there before anything is run."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from schemas.topics import MAX_MESSAGE_BYTES, TOPICS, TopicSpec

TIMEOUT_S = 15.0
POLL_S = 0.05


class BrokerUnreachable(RuntimeError):
    """Nothing that speaks Kafka answers at the bootstrap address."""


class TopicsMissing(RuntimeError):
    """Topics that the pipeline needs do not exist."""


def declare(bootstrap: str, topics: Iterable[TopicSpec] = TOPICS, *, replication: int = 1) -> list[str]:
    """Create what is missing, add partitions where there are too few, set retention and clean-up policy.

    Returns one sentence per change; an empty list says that everything stood as it should. Partitions are never taken
    away: a topic that has more is left as it is. Raises BrokerUnreachable, or RuntimeError with the broker's words.
    """
    admin = _admin(bootstrap)
    wanted = list(topics)
    found = partition_counts(bootstrap, admin)
    changes: list[str] = []
    for spec in wanted:
        if spec.name not in found:
            topic = NewTopic(spec.name, spec.partitions, replication, config=_config(spec))
            if _await(admin.create_topics([topic], operation_timeout=TIMEOUT_S), f"creating topic {spec.name}"):
                changes.append(f"created {spec.name} with {spec.partitions} partitions")
        elif found[spec.name] < spec.partitions:
            growth = NewPartitions(spec.name, spec.partitions)
            _await(admin.create_partitions([growth], operation_timeout=TIMEOUT_S), f"growing topic {spec.name}")
            changes.append(f"grew {spec.name} from {found[spec.name]} to {spec.partitions} partitions")
    changes += _configure(admin, [spec for spec in wanted if spec.name in found])
    _wait_until_known(bootstrap, admin, wanted)
    return changes


def check(bootstrap: str, topics: Iterable[TopicSpec] = TOPICS) -> dict[str, int]:
    """Return the number of partitions by topic name. Raises TopicsMissing, with the remedy, or BrokerUnreachable."""
    found = partition_counts(bootstrap)
    missing = [spec.name for spec in topics if spec.name not in found]
    if missing:
        raise TopicsMissing(
            f"{bootstrap} has no topic {', '.join(missing)}: run `failslow init --bootstrap {bootstrap}`"
        )
    return found


def partition_counts(
    bootstrap: str, admin: AdminClient | None = None, *, timeout_s: float = TIMEOUT_S
) -> dict[str, int]:
    """Return the number of partitions of every topic that the broker has. Raises BrokerUnreachable."""
    try:
        metadata = (admin or _admin(bootstrap)).list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise BrokerUnreachable(f"no Kafka broker answers at {bootstrap}: is it running, is the port right?") from error
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "socket.timeout.ms": int(TIMEOUT_S * 1000)})


def _config(spec: TopicSpec) -> dict[str, str]:
    return {
        "retention.ms": str(spec.retention_ms),
        "cleanup.policy": spec.cleanup_policy,
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
    }


def _configure(admin: AdminClient, specs: list[TopicSpec]) -> list[str]:
    """Bring the configuration of topics that exist in line, touching what differs and nothing else."""
    if not specs:
        return []
    resources = {spec: ConfigResource(ResourceType.TOPIC, spec.name) for spec in specs}
    answers = admin.describe_configs(list(resources.values()), request_timeout=TIMEOUT_S)
    found = {resource.name: future.result() for resource, future in answers.items()}
    changes: list[str] = []
    for spec in specs:
        differing = {
            name: value
            for name, value in _config(spec).items()
            if name not in found[spec.name] or found[spec.name][name].value != value
        }
        if not differing:
            continue
        # The incremental form leaves alone what an operator has set beside these names.
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in differing.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, spec.name, incremental_configs=entries)
        _await(admin.incremental_alter_configs([resource]), f"configuring topic {spec.name}")
        changes += [f"set {name} of {spec.name} to {value}" for name, value in differing.items()]
    return changes


def _wait_until_known(bootstrap: str, admin: AdminClient, topics: list[TopicSpec]) -> None:
    """Return when the broker's own metadata, which follow a change with a delay, show every topic."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = partition_counts(bootstrap, admin)
        if all(found.get(spec.name, 0) >= spec.partitions for spec in topics):
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"{bootstrap} has accepted the topics, but does not show them after {TIMEOUT_S:g} s")


def _await(futures: Mapping[Any, Any], doing: str) -> bool:
    """Wait for the broker to have done it; returns whether it was this request that did."""
    for future in futures.values():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return False  # somebody else declared it meanwhile: the outcome that was wanted
            raise RuntimeError(f"{doing} failed: {error.args[0].str()}") from error
    return True
