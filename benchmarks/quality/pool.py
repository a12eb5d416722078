"""Runs episodes on all cores and remembers what is done, so that a broken run goes on where it stopped."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.quality.corpus import Episode
from benchmarks.quality.trial import Outcome, outcome

_ROOT = Path(__file__).resolve().parents[2]
# What an outcome depends on; how it is scored and shown is not among it.
_CODE = ("agents/simulated", "detectors", "pipeline", "schemas")
_HERE = ("answers", "benign", "components", "corpus", "draw", "faults", "layouts", "trial")


def outcomes(wanted: Sequence[Episode], folder: Path, n_processes: int) -> list[Outcome]:
    """Return the outcomes of episodes in their order; those already in `folder`, by the same code, are read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"outcomes-{code_digest()}.jsonl"
    done = {(one.class_name, one.seed): one for one in _read(path)}
    missing = [episode for episode in wanted if (episode.class_name, episode.seed) not in done]
    with path.open("ab") as file:
        for one in _run(missing, n_processes):
            file.write(msgspec.json.encode(one) + b"\n")
            file.flush()
            done[one.class_name, one.seed] = one
    return [done[episode.class_name, episode.seed] for episode in wanted]


def code_digest() -> str:
    """Return a name for the code that outcomes depend on."""
    digest = hashlib.blake2b(digest_size=6)
    paths = [path for folder in _CODE for path in (_ROOT / folder).rglob("*.py")]
    paths += [Path(__file__).parent / f"{name}.py" for name in _HERE] + [Path(__file__).parent / "answers.toml"]
    for path in sorted(paths):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Iterator[Outcome]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=Outcome)
        except msgspec.DecodeError:
            continue  # a line that was being written when the run was broken off


def _run(missing: Sequence[Episode], n_processes: int) -> Iterator[Outcome]:
    if not missing:
        return
    columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(n_processes) as pool:
        bar = progress.add_task("episodes", total=len(missing))
        futures = [pool.submit(outcome, episode) for episode in missing]
        for future in as_completed(futures):
            progress.advance(bar)
            yield future.result()
