"""Topics, their keys, and how they have to be declared (docs/decisions/0004-topics-and-keys.md)."""

from dataclasses import dataclass

EVENTS = "failslow.events"
ITERATIONS = "failslow.iterations"
ALERTS = "failslow.alerts"
DEAD_LETTERS = "failslow.dead-letters"

DAY_MS = 24 * 3600 * 1000

# Of one message on the wire, compressed; a node that has much to say sends several megabytes before compression.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

# Every producer chooses partitions like this (librdkafka's name for what Java clients and aiokafka do): one key lands
# on one partition, whoever sends it.
PARTITIONER = "murmur2_random"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """How one topic is declared: enough partitions to scale by, enough retention to rebuild state from."""

    name: str
    partitions: int
    retention_ms: int
    cleanup_policy: str = "delete"


TOPICS = (
    TopicSpec(EVENTS, partitions=8, retention_ms=1 * DAY_MS),
    TopicSpec(ITERATIONS, partitions=8, retention_ms=7 * DAY_MS),
    TopicSpec(ALERTS, partitions=8, retention_ms=90 * DAY_MS),
    TopicSpec(DEAD_LETTERS, partitions=1, retention_ms=7 * DAY_MS),
)


def events_key(job_id: str, node: str) -> bytes:
    """Key of an EventBatch: one node's batches keep their order, and windows scale by node."""
    return f"{job_id}/{node}".encode()


def job_key(job_id: str) -> bytes:
    """Key of iteration batches and alerts: one partition holds one job's total order."""
    return job_id.encode()
