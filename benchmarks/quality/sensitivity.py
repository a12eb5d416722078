"""What each parameter of the judge does to the scores: python -m benchmarks.quality.sensitivity --help.

A fixed part of the development episodes, of small jobs, is simulated once each and judged anew with one parameter at
half and at twice its default (of a ratio, what it exceeds 1 by), everything else at its default. Figures over classes
by their weights, as everywhere. A run that is broken off goes on where it stopped.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import click
import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from benchmarks.quality import results
from benchmarks.quality.benign import BENIGN
from benchmarks.quality.beside import OURS, Beside
from benchmarks.quality.corpus import CLASSES, Episode
from benchmarks.quality.given import given
from benchmarks.quality.layouts import LAYOUTS
from benchmarks.quality.matching import match
from benchmarks.quality.pool import code_digest, kept
from benchmarks.quality.score import Share, headline
from benchmarks.quality.trial import judged
from pipeline.judge_params import DEFAULTS, JudgeParams

_RANKS_MAX = 16
_SEEDS = range(0, 400, 2)
_COLUMNS = 4
_LINES = (("recall", "o-", "C0"), ("recall_any", "o:", "C9"), ("precision", "x-", "C2"))
_LABELS = {"recall": "recall, clear faults", "recall_any": "recall, all faults", "precision": "precision"}
_RATIOS = ("_slowdown", "_ratio")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The scores with one parameter at one value; recall_any is of all faults that ask for an incident."""

    parameter: str
    value: float
    is_default: bool
    recall: float
    recall_any: float
    precision: float
    component_first: float
    delay_iterations_median: float
    delay_iterations_p95: float
    false_incidents_per_10000: float
    intervals: dict[str, tuple[float, float]]


