"""Which call ends an iteration? Learnt from the calls of one rank, all ranks of a job choosing the same kind of call.

Source: T. Wu et al., Greyhound: Hunting Fail-Slows in Hybrid-Parallel Training at Scale, USENIX ATC (2025), section 4,
with the anchor that detectors/period.py explains. The period is looked for among the collectives of the largest
communicators first, since micro-batches repeat calls of the smaller ones; runs of equal calls count as one. Of the
calls that recur as regularly, the smallest is the anchor: a scalar that all ranks reduce, such as the gradients' norm.
A choice has to be confirmed by iterations that equal their successors call by call.

Blind to: a largest communicator that is used in every n-th iteration alone (then n iterations are taken for one), and
iterations that consist of one and the same call.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detectors.period import period
from pipeline.window_calls import BYTES, COUNT, COUNTER, KEY, POINT_TO_POINT, SEQ, START, TOKEN, Keys, mixed
from schemas.table import BoolArray, FloatArray, IntArray

_FEWEST_ANCHORS = 3
_LONGEST_GAP = 1.5  # of an anchor, in its shortest
_SMALL_BYTES = 4096
_MOST_TOKENS = 6000  # looked at for a period: it takes quadratic time
_LEAST_SHARE = 0.5  # of the iterations that are like earlier ones
_PATIENCE = 64  # anchors to wait for the second synchronisation


@dataclass(frozen=True, slots=True)
class Pattern:
    """How the stream of one rank is cut into iterations.

    line: KEY or TOKEN, whether the sizes of calls are looked at. tail: calls after the anchor that still belong to the
    iteration, up to the synchronisation that ends it; None: nothing is known of synchronisations. block: iterations
    from one synchronisation to the next.
    """

    line: int
    anchor: int
    counter: int
    step: int  # sequence numbers per iteration
    tail: int | None
    block: int
    signature: int
    rows: int  # of an iteration


def signatures(lines: IntArray, line: int, bounds: IntArray) -> IntArray:
    """Return (n - 1,): a number for the calls between each two of bounds (n,), whatever their order."""
    names = lines[TOKEN] if line == TOKEN else mixed(lines[line]).view(np.int64)
    sums = np.concatenate(([0], np.cumsum(names * lines[COUNT])))[bounds]
    return sums[1:] - sums[:-1]


def anchors(lines: IntArray, line: int, anchor: int) -> IntArray:
    """Return the last row of each run of anchors."""
    is_anchor = lines[line] == anchor
    is_anchor[:-1] &= ~is_anchor[1:]
    return np.flatnonzero(is_anchor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """How large a rank's communicators are: size (n_keys,), 0 where unknown; top is the largest, used or not."""

    size: IntArray
    top: int
    least: int = 0  # of an anchor's communicator


def learn(
    lines: IntArray, keys: Keys, members: Members, sync_end_ns: IntArray | None, patience_rows: int
) -> Pattern | None:
    """Find the pattern of one rank's calls, a matrix in the order of their start; None if it is not clear yet.

    sync_end_ns: None without such a sensor. Before there are `patience_rows`, only what all ranks call is believed:
    there may be nothing but micro-batches yet.
    """
    if lines.shape[1] < _FEWEST_ANCHORS:
        return None
    for line, anchor, n_iterations in _proposals(lines, keys, members, is_patient=lines.shape[1] >= patience_rows):
        if found := _confirmed(lines, line, anchor, n_iterations):
            counter, step, signature, n_rows = found
            tail, block = _tail(lines, anchors(lines, line, anchor), sync_end_ns)
            return None if block < 1 else Pattern(line, anchor, counter, step, tail, block, signature, n_rows)
    return None


