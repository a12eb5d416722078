"""The product and published methods on the same episodes: python -m benchmarks.quality.compare --help.

All get the window's output of the same simulated jobs and are scored by the same scorer, from the same labels.
Baselines keep their authors' defaults. Results go to build/quality.json, under `baselines` of `development` and
`held_out`.
"""

import os
from collections.abc import Sequence
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import click
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.quality import results
from benchmarks.quality.baselines.registry import BASELINES, CLAIMS
from benchmarks.quality.beside import OURS, Beside, beside
from benchmarks.quality.corpus import CLASSES, Episode, Part, Seeds, episodes
from benchmarks.quality.intervals import Interval
from benchmarks.quality.layouts import LAYOUTS
from benchmarks.quality.matching import Matched, match
from benchmarks.quality.pool import code_digest, kept
from benchmarks.quality.report import number
from benchmarks.quality.score import Share, headline, is_clear

_PARTS = {"development": False, "held_out": True}
_SHARES = ("recall", "recall_where_seen", "precision", "component_first", "kind")


class Compared(Struct, frozen=True, kw_only=True):
    """One method over all classes by their weights; NaN (null) is what it does not claim or what does not apply."""

    method: str
    sees: float  # share of the episodes whose sensors show what it needs
    recall: float
    recall_where_seen: float
    precision: float
    component_first: float
    kind: float
    delay_iterations_median: float
    delay_iterations_p95: float
    false_incidents_per_10000: float
    openings_per_fault: float
    intervals: dict[str, Interval]
    recall_by_class: dict[str, Share]
    false_per_10000_by_class: dict[str, float]


def compared(name: str, given: Sequence[Beside]) -> Compared:
    """Score one method."""
    matched = [match(one.outcome(name)) for one in given]
    scores = headline(matched)
    seen = [m for m, one in zip(matched, given, strict=True) if one.sees(name)]
    where_seen = headline(seen) if 0 < len(seen) < len(matched) else scores
    is_online = name == OURS or BASELINES[name]().is_online
    claims_kind = name == OURS or name in CLAIMS
    unknown = float("nan")
    return Compared(
        method=name,
        sees=len(seen) / len(matched),
        recall=scores.recall,
        recall_where_seen=where_seen.recall if seen else unknown,
        precision=scores.precision,
        component_first=scores.component_first,
        kind=scores.kind if claims_kind else unknown,
        delay_iterations_median=scores.delay_iterations_median if is_online else unknown,
        delay_iterations_p95=scores.delay_iterations_p95 if is_online else unknown,
        false_incidents_per_10000=scores.false_incidents_per_10000,
        openings_per_fault=_openings_per_fault(matched),
        intervals=scores.intervals | _where_seen(where_seen.intervals if seen else {}),
        recall_by_class={c: one.recall for c, one in scores.classes.items() if one.recall.n},
        false_per_10000_by_class={c: one.false_per_10000.value for c, one in scores.classes.items()},
    )


def _where_seen(intervals: dict[str, Interval]) -> dict[str, Interval]:
    return {"recall_where_seen": intervals["recall"]} if "recall" in intervals else {}


def _openings_per_fault(matched: Sequence[Matched]) -> float:
    opened = [len(f.said) for m in matched for f in m.findings if is_clear(f) and f.said]
    return sum(opened) / len(opened) if opened else float("nan")


