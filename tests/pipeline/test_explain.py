"""An explanation tells what was weighed and why, and nothing is decided otherwise because somebody listens."""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from agents.simulated import load_scenario
from pipeline.__main__ import main
from pipeline.explain import Explaining, Explanation
from pipeline.explain_view import explanation_view, quantity
from pipeline.hypotheses import Hypothesis, Number, Question, Verdict
from pipeline.judge import Judge
from pipeline.judge_params import DEFAULTS
from pipeline.notes import NO_NOTES
from pipeline.record import Record
from pipeline.recording import Header, write_recording
from schemas.alerts import Alert, ComponentName, ComponentType, Kind
from schemas.codec import encode_alert
from tests.pipeline.simulation import alerts_of, event_records, iteration_records, judged, scenario

SCENARIO = """
title = "a slow GPU in a small job, then a slow host"
seed = 17
iterations = 167
micro_batches = 2
layout = { tp = 1, pp = 1, dp = 6, gpus_per_node = 2 }
faults = [
    { kind = "slow_gpu", node = 1, gpu = 0, factor = 1.6, onset = 53, end = 79 },
    { kind = "slow_host", node = 2, factor = 7.0, onset = 113, end = 137 },
]
agents = { sensors = ["gpu", "sync", "nvml", "marker"], flush_interval_s = 0.1 }
"""
FAINT = """
title = "a slowdown of less than a tenth that only iteration times show"
seed = 17
iterations = 97
micro_batches = 2
layout = { tp = 1, pp = 1, dp = 6, gpus_per_node = 2 }
faults = [{ kind = "slow_gpu", node = 1, gpu = 0, factor = 1.09, onset = 53, end = 79 }]
agents = { sensors = ["host_call", "marker"], flush_interval_s = 0.1 }
"""
WRITTEN = {"small": SCENARIO, "faint": FAINT}
HOSTILE = ComponentName(type=ComponentType.HOST, node="node\x1b]0;owned\x07")


@cache
def events(name: str = "small") -> tuple[Record, ...]:
    return tuple(event_records(load_scenario(WRITTEN[name])))


@cache
def iterations(name: str) -> tuple[Record, ...]:
    return tuple(iteration_records(events(name) if name in WRITTEN else event_records(scenario(name))))


@cache
def explained(name: str) -> Explaining:
    explaining = Explaining()
    judged(iterations(name), Judge(explaining))
    return explaining


def accused(explanation: Explanation) -> Hypothesis:
    (hypothesis,) = [h for h in explanation.deciding if h.fingerprint == explanation.first.fingerprint]
    return hypothesis


def encoded(alerts: list[Alert]) -> list[bytes]:
    return [encode_alert(alert) for alert in alerts]


def shown(explanation: Explanation, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(explanation_view(explanation, width))
    return out.getvalue()


@pytest.mark.parametrize("name", ["small", "slow_link", "slow_gpu_ramp", "absorbed"])
def test_the_alerts_are_the_same_byte_for_byte_whether_somebody_listens_or_not(name: str) -> None:
    explaining = Explaining()
    listened = judged(iterations(name), Judge(explaining))
    assert encoded(listened) == encoded(judged(iterations(name)))


def test_nothing_is_built_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_fields: object) -> None:
        raise AssertionError("a hypothesis was built")

    monkeypatch.setattr(Hypothesis, "__init__", refuse)
    judge = Judge()
    assert judged(iterations("small"), judge)
    assert all(tracked.job.notes is NO_NOTES for tracked in judge._jobs.values())


def test_the_accused_stands_with_its_numbers_above_all_bounds_and_the_others_below_one() -> None:
    first, second = explained("small").explanations
    assert accused(first).verdict is Verdict.ACCUSED
    assert accused(first).kind is Kind.SLOW_GPU
    assert accused(first).candidates == first.first.component.candidates
    assert accused(second).kind is Kind.SLOW_HOST
    for explanation in (first, second):
        winner = accused(explanation)
        assert winner.iteration == explanation.first.as_of_iteration
        assert winner.missed == ()
        assert {number.what: number.bound for number in winner.numbers}["signal over noise"] == 5.0
        others = [h for h in explanation.deciding if h.question is winner.question and h is not winner]
        assert {h.kind for h in others} == {Kind.SLOW_GPU, Kind.SLOW_HOST}
        assert all(h.missed or h.verdict is Verdict.OUTSCORED for h in others)
        assert all(h.excess_s < winner.excess_s for h in others if h.verdict is Verdict.BELOW)


def test_the_change_that_asked_the_question_is_confirmed_by_its_lower_bound() -> None:
    for explanation in explained("small").explanations:
        changes = [h for h in explanation.on_the_way if h.question is Question.CHANGE]
        assert changes[-1].verdict is Verdict.CONFIRMED
        bound = next(number for number in changes[-1].numbers if number.bound is not None)
        assert bound.is_met
        assert bound.value == changes[-1].score


