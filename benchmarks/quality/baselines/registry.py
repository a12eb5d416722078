"""All baselines with their authors' defaults, by the name that a command line takes.

Two whose reports are far apart are there once more (`_prompt`), reporting every 5 s and every ten iterations, so that a
fault of a minute is not missed for that reason alone; Megatron's report is then believed where the slowest rank takes
a tenth longer than the fastest.
"""

from collections.abc import Callable

from benchmarks.quality.baselines.baseline import Baseline
from benchmarks.quality.baselines.bocd_package import BocdPackage
from benchmarks.quality.baselines.dlrover import DlRover
from benchmarks.quality.baselines.longest_collective import LongestCollective
from benchmarks.quality.baselines.megatron import MegatronReport
from benchmarks.quality.baselines.nvrx import Nvrx
from benchmarks.quality.baselines.rbeast_falcon import RbeastFalcon
from benchmarks.quality.baselines.river_drift import adwin, kswin, page_hinkley
from benchmarks.quality.baselines.ruptures_offline import RupturesOffline
from schemas.alerts import Kind

BASELINES: dict[str, Callable[[], Baseline]] = {
    "nvrx": Nvrx,
    "nvrx_prompt": lambda: Nvrx(interval_s=5.0),
    "falcon": RbeastFalcon,
    "bocd": BocdPackage,
    "adwin": adwin,
    "page_hinkley": page_hinkley,
    "kswin": kswin,
    "pelt": lambda: RupturesOffline("Pelt"),
    "binseg": lambda: RupturesOffline("Binseg"),
    "dlrover": DlRover,
    "megatron": MegatronReport,
    "megatron_prompt": lambda: MegatronReport(interval=10, least_ratio=1.1),
    "longest_collective": LongestCollective,
}

# What a baseline that names ranks means by them; all others claim no kind.
CLAIMS: dict[str, Kind] = {"nvrx": Kind.SLOW_GPU, "nvrx_prompt": Kind.SLOW_GPU}
