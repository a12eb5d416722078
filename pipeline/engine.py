"""Both stages in one: what replay and the embedded mode use, and what the way through the topics has to equal."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.judge import Judge
from pipeline.observer import Observer
from pipeline.record import Record
from pipeline.window import Window
from schemas.alerts import Alert
from schemas.codec import encode_iterations
from schemas.topics import ITERATIONS, job_key


@dataclass(slots=True)
class Engine:
    """The composition of window and judge, through the same bytes that the topic would carry."""

    observer: Observer = field(default_factory=Observer)
    window: Window = field(init=False)
    judge: Judge = field(init=False)
    _n_handed: int = 0

    def __post_init__(self) -> None:
        self.window = Window(self.observer)
        self.judge = Judge(self.observer)

    def handle(self, record: Record) -> Iterator[Alert]:
        """Take in one record of the events topic. Raises InvalidRecord, before any state has changed."""
        for batch in self.window.handle(record):
            handed = Record(
                ITERATIONS, 0, self._n_handed, record.time_ns, job_key(batch.job_id), encode_iterations(batch)
            )
            self._n_handed += 1
            yield from self.judge.handle(handed)
