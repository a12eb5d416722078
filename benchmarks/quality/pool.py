"""Runs episodes on all cores and remembers what is done, so that a broken run goes on where it stopped."""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.quality.corpus import Episode
from benchmarks.quality.outcome import Outcome
from benchmarks.quality.trial import outcome

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_ROOT = Path(__file__).resolve().parents[2]
# What an outcome depends on; how it is scored and shown is not among it.
_CODE = ("agents/simulated", "detectors", "pipeline", "schemas")
_HERE = ("answers", "benign", "components", "corpus", "draw", "faults", "given", "layouts", "outcome", "trial")


def outcomes(wanted: Sequence[Episode], folder: Path, n_processes: int, *, keeps: bool = False) -> list[Outcome]:
    """Return the outcomes of episodes in their order; those already in `folder`, by the same code, are read.

    keeps: whether what the judge was given is kept there as well.
    """
    path = folder / f"outcomes-{code_digest()}.jsonl"
    run = partial(outcome, folder=folder if keeps else None)
    return kept(wanted, path, run, Outcome, lambda one: Episode(one.class_name, one.seed), n_processes)


def kept(
    wanted: Sequence[K],
    path: Path,
    run: Callable[[K], T],
    of: type[T],
    key: Callable[[T], K],
    n_processes: int,
    what: str = "episodes",
) -> list[T]:
    """Return what `run` makes of all wanted, in their order; what the file holds already is read, the rest is added."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {key(one): one for one in _read(path, of)}
    missing = [one for one in wanted if one not in done]
    with path.open("ab") as file:
        for one in _run(missing, run, n_processes, what):
            file.write(msgspec.json.encode(one) + b"\n")
            file.flush()
            done[key(one)] = one
    return [done[one] for one in wanted]


def code_digest(*more: str) -> str:
    """Return a name for the code that outcomes depend on, and for `more` files beside this one (glob patterns)."""
    digest = hashlib.blake2b(digest_size=6)
    here = Path(__file__).parent
    paths = [path for folder in _CODE for path in (_ROOT / folder).rglob("*.py")]
    paths += [here / f"{name}.py" for name in _HERE] + [here / "answers.toml"]
    paths += [path for pattern in more for path in here.glob(pattern)]
    for path in sorted(paths):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, of: type[T]) -> Iterator[T]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=of)
        except msgspec.DecodeError:
            continue  # a line that was being written when the run was broken off


def _run(missing: Sequence[K], run: Callable[[K], T], n_processes: int, what: str) -> Iterator[T]:
    if not missing:
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(n_processes) as pool:
        bar = progress.add_task(what, total=len(missing))
        futures = [pool.submit(run, one) for one in missing]
        for future in as_completed(futures):
            progress.advance(bar)
            yield future.result()
