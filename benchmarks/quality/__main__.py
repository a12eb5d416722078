"""Generate, judge and score the corpus: python -m benchmarks.quality --help."""

import os
from math import isfinite
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from benchmarks.quality.corpus import CLASSES, Part, Seeds, episodes
from benchmarks.quality.failures import failures
from benchmarks.quality.matching import match
from benchmarks.quality.pool import code_digest, outcomes
from benchmarks.quality.report import print_table
from benchmarks.quality.score import headline


@click.command()
@click.option("--classes", default="", help="Names with commas between; all if empty.")
@click.option("--share", default=1.0, help="Of each class's episodes.")
@click.option("--seeds", type=click.Choice(["even", "odd", "all"]), default="all", help="Odd ones are held out.")
@click.option(
    "--part", type=click.Choice(["development", "held-out", "all"]), default="development", help="Of held_out.toml."
)
@click.option("--processes", default=os.cpu_count() or 1, help="How many episodes run at once.")
@click.option("--failures", "shows_failures", is_flag=True, help="List what went wrong, episode by episode.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/quality.json"))
def main(classes: str, share: float, seeds: Seeds, part: Part, processes: int, shows_failures: bool, out: Path) -> None:
    """Judge a share of the corpus, print scores by class and write them with their intervals."""
    names = [name for name in classes.split(",") if name] or list(CLASSES)
    unknown = [name for name in names if name not in CLASSES]
    if unknown:
        raise click.UsageError(f"no class {unknown[0]!r}: the classes are {', '.join(CLASSES)}")
    wanted = list(episodes(classes=names, share=share, seeds=seeds, part=part))
    found = outcomes(wanted, out.parent / "quality", processes)
    result: dict[str, Any] = {"code": code_digest(), "share": share, "classes": names, "seeds": seeds}
    console = Console(width=220)
    for title, is_held_out in (("held_out", True), ("development", False)):
        given = [one for one, e in zip(found, wanted, strict=True) if e.is_held_out is is_held_out]
        if given:
            matched = [match(one) for one in given]
            scores = headline(matched)
            print_table(console, title, scores)
            if shows_failures:
                for line in failures(matched):
                    console.print(line, highlight=False, soft_wrap=True)
            result[title] = _finite(msgspec.to_builtins(scores))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    console.print(f"{out}")


def _finite(value: Any) -> Any:
    """Return numbers that are none as null, which JSON has, and NaN it has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


if __name__ == "__main__":
    main()
