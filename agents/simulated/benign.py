"""What slows or disturbs a healthy job, and must not be taken for a fault.

Source of the kinds and their numbers: the characterisation studies of ByteDance ("Understanding stragglers in large
model training", 2025) and Greyhound (ATC'25).
"""

from typing import TypeVar

import msgspec


class _Benign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base: `kind` in the file selects which."""


class WarmUp(_Benign, tag="warm_up", frozen=True, kw_only=True):
    """First iterations after every start are slower: just-in-time compilation, allocator, autotuning."""

    iterations: int = 10
    factor: float = 3.0  # of the first; falls to 1 in equal ratios


class Checkpoint(_Benign, tag="checkpoint", frozen=True, kw_only=True):
    """All ranks pause after every so many iterations."""

    every: int
    pause_s: float
    marker: bool = True  # whether the training process says so, where the marker sensor is on


class Evaluation(_Benign, tag="evaluation", frozen=True, kw_only=True):
    """Forward-only passes after every so many iterations."""

    every: int
    micro_batches: int
    marker: bool = True


class VariableSequenceLength(_Benign, tag="variable_sequence_length", frozen=True, kw_only=True):
    """Every micro-batch of every data-parallel rank has its own cost, forwards and backwards alike."""

    cv: float = 0.25


class LongLastStage(_Benign, tag="long_last_stage", frozen=True, kw_only=True):
    """The last pipeline stage computes longer, as the one with the output layer does."""

    factor: float = 1.6


class GcPauses(_Benign, tag="gc_pauses", frozen=True, kw_only=True):
    """Python's garbage collector stops a host thread now and then, another rank each time."""

    probability: float = 0.002  # per rank and iteration
    pause_s: float = 0.03


class DataStalls(_Benign, tag="data_stalls", frozen=True, kw_only=True):
    """A host waits for its data before the first forward, now and then, for an exponentially distributed time."""

    probability: float = 0.002  # per rank and iteration
    pause_s: float = 0.03  # mean
    is_shared: bool = False  # whether all wait at once, as for a storage that all read from; then per iteration


class MoeImbalance(_Benign, tag="moe_imbalance", frozen=True, kw_only=True):
    """Experts get more or fewer tokens: each rank's computation varies from iteration to iteration, with a memory."""

    cv: float = 0.08
    memory: int = 4  # iterations over which routing stays alike


class SlowSpells(_Benign, tag="slow_spells", frozen=True, kw_only=True):
    """All computation is slower for a few iterations: a recompilation, or our own profiling, which the agent states."""

    every: int
    iterations: int = 1
    factor: float = 2.0
    is_profiling: bool = False

    def is_slow(self, iteration: int) -> bool:
        """Return whether an iteration belongs to a spell; the first spell begins at iteration `every`."""
        return iteration >= self.every and iteration % self.every < self.iterations


class ThrottleReports(_Benign, tag="throttle_reports", frozen=True, kw_only=True):
    """Cards report a power cap in some of their samples, though nothing gets slower."""

    share: float = 0.1  # of the cards
    probability: float = 0.2  # of one of their samples


class Restart(_Benign, tag="restart", frozen=True, kw_only=True):
    """The job ends before an iteration and starts anew as the next incarnation, its ranks moved on by some nodes.

    With `dp` or `micro_batches` it goes on in another size; nodes that are no longer needed are left.
    """

    at_iteration: int
    pause_s: float = 5.0
    node_shift: int = 1
    dp: int | None = None
    micro_batches: int | None = None


class LostBatches(_Benign, tag="lost_batches", frozen=True, kw_only=True):
    """Some batches never arrive, or (known) arrive without their events but with their number. Never a node's last."""

    probability: float
    known: bool = False


class DuplicatedBatches(_Benign, tag="duplicated_batches", frozen=True, kw_only=True):
    """Some batches arrive once more later."""

    probability: float
    delay_s: float = 0.5


class LateBatches(_Benign, tag="late_batches", frozen=True, kw_only=True):
    """Some batches, and with them whatever their node sends after, are held up."""

    probability: float
    delay_s: float = 1.0


Benign = (
    WarmUp
    | Checkpoint
    | Evaluation
    | VariableSequenceLength
    | LongLastStage
    | GcPauses
    | DataStalls
    | MoeImbalance
    | SlowSpells
    | ThrottleReports
    | Restart
    | LostBatches
    | DuplicatedBatches
    | LateBatches
)
BenignT = TypeVar("BenignT", bound=_Benign)
