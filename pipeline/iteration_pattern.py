"""What an iteration looks like in a rank's calls, and the call that marks its end."""

from dataclasses import dataclass

import numpy as np

from detectors.period import Period, anchor, period
from schemas.events import Calls, CallSource, Op
from schemas.table import AnyArray, BoolArray, IntArray

_SMALL_BYTES = 4096  # calls below say little about the iteration and come at odd times
_MOST_TOKENS = 4000
_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))


@dataclass(frozen=True, slots=True)
class AnchorCall:
    """The call that occurs once per iteration."""

    comm: int
    op: int
    bytes: int

    def rows(self, stream: Calls) -> IntArray:
        """Return where it occurs in a stream."""
        return np.flatnonzero(self._is(stream))

    def rows_on_gpu(self, calls: Calls) -> BoolArray:
        """Return (n_calls,) whether a row is its execution on the GPU."""
        mask: BoolArray = self._is(calls) & (calls.source == int(CallSource.GPU))
        return mask

    def _is(self, calls: Calls) -> BoolArray:
        mask: BoolArray = (calls.comm == self.comm) & (calls.op == self.op) & (calls.bytes == self.bytes)
        return mask


def token_hashes(calls: Calls) -> AnyArray:
    """Return (n_calls,) a number for each call's communicator, op, peer and size: equal for equal calls."""
    with np.errstate(over="ignore"):
        mixed = calls.comm * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (calls.op.astype(np.uint64) << np.uint64(40))) * np.uint64(0xBF58476D1CE4E5B9)
        peer = np.where(np.isin(calls.op, _POINT_TO_POINT), calls.peer, 0).astype(np.uint64)
        mixed = (mixed ^ (peer << np.uint64(20))) * np.uint64(0x94D049BB133111EB)
        mixed = (mixed ^ calls.bytes.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(31))


def learn_anchor(stream: Calls, sizes: dict[int, int]) -> AnchorCall | None:
    """Return the call on the largest communicator that marks an iteration; None while no period is seen.

    The period is that of the large calls; small ones may still be the anchor (a norm's all-reduce often is).
    """
    hashes = token_hashes(stream)
    kept = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))[-_MOST_TOKENS:]
    tokens = hashes[kept].view(np.int64)
    large = np.flatnonzero(stream.bytes[kept] >= _SMALL_BYTES)
    found = period(tokens[large]) if len(large) else period(tokens)
    if found is None:
        return None
    if len(large):
        start, stop = int(large[found.offset]), int(large[min(found.offset + found.length, len(large) - 1)])
        found = Period(max(stop - start, 1), start, found.agreement)
    candidates = _candidates(stream, kept, hashes, sizes)
    marked = anchor(tokens, found, candidates=candidates) if candidates else None
    if marked is None:
        return None
    row = int(kept[np.flatnonzero(tokens == marked.token)[0]])
    return AnchorCall(int(stream.comm[row]), int(stream.op[row]), int(stream.bytes[row]))


def _candidates(stream: Calls, kept: IntArray, hashes: AnyArray, sizes: dict[int, int]) -> set[int]:
    """Return the tokens of collectives on the largest communicator that has any."""
    is_collective = ~np.isin(stream.op[kept], _POINT_TO_POINT)
    comms = stream.comm[kept][is_collective]
    if len(comms) == 0:
        return set()
    largest = max(sizes.get(int(c), 0) for c in np.unique(comms))
    chosen = {c for c in np.unique(comms).tolist() if sizes.get(c, 0) == largest}
    picked = kept[is_collective][np.isin(comms, list(chosen))]
    return set(np.unique(hashes[picked].view(np.int64)).tolist())
