"""Writes the results of build/quality.json into docs/benchmarks.md, between its two markers.

    python -m benchmarks.quality.document                   what is held out
    python -m benchmarks.quality.document --part development

Nothing is computed here but which method is ahead in which figure; what a command has not written is left out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.quality import results
from benchmarks.quality.beside import OURS
from benchmarks.quality.document_series import series_lines, times_lines
from benchmarks.quality.markdown import quantiles, share, table, value, with_interval

BEGIN = "<!-- results: written by `python -m benchmarks.quality.document` -->"
END = "<!-- end of results -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"

# Figures of all methods, and whether more is better.
_FIGURES = {
    "recall": ("recall", True),
    "recall_where_seen": ("recall where it sees", True),
    "precision": ("precision", True),
    "component_first": ("component first", True),
    "kind": ("kind", True),
    "delay_iterations_median": ("median delay", False),
    "delay_iterations_p95": ("95th percentile of the delay", False),
    "false_incidents_per_10000": ("false incidents per 10,000 healthy iterations", False),
    "openings_per_fault": ("incidents opened per fault", False),
}
# Figures over all classes: digits, and which field of a class tells how many cases there are.
_HEADLINE = {
    "recall": (4, "recall"),
    "precision": (4, "precision"),
    "component_first": (4, "component_first"),
    "kind": (4, "kind"),
    "in_time": (4, "in_time"),
    "delay_iterations_median": (1, ""),
    "delay_iterations_p95": (1, ""),
    "false_incidents_per_10000": (2, ""),
}


def block(known: Mapping[str, Any], part: str) -> str:
    """Return the results of a part (`held_out` or `development`) as Markdown, without the markers."""
    given = known.get(part, {})
    name = part.replace("_", " ")
    lines = [f"### Results: {name}", ""]
    if "recall" in given:
        lines += _corpus(known, given, part)
    if "unseen" in given:
        lines += _unseen(given["unseen"])
    if "baselines" in given:
        lines += _baselines(given["baselines"], part)
    if "real_healthy" in given:
        lines += times_lines(given)
    if "series" in given:
        lines += series_lines(given["series"], part)
    return "\n".join(lines).rstrip() + "\n"


def _corpus(known: Mapping[str, Any], given: Mapping[str, Any], part: str) -> Iterator[str]:
    flag = part.replace("_", "-")
    seen = f" --seen-share {known['seen_share']:g}" if known.get("seen_share") else ""
    shares = f"--share {known['share']:g}{seen}"
    yield f"`.venv/bin/python -m benchmarks.quality --part {flag} {shares} --seeds {known['seeds']}`:"
    healthy = sum(one["false_per_10000"]["iterations"] for one in given["classes"].values())
    yield f"{given['episodes']:,} episodes with {healthy:,} healthy iterations, code {known['code']}, weighed by class;"
    yield "95 % intervals."
    yield ""
    rows = [
        (
            name.replace("_", " "),
            str(sum(one[cases]["n"] for one in given["classes"].values())) if cases else "-",
            with_interval(given[name], given["intervals"].get(name), digits),
        )
        for name, (digits, cases) in _HEADLINE.items()
    ]
    yield from table(("figure", "n", "value"), rows)
    names = ("class", "episodes", "clear", "recall", "precision", "component first", "kind", "delay", "false / 10,000")
    rows_by_class = [
        (
            name.replace("_", " "),
            str(one["episodes"]),
            str(one["recall"]["n"]),
            *(share(one[field]) for field in ("recall", "precision", "component_first", "kind")),
            quantiles(one["delay_iterations"]),
            value(one["false_per_10000"]["value"], 2),
        )
        for name, one in given["classes"].items()
    ]
    yield from table(names, rows_by_class)


def _unseen(given: Mapping[str, Any]) -> Iterator[str]:
    yield "Where something could not be judged (a node's agent is silent, or 5 % of the batches are lost):"
    yield ""
    names = ("setting", "episodes", "nobody accused falsely", "nothing false", "counted", "said in the incident")
    fields = ("nobody_accused_falsely", "nothing_false", "counted", "said")
    rows = [
        (name.replace("_", " "), str(one["episodes"]), *(share(one[field]) for field in fields))
        for name, one in given.items()
    ]
    yield from table(names, rows)


def _baselines(given: Mapping[str, Any], part: str) -> Iterator[str]:
    flag, ranks = part.replace("_", "-"), given["most_ranks"]
    seen = f" --seen-share {given['seen_share']:g}" if given.get("seen_share") else ""
    yield (
        f"`.venv/bin/python -m benchmarks.quality.compare --part {flag} --share {given['share']:g}{seen} "
        f"--seeds {given['seeds']} --most-ranks {ranks}`:"
    )
    yield f"{given['episodes']:,} episodes, the same for all, code {given['code']}, authors' defaults."
    yield ""
    methods: dict[str, Any] = given["methods"]
    names = ("method", "sees", *(label for label, _ in _FIGURES.values()))
    rows = [
        (
            method.replace("_", " "),
            value(one["sees"], 2),
            *(with_interval(one[field], one["intervals"].get(field), 2) for field in _FIGURES),
        )
        for method, one in methods.items()
    ]
    yield from table(names, rows)
    yield "Recall of clear faults, class by class:"
    yield ""
    by_class = [
        (
            name.replace("_", " "),
            str(one["n"]),
            *(value(other["recall_by_class"][name]["value"], 2) for other in methods.values()),
        )
        for name, one in methods[OURS]["recall_by_class"].items()
    ]
    yield from table(("class", "n", *(method.replace("_", " ") for method in methods)), by_class)
    yield "Where a baseline is better than failslow:"
    yield ""
    yield from better(methods) or ["- nowhere"]
    yield ""


def better(methods: Mapping[str, Any]) -> list[str]:
    """Return one line per figure, and one per class, in which some baseline is ahead, however little."""
    ours, lines = methods[OURS], []
    others = {method: one for method, one in methods.items() if method != OURS}
    for field, (label, is_more) in _FIGURES.items():
        ahead = [
            f"{method.replace('_', ' ')} {value(one[field], 2)}"
            for method, one in others.items()
            if _is_better(one[field], ours[field], is_more=is_more)
        ]
        if ahead:
            lines.append(f"- {label} ({value(ours[field], 2)}): {', '.join(ahead)}")
    for name, one in ours["recall_by_class"].items():
        ahead = [
            f"{method.replace('_', ' ')} {value(other['recall_by_class'][name]['value'], 2)}"
            for method, other in others.items()
            if _is_better(other["recall_by_class"][name]["value"], one["value"], is_more=True)
        ]
        if ahead:
            lines.append(f"- recall of {name.replace('_', ' ')} ({value(one['value'], 2)}): {', '.join(ahead)}")
    return lines


def _is_better(other: float | None, ours: float | None, *, is_more: bool) -> bool:
    if other is None or ours is None:
        return False
    return other > ours if is_more else other < ours


def replaced(page: str, content: str) -> str:
    """Return the page with what stands between its markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one line {BEGIN!r}, and one {END!r} after it")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


@click.command()
@click.option("--part", type=click.Choice(["held-out", "development"]), default="held-out")
@click.option("--results", "path", type=click.Path(path_type=Path), default=Path("build/quality.json"))
@click.option("--page", type=click.Path(path_type=Path), default=PAGE)
def main(part: str, path: Path, page: Path) -> None:  # noqa: D103  click prints the module's words
    known = results.read(path)
    name = part.replace("-", "_")
    if name not in known:
        raise click.UsageError(f"{path} holds nothing of {part}: run `make quality` before")
    page.write_text(replaced(page.read_text(encoding="utf-8"), block(known, name)), encoding="utf-8")
    click.echo(f"wrote {page}")


if __name__ == "__main__":
    main()
