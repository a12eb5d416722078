"""Keys decide which partition holds what: they are part of the contract."""

from schemas.topics import ALERTS, DEAD_LETTERS, EVENTS, ITERATIONS, TOPICS, events_key, job_key


def test_every_topic_is_declared_once_and_none_is_compacted() -> None:
    assert [spec.name for spec in TOPICS] == [EVENTS, ITERATIONS, ALERTS, DEAD_LETTERS]
    assert {spec.cleanup_policy for spec in TOPICS} == {"delete"}


def test_alerts_are_kept_longest() -> None:
    retention_ms = {spec.name: spec.retention_ms for spec in TOPICS}
    assert max(retention_ms, key=lambda name: retention_ms[name]) == ALERTS


def test_keys_are_those_of_the_decision() -> None:
    assert events_key("job", "node-3") == b"job/node-3"
    assert job_key("job") == b"job"