def neighbours(parameter: str) -> tuple[JudgeParams, ...]:
    """Return the defaults with one parameter at half and at twice its value, where that is another one."""
    default = getattr(DEFAULTS, parameter)
    if parameter.endswith(_RATIOS):
        values: list[float] = [1 + (default - 1) / 2, 1 + (default - 1) * 2]
    elif isinstance(default, int):
        values = [max(default // 2, 1), default * 2]
    else:
        values = [default / 2, default * 2]
    return tuple(replace(DEFAULTS, **{parameter: round(v, 6)}) for v in values if v != default)


def label(parameter: str, params: JudgeParams) -> str:
    """Return a name for a parameter at a value."""
    return f"{parameter}={getattr(params, parameter):g}"


def chosen(*, per_fault: int, per_benign: int, classes: Sequence[str]) -> Iterator[Episode]:
    """Yield the first development episodes of each class whose jobs are small and whose agents send seldom."""
    for name in classes:
        wanted = per_benign if name in BENIGN else per_fault
        for episode in (Episode(name, seed) for seed in _SEEDS):
            if wanted and not episode.is_held_out:
                begun = episode.begun()
                if LAYOUTS[begun.layout_name].shape.world_size <= _RANKS_MAX and not begun.is_prompt:
                    wanted -= 1
                    yield episode


def varied(episode: Episode, settings: dict[str, JudgeParams]) -> Beside:
    """Judge an episode at the defaults and at each setting, of one simulation."""
    heard = given(episode)
    return Beside(ours=judged(heard), others={name: judged(heard, one).openings for name, one in settings.items()})


def points(found: Sequence[Beside], parameters: Sequence[str]) -> list[Point]:
    """Return the scores of every parameter at every value, in ascending order of values."""
    made = [_point(parameter, DEFAULTS, OURS, found) for parameter in parameters]
    for parameter in parameters:
        made += [_point(parameter, one, label(parameter, one), found) for one in neighbours(parameter)]
    return sorted(made, key=lambda one: (parameters.index(one.parameter), one.value))


def _point(parameter: str, params: JudgeParams, name: str, found: Sequence[Beside]) -> Point:
    matched = [match(replace(one.ours, openings=_openings(one, name))) for one in found]
    scores = headline(matched)
    asked = [f.is_found for m in matched for f in m.findings if f.answer.asked == "incident"]
    names = ("recall", "precision", "component_first", "delay_iterations_median", "delay_iterations_p95")
    return Point(
        parameter=parameter,
        value=float(getattr(params, parameter)),
        is_default=params == DEFAULTS,
        recall_any=Share.of(asked).value,
        false_incidents_per_10000=scores.false_incidents_per_10000,
        intervals={name: bounds for name, bounds in scores.intervals.items() if name in {"recall", "precision"}},
        **{field: getattr(scores, field) for field in names},
    )


def _openings(one: Beside, name: str) -> tuple[Any, ...]:
    return one.ours.openings if name == OURS else one.others[name] or ()


def draw(path: Path, made: Sequence[Point], n_episodes: int) -> None:
    """Write one small plot per parameter; shares on the left, the median delay on the right."""
    parameters = list(dict.fromkeys(one.parameter for one in made))
    n_rows = -(-len(parameters) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.8 * n_rows + 0.8), layout="constrained")
    figure.suptitle(f"One parameter at half, at its default (dotted) and at twice; {n_episodes} development episodes")
    delays = [one.delay_iterations_median for one in made]
    lowest = min(min(one.recall, one.recall_any, one.precision) for one in made)
    for number, parameter in enumerate(parameters):
        axis = figure.add_subplot(n_rows, _COLUMNS, number + 1)
        line = [one for one in made if one.parameter == parameter]
        values = [one.value for one in line]
        for field, style, color in _LINES:
            shares = [getattr(one, field) for one in line]
            axis.plot(values, shares, style, color=color, label=_LABELS[field], markersize=5, fillstyle="none")
            bounds = [one.intervals.get(field, (float("nan"),) * 2) for one in line]
            axis.fill_between(values, [b[0] for b in bounds], [b[1] for b in bounds], color=color, alpha=0.12)
        axis.axvline(next(one.value for one in line if one.is_default), color="grey", linestyle=":", linewidth=1)
        axis.set(title=parameter, ylim=(min(lowest, 0.9) - 0.05, 1.02), xticks=values)
        axis.set_xticks(values, [f"{value:g}" for value in values])
        other = axis.twinx()
        middle = [one.delay_iterations_median for one in line]
        other.plot(values, middle, "s--", color="C1", label="median delay", markersize=3, linewidth=1)
        other.set_ylim(0, 1.3 * max(delays))
        if number == 0:
            handles = [*axis.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
            axis.legend(handles=handles, fontsize=7, loc="lower right")
        if number % _COLUMNS == _COLUMNS - 1 or number == len(parameters) - 1:
            other.set_ylabel("iterations", fontsize=8)
    figure.savefig(path, dpi=100)


@click.command()
@click.option("--parameters", default="", help="Names with commas between; all of judge_params.py if empty.")
@click.option("--classes", default="", help="Names with commas between; all if empty.")
@click.option("--per-fault", default=2, help="Episodes of each class of faults.")
@click.option("--per-benign", default=1, help="Episodes of each benign class.")
@click.option("--processes", default=1)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/sensitivity.json"))
def main(*, parameters: str, classes: str, per_fault: int, per_benign: int, processes: int, out: Path) -> None:
    """Judge a fixed part of the development episodes with each parameter at half and at twice its default."""
    fields = JudgeParams.__struct_fields__
    names = [name for name in parameters.split(",") if name] or list(fields)
    if unknown := [name for name in names if name not in fields]:
        raise click.UsageError(f"no parameter {unknown[0]!r}: they are {', '.join(fields)}")
    settings = {label(name, params): params for name in names for params in neighbours(name)}
    wanted = list(
        chosen(
            per_fault=per_fault, per_benign=per_benign, classes=[c for c in classes.split(",") if c] or list(CLASSES)
        )
    )
    key = blake2b("".join(settings).encode(), digest_size=4).hexdigest()
    code = code_digest()
    path = out.parent / "quality" / f"sensitivity-{code}-{key}.jsonl"
    run = partial(varied, settings=settings)
    found = kept(wanted, path, run, Beside, lambda one: Episode(one.ours.class_name, one.ours.seed), processes)
    made = points(found, names)
    results.write(out, {"code": code, "episodes": len(found), "points": made})
    draw(out.with_suffix(".png"), made, len(found))
    click.echo(f"wrote {out} and {out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
