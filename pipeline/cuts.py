"""Where iterations end: from markers, or from an anchor call and the host's waits."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from schemas.events import Calls, Markers, Syncs
from schemas.iterations import Numbering
from schemas.table import IntArray

_MOST_UNSYNCHRONISED = 64  # iterations without a wait, after which their ends are taken as they are


@dataclass(slots=True, eq=False)
class Cuts:
    """Ends of successive iterations, (n,); block is how many of them share one wait (1: each its own)."""

    end_ns: IntArray
    number: IntArray
    block: IntArray
    numbering: Numbering
    batches_waited: int = 0

    @property
    def last_ns(self) -> int:
        """The last end."""
        return int(self.end_ns[-1])

    def split(self, n: int) -> tuple["Cuts", "Cuts"]:
        """Return the first n, and the rest."""
        return (
            Cuts(self.end_ns[:n], self.number[:n], self.block[:n], self.numbering, self.batches_waited),
            Cuts(self.end_ns[n:], self.number[n:], self.block[n:], self.numbering, self.batches_waited),
        )

    @classmethod
    def joined(cls, parts: list[Self]) -> "Cuts":
        """Return all parts as one; the numbering is that of the last."""
        if not parts:
            none = np.empty(0, np.int64)
            return Cuts(none, none, none, Numbering.LOCAL)
        return Cuts(
            np.concatenate([p.end_ns for p in parts]),
            np.concatenate([p.number for p in parts]),
            np.concatenate([p.block for p in parts]),
            parts[-1].numbering,
        )


def cuts_of_markers(markers: Markers, syncs: Syncs | None) -> tuple[Cuts, int]:
    """Return the iterations that markers end, and how many markers that used up.

    With `syncs` given, markers between two waits form a block, which only its last one ends.
    """
    ends, numbers = markers.time_ns.astype(np.int64), markers.iteration.astype(np.int64)
    if syncs is None or not len(syncs):
        n = len(ends)
        if syncs is not None and n <= _MOST_UNSYNCHRONISED and n:
            n = 0
        return Cuts(ends[:n], numbers[:n], np.ones(n, np.int64), Numbering.MARKER), n
    waits_before = np.searchsorted(np.sort(syncs.start_ns + syncs.duration_ns), ends, side="right")
    closes = np.diff(waits_before, prepend=0) > 0
    return _blocks(ends, numbers, closes, ends, Numbering.MARKER, None)


def cuts_of_anchor(anchors: IntArray, stream: Calls, syncs: Syncs | None, since_ns: int | None, n_before: int) -> Cuts:
    """Return the iterations that the anchor calls stream[anchors] end after `since_ns`."""
    times = stream.start_ns[anchors].astype(np.int64)
    if len(times) == 0:
        return Cuts.joined([])
    known = bool((stream.seq_known[anchors] != 0).all())
    if syncs is None:
        fresh = times > (since_ns if since_ns is not None else -(1 << 62))
        ends, closes, anchors = times[fresh], np.ones(int(fresh.sum()), bool), anchors[fresh]
    else:
        sync_ends = np.sort(syncs.start_ns + syncs.duration_ns)
        wait = np.searchsorted(sync_ends, times, side="left")
        has_wait = wait < len(sync_ends)
        if not has_wait.any() and len(times) > _MOST_UNSYNCHRONISED:
            has_wait, ends = np.ones(len(times), bool), times
            wait = np.arange(len(times))
        else:
            ends = sync_ends[np.minimum(wait, len(sync_ends) - 1)] if len(sync_ends) else times
        fresh = has_wait & (ends > (since_ns if since_ns is not None else -(1 << 62)))
        anchors, ends, wait = anchors[fresh], ends[fresh], wait[fresh]
        closes = np.append(np.diff(wait) > 0, True) if len(wait) else np.empty(0, bool)
    numbers = (
        stream.first_seq[anchors].astype(np.int64) if known else n_before + np.arange(len(anchors), dtype=np.int64)
    )
    numbering = Numbering.SEQUENCE if known else Numbering.LOCAL
    return _blocks(ends, numbers, closes, ends, numbering, since_ns)[0]


def _blocks(
    ends: IntArray,
    numbers: IntArray,
    closes: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]",
    times: IntArray,
    numbering: Numbering,
    since_ns: int | None,
) -> tuple[Cuts, int]:
    """Divide the stretch between two closing ends evenly among the iterations in it."""
    closing = np.flatnonzero(closes)
    if len(closing) == 0:
        return Cuts(ends[:0], numbers[:0], numbers[:0], numbering), 0
    n = int(closing[-1]) + 1
    block = np.diff(closing, prepend=-1)
    size = np.repeat(block, block)
    if (block == 1).all():
        return Cuts(ends[:n], numbers[:n], size, numbering), n
    stop = np.repeat(times[closing], block).astype(np.float64)
    first = since_ns if since_ns is not None else int(times[0])
    begin = np.repeat(np.concatenate([[first], times[closing][:-1]]), block).astype(np.float64)
    place = np.concatenate([np.arange(1, b + 1) for b in block.tolist()])
    even = begin + (stop - begin) * place / size
    spread = np.where(size > 1, even, ends[:n]).astype(np.int64)
    return Cuts(spread, numbers[:n], size, numbering), n