def print_compared(console: Console, title: str, rows: Sequence[Compared], n_episodes: int) -> None:
    """Print one line per method, and its recall class by class."""
    table = Table(title=f"{title}: {n_episodes} episodes, the same for all", title_justify="left")
    table.add_column("method")
    for name in ("sees", *(share.replace("_", " ") for share in _SHARES)):
        table.add_column(name, justify="right")
    for name in ("delay, iterations", "false / 10,000", "opened per fault"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            f"{row.sees:.0%}",
            *(_with_interval(row, name) for name in _SHARES),
            f"{number(row.delay_iterations_median, 0)} / {number(row.delay_iterations_p95, 0)}",
            number(row.false_incidents_per_10000, 1),
            number(row.openings_per_fault, 2),
        )
    console.print(table)
    classes = Table(title=f"{title}: recall of clear faults by class", title_justify="left")
    classes.add_column("class")
    classes.add_column("n", justify="right")
    for row in rows:
        classes.add_column(row.method.replace("_", " "), justify="right")
    for name, share in rows[0].recall_by_class.items():
        classes.add_row(name, str(share.n), *(number(row.recall_by_class[name].value, 2) for row in rows))
    console.print(classes)


def _with_interval(row: Compared, name: str) -> str:
    value: float = getattr(row, name)
    if isnan(value) or name not in row.intervals:
        return number(value, 3)
    low, high = row.intervals[name]
    return f"{value:.3f} ({low:.2f}-{high:.2f})"


def _chosen(names: list[str], shares: tuple[float, float], seeds: Seeds, part: Part, most_ranks: int) -> list[Episode]:
    wanted = episodes(classes=names, share=shares[1], seeds=seeds, part=part, seen_share=shares[0])
    return [one for one in wanted if LAYOUTS[one.begun().layout_name].shape.world_size <= most_ranks]


@click.command()
@click.option("--classes", default="", help="Names with commas between; all if empty.")
@click.option("--share", default=0.05, help="Of each class's episodes.")
@click.option("--seeds", type=click.Choice(["even", "odd", "all"]), default="all", help="Odd ones are held out.")
@click.option(
    "--part", type=click.Choice(["development", "held-out", "all"]), default="development", help="Of held_out.toml."
)
@click.option("--most-ranks", default=1024, help="Leave out larger jobs.")
@click.option("--baselines", default=",".join(BASELINES), help="Names with commas between.")
@click.option("--seen-share", default=0.0, help="Of each class's episodes, left out since they were looked at before.")
@click.option("--keep", "keeps", is_flag=True, help="Keep what is given to all, and use it where it is kept.")
@click.option("--processes", default=os.cpu_count() or 1, help="How many episodes run at once.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/quality.json"))
def main(
    *,
    classes: str,
    share: float,
    seeds: Seeds,
    part: Part,
    most_ranks: int,
    baselines: str,
    seen_share: float,
    keeps: bool,
    processes: int,
    out: Path,
) -> None:
    """Judge a share of the corpus with the product and with published methods, and score all alike."""
    names = [name for name in classes.split(",") if name] or list(CLASSES)
    methods = tuple(name for name in baselines.split(",") if name)
    unknown = [name for name in (*names, *methods) if name not in CLASSES and name not in BASELINES]
    if unknown:
        raise click.UsageError(f"no {unknown[0]!r}: baselines are {', '.join(BASELINES)}; classes {', '.join(CLASSES)}")
    console = Console(width=220)
    wanted = _chosen(names, (seen_share, share), seeds, part, most_ranks)
    code = code_digest("beside.py", "baselines/*.py")
    path = out.parent / "quality" / f"beside-{code}-{'-'.join(methods)}.jsonl"
    run = partial(beside, names=methods, folder=path.parent if keeps else None)
    found = kept(wanted, path, run, Beside, lambda one: Episode(one.ours.class_name, one.ours.seed), processes)
    sections: dict[str, Any] = {}
    for title, is_held_out in _PARTS.items():
        given = [one for one, episode in zip(found, wanted, strict=True) if episode.is_held_out is is_held_out]
        if not given:
            continue
        rows = [compared(name, given) for name in (OURS, *methods)]
        print_compared(console, title, rows, len(given))
        facts = {
            "code": code,
            "share": share,
            "seen_share": seen_share,
            "seeds": seeds,
            "most_ranks": most_ranks,
            "episodes": len(given),
        }
        sections[title] = {"baselines": facts | {"methods": {row.method: row for row in rows}}}
    results.write(out, sections)
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
