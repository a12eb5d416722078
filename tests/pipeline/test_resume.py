"""Where to begin again, and which alerts are new: the pure half of recovery."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import resume
from pipeline.resume import OpenIncident, Published, rewind_time_ns
from schemas.alerts import Alert, AlertState, Resolution
from tests.integration.fake_stages import END, ONSET, T0_NS, expected

N_BATCHES = 43
ALERTS = expected("job-a", N_BATCHES)
RECORD_NS = 10**18  # the broker's clock is its own


def admitted(published: Published, alerts: list[Alert]) -> list[Alert]:
    return [new for alert in alerts if (new := published.admit(alert, RECORD_NS)) is not None]


def read_back(alerts: list[Alert]) -> Published:
    published = Published()
    for alert in alerts:
        published.note(alert, RECORD_NS)
    return published


def test_a_rewind_reaches_back_by_the_warm_up() -> None:
    assert rewind_time_ns(1000, 300, []) == 700


def test_a_rewind_reaches_back_before_the_onset_of_the_oldest_open_incident() -> None:
    incidents = [OpenIncident("a", 800), OpenIncident("b", 500), OpenIncident("c", 1200)]
    assert rewind_time_ns(1000, 300, incidents) == 200
    assert rewind_time_ns(1000, 300, incidents[2:]) == 700


def test_an_onset_is_put_on_the_clock_of_the_records() -> None:
    (incident,) = read_back(ALERTS[:1]).incidents
    assert RECORD_NS - incident.onset_record_ns == ALERTS[0].as_of_time_ns - ALERTS[0].onset_time_ns


def test_a_resolved_incident_holds_nothing_back() -> None:
    assert read_back(ALERTS).incidents == []
    assert read_back(ALERTS).firing == []
    assert read_back(ALERTS[:-1]).firing == [ALERTS[-2]]


def test_a_first_run_publishes_all_as_it_is() -> None:
    assert admitted(Published(), ALERTS) == ALERTS


@pytest.mark.parametrize("n_published", range(len(ALERTS) + 1))
def test_a_rebuilt_judge_publishes_what_is_missing_and_nothing_else(n_published: int) -> None:
    assert admitted(read_back(ALERTS[:n_published]), ALERTS) == ALERTS[n_published:]


@given(st.lists(st.integers(0, len(ALERTS) - 1)))
def test_the_order_and_number_of_times_that_alerts_are_read_back_do_not_matter(order: list[int]) -> None:
    published = read_back([ALERTS[number] for number in order])
    assert admitted(published, ALERTS) == ALERTS[max(order, default=-1) + 1 :]


def test_two_alerts_of_one_incident_may_be_of_the_same_time() -> None:
    again = msgspec.structs.replace(
        ALERTS[-2], revision=ALERTS[-1].revision + 1, as_of_time_ns=ALERTS[-1].as_of_time_ns
    )
    assert admitted(read_back(ALERTS[:-1]), [*ALERTS, again]) == [ALERTS[-1], again]


def test_revisions_go_on_where_a_judge_with_a_shorter_memory_counts_from_one() -> None:
    published = read_back(ALERTS[:3])
    later = [
        msgspec.structs.replace(alert, revision=number + 1, as_of_time_ns=alert.as_of_time_ns)
        for number, alert in enumerate(ALERTS[1:])
    ]
    new = admitted(published, later)
    assert [alert.as_of_time_ns for alert in new] == [alert.as_of_time_ns for alert in ALERTS[3:]]
    assert [alert.revision for alert in new] == [ALERTS[2].revision + 1 + number for number in range(len(ALERTS) - 3)]


def test_the_end_of_an_incident_that_nobody_was_told_of_is_no_news() -> None:
    assert admitted(Published(), ALERTS[-1:]) == []
    again = msgspec.structs.replace(ALERTS[-1], revision=99, as_of_time_ns=ALERTS[-1].as_of_time_ns + 1)
    assert admitted(read_back(ALERTS), [again]) == []


def test_an_incident_that_the_rebuilt_judge_holds_open_stays_open() -> None:
    published = read_back(ALERTS[:2])
    assert admitted(published, ALERTS[:2]) == []
    assert published.settle(RECORD_NS) == []


def test_an_incident_that_the_rebuilt_judge_does_not_know_is_lost_sight_of() -> None:
    published = read_back(ALERTS[:2])
    (end,) = published.settle(RECORD_NS)
    assert (end.state, end.resolution) == (AlertState.RESOLVED, Resolution.LOST_SIGHT)
    assert end.fingerprint == ALERTS[1].fingerprint
    assert end.revision == ALERTS[1].revision + 1
    assert end.resolved_iteration == ALERTS[1].as_of_iteration
    assert published.settle(RECORD_NS) == []


def test_an_incident_that_the_rebuilt_judge_saw_end_before_what_was_published_ends_so() -> None:
    published = read_back(ALERTS[:3])
    ended_early = msgspec.structs.replace(
        ALERTS[-1], revision=2, as_of_time_ns=ALERTS[1].as_of_time_ns, resolved_iteration=ONSET + 1
    )
    assert admitted(published, [ALERTS[0], ended_early]) == []
    (end,) = published.settle(RECORD_NS)
    assert (end.state, end.resolution) == (AlertState.RESOLVED, Resolution.RECOVERED)
    assert (end.revision, end.resolved_iteration) == (ALERTS[2].revision + 1, ONSET + 1)


def test_what_is_remembered_of_resolved_incidents_is_bounded_and_open_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume, "_MOST_REMEMBERED", 5)
    published = read_back(expected("open", ONSET + 1))
    for number in range(13):
        admitted(published, expected(f"job-{number}", END + 1))
    assert published.n_forgotten == 13 + 1 - 5
    assert [alert.job_id for alert in published.firing] == ["open"]
    assert T0_NS > 0
