"""Whether what was said of a job is what was right to say: injected faults beside the incidents that were flagged."""

from dataclasses import dataclass

from pipeline.agent_process import ExpectedIncident
from pipeline.replay import Incident, incidents
from schemas.alerts import Alert


@dataclass(frozen=True, slots=True)
class Arrival:
    """An alert, and when the broker had it."""

    alert: Alert
    time_ns: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What was injected, beside what was said of it; `found` is None where nothing right was said."""

    expected: ExpectedIncident
    found: Incident | None
    delay_iterations: int | None
    delay_s: float | None  # from the first faulty iteration's begin to the broker having the alert

    @property
    def is_right(self) -> bool:
        """Whether the right component was flagged, and the incident has ended."""
        return self.found is not None and self.found.last.resolution is not None


def answers(
    expected: list[ExpectedIncident], arrivals: list[Arrival], epoch_ns: int
) -> tuple[list[Answer], list[Incident]]:
    """Return an answer for each injected fault, and the incidents above info that nobody injected.

    An incident answers one fault: of those that name its set of components, the one whose onset is the nearest.
    """
    found = incidents(arrival.alert for arrival in arrivals)
    time_ns_by_revision = {(a.alert.fingerprint, a.alert.revision): a.time_ns for a in reversed(arrivals)}
    pairs = sorted(
        (abs(incident.first.onset_iteration - fault.onset_iteration), number, place)
        for number, fault in enumerate(expected)
        for place, incident in enumerate(found)
        if incident.last.kind == fault.kind and frozenset(incident.last.component.candidates) == fault.candidates
    )
    place_by_fault: dict[int, int] = {}
    for _, number, place in pairs:
        if number not in place_by_fault and place not in place_by_fault.values():
            place_by_fault[number] = place
    given = []
    for number, fault in enumerate(expected):
        if number not in place_by_fault:
            given.append(Answer(fault, None, None, None))
            continue
        first = found[place_by_fault[number]].first
        arrived_ns = time_ns_by_revision[first.fingerprint, first.revision]
        delay_s = (arrived_ns - epoch_ns) / 1e9 - fault.onset_s
        delay_iterations = first.detected_iteration - fault.onset_iteration
        given.append(Answer(fault, found[place_by_fault[number]], delay_iterations, delay_s))
    left = [incident for place, incident in enumerate(found) if place not in place_by_fault.values()]
    return given, [incident for incident in left if incident.is_above_info]
