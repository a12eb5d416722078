"""How many calls make one iteration? The period of a sequence of tokens, and the call that marks an iteration.

Source: T. Wu et al., Greyhound: Hunting Fail-Slows in Hybrid-Parallel Training at Scale, USENIX ATC (2025), section 4:
the first peak of the autocorrelation of 0.95 or more, confirmed by an exact repeat. Correcting agreement for chance:
J. Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 20 (1960), 37-46.

Tokens stand for calls (operation, size, communicator); their numbers mean nothing, so the agreement counts matches:
agreement(k) = (m(k) - c) / (1 - c), m(k) the share of positions i with token(i) = token(i + k), c the sum of squared
token shares. The period is the first k with agreement >= 0.95 that rises above agreement(k - 1), has k tokens that are
repeated exactly, straight away, and comes within 0.01 of the best such agreement: two calls that alternate for a whole
layer agree well at k = 2, but the iteration agrees better. Failing that, the same is asked of the sequence without the
worst four of sixteen equal pieces, so that a few corrupted stretches (lost events, an evaluation) do not hide the rest.

Where every n-th iteration makes extra calls, this finds n iterations, since only they repeat. The anchor counts them: a
token that recurs in nearly equal gaps, at most half as long again as each other and mostly the least.

Blind to: a period of more than a third of the sequence; iterations whose calls differ each time; what a call means: a
micro-batch that repeats inside an iteration looks like an iteration with a few extra calls at times. Name the tokens
that can only occur once per iteration (`candidates`) where they are known. A sequence of one token has the period 1.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from detectors.detector import BoolArray, FloatArray, IntArray

Codes = npt.NDArray[np.signedinteger[Any]]

LEAST_AGREEMENT = 0.95
_AS_GOOD = 0.01
_LEAST_REPEATS = 3
_PIECES, _LEFT_OUT = 16, 4
_LONGEST_GAP = 1.5  # of an anchor, in its shortest


@dataclass(frozen=True, slots=True)
class Period:
    """What repeats in a sequence of tokens."""

    length: int  # tokens
    offset: int  # of the first token from which `length` tokens are repeated exactly
    agreement: float  # 1 is a perfect repetition, 0 is chance


@dataclass(frozen=True, slots=True)
class Anchor:
    """The call that marks an iteration."""

    token: int
    iterations: int  # in one period: more than one if only every n-th iteration makes some of the calls


def period(tokens: IntArray) -> Period | None:
    """Find the period of tokens (n,), any integers; None if there is none, or fewer than three repeats to see it by."""
    codes, share = _codes(tokens)
    longest = len(codes) // _LEAST_REPEATS
    if longest < 1:
        return None
    chance = float(share @ share)
    if chance == 1.0:
        return Period(1, 0, 1.0)
    shares = np.array([1.0] + [_share(codes, lag) for lag in range(1, longest + 1)])
    found = _first_peak(codes, (shares - chance) / (1 - chance))
    if found is None:
        # Leaving out a quarter can lift a share by a third at most: most lags need no second look.
        hopeful = np.flatnonzero(shares >= (1 - _LEFT_OUT / _PIECES) * LEAST_AGREEMENT)
        shares[hopeful[1:]] = [_share_of_best(codes, lag) for lag in hopeful[1:].tolist()]
        found = _first_peak(codes, (shares - chance) / (1 - chance))
    return found


def anchor(tokens: IntArray, found: Period, *, candidates: Collection[int] | None = None) -> Anchor | None:
    """Find the token that occurs once per iteration, and how many iterations a period has.

    candidates: tokens that are known to occur at most once per iteration; all are tried if None. None is returned if no
    token occurs at regular distances: every iteration then has the length of the period.
    """
    pattern = np.asarray(tokens)[found.offset : found.offset + found.length]
    names, counts = np.unique(pattern, return_counts=True)
    best: tuple[int, float, int] | None = None
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        if candidates is not None and name not in candidates:
            continue
        places = np.flatnonzero(pattern == name)
        gaps = np.diff(places, append=places[0] + found.length)
        if candidates is None and not _is_regular(gaps):
            continue
        # The most iterations first, then the steadiest, then the earliest in the period.
        rank = (-count, float(gaps.std() / gaps.mean()), int(places[0]))
        best = rank if best is None else min(best, rank)
    return None if best is None else Anchor(int(pattern[best[2]]), -best[0])


def _codes(tokens: IntArray) -> tuple[Codes, FloatArray]:
    """Return the tokens as small codes, and the share of each."""
    values = np.asarray(tokens)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a list of integers: shape {values.shape}, dtype {values.dtype}")
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    return codes.astype(np.int16 if len(counts) < 2**15 else np.int32), counts / max(len(values), 1)


def _first_peak(codes: Codes, agreement: FloatArray) -> Period | None:
    """Return the first peak of the agreement, close to the best one, that has an exact repeat."""
    rises = np.concatenate(([False], agreement[1:] > agreement[:-1]))
    least = max(LEAST_AGREEMENT, float(agreement[rises].max(initial=0.0)) - _AS_GOOD)
    for lag in np.flatnonzero(rises & (agreement >= least)).tolist():
        offset = _first_run(codes[:-lag] == codes[lag:], lag)
        if offset is not None:
            return Period(lag, offset, float(agreement[lag]))
    return None


def _share(codes: Codes, lag: int) -> float:
    return np.count_nonzero(codes[:-lag] == codes[lag:]) / (len(codes) - lag)


def _share_of_best(codes: Codes, lag: int) -> float:
    """Return the share of matches in the best pieces."""
    pieces = np.array_split(codes[:-lag] == codes[lag:], _PIECES)
    best = sorted(pieces, key=lambda piece: float(piece.mean()) if len(piece) else 0.0)[_LEFT_OUT:]
    return float(np.concatenate(best).mean())


def _first_run(matches: BoolArray, length: int) -> int | None:
    """Return where the first `length` matches in a row begin."""
    misses = np.concatenate(([-1], np.flatnonzero(~matches), [len(matches)]))
    long_enough = np.flatnonzero(np.diff(misses) > length)
    return int(misses[long_enough[0]]) + 1 if len(long_enough) else None


def _is_regular(gaps: IntArray) -> bool:
    least = gaps.min()
    return bool(gaps.max() <= _LONGEST_GAP * least and 2 * np.count_nonzero(gaps == least) >= len(gaps))