def _proposals(lines: IntArray, keys: Keys, members: Members, *, is_patient: bool) -> Iterator[tuple[int, int, int]]:
    """Yield lines, calls that recur regularly and how often they do in one period, the likeliest first."""
    size = members.size[lines[KEY]]
    is_collective = ~np.isin(keys.op[lines[KEY]], POINT_TO_POINT)
    everything = np.ones(lines.shape[1], bool)
    if members.top:
        yield from _regular(lines, TOKEN, everything, is_collective & (size == members.top), keys)
    if not is_patient:
        return
    for line in (TOKEN, KEY):
        for rows in (everything, lines[BYTES] >= _SMALL_BYTES):
            for level in np.unique(size[is_collective & rows])[::-1].tolist():
                if level >= members.least:
                    yield from _regular(lines, line, rows, is_collective & (size == level), keys)
            if not members.least:
                yield from _regular(lines, line, rows, everything, keys)


def _regular(
    lines: IntArray, line: int, among: BoolArray, chosen: BoolArray, keys: Keys
) -> Iterator[tuple[int, int, int]]:
    """Yield the chosen calls that recur in nearly equal gaps, counted in runs of the calls among which they are."""
    rows = np.flatnonzero(among)
    tokens = lines[line, rows]
    ends_run = np.ones(len(tokens), bool)
    ends_run[:-1] = tokens[1:] != tokens[:-1]
    runs = rows[ends_run]
    places = np.flatnonzero(chosen[runs])[-_MOST_TOKENS:]
    tokens = lines[line, runs[places]]
    found = period(tokens)
    if found is None or found.offset + found.length >= len(places):
        return
    once = slice(found.offset, found.offset + found.length)
    length = places[once.stop] - places[once.start]
    ranked = []
    for token in np.unique(tokens[once]).tolist():
        own = places[once][tokens[once] == token]
        gaps = np.diff(own, append=own[0] + length)
        if gaps.max() <= _LONGEST_GAP * gaps.min() and 2 * np.count_nonzero(gaps == gaps.min()) >= len(gaps):
            row = runs[own[0]]
            key = lines[KEY, row]
            ranked.append((-len(own), int(lines[BYTES, row]), int(keys.op[key]), int(keys.comm[key]), token))
    for count, _, _, _, token in sorted(ranked):
        yield line, token, -count


def _confirmed(lines: IntArray, line: int, anchor: int, n_iterations: int) -> tuple[int, int, int, int] | None:
    """Return the counter, step, signature and rows of the iterations that an anchor makes.

    None if most do not equal the one that came n_iterations before.
    """
    places = anchors(lines, line, anchor)
    if len(places) < _FEWEST_ANCHORS:
        return None
    signature = signatures(lines, line, places + 1)
    repeats = signature[n_iterations:] == signature[:-n_iterations]
    if len(repeats) < n_iterations or repeats.mean() < _LEAST_SHARE:
        return None
    names, counts = np.unique(signature, return_counts=True)
    usual = signature == names[counts.argmax()]
    last = lines[SEQ, places] + lines[COUNT, places] - 1
    step = int(np.median(np.diff(last)[usual]))
    if step < 1:
        return None
    counter = int(lines[COUNTER, places[-1]])
    return counter, step, int(names[counts.argmax()]), int(np.median(np.diff(places)[usual]))


def _tail(lines: IntArray, places: IntArray, sync_end_ns: IntArray | None) -> tuple[int | None, int]:
    """Return how many calls after the anchor the synchronisation comes, and how many iterations apart; 0: wait.

    Of several positions it is the one after which the host goes on for longest.
    """
    if sync_end_ns is None:
        return None, 1
    calls = np.cumsum(lines[COUNT])
    sync_end_ns = sync_end_ns[sync_end_ns <= lines[START, -1]]  # of later ones it is not known what came before
    row = lines[START].searchsorted(sync_end_ns, "left") - 1
    anchor = places.searchsorted(row, "right") - 1
    row, anchor = row[anchor >= 0], anchor[anchor >= 0]
    positions, counts = np.unique(calls[row] - calls[places[anchor]], return_counts=True)
    if not len(positions) or counts.max() < 2:
        return None, int(len(places) >= _PATIENCE)
    often = counts >= _LEAST_SHARE * counts.max()
    positions, counts = positions[often], counts[often]
    per_iteration: FloatArray = np.median(np.diff(calls[places]))
    stretches = np.diff(positions, append=positions[0] + per_iteration)
    best = int(stretches.argmax())
    return int(positions[best]), max(1, round(len(places) / int(counts[best])))
