"""What could not be judged has to be said, and nobody may be accused for it: small cases worked out by hand."""

from typing import Any

from msgspec.structs import replace

from benchmarks.quality.corpus import Episode
from benchmarks.quality.matching import Matched, match
from benchmarks.quality.outcome import Opening
from benchmarks.quality.trial import outcome
from benchmarks.quality.unseen import unseen
from tests.quality.test_matching import THIS_JOB, answer, matched, opening


def blind(*openings: Opening, setting: str = "agent_missing", **changes: Any) -> Matched:
    given: dict[str, Any] = {"unreported": 4, "unseen": {"ranks_missing": 600}}
    return match(replace(matched([answer()], *openings).outcome, setting=setting, **(given | changes)))


def test_an_accusation_that_is_false_counts_and_a_slower_job_accuses_nobody() -> None:
    early = opening(detected=20), opening(THIS_JOB, detected=20)
    scores = unseen([blind(early[0]), blind(early[1]), blind(opening()), blind()])["agent_missing"]
    assert scores.nobody_accused_falsely.value == 0.75
    assert scores.nothing_false.value == 0.5


def test_an_incident_says_how_many_ranks_nobody_reports_exactly() -> None:
    said = [opening(unreported=4), opening(unreported=3), opening()]
    assert unseen([blind(*said)])["agent_missing"].said.value == 1 / 3
    assert unseen([blind(*said, unreported=0)])["agent_missing"].said.n == 0


def test_what_is_missing_has_to_be_counted_where_something_was() -> None:
    lost = [
        blind(setting="losses", unreported=0, lost_batches=3, unseen={"batches_lost": 3}),
        blind(setting="losses", unreported=0, lost_batches=2, unseen={"ranks_missing": 9}),
        blind(setting="losses", unreported=0, lost_batches=0, unseen={}),
    ]
    scores = unseen([*lost, blind(unseen={}), blind()])
    assert (scores["losses"].counted.n, scores["losses"].counted.value) == (2, 0.5)
    assert scores["agent_missing"].counted.value == 0.5


def test_the_truth_of_what_is_missing_comes_from_the_scenario_and_not_from_what_is_said() -> None:
    silent, lossy = outcome(Episode("nic_staircase", 2)), outcome(Episode("gpu_step", 2))
    assert (silent.setting, silent.unreported, silent.lost_batches) == ("agent_missing", 4, 0)
    assert (lossy.setting, lossy.unreported) == ("losses", 0)
    assert lossy.lost_batches > 0
