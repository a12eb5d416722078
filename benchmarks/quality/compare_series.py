"""The product beside other change detectors on one bare series of iteration times with a shift of known size.

    python -m benchmarks.quality.compare_series                     four development series, CV 10 %, shift 10 %
    python -m benchmarks.quality.compare_series --held-out          the other four: only once a change is finished

Every method judges the same splices. The first alarm for a slowdown after the onset finds the shift; all other alarms
for slowdowns, before it or repeated, are extra; alarms for speed-ups count for nobody. Information is an alarm here as
anything else is. Results go to build/quality.json, under `series` of `development` or `held_out`; what a method made of
the splices is remembered beside it, so that a broken run goes on and a change of ours leaves the others as they are.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from math import log
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.quality import results
from benchmarks.quality.baselines.baseline import Observed
from benchmarks.quality.curves import PER, Outcomes, Scored, resampled, score
from benchmarks.quality.paired import (
    OURS,
    before_only,
    defaults,
    paired,
    print_defaults,
    print_paired,
    print_settings,
    settings,
)
from benchmarks.quality.pool import code_digest
from benchmarks.quality.splices import Splice, read_noise, series_names, splices
from benchmarks.quality.sweeps import METHODS

DATA = Path(os.environ.get("FAILSLOW_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
SEED = 20261130
_HERE = Path(__file__).parent
_METHODS = [m for m in METHODS if "FALCON" not in m and "alone" not in m]
_OF_OTHERS = ("baselines/*.py", "splices.py", "curves.py", "sweeps.py")  # code that a baseline's outcomes depend on

_given: list[Splice] = []


class _Kept(msgspec.Struct, frozen=True):
    """One line of what is remembered."""

    key: str
    rows: tuple[tuple[int, int, float | None, int, bool], ...]  # Scored, a miss is null


def _receive(given: list[Splice]) -> None:
    _given[:] = given


def _judge(method: str, number: int) -> list[Scored]:
    baseline = list(METHODS[method]())[number].make()
    return [score(baseline.judges(Observed(duration_s=s.duration_s)), s, is_online=baseline.is_online) for s in _given]


def judged(
    given: list[Splice], methods: list[str], n_processes: int, kept: Path | None = None
) -> dict[str, list[Outcomes]]:
    """Return what each setting of each method made of the splices; what the file `kept` holds already is read."""
    names = [(m, k, setting.label) for m in methods for k, setting in enumerate(METHODS[m]())]
    content = blake2b(b"".join(s.duration_s.tobytes() for s in given), digest_size=8).hexdigest()
    codes = {
        m: code_digest("chain.py", *_OF_OTHERS) if m == OURS or "alone" in m else _code_of_others() for m in methods
    }
    keys = {(m, k): f"{content} {codes[m]} {m} {label}" for m, k, label in names}
    done = _remembered(kept)
    missing = [pair for pair, key in keys.items() if key not in done]
    with ProcessPoolExecutor(n_processes, initializer=_receive, initargs=(given,)) as pool:
        made = pool.map(_judge, *zip(*missing, strict=True)) if missing else iter(())
        for pair, scored in track(zip(missing, made, strict=True), "settings", total=len(missing)):
            done[keys[pair]] = scored
            _remember(kept, keys[pair], scored)
    return {m: [Outcomes.of(label, done[keys[m, k]]) for one, k, label in names if one == m] for m in methods}


def _code_of_others() -> str:
    digest = blake2b(digest_size=6)
    for path in sorted(path for pattern in _OF_OTHERS for path in _HERE.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _remembered(path: Path | None) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {}
    for line in path.read_bytes().splitlines() if path is not None and path.exists() else ():
        try:
            one = msgspec.json.decode(line, type=_Kept)
        except msgspec.DecodeError:
            continue  # a line that was being written when the run was broken off
        found[one.key] = [
            Scored(before=b, after=a, delay=float("nan") if d is None else d, iterations=n, is_information=i)
            for b, a, d, n, i in one.rows
        ]
    return found


def _remember(path: Path | None, key: str, scored: list[Scored]) -> None:
    if path is None:
        return
    rows = tuple(
        (s.before, s.after, s.delay if np.isfinite(s.delay) else None, s.iterations, s.is_information) for s in scored
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(_Kept(key, rows)) + b"\n")


def bound_iterations(cv: float, shift: float) -> float:
    """Return ln(10,000) / KL: the fewest iterations, on average, at one false alarm in 10,000, for Gaussian logs."""
    return log(PER) / (log(shift) ** 2 / (2 * log(1 + cv**2)))


def _names(methods: str) -> Iterator[str]:
    for name in (m.strip() for m in methods.split(";")):
        if name not in METHODS:
            raise click.UsageError(f"no method {name!r}: the methods are {'; '.join(METHODS)}")
        yield name


def _compared(
    console: Console, found: dict[str, list[Outcomes]], n: int, seed: int, *, is_long: bool
) -> dict[str, Any]:
    """Print the comparison and return it for the file of results."""
    weights = resampled(n, seed)
    at = {method: [setting.is_default for setting in METHODS[method]()].index(True) for method in found}
    made: dict[str, Any] = {"defaults": defaults(found, at, weights), "settings": settings(found)}
    print_defaults(console, made["defaults"])
    if is_long:
        print_settings(console, made["settings"])
    if OURS in found:
        forgiven = {method: [before_only(one) for one in outcomes] for method, outcomes in found.items()}
        made |= {"paired": paired(found, weights), "paired_before_onset": paired(forgiven, weights)}
        print_paired(console, f"{OURS} beside others, any setting, all extra alarms", made["paired"])
        print_paired(console, "the same, only alarms before the onset are extra", made["paired_before_onset"])
    return made


@click.command()
@click.option("--cv", "cvs", default=(0.10,), multiple=True, help="Coefficient of variation of the noise; may repeat.")
@click.option("--shift", default=1.10, help="Iteration time after over before.")
@click.option("--splices", "n_splices", default=300, help="How many series.")
@click.option("--before", default=200, help="Healthy iterations of each.")
@click.option("--after", default=100, help="Slow iterations of each: later alarms do not count.")
@click.option("--seed", default=SEED)
@click.option("--processes", default=1)
@click.option("--held-out", is_flag=True, help="The series that nobody tunes on.")
@click.option("--methods", default="; ".join(_METHODS), help=f"With ; between, of: {'; '.join(METHODS)}.")
@click.option("--every-setting", is_flag=True, help="Print each setting as well.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/quality.json"))
def main(  # noqa: D103  click prints the module's words
    *,
    cvs: tuple[float, ...],
    shift: float,
    n_splices: int,
    before: int,
    after: int,
    seed: int,
    processes: int,
    held_out: bool,
    methods: str,
    every_setting: bool,
    out: Path,
) -> None:
    names = series_names(DATA, held_out=held_out)
    noises = [read_noise(DATA, name) for name in names]
    console = Console(width=160)
    title = "held_out" if held_out else "development"
    for cv in cvs:
        given = list(splices(noises, n_splices, seed=seed, cv=cv, shift=shift, before=before, after=after))
        bound = bound_iterations(cv, shift)
        console.print(
            f"{n_splices} splices of {before} + {after} iterations, CV {cv:.0%}, shift {shift - 1:.0%}, seed {seed}, "
            f"of {', '.join(names)}\ninformation bound: {bound:.1f} iterations"
        )
        found = judged(given, list(_names(methods)), processes, out.parent / "quality" / "series.jsonl")
        facts = {
            "cv": cv,
            "shift": shift,
            "splices": n_splices,
            "before": before,
            "after": after,
            "seed": seed,
            "series": names,
            "bound_iterations": bound,
        }
        made = facts | _compared(console, found, n_splices, seed, is_long=every_setting)
        known = results.read(out).get(title, {}).get("series", {})
        results.write(out, {title: {"series": known | {f"cv {cv:.0%}, shift {shift - 1:.0%}": made}}})
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