def test_a_ranks_own_lateness_is_told_as_its_hosts_where_the_host_is_late() -> None:
    (_, of_host) = explained("small").explanations
    outscored = [h for h in of_host.deciding if h.verdict is Verdict.OUTSCORED]
    assert {name.node for h in outscored for name in h.candidates} == {"node2"}
    assert all(h.reason.startswith("by its host, node2") for h in outscored)


def test_what_is_too_small_to_accuse_anybody_says_so_and_who_it_would_be() -> None:
    first, second = explained("slow_gpu_ramp").explanations
    assert first.first.kind is Kind.SLOW_JOB
    assert (accused(first).kind, accused(first).verdict) == (Kind.SLOW_GPU, Verdict.INFORMED)
    assert [number.what for number in accused(first).missed] == ["the job's slowdown by it"]
    text = shown(first)
    assert "too small to accuse anybody" in text
    assert "it would accuse somebody with" in text
    assert accused(second).verdict is Verdict.ACCUSED
    assert accused(second).candidates == accused(first).candidates
    assert "it would not stand with" in shown(second)


def test_a_slowdown_that_no_sensor_attributes_has_no_score_that_nobody_measured() -> None:
    (explanation,) = explained("faint").explanations
    assert (accused(explanation).kind, accused(explanation).verdict) == (Kind.SLOW_JOB, Verdict.INFORMED)
    assert math.isnan(accused(explanation).score)
    assert "it would accuse somebody with" in shown(explanation)
    assert "it would not stand with" not in shown(explanation)


def test_the_evidence_that_has_added_up_is_told_with_its_bound() -> None:
    changes = [h for h in explained("slow_gpu_ramp").explanations[0].on_the_way if h.question is Question.CHANGE]
    (evidence,) = [number for number in changes[-1].numbers if number.what == "evidence"]
    assert changes[-1].verdict is Verdict.CONFIRMED
    assert evidence.is_met
    assert evidence.bound == DEFAULTS.evidence


def test_links_are_ranked_by_their_likelihood_and_the_winner_is_ahead_of_all() -> None:
    (explanation,) = explained("slow_link").explanations
    winner = accused(explanation)
    rivals = [h for h in explanation.deciding if h.kind is Kind.SLOW_LINK and h is not winner]
    assert winner.score_unit == "nats"
    assert any(h.verdict is Verdict.OUTSCORED for h in rivals)
    for rival in (h for h in rivals if h.verdict is Verdict.OUTSCORED):
        assert rival.score < winner.score
        assert rival.reason == f"{winner.score - rival.score:.1f} nats less likely than the best"
        assert not rival.missed


def test_what_slack_absorbs_is_told_with_by_how_much_it_fell_short() -> None:
    weighed: list[Hypothesis] = []

    class All(Explaining):
        def weighed(self, hypothesis: Hypothesis, /) -> None:
            weighed.append(hypothesis)

    judged(iterations("absorbed"), Judge(All()))
    absorbed = [h for h in weighed if h.verdict is Verdict.ABSORBED]
    assert absorbed
    for hypothesis in absorbed:
        assert [number.what for number in hypothesis.missed] == ["outlasts all others by"]


def test_the_end_is_explained_by_the_last_looks() -> None:
    for explanation in explained("small").explanations:
        *looks, last = explanation.at_the_end
        assert last.verdict is Verdict.RESOLVED
        assert last.iteration == explanation.last.as_of_iteration
        good = [h.iteration for h in looks if h.verdict is Verdict.GOOD]
        assert good[0] == explanation.last.resolved_iteration
        assert all(not h.missed for h in looks if h.verdict is Verdict.LASTS)


def test_hypotheses_are_kept_of_the_last_iterations_only_and_of_no_job_that_has_ended() -> None:
    explaining = Explaining()
    hypothesis = explained("small").explanations[0].on_the_way[0]
    for iteration in range(20_000):
        explaining.weighed(replace(hypothesis, iteration=iteration))
    ((_, held),) = explaining._held.items()
    assert held[-1].iteration == 19_999
    assert len(held) < 10_000
    explaining.job_ended(hypothesis.job_id, hypothesis.incarnation)
    assert not explaining._held
    assert not explained("small")._held


def test_the_events_are_explained_like_the_iterations_that_follow_from_them() -> None:
    from_events = Explaining()
    alerts_of(events(), from_events)
    from_iterations = [explanation.as_json() for explanation in explained("small").explanations]
    assert [explanation.as_json() for explanation in from_events.explanations] == from_iterations


