"""What the judge tells its observer about one frame."""

import numpy as np

from pipeline.frames import Frame, Signal
from pipeline.incidents import JobIdentity
from pipeline.observer import FrameSummary
from pipeline.structure import Structure
from schemas.table import BoolArray


def summary(
    identity: JobIdentity,
    frame: Frame,
    duration_s: float,
    usable: BoolArray,
    structure: Structure,
    reference_s: float,
) -> FrameSummary:
    """Return it; usable (world_size,), times in seconds."""
    compute = np.where(usable, frame.signal(Signal.COMPUTE), np.nan)
    if not np.isfinite(compute).any():
        compute = np.where(usable, frame.signal(Signal.DURATION) - frame.signal(Signal.HOST_WAIT), np.nan)
    usual = structure.groups.to_ranks(structure.groups.lower_median(compute))
    return FrameSummary(
        job_id=identity.job_id,
        incarnation=identity.incarnation,
        iteration=frame.iteration,
        end_ns=frame.end_ns,
        iteration_s=duration_s,
        reference_s=reference_s,
        rank_slowdown=compute / np.where(usual > 0, usual, np.nan),
        node=structure.node,
        gpu=structure.gpu,
        missing_ranks=frame.missing,
    )
