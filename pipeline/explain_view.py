"""How an explanation looks to a tired engineer: what was asked and weighed, who won, and what would change that."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import isfinite

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipeline.explain import Explanation
from pipeline.hypotheses import Hypothesis, Number, Question, Verdict, seconds_text
from pipeline.terminal import alert_line, component_text, printable
from schemas.alerts import Kind, Severity

_NAMES_WIDTH = 50  # columns of the terminal that the hypothesis and its verdict take
_NUMBER_WIDTH = 16
_LEVEL = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
_SORTS = {
    Kind.SLOW_GPU: "GPUs",
    Kind.SLOW_RANK: "GPUs",
    Kind.SLOW_HOST: "hosts",
    Kind.SLOW_LINK: "links",
}
_MOST_BOUNDS = 4
_MOST_RIVALS = 2

_STYLE = {
    Verdict.ACCUSED: "bold red",
    Verdict.INFORMED: "cyan",
    Verdict.CONFIRMED: "yellow",
    Verdict.RESOLVED: "green",
    Verdict.GOOD: "green",
}
_DECIDED = (Verdict.ACCUSED, Verdict.INFORMED)
_IN_ORDER = (  # of how far a hypothesis got
    *_DECIDED,
    Verdict.WAITING,
    Verdict.CLAIMED,
    Verdict.ABSORBED,
    Verdict.SUSPECTED,
    Verdict.CONFIRMED,
    Verdict.OUTSCORED,
)


def explanation_view(explanation: Explanation, width: int) -> Group:
    """Return one incident with everything that was weighed, as text and tables for a terminal of `width` columns."""
    deciding = [h for h in explanation.deciding if h.question is not Question.CHANGE]
    parts: list[Text | Table] = [
        Text(f"incident {explanation.number}, {explanation.first.fingerprint}", "bold"),
        Text(alert_line(explanation.last).plain, _LEVEL[explanation.severity]),
        Text(),
        _way_table(explanation),
    ]
    for _, weighed in groupby(sorted(deciding, key=_by_question), key=lambda h: h.question):
        for table in _weighed_tables(list(weighed), width):
            parts += [Text(), table]
    parts.append(Text())
    parts += list(_reasons(explanation, deciding))
    if explanation.at_the_end:
        parts += [Text(), _end_table(explanation.at_the_end)]
    return Group(*parts)


def quantity(value: float, unit: str) -> str:
    """Return a number as people read it: seconds as milliseconds, shares in percent, "-" where it is unknown."""
    if not isfinite(value):
        return "-"
    if unit == "s":
        return seconds_text(value)
    form, said = {
        "share": ("z.0%", ""),
        "count": (".0f", ""),
        "iteration": (".0f", ""),
        "nats": ("z,.1f", " nats"),
        "sigma": ("z.1f", " sigma"),
        "ratio": ("z.2f", ""),
    }.get(unit, ("z.3g", f" {unit}" if unit else ""))
    return f"{value:{form}}{said}"


def _way_table(explanation: Explanation) -> Table:
    """Return what was asked from the onset on, the answer that got furthest each time; equal answers in one row."""
    table = _table("how it came to this", "iteration", "asked", "answer", "about", "why")
    rows: list[list[Hypothesis]] = []
    latest: dict[Question, list[Hypothesis]] = {}
    asked = [h for h in explanation.on_the_way if h.question is not Question.LASTS]
    for (_, question), weighed in groupby(asked, key=lambda h: (h.iteration, h.question)):
        best = max(weighed, key=_how_far)
        row = latest.get(question)
        if row is not None and (row[-1].verdict, _about(row[-1])) == (best.verdict, _about(best)):
            row.append(best)
        else:
            latest[question] = [best]
            rows.append(latest[question])
    for row in rows:
        last = row[-1]
        table.add_row(
            _range([h.iteration for h in row]),
            Text(last.question),
            Text(last.verdict, _STYLE.get(last.verdict, "")),
            Text(_about(last)),
            _why(last),
        )
    return table


def _why(hypothesis: Hypothesis) -> Text:
    text = Text(printable(hypothesis.reason))
    if (number := hypothesis.closest) is not None:
        text.append("; " if hypothesis.reason else "")
        text.append_text(_number_text(number))
    return text


def _weighed_tables(weighed: list[Hypothesis], width: int) -> Iterator[Table]:
    """Yield one table for each sort of hypotheses, those that stand on the same numbers."""
    by_sort: dict[str, list[Hypothesis]] = {}
    for hypothesis in sorted(weighed, key=_how_far, reverse=True):
        sort = hypothesis.numbers[0].what if hypothesis.numbers else ""
        by_sort.setdefault(sort, []).append(hypothesis)
    for alike in by_sort.values():
        yield _weighed_table(alike, width)


def _weighed_table(alike: list[Hypothesis], width: int) -> Table:
    common = _common_numbers(alike, (width - _NAMES_WIDTH) // _NUMBER_WIDTH)
    shows_excess = all(number.unit != "s" for number in common) and any(isfinite(h.excess_s) for h in alike)
    sort = _SORTS.get(alike[0].kind, "")
    table = _table(f"iteration {alike[0].iteration}: {alike[0].question} {sort}".rstrip())
    table.add_column("hypothesis", overflow="fold")
    table.add_column("became", overflow="fold")
    if shows_excess:
        table.add_column("adds", justify="right")
    for number in common:
        table.add_column(number.what, justify="right", overflow="fold", max_width=_NUMBER_WIDTH)
    needed = [Text(_needed(number), "dim") for number in common]
    if any(text.plain for text in needed):
        table.add_row(Text("needed", "dim"), "", *([""] if shows_excess else []), *needed, end_section=True)
    for hypothesis in alike:
        style = _STYLE.get(hypothesis.verdict, "dim")
        became = Text(hypothesis.verdict, style)
        if hypothesis.verdict not in (Verdict.ACCUSED, Verdict.BELOW):
            became.append(f": {printable(hypothesis.reason)}", "default")
        by_name = {number.what: number for number in hypothesis.numbers}
        cells = [_cell(by_name.get(number.what)) for number in common]
        excess = [quantity(hypothesis.excess_s, "s")] if shows_excess else []
        table.add_row(Text(_who(hypothesis)), became, *excess, *cells)
    return table


def _common_numbers(alike: list[Hypothesis], n_most: int) -> list[Number]:
    """Return the numbers that more than one of the hypotheses stands on, or the only one: the bounded and others."""
    times: dict[str, int] = {}
    first: dict[str, Number] = {}
    for number in (number for hypothesis in alike for number in hypothesis.numbers):
        times[number.what] = times.get(number.what, 0) + 1
        first.setdefault(number.what, number)
    common = [number for what, number in first.items() if times[what] > 1 or len(alike) == 1]
    n_bounded = sum(number.bound is not None for number in common)
    others = [number for number in common if number.bound is None][: max(0, n_most - n_bounded)]
    return [number for number in common if number.bound is not None or number in others]


def _needed(number: Number) -> str:
    return "" if number.bound is None else f"{'<=' if number.at_most else '>='} {quantity(number.bound, number.unit)}"


def _cell(number: Number | None) -> Text:
    if number is None:
        return Text("-", "dim")
    shown = quantity(number.value, number.unit)
    if number.bound is None:
        return Text(shown, "dim")
    return Text(shown) if number.is_met else Text(f"{shown} !", "yellow")


def _number_text(number: Number) -> Text:
    text = Text(f"{number.what} {quantity(number.value, number.unit)}")
    if needed := _needed(number):
        text.append(f" ({needed})" if number.is_met else f" (needs {needed})", "dim")
    return text


def _reasons(explanation: Explanation, deciding: list[Hypothesis]) -> Iterator[Text]:
    """Yield in sentences who won, by how much, and which evidence would have changed it."""
    won = [h for h in deciding if h.fingerprint == explanation.first.fingerprint]
    if not won:
        yield Text("No hypothesis of its iteration is held: it was opened when an earlier suspicion had grown.", "dim")
        return
    winner = won[0]
    said = "" if winner.verdict is Verdict.ACCUSED else f": {printable(winner.reason)}"
    line = Text("it is ", "bold").append(_about(winner), _STYLE.get(winner.verdict, ""))
    yield line.append(_strength(winner) + said)
    others = sorted((h for h in deciding if h.verdict not in _DECIDED), key=_how_far, reverse=True)
    for rival in others[:1]:
        why = "" if rival.verdict is Verdict.BELOW else f": {printable(rival.reason)}"
        yield Text("next came ", "bold").append(_about(rival)).append(_strength(rival) + why)
    bounds = sorted((n for n in winner.numbers if n.bound), key=lambda n: n.nearness)
    for is_met, heading in ((False, "it would accuse somebody with"), (True, "it would not stand with")):
        numbers = [number for number in bounds if number.is_met is is_met]
        if numbers:
            yield Text(heading, "bold")
        for number in numbers[:_MOST_BOUNDS]:
            yield Text("  ").append_text(_other_side(number))
    for rival in [h for h in others if h.verdict is Verdict.BELOW][:_MOST_RIVALS]:
        yield Text(_about(rival), "bold").append(" would have needed")
        for number in rival.missed:
            yield Text("  ").append_text(_other_side(number))


def _strength(hypothesis: Hypothesis) -> str:
    known = [quantity(hypothesis.excess_s, "s"), quantity(hypothesis.score, hypothesis.score_unit)]
    shown = ", ".join(text for text in known if text != "-")
    return f" ({shown})" if shown else ""


def _other_side(number: Number) -> Text:
    """Return where a number would have to be for its bound to say the opposite."""
    assert number.bound is not None
    side = ">" if number.at_most == number.is_met else "<"
    text = Text(f"{number.what} {side if number.is_met else side + '='} {quantity(number.bound, number.unit)}")
    return text.append(f", it was {quantity(number.value, number.unit)}", "dim")


def _lowest_nearness(hypothesis: Hypothesis) -> float:
    return min((number.nearness for number in hypothesis.missed), default=float("inf"))


def _end_table(looks: Iterable[Hypothesis]) -> Table:
    """Return the last looks at an incident, equal answers in one row."""
    table = _table("how it ended", "iteration", "answer", "excess", "why")
    for verdict, group in groupby(looks, key=lambda h: h.verdict):
        same = list(group)
        excess = [h.excess_s for h in same if isfinite(h.excess_s)]
        bound = next((n.bound for h in reversed(same) for n in h.numbers if n.bound is not None), None)
        shown = " to ".join(dict.fromkeys(quantity(v, "s") for v in (min(excess), max(excess)))) if excess else "-"
        good = f"; good is at most {quantity(bound, 's')}" if bound is not None else ""
        table.add_row(
            _range([h.iteration for h in same]),
            Text(verdict, _STYLE.get(verdict, "")),
            shown,
            Text(printable(same[-1].reason) + good),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _about(hypothesis: Hypothesis) -> str:
    return f"{hypothesis.kind}: {_who(hypothesis)}"


def _who(hypothesis: Hypothesis) -> str:
    """Return the candidates that cannot be told apart, four at most."""
    shown = " or ".join(component_text(name) for name in hypothesis.candidates[:4])
    more = len(hypothesis.candidates) - 4
    return f"{shown} or {more} more" if more > 0 else shown


def _range(iterations: list[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return str(first) if first == last else f"{first}-{last}, {len(iterations)} looks"


def _by_question(hypothesis: Hypothesis) -> int:
    return list(Question).index(hypothesis.question)


def _how_far(hypothesis: Hypothesis) -> tuple[float, ...]:
    place = _IN_ORDER.index(hypothesis.verdict) if hypothesis.verdict in _IN_ORDER else len(_IN_ORDER)
    score = hypothesis.score if isfinite(hypothesis.score) else float("-inf")
    return (-place, min(_lowest_nearness(hypothesis), 1e9), score)