@pytest.mark.parametrize(
    ("number", "is_met", "nearness"),
    [
        (Number(what="z", value=6.0, unit="sigma", bound=5.0), True, 1.2),
        (Number(what="z", value=5.0, unit="sigma", bound=5.0), True, 1.0),
        (Number(what="z", value=2.5, unit="sigma", bound=5.0), False, 0.5),
        (Number(what="clock", value=0.75, unit="ratio", bound=0.95, at_most=True), True, 5.0),
        (Number(what="clock", value=0.98, unit="ratio", bound=0.95, at_most=True), False, 0.4),
        (Number(what="slowdown", value=1.04, unit="ratio", bound=1.10), False, 0.4),
        (Number(what="level", value=-1.0, unit="s"), True, float("inf")),
        (Number(what="behind", value=7.0, unit="nats", bound=0.0, at_most=True), False, 0.0),
        (Number(what="lower", value=1.01, unit="ratio", bound=1.0), True, float("inf")),
        (Number(what="excess", value=-7.0, unit="s", bound=3.5), False, -2.0),
    ],
)
def test_a_number_knows_its_side_of_the_bound(number: Number, *, is_met: bool, nearness: float) -> None:
    assert number.is_met is is_met
    assert number.nearness == pytest.approx(nearness)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0237, "s", "23.7 ms"),
        (-0.00001, "s", "0.0 ms"),
        (7.0, "s", "7.00 s"),
        (0.5, "share", "50%"),
        (3378.04, "nats", "3,378.0 nats"),
        (170.04, "sigma", "170.0 sigma"),
        (1.254, "ratio", "1.25"),
        (13.0, "count", "13"),
        (0.1234, "s/s", "0.123 s/s"),
        (float("nan"), "s", "-"),
    ],
)
def test_a_quantity_is_said_as_people_read_it(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_view_names_the_accused_the_next_and_what_would_have_changed_it(width: int) -> None:
    (first, second) = explained("small").explanations
    text = shown(first, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert all(line.endswith(("┓", "┃", "┩", "│", "┤", "┘")) for line in text.splitlines() if line[:1] in set("┏┃┡│├└"))
    for part in ("how it came to this", "it is slow_gpu", "next came", "it would not stand with", "how it ended"):
        assert part in text
    assert "would have needed" in text
    assert "it is slow_host: host node2" in shown(second, width)


def test_names_cannot_steer_the_terminal() -> None:
    (first, _) = explained("small").explanations
    hypotheses = tuple(_renamed(h) for h in first.on_the_way)
    ends = tuple(_renamed(h) for h in first.at_the_end)
    text = shown(Explanation(1, first.first, first.last, first.severity, hypotheses, ends))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\N{REPLACEMENT CHARACTER}" in text


def _renamed(hypothesis: Hypothesis) -> Hypothesis:
    return replace(hypothesis, candidates=(HOSTILE,), reason=f"told of {HOSTILE.node}")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "small.fsr"
    with write_recording(path, Header(source="a test")) as writer:
        for record in (*events(), *iterations("small")):
            writer.write(record)
        writer.flush()
    return path


@pytest.fixture
def run(recording: Path) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(main, ["replay", str(recording), *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.mark.parametrize("start", ["events", "iterations"])
def test_the_command_explains_the_worst_incident_below_the_table(run: Callable[..., Result], start: str) -> None:
    plain, explaining = run("--from", start), run("--from", start, "--explain")
    assert explaining.stdout.startswith(plain.stdout)
    assert plain.exit_code == explaining.exit_code == 3
    worst = explained("small").worst()
    assert f"incident {worst.number}, {worst.first.fingerprint}" in explaining.stdout


def test_the_command_takes_a_number_or_the_beginning_of_a_fingerprint(run: Callable[..., Result]) -> None:
    for explanation in explained("small").explanations:
        by_number = run("--explain", str(explanation.number))
        by_name = run("--explain", explanation.first.fingerprint[:6])
        assert by_number.stdout == by_name.stdout
        assert f"incident {explanation.number}, {explanation.first.fingerprint}" in by_number.stdout


@pytest.mark.parametrize(("which", "said"), [("7", "names no incident"), ("", "begins the fingerprints of 2")])
def test_an_incident_that_is_not_there_is_one_clear_sentence(run: Callable[..., Result], which: str, said: str) -> None:
    result = run("--explain", which)
    assert result.exit_code == 2
    assert said in result.stderr
    for explanation in explained("small").explanations:
        assert explanation.first.fingerprint in result.stderr


def test_an_explanation_as_json_is_one_object_with_alerts_as_on_the_topic(run: Callable[..., Result]) -> None:
    result = run("--explain", "1", "--json")
    (line,) = result.stdout.splitlines()
    told = msgspec.json.decode(line)
    explanation = explained("small").explanations[0]
    assert msgspec.json.encode(told["first"]) == encode_alert(explanation.first)
    assert told["last"]["resolution"] == "recovered"
    assert len(told["hypotheses"]) == len(explanation.on_the_way) + len(explanation.at_the_end)
    assert [h["verdict"] for h in told["hypotheses"]].count("accused") == 1
