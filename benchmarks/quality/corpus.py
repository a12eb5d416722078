"""The corpus: which episodes there are, and which of them are held out."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from agents.simulated.scenario import Scenario
from benchmarks.quality.benign import BENIGN
from benchmarks.quality.draw import Draw
from benchmarks.quality.faults import FAULTS, EpisodeClass
from benchmarks.quality.layouts import LAYOUTS

CLASSES: dict[str, EpisodeClass] = FAULTS | BENIGN
Part = Literal["development", "held-out", "all"]
Seeds = Literal["even", "odd", "all"]
_EVEN_SHARE = 0.25  # of a class's episodes: enough to develop on, and the figures that count stand on the rest


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode by its class and seed, from which everything else follows."""

    class_name: str
    seed: int

    @property
    def name(self) -> str:
        """A name that finds it again."""
        return f"{self.class_name}/{self.seed}"

    def draw(self) -> tuple[Draw, Scenario]:
        """Return what chance decided, and the scenario."""
        draw = self.begun()
        return draw, CLASSES[self.class_name].make(draw)

    def begun(self) -> Draw:
        """Return what chance decides before the class does: layout, sensors and noise."""
        layouts = (n for n, one in LAYOUTS.items() if one.shape.pp > 1 or not CLASSES[self.class_name].needs_stages)
        return Draw(self.class_name, self.seed, tuple(layouts))

    @property
    def is_held_out(self) -> bool:
        """Whether nobody may tune on it."""
        lists = held_out()
        return self.seed % 2 == 1 or self.class_name in lists["classes"] or self.begun().layout_name in lists["layouts"]


@cache
def held_out() -> dict[str, list[str]]:
    """Return the lists of held_out.toml by name."""
    text = (Path(__file__).parent / "held_out.toml").read_text(encoding="utf-8")
    return {name: value for name, value in tomllib.loads(text).items() if isinstance(value, list)}


def episodes(
    *, classes: list[str], share: float, seeds: Seeds, part: Part, seen_share: float = 0.0
) -> Iterator[Episode]:
    """Yield a share of the corpus, class by class; a smaller share is a part of a larger.

    Those of `seen_share`, which somebody has looked at, are left out.
    """
    for class_name in classes:
        total = CLASSES[class_name].episodes * share
        seen = CLASSES[class_name].episodes * seen_share
        for parity, part_of_all in (("even", _EVEN_SHARE), ("odd", 1 - _EVEN_SHARE)):
            count, first = part_of_all * total, round(part_of_all * seen)
            if seeds not in (parity, "all"):
                continue
            for number in range(first, max(1, round(count))):
                episode = Episode(class_name, 2 * number + (parity == "odd"))
                if part == "all" or episode.is_held_out == (part == "held-out"):
                    yield episode
