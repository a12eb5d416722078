"""A small fixed part of the corpus: no score may fall out of the interval in which it was when last written down.

Write anew, after a change for the better: python -m tests.quality.test_subset
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.quality.corpus import CLASSES, Episode
from benchmarks.quality.failures import failures
from benchmarks.quality.faults import FAULTS
from benchmarks.quality.intervals import wilson
from benchmarks.quality.layouts import LAYOUTS
from benchmarks.quality.matching import Matched, match
from benchmarks.quality.score import is_clear, is_in_time
from benchmarks.quality.trial import outcome

RECORD = Path(__file__).with_name("subset.toml")
RANKS_MAX = 16
PER_FAULT, PER_BENIGN = 2, 1
FALSE_MORE = 2  # incidents by which chance may raise a count so small

Counts = dict[str, tuple[int, int]]


def chosen() -> Iterator[Episode]:
    """The first development episodes of each class whose jobs are small."""
    for name in CLASSES:
        wanted = PER_FAULT if name in FAULTS else PER_BENIGN
        for seed in range(0, 100, 2):
            episode = Episode(name, seed)
            if wanted and not episode.is_held_out:
                ranks = LAYOUTS[episode.begun().layout_name].shape.world_size
                if ranks <= RANKS_MAX and not episode.begun().is_prompt:
                    wanted -= 1
                    yield episode


def counts(matched: list[Matched]) -> Counts:
    """Hits and cases of every score."""
    findings = [finding for one in matched for finding in one.findings if is_clear(finding)]
    found = [finding for finding in findings if finding.is_found]
    n_accusing, n_false = sum(one.n_accusing for one in matched), sum(len(one.false) for one in matched)
    return {
        "recall": (len(found), len(findings)),
        "precision": (n_accusing - n_false, n_accusing),
        "component_first": (sum(finding.names_component_first for finding in found), len(found)),
        "kind": (sum(finding.names_kind for finding in found), len(found)),
        "in_time": (sum(is_in_time(finding) for finding in findings), len(findings)),
    }


@pytest.mark.timeout(900)  # a minute, on a machine that does nothing else
def test_no_score_of_the_small_fixed_subset_has_fallen_out_of_its_interval() -> None:
    matched = [match(outcome(episode)) for episode in chosen()]
    written = tomllib.loads(RECORD.read_text())
    told = "\n".join(failures(matched))
    for name, (hits, n) in counts(matched).items():
        least = wilson(*written[name])[0]
        assert hits >= least * n, f"{name} is {hits} of {n}, it was {written[name]}\n{told}"
    n_false = sum(one.n_false_while_healthy for one in matched)
    assert n_false <= written["false_while_healthy"] + FALSE_MORE, told


def write() -> None:
    """Write the scores of today."""
    matched = [match(outcome(episode)) for episode in chosen()]
    lines = [f"{name} = [{hits}, {n}]" for name, (hits, n) in counts(matched).items()]
    lines.append(f"false_while_healthy = {sum(one.n_false_while_healthy for one in matched)}")
    header = "# Hits and cases of test_subset.py when last written, by `python -m tests.quality.test_subset`.\n"
    RECORD.write_text(header + "\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
