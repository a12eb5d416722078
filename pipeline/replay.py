"""Replay: a recording through the same stages as live, and whether the alerts are the same."""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pipeline.observer import FrameSummary, Observer
from pipeline.record import Record
from schemas.alerts import Alert, Severity
from schemas.codec import InvalidRecord, decode_alert, encode_alert


class Stage(Protocol):
    """An Engine, fed with events, or a Judge, fed with iterations."""

    def handle(self, record: Record) -> Iterator[Alert]:
        """Take one record and yield the alerts that it causes. Raises InvalidRecord."""
        ...


def replay(
    records: Iterable[Record], stage: Stage, *, when_unreadable: Callable[[Record, InvalidRecord], None] | None = None
) -> Iterator[Alert]:
    """Yield the alerts of all records in their order; records that cannot be read are reported and passed over."""
    for record in records:
        try:
            yield from stage.handle(record)
        except InvalidRecord as error:
            if when_unreadable is not None:
                when_unreadable(record, error)


Partition = tuple[str, int]


def count_records(records: Iterable[Record]) -> Counter[Partition]:
    """Return how many records each (topic, partition) has."""
    return Counter((record.topic, record.partition) for record in records)


def merge(records: Iterable[Record], topic: str, counts: Counter[Partition]) -> Iterator[Record]:
    """Yield a topic's records in the one canonical order, whatever order its partitions were recorded in.

    The partitions are merged by (time_ns, partition, offset), each keeping its own order, since producers' clocks
    differ. `counts` tells when a partition is exhausted; records are held only while another partition lags behind.
    """
    left = {partition: n for (name, partition), n in counts.items() if name == topic}
    waiting: dict[int, deque[Record]] = {partition: deque() for partition in left}
    for record in records:
        if record.topic != topic:
            continue
        waiting.setdefault(record.partition, deque()).append(record)
        left[record.partition] = left.get(record.partition, 1) - 1
        while (partition := _earliest(waiting, left)) is not None:
            yield waiting[partition].popleft()


def _earliest(waiting: dict[int, deque[Record]], left: dict[int, int]) -> int | None:
    """Return the partition whose next record is the earliest, None while that of another is not known yet."""
    if any(left[partition] > 0 and not queue for partition, queue in waiting.items()):
        return None
    heads = [(queue[0].time_ns, partition) for partition, queue in waiting.items() if queue]
    return min(heads)[1] if heads else None


@dataclass(slots=True)
class Comparison:
    """Recorded alerts beside replayed ones: per job, the same bytes in the same order, or what differs.

    Alerts are delivered at least once, so a recorded revision that stands again with the same content counts once.
    """

    n_identical: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(recorded: Iterable[bytes], replayed: Iterable[Alert]) -> Comparison:
    """Compare recorded alerts (as on the wire) with replayed ones, job by job."""
    comparison = Comparison()
    recorded_by_job = _recorded_by_job(recorded, comparison)
    replayed_by_job: dict[str, list[Alert]] = defaultdict(list)
    for alert in replayed:
        replayed_by_job[alert.job_id].append(alert)
    for job_id in sorted(recorded_by_job.keys() | replayed_by_job.keys()):
        then, now = recorded_by_job.get(job_id, []), replayed_by_job.get(job_id, [])
        for place in range(max(len(then), len(now))):
            before = then[place] if place < len(then) else None
            after = now[place] if place < len(now) else None
            if before is not None and after is not None and before[0] == encode_alert(after):
                comparison.n_identical += 1
            else:
                comparison.differences.append(_difference(job_id, place, before[1] if before else None, after))
    return comparison


def _recorded_by_job(recorded: Iterable[bytes], comparison: Comparison) -> dict[str, list[tuple[bytes, Alert]]]:
    by_job: dict[str, list[tuple[bytes, Alert]]] = defaultdict(list)
    content_by_revision: dict[tuple[str, str, int], bytes] = {}
    for content in recorded:
        try:
            alert = decode_alert(content)
        except InvalidRecord as error:
            comparison.differences.append(f"a recorded alert cannot be read: {error}")
            continue
        key = (alert.job_id, alert.fingerprint, alert.revision)
        first = content_by_revision.setdefault(key, content)
        if first is content:
            by_job[alert.job_id].append((content, alert))
        elif first != content:
            comparison.differences.append(f"job {alert.job_id}: {_name(alert)} was recorded twice, with other content")
    return by_job


def _name(alert: Alert) -> str:
    return f"{alert.kind} {alert.fingerprint} revision {alert.revision} ({alert.state})"


def _difference(job_id: str, place: int, before: Alert | None, after: Alert | None) -> str:
    where = f"job {job_id}, alert {place + 1}"
    if before is None or after is None:
        made, said = ("replayed", after) if before is None else ("recorded", before)
        return f"{where}: only {made}: {_name(said)}" if said is not None else where
    fields = [
        f"{name} {_short(old)} recorded, {_short(new)} replayed"
        for name in Alert.__struct_fields__
        if (old := getattr(before, name)) != (new := getattr(after, name))
    ]
    return f"{where}: {_name(before)}: " + ("; ".join(fields) or "the same values in other bytes")


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Incident:
    """All revisions of one incident, from its first firing to its last word."""

    first: Alert
    last: Alert
    is_above_info: bool  # at any time: whether it accused somebody


def incidents(alerts: Iterable[Alert]) -> list[Incident]:
    """Group alerts into incidents, in order of their first alert; one that fires again after its end is a new one."""
    grouped: list[Incident] = []
    place_by_key: dict[tuple[str, str], int] = {}
    for alert in alerts:
        is_above_info = alert.severity != Severity.INFO
        key = (alert.job_id, alert.fingerprint)
        place = place_by_key.get(key)
        if place is None or grouped[place].last.resolution is not None:
            place_by_key[key] = len(grouped)
            grouped.append(Incident(alert, alert, is_above_info))
        else:
            before = grouped[place]
            grouped[place] = Incident(before.first, alert, before.is_above_info or is_above_info)
    return grouped


@dataclass(slots=True)
class FrameLog(Observer):
    """What was judged of each iteration, in short: enough to say where two runs part."""

    frames: dict[tuple[str, str, int], tuple[int, bytes]] = field(default_factory=dict)

    def frame_judged(self, frame: FrameSummary, /) -> None:
        """Note how many ranks the frame lacked, and what it held."""
        content = f"{frame.iteration_s!r} {frame.end_ns}".encode() + frame.rank_slowdown.tobytes()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        self.frames[frame.job_id, frame.incarnation, frame.iteration] = frame.missing_ranks, digest


def differing_frames(live: FrameLog, replayed: FrameLog) -> list[str]:
    """Say which frames differ between the recorded iterations and the recorded events, and why."""
    differences = []
    for key in sorted(live.frames.keys() | replayed.frames.keys()):
        before, after = live.frames.get(key), replayed.frames.get(key)
        if before == after:
            continue
        where = f"job {key[0]}, iteration {key[2]}"
        if before is None:
            differences.append(f"{where}: judged on replay alone; its iterations came after the recording had ended")
        elif after is None:
            differences.append(f"{where}: judged live alone; its events are not in the recording")
        elif before[0] != after[0]:
            differences.append(
                f"{where}: closed without {before[0]} ranks live and without {after[0]} on replay; "
                "their batches were late, or are missing in the recording"
            )
        else:
            differences.append(f"{where}: other values; events before it are missing, or another version made them")
    return differences
