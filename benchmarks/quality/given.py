"""What the judge is given of an episode: simulated and put through the window, and kept for judging it again.

Both take three quarters of an episode's time and do not depend on the judge, so whoever works on the judge keeps them.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import grimp
import msgspec
import zstandard

from agents.simulated import Cluster, Scenario
from agents.simulated.layout import incarnations
from benchmarks.quality.answers import answers, clock, hints
from benchmarks.quality.corpus import Episode
from benchmarks.quality.outcome import Outcome
from pipeline.observer import Counting
from pipeline.record import Record
from pipeline.window import Window
from schemas.codec import encode_events, encode_iterations
from schemas.events import EventBatch
from schemas.topics import EVENTS, ITERATIONS, events_key, job_key

NOT_SEEN = ("ranks_missing", "frames_not_comparable", "frames_sparse", "events_lost", "batches_lost")
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("agents", "benchmarks", "detectors", "pipeline", "schemas")
# What is given depends on these and what they import; of the observer that the window has, on none of what it observes.
_MADE_BY = (
    "agents.simulated.cluster",
    "benchmarks.quality.answers",
    "benchmarks.quality.corpus",
    "pipeline.window_check",
    "pipeline.window_state",
)
_FILES = ("benchmarks/quality/answers.toml", "benchmarks/quality/given.py", "pipeline/window.py")


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The records of the iterations topic, and what is right about the episode."""

    due: Outcome  # without incidents; what was not seen is what the window says of it
    epoch_ns: int
    first_iterations: dict[str, int]  # by incarnation, what its own iteration numbers count from
    key: bytes
    batches: list[tuple[int, bytes]]  # when each came, nanoseconds since the epoch, and what it holds

    def records(self) -> Iterator[Record]:
        """Yield the records in their order."""
        for offset, (time_ns, value) in enumerate(self.batches):
            yield Record(ITERATIONS, 0, offset, time_ns, self.key, value)


def given(episode: Episode, folder: Path | None = None) -> Given:
    """Return what the judge is given of an episode; kept in `folder`, if given, for as long as the code stays."""
    if folder is None:
        return _made(episode)
    path = folder / f"given-{_digest()}" / f"{episode.class_name}-{episode.seed}.zst"
    if path.exists():
        return msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=Given)
    made = _made(episode)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zstandard.compress(msgspec.msgpack.encode(made), 6))
    Path(file.name).rename(path)  # whole, or not there
    return made


def records(scenario: Scenario, note: Callable[[EventBatch], None] = lambda _: None) -> Iterator[Record]:
    """Yield the scenario's batches as the events topic would hold them; `note` is told of each."""
    for offset, batch in enumerate(Cluster(scenario).batches()):
        note(batch)
        key = events_key(batch.job_id, batch.node)
        yield Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch))


def first_iterations(scenario: Scenario) -> dict[str, int]:
    """Return, by incarnation, what its own iteration numbers count from; without markers each counts from 0."""
    has_markers = "marker" in scenario.agents.sensors
    return {one.name: 0 if has_markers else first for one, first, _ in incarnations(scenario)}


def _made(episode: Episode) -> Given:
    draw, scenario = episode.draw()
    times = clock(scenario)
    counting, losses = Counting(), _Losses()
    window = Window(counting)
    batches = [
        (record.time_ns, encode_iterations(batch))
        for record in records(scenario, losses.note)
        for batch in window.handle(record)
    ]
    due = Outcome(
        class_name=episode.class_name,
        seed=episode.seed,
        layout=draw.layout_name,
        setting=draw.setting,
        ranks=scenario.layout.world_size,
        iterations=scenario.iterations,
        sigma=times.sigma,
        flush_s=scenario.agents.flush_interval_s,
        answers=answers(scenario, draw.setting, times),
        hints=hints(scenario, draw.setting),
        openings=(),
        unseen={name: counting.counts[name] for name in NOT_SEEN if name in counting.counts},
        unreported=_unreported(scenario),
        lost_batches=losses.total,
    )
    return Given(
        due=due,
        epoch_ns=scenario.epoch_ns,
        first_iterations=first_iterations(scenario),
        key=job_key(scenario.job_id),
        batches=batches,
    )


def sources() -> list[Path]:
    """Return the files that what is given depends on, in order."""
    graph = grimp.build_graph(*_PACKAGES, cache_dir=None)
    modules = {module for root in _MADE_BY for module in (root, *graph.find_upstream_modules(root))}
    return sorted(_ROOT / name for name in {*_FILES, *(f"{module.replace('.', '/')}.py" for module in modules)})


@cache
def _digest() -> str:
    """Return a name for what is in these files."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sources():
        digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _unreported(scenario: Scenario) -> int:
    silent = {late.node for late in scenario.agents.late if late.at_iteration >= scenario.iterations}
    return len(silent) * scenario.layout.gpus_per_node


@dataclass(slots=True)
class _Losses:
    """What never arrived, by the gaps in the batches' numbers, and what arrived without its events."""

    _numbers: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    _n_emptied: int = 0

    def note(self, batch: EventBatch) -> None:
        self._numbers.setdefault((batch.node, batch.agent_start_ns), set()).add(batch.seq)
        self._n_emptied += batch.lost_events > 0

    @property
    def total(self) -> int:
        return self._n_emptied + sum(max(numbers) + 1 - len(numbers) for numbers in self._numbers.values())
