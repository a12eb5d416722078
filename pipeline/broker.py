"""A Kafka broker inside this process: librdkafka's mock cluster, for demos, tests and machines without a broker.

It is the broker that librdkafka's own tests run against: real sockets, real protocol, memory only. Its limits: about
5 MB are kept per partition, clients cannot create topics (they are created here, when the broker starts), offsets
cannot be looked up by time, and one worker per consumer group is what it handles well.
"""

import ctypes
import ctypes.util
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka

from schemas.topics import TOPICS, TopicSpec

_PRODUCER = 0  # RD_KAFKA_PRODUCER: the kind of client that hosts the cluster
_BROKER_ID = 1  # the mock cluster numbers its brokers from 1
_ERROR_BYTES = 512


class BrokerError(RuntimeError):
    """The embedded broker could not be started or told something."""


class EmbeddedBroker:
    """One broker on a free port of 127.0.0.1, with its topics; a context manager.

    `topics` says which topics exist and with how many partitions; retention and clean-up policy do not apply.
    """

    def __init__(self, topics: Iterable[TopicSpec] = TOPICS) -> None:
        self._lib = _library()
        conf = self._lib.rd_kafka_conf_new()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._lib.rd_kafka_conf_set(conf, b"log_level", b"0", error, _ERROR_BYTES)
        self._host = self._lib.rd_kafka_new(_PRODUCER, conf, error, _ERROR_BYTES)
        if not self._host:
            raise BrokerError(f"librdkafka refused a client for the embedded broker: {error.value.decode()}")
        self._cluster = self._lib.rd_kafka_mock_cluster_new(self._host, 1)
        if not self._cluster:
            self._lib.rd_kafka_destroy(self._host)
            raise BrokerError("librdkafka could not start its mock cluster: is the loopback interface up?")
        self._lib.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        self.bootstrap: str = self._lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        for topic in topics:
            self.create_topic(topic.name, topic.partitions)

    def create_topic(self, name: str, partitions: int) -> None:
        """Create one topic. Raises BrokerError where it exists."""
        code = self._lib.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        if code:
            raise BrokerError(f"topic {name!r} with {partitions} partitions was refused (code {code}): does it exist?")

    def down(self) -> None:
        """Close all connections and accept none, as a broker that died; what it holds is kept."""
        self._told(self._lib.rd_kafka_mock_broker_set_down(self._cluster, _BROKER_ID))

    def up(self) -> None:
        """Accept connections again."""
        self._told(self._lib.rd_kafka_mock_broker_set_up(self._cluster, _BROKER_ID))

    def close(self) -> None:
        """Stop the broker; what it held is gone. Closing twice is allowed."""
        if self._cluster:
            self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
            self._lib.rd_kafka_destroy(self._host)
            self._cluster = self._host = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _told(code: int) -> None:
        if code:
            raise BrokerError(f"the embedded broker did not obey (code {code})")


def _library() -> Any:
    """Load the librdkafka that confluent-kafka itself uses, and declare the functions called here."""
    bundled = sorted((Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*"))
    path = str(bundled[0]) if bundled else ctypes.util.find_library("rdkafka")
    if path is None:
        raise BrokerError("no librdkafka found: install confluent-kafka from its binary wheel, or Debian's librdkafka1")
    lib = ctypes.CDLL(path)
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
        ("conf_new", pointer, []),
        ("conf_set", number, [pointer, text, text, text, ctypes.c_size_t]),
        ("new", pointer, [number, pointer, text, ctypes.c_size_t]),
        ("destroy", None, [pointer]),
        ("mock_cluster_new", pointer, [pointer, number]),
        ("mock_cluster_destroy", None, [pointer]),
        ("mock_cluster_bootstraps", text, [pointer]),
        ("mock_topic_create", number, [pointer, text, number, number]),
        ("mock_broker_set_down", number, [pointer, ctypes.c_int32]),
        ("mock_broker_set_up", number, [pointer, ctypes.c_int32]),
        ("mock_group_initial_rebalance_delay_ms", None, [pointer, ctypes.c_int32]),
    ):
        function = getattr(lib, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    return lib
