"""Imbalance that is the workload's own: a long pipeline stage, or micro-batches of unequal length. Information only."""

from dataclasses import dataclass

import numpy as np

from pipeline.groups import Groups, quiet_median
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.notes import NO_NOTES, Notes
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind
from schemas.table import FloatArray, IntArray

_FEWEST_PEERS = 3
_TOP_SHARE = 0.5  # one rank that is slowest in more than half of the frames is a straggler, not chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """A finding about the job's own work: ratio is the iteration time over what balanced work would take."""

    kind: Kind
    component: Component
    ratio: float
    excess_s: float
    evidence: Evidence


def find_imbalance(
    history: History, groups: Groups, stages: IntArray, params: JudgeParams, stop: int, notes: Notes = NO_NOTES
) -> Imbalance | None:
    """Return the imbalance that costs most, if either is beyond its bound in the last frames before `stop`."""
    start = max(history.first, stop - 2 * params.imbalance_frames)
    compute = history.compute(start, stop)
    if len(compute) < params.imbalance_frames or not np.isfinite(compute).any():
        return None
    found = [
        imbalance
        for imbalance in (_stage(compute, stages, params, notes), _data(compute, groups, params, notes))
        if imbalance is not None
    ]
    return max(found, key=lambda imbalance: imbalance.excess_s, default=None)


def _stage(compute: FloatArray, stages: IntArray, params: JudgeParams, notes: Notes) -> Imbalance | None:
    level = quiet_median(compute)
    numbers = np.unique(stages)
    if len(numbers) < 2:
        return None
    by_stage = np.array(
        [np.nanmedian(level[stages == n]) if np.isfinite(level[stages == n]).any() else np.nan for n in numbers]
    )
    if not np.isfinite(by_stage).all():
        return None
    longest = int(np.argmax(by_stage))
    others = float(np.median(np.delete(by_stage, longest)))
    ratio = float(by_stage[longest] / others)
    excess_s = float(by_stage[longest] - by_stage.mean())
    notes.balanced(f"stage {numbers[longest]}", ratio, params.stage_imbalance_ratio, excess_s)
    if ratio < params.stage_imbalance_ratio:
        return None
    name = ComponentName(type=ComponentType.STAGE, stage=int(numbers[longest]))
    return Imbalance(
        kind=Kind.STAGE_IMBALANCE,
        component=Component(type=ComponentType.STAGE, name=name, candidates=(name,)),
        ratio=ratio,
        excess_s=excess_s,
        evidence=Evidence(
            what=f"computation of stage {numbers[longest]} per iteration",
            value=float(by_stage[longest]),
            unit="s",
            reference=others,
            source="gpu",
        ),
    )


def _data(compute: FloatArray, groups: Groups, params: JudgeParams, notes: Notes) -> Imbalance | None:
    spread = groups.spread(compute)  # (n, n_groups, largest)
    known = np.isfinite(spread)
    whole = np.flatnonzero(known.all(axis=0).sum(axis=-1) >= _FEWEST_PEERS)
    if len(whole) == 0:
        return None
    spread = np.where(known, spread, -np.inf)[:, whole]
    slowest = spread.max(axis=-1)
    middle = groups.lower_median(compute)[:, whole]
    ratio = np.median(slowest / np.maximum(middle, 1e-12), axis=0)  # (n_whole,)
    winners = spread.argmax(axis=-1)
    share = np.array([np.bincount(w).max() / len(w) for w in winners.T])
    uneven = (ratio >= params.data_imbalance_ratio) & (share <= _TOP_SHARE)
    excess_s = np.median(slowest - middle, axis=0)
    top = int(ratio.argmax())
    notes.balanced("ranks in turns", float(ratio[top]), params.data_imbalance_ratio, float(excess_s[top]))
    if np.count_nonzero(uneven) < 0.5 * len(whole):
        return None
    worst = int(np.argmax(np.where(uneven, ratio, -np.inf)))
    name = ComponentName(type=ComponentType.JOB)
    return Imbalance(
        kind=Kind.DATA_IMBALANCE,
        component=Component(type=ComponentType.JOB, name=name, candidates=(name,)),
        ratio=float(ratio[worst]),
        excess_s=float(excess_s[worst]),
        evidence=Evidence(
            what="slowest over median computation among peers, another rank each time",
            value=float(ratio[worst]),
            unit="ratio",
            reference=1.0,
            source="gpu",
        ),
    )
