"""Where a stage begins again, and which of the alerts that it then makes once more have been published already.

Pure: what has been committed and published is told to it; docs/decisions/0006-live-recovery.md says why it is so.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from schemas.alerts import Alert, AlertState, Resolution

_MOST_REMEMBERED = 65536  # incidents of one partition, open ones excepted


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """An incident whose last published word is `firing`."""

    fingerprint: str
    onset_record_ns: int  # when its onset was, by the clock of the records


def rewind_time_ns(committed_time_ns: int, warmup_ns: int, incidents: Iterable[OpenIncident]) -> int:
    """Return the record time to begin again at.

    That is the warm-up before the committed record or, where that is older, before the onset of the oldest open
    incident: the reference that an incident is measured against lies before its onset.
    """
    return min([committed_time_ns, *(incident.onset_record_ns for incident in incidents)]) - warmup_ns


@dataclass(slots=True)
class _Published:
    revision: int
    key: tuple[int, int]  # (as of, the judge's own revision) of the last one published
    alert: Alert  # the last one published
    record_ns: int  # when the broker got it


@dataclass(slots=True)
class Published:
    """What the alerts topic holds of one partition's incidents, by fingerprint."""

    _last: OrderedDict[str, _Published] = field(default_factory=OrderedDict)
    _remade: dict[str, Alert] = field(default_factory=dict)  # the judge's last word since the rewind, published or not
    n_forgotten: int = 0

    def note(self, alert: Alert, record_ns: int) -> None:
        """Take in an alert that was read back from the topic; a revision that is not newer changes nothing."""
        known = self._last.get(alert.fingerprint)
        if known is None or alert.revision > known.revision:
            self._remember(alert, (alert.as_of_time_ns, alert.revision), record_ns)

    def remake(self, alert: Alert) -> None:
        """Take in an alert that the judge has made of a record that was done before.

        It has been published, or comes of seeing less of the job than the judge before, and is not to be.
        """
        self._remade[alert.fingerprint] = alert

    def admit(self, alert: Alert, record_ns: int) -> Alert | None:
        """Return what is to be published for an alert that the judge has made: nothing where it was already.

        An alert is new if it says more than the last one published of its incident: it is of a later time, or of the
        same time and a higher revision. Revisions go on from the last one published. The end of an incident that
        nobody was told of is no news.
        """
        self._remade[alert.fingerprint] = alert
        key = (alert.as_of_time_ns, alert.revision)
        known = self._last.get(alert.fingerprint)
        is_open = known is not None and known.alert.state is AlertState.FIRING
        if alert.state is AlertState.RESOLVED and not is_open:
            return None
        if known is not None:
            if key <= known.key:
                return None
            if alert.revision <= known.revision:
                alert = msgspec.structs.replace(alert, revision=known.revision + 1)
        self._remember(alert, key, record_ns)
        return alert

    def settle(self, record_ns: int) -> list[Alert]:
        """Return the ends of incidents that are open on the topic, but not for a judge that has seen all there is.

        They were opened by a judge with a longer memory than the topic: what became of them is not known, unless the
        judge has since seen them end.
        """
        ends = []
        for fingerprint, known in list(self._last.items()):
            remade = self._remade.get(fingerprint)
            if known.alert.state is AlertState.RESOLVED or (remade and remade.state is AlertState.FIRING):
                continue
            last = known.alert
            end = msgspec.structs.replace(
                last,
                revision=known.revision + 1,
                state=AlertState.RESOLVED,
                resolution=remade.resolution if remade else Resolution.LOST_SIGHT,
                resolved_iteration=remade.resolved_iteration if remade else last.as_of_iteration,
            )
            self._remember(end, known.key, record_ns)
            ends.append(end)
        self._remade.clear()
        return ends

    @property
    def firing(self) -> list[Alert]:
        """The last alert of every open incident."""
        return [known.alert for known in self._last.values() if known.alert.state is AlertState.FIRING]

    @property
    def incidents(self) -> list[OpenIncident]:
        """Every open incident.

        Its onset, told by the nodes' clocks, is put on the clock of the records by how long before the alert it was.
        """
        return [
            OpenIncident(fingerprint, known.record_ns - (known.alert.as_of_time_ns - known.alert.onset_time_ns))
            for fingerprint, known in self._last.items()
            if known.alert.state is AlertState.FIRING
        ]

    def _remember(self, alert: Alert, key: tuple[int, int], record_ns: int) -> None:
        self._last[alert.fingerprint] = _Published(alert.revision, key, alert, record_ns)
        self._last.move_to_end(alert.fingerprint)
        while len(self._last) > _MOST_REMEMBERED:
            resolved = (name for name, known in self._last.items() if known.alert.state is AlertState.RESOLVED)
            name = next(resolved, None)
            if name is None:
                return
            del self._last[name]
            self.n_forgotten += 1
