"""Generate, judge and score the corpus and the real series: python -m benchmarks.quality --help."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from benchmarks.quality import real, real_curves, results
from benchmarks.quality.corpus import CLASSES, Part, Seeds, episodes
from benchmarks.quality.failures import failures
from benchmarks.quality.matching import Matched, match
from benchmarks.quality.plots import draw_page
from benchmarks.quality.pool import code_digest, outcomes
from benchmarks.quality.report import print_real, print_table, print_unseen
from benchmarks.quality.score import headline
from benchmarks.quality.unseen import unseen

_DATA = Path(os.environ.get("FAILSLOW_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
_PARTS = {"development": False, "held_out": True}


@click.command()
@click.option("--classes", default="", help="Names with commas between; all if empty.")
@click.option("--share", default=1.0, help="Of each class's episodes.")
@click.option("--seen-share", default=0.0, help="Of each class's episodes, left out since they were looked at before.")
@click.option("--seeds", type=click.Choice(["even", "odd", "all"]), default="all", help="Odd ones are held out.")
@click.option(
    "--part", type=click.Choice(["development", "held-out", "all"]), default="development", help="Of held_out.toml."
)
@click.option("--splices", default=300, help="Per point of the curves on real noise; 0 leaves the real series out.")
@click.option("--keep", "keeps", is_flag=True, help="Keep what the judge is given, and use it where it is kept.")
@click.option("--processes", default=os.cpu_count() or 1, help="How many episodes run at once.")
@click.option("--failures", "shows_failures", is_flag=True, help="List what went wrong, episode by episode.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/quality.json"))
def main(
    *,
    classes: str,
    share: float,
    seen_share: float,
    seeds: Seeds,
    part: Part,
    splices: int,
    keeps: bool,
    processes: int,
    shows_failures: bool,
    out: Path,
) -> None:
    """Judge a share of the corpus and the real series; print scores, write them with their intervals, draw a page."""
    names = [name for name in classes.split(",") if name] or list(CLASSES)
    unknown = [name for name in names if name not in CLASSES]
    if unknown:
        raise click.UsageError(f"no class {unknown[0]!r}: the classes are {', '.join(CLASSES)}")
    if splices and not _DATA.is_dir():
        raise click.UsageError(f"no recordings at {_DATA}: set FAILSLOW_DATA to their folder, or --splices 0")
    console = Console(width=220)
    code = code_digest()  # before anything is judged: the files may change while it runs
    matched = _corpus(names, (seen_share, share), seeds, part, processes, out.parent / "quality", keeps=keeps)
    result: dict[str, Any] = {"code": code, "share": share, "seen_share": seen_share, "classes": names, "seeds": seeds}
    for title, is_held_out in _PARTS.items():
        if part not in (title.replace("_", "-"), "all"):
            continue
        given = [one for one, held in matched if held is is_held_out]
        scores = headline(given)
        blind = unseen(given)
        print_table(console, title, scores)
        print_unseen(console, title, blind)
        if shows_failures:
            for line in failures(given):
                console.print(line, highlight=False, soft_wrap=True)
        curves = []
        result[title] = msgspec.to_builtins(scores) | {"unseen": msgspec.to_builtins(blind)}
        if splices:
            said = real.healthy(_DATA, held_out=is_held_out)
            curves = real_curves.curves(
                _DATA, held_out=is_held_out, n=splices, n_processes=processes, folder=out.parent / "quality"
            )
            print_real(console, said, curves)
            result[title] |= {"real_healthy": msgspec.to_builtins(said), "real_curves": msgspec.to_builtins(curves)}
        draw_page(out.with_name(f"quality-{title}.png"), title, scores, given, curves)
    if splices:
        result["real_traces"] = msgspec.to_builtins(real.traces(_DATA))
        console.print(result["real_traces"])
    results.write(out, result)
    console.print(f"wrote {out}")


def _corpus(
    names: list[str],
    shares: tuple[float, float],
    seeds: Seeds,
    part: Part,
    n_processes: int,
    folder: Path,
    *,
    keeps: bool,
) -> list[tuple[Matched, bool]]:
    """Return the episodes, matched, and whether each is held out."""
    wanted = list(episodes(classes=names, share=shares[1], seeds=seeds, part=part, seen_share=shares[0]))
    found = outcomes(wanted, folder, n_processes, keeps=keeps)
    return [(match(one), episode.is_held_out) for one, episode in zip(found, wanted, strict=True)]


if __name__ == "__main__":
    main()
