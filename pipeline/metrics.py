"""Every metric of a worker, declared once; docs/metrics.md describes them and a test compares the two."""

import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from pipeline.dead_letters import Cause
from pipeline.lookback import Partition
from pipeline.observer import FrameSummary, Observer
from schemas.alerts import Alert

COMPONENTS_MAX = 20_000  # series of one worker: 10,240 GPUs of one job and as many again
JOBS_MAX = 1_000

_Component = tuple[str, str, str]  # (job_id, node, gpu)


class Metrics(Observer):
    """An Observer that keeps the metrics of one worker on an injected registry.

    Labels are bounded: beyond COMPONENTS_MAX and JOBS_MAX no new series is made, which is counted. Series of a job go
    when it ends.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._components: dict[str, dict[_Component, Any]] = {}  # of each job: its series, held for speed
        self._n_components = 0
        self._shown_firing: set[tuple[str, str]] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.records = counter("failslow_records_total", "Records handled", "topic")
        self.rebuilt = counter("failslow_records_rebuilt_total", "Of these, read again to rebuild state", "topic")
        self.published = counter("failslow_published_total", "Messages that the broker has acknowledged", "topic")
        self.dead_letters = counter("failslow_dead_letters_total", "Records set aside", "topic", "reason")
        self.occurrences = counter("failslow_occurrences_total", "What the stages could not use, by name", "what")
        self.lag_records = gauge("failslow_lag_records", "Records not yet handled", "topic", "partition")
        self.record_lag = gauge("failslow_record_lag_seconds", "Age of the last record when it was handled", "topic")
        self.last_record = gauge("failslow_last_record_timestamp_seconds", "Time of the last record", "topic")
        self.assigned = gauge("failslow_partitions_assigned", "Partitions that this worker holds", "topic")
        self.frames = counter("failslow_frames_judged_total", "Iterations judged")
        self.missing = counter("failslow_frame_ranks_missing_total", "Ranks that a frame was closed without")
        self.frame_lag = gauge("failslow_frame_lag_seconds", "Age of the last judged iteration's end", "job_id")
        self.iteration = gauge("failslow_iteration_seconds", "Iteration time, median over ranks", "job_id")
        self.reference = gauge("failslow_reference_seconds", "Healthy iteration time it is compared with", "job_id")
        self.slowdown = gauge(
            "failslow_component_slowdown_ratio", "Own computation over that of the peers", "job_id", "node", "gpu"
        )
        self.alerts = counter("failslow_alerts_total", "Alerts published", "kind", "state")
        self.firing = gauge("failslow_alerts_firing", "Incidents that are open", "job_id", "kind")
        self.series_dropped = counter("failslow_series_dropped_total", "Label values beyond the bound", "metric")

    def frame_judged(self, frame: FrameSummary, /) -> None:
        """Show one judged iteration."""
        self.frames.inc()
        self.missing.inc(frame.missing_ranks)
        if frame.job_id not in self._components and len(self._components) >= JOBS_MAX:
            self.series_dropped.labels("failslow_iteration_seconds").inc()
            return
        known = self._components.setdefault(frame.job_id, {})
        _set_known(self.iteration.labels(frame.job_id), frame.iteration_s)
        _set_known(self.reference.labels(frame.job_id), frame.reference_s)
        self.frame_lag.labels(frame.job_id).set(time.time() - frame.end_ns / 1e9)
        for rank in np.flatnonzero(np.isfinite(frame.rank_slowdown)):
            component = (frame.job_id, frame.node[rank], frame.gpu[rank])
            if component not in known:
                if self._n_components >= COMPONENTS_MAX:
                    self.series_dropped.labels("failslow_component_slowdown_ratio").inc()
                    continue
                known[component] = self.slowdown.labels(*component)
                self._n_components += 1
            known[component].set(frame.rank_slowdown[rank])

    def counted(self, what: str, amount: int, /) -> None:
        """Count an occurrence by its name."""
        self.occurrences.labels(what).inc(amount)

    def job_ended(self, job_id: str, _incarnation: str, /) -> None:
        """Remove the series of a job."""
        components = self._components.pop(job_id, {})
        self._n_components -= len(components)
        for component in components:
            _remove(self.slowdown, *component)
        for gauge in (self.iteration, self.reference, self.frame_lag):
            _remove(gauge, job_id)

    def record_handled(self, topic: str, time_ns: int, *, is_rebuilding: bool) -> None:
        """Count one record of a topic, whatever came of it."""
        self.records.labels(topic).inc()
        self.last_record.labels(topic).set(time_ns / 1e9)
        self.record_lag.labels(topic).set(time.time() - time_ns / 1e9)
        if is_rebuilding:
            self.rebuilt.labels(topic).inc()

    def dead_lettered(self, topic: str, cause: Cause) -> None:
        """Count one record that was set aside."""
        self.dead_letters.labels(topic, cause.value).inc()

    def alert_published(self, alert: Alert) -> None:
        """Count one alert that the broker has."""
        self.alerts.labels(alert.kind.value, alert.state.value).inc()

    def show_firing(self, alerts: Iterable[Alert]) -> None:
        """Show the open incidents of all partitions that this worker holds, and no others."""
        tally = Tally((alert.job_id, alert.kind.value) for alert in alerts)
        for labels, count in tally.items():
            self.firing.labels(*labels).set(count)
        for labels in self._shown_firing - tally.keys():
            _remove(self.firing, *labels)
        self._shown_firing = set(tally)

    def show_assignment(self, partitions: Iterable[Partition], topics: Iterable[str]) -> None:
        """Show what this worker holds; lag of partitions that it lost goes."""
        held = Tally(topic for topic, _ in partitions)
        self.lag_records.clear()
        for topic in topics:
            self.assigned.labels(topic).set(held[topic])

    def show_lags(self, positions: Mapping[Partition, int], end: Callable[[Partition], int | None]) -> None:
        """Show how far each position is from the end of its partition, where that is known."""
        for (topic, partition), position in positions.items():
            offset = end((topic, partition))
            if offset is not None and offset >= 0:
                self.lag_records.labels(topic, str(partition)).set(max(0, offset - position))

    def serve(self, host: str, port: int) -> int:
        """Serve the metrics over HTTP until the process ends; returns the port. Raises OSError where it is taken."""
        server, _ = start_http_server(port, host, self.registry)
        return int(server.server_port)


class PartitionObserver(Observer):
    """Passes on what the stage of one partition says, and knows which jobs it spoke of: they go with the partition."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._jobs: set[str] = set()

    def frame_judged(self, frame: FrameSummary, /) -> None:
        """Pass on a frame."""
        self._jobs.add(frame.job_id)
        self._metrics.frame_judged(frame)

    def counted(self, what: str, amount: int, /) -> None:
        """Pass on a count."""
        self._metrics.counted(what, amount)

    def job_ended(self, job_id: str, incarnation: str, /) -> None:
        """Pass on the end of a job."""
        self._jobs.discard(job_id)
        self._metrics.job_ended(job_id, incarnation)

    def forget(self) -> None:
        """Remove the series of all jobs that are left: another worker shows them from now on."""
        for job_id in self._jobs:
            self._metrics.job_ended(job_id, "")
        self._jobs.clear()


def _set_known(gauge: Any, value: float) -> None:
    if math.isfinite(value):
        gauge.set(value)


def _remove(gauge: Gauge, *labels: str) -> None:
    try:
        gauge.remove(*labels)
    except KeyError:
        return  # the job ended before the value was ever known
