"""Every threshold of the judge, with its unit and its reason. Frames are ordinary iterations."""

import msgspec


class JudgeParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are meant to be left alone; none is tuned to a job."""

    warm_up_frames: int = 10  # compilation, autotuning and caches make the first iterations long
    reference_frames: int = 30  # before a change: as many as verification can use
    window_frames: int = 8  # of the spatial questions: enough to tell a lasting straggler from an alternating one
    peer_stride: int = 4  # frames between two looks at peers, and twice as many between two at links
    inquiry_frames: int = 6  # more frames to find the component in, after a slowdown is confirmed
    transient_frames: int = 3  # a slowdown without a culprit has to last so much longer: real jobs have short ones
    least_slowdown: float = 1.05  # of the iteration time: below, nobody is called
    accused_slowdown: float = 1.10  # below this an incident is information and accuses no component
    lasting_slowdown: float = 1.075  # likewise, once it has lasted for 24 frames: of a tenth, estimates may fall short
    critical_slowdown: float = 1.5
    evidence: float = 8.0  # log likelihood ratio of a change within the noise: once in 10,000 iterations by chance
    least_z: float = 5.0  # 10,000 ranks are compared at once
    least_link_ratio: float = 1.3  # of transfer time: single transfers vary by 30 % in healthy networks
    explained_share: float = 0.25  # of a slowdown that a component has to explain to be named
    hold_frames: int = 10  # of good frames before an incident is resolved; doubles when it flaps
    lost_sight_frames: int = 30  # a node whose batches get lost comes back; one that has gone takes its job with it
    update_frames: int = 100  # an incident that lasts is restated this often, for its cost
    restate_frames: int = 25  # or this often, where its size has changed by a third
    imbalance_frames: int = 12  # seen before a job's own imbalance is told, of twice as many looked at
    stage_imbalance_ratio: float = 1.25
    data_imbalance_ratio: float = 1.10


DEFAULTS = JudgeParams()
