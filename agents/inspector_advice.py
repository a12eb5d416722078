"""What keeps GPU times from being known, and how to switch NCCL's Inspector on for new jobs; for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from agents.collector import Limit
from agents.inspector_files import Settings
from agents.inspector_records import Counts

GRACE_NS = 60_000_000_000  # a process may take as long to create its communicators
_ENOUGH = 0.8  # of the calls of so short a time that the latest of them have no record yet

SWITCH_ON = (
    "for jobs that start from now on, without a change of their code, put these lines into /etc/nccl.conf of the node "
    "or its container image (or into the file that NCCL_CONF_FILE names, or the job's environment):\n"
    "  NCCL_PROFILER_PLUGIN=/path/to/libnccl-profiler-inspector.so\n"
    "  NCCL_INSPECTOR_ENABLE=1\n"
    "  NCCL_INSPECTOR_DUMP_DIR=/var/tmp/nccl-inspector\n"
    "  NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=500000\n"
    "  NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0\n"
    "It takes NCCL 2.28 or newer, and the plug-in built from plugins/profiler/inspector of NVIDIA/nccl. The folder "
    "must exist, and be writable by the jobs' users"
)
RAISE = (
    "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0 records small operations too (below 8192 bytes they have no GPU time, and "
    "iterations that contain one are not compared by GPU time); "
    "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS at most 1000000, since later records come too late, and with "
    "NCCL 2.28 and 2.29, which keep the last collective of each communicator alone, shorter than the time between two "
    "(such as 500); NCCL_INSPECTOR_DUMP_VERBOSE=1 says when each operation ran, so that it finds its place without "
    "host calls that are counted from the communicator's creation; NCCL_INSPECTOR_DUMP_COLL_RING_SIZE and "
    "NCCL_INSPECTOR_DUMP_P2P_RING_SIZE above the operations of one interval"
)
COST = (
    "Inspector runs inside the training process: NCCL's kernels write two time stamps per channel, a CPU thread takes "
    "note of them, and another one writes 200 to 500 bytes per operation (several times that when verbose) to a file "
    "that grows without bound. This project has not measured what that costs a real job; compare iteration times with "
    "and without it before switching it on everywhere"
)


def advice() -> tuple[str, ...]:
    """Return how to switch Inspector on, what raises the share of calls with GPU times, and what it costs."""
    return (SWITCH_ON, RAISE, COST)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known of the file of one rank process."""

    rank: int
    pid: int
    settings: Settings
    trouble: str
    has_file: bool
    age_ns: int
    is_silent: bool
    has_calls: bool
    counts: Counts
    n_skipped: int  # bytes
    records: int
    unplaced: int
    contradicting: int
    gap_share: float  # of the numbers between the first and the last record, those without one
    calls: int  # of the host
    on_calls: int  # of them with a record


def limits_of(views: Sequence[View]) -> list[Limit]:
    """Return one limit for each reason, naming the ranks that it goes for."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for view in views:
        for reason in _reasons(view):
            ranks.setdefault(reason, []).append(view.rank)
    return [
        Limit(f"{what} of rank{'s' if len(own) > 1 else ''} {', '.join(map(str, sorted(own)))}", why, remedy)
        for (what, why, remedy), own in ranks.items()
    ]


def _reasons(view: View) -> list[tuple[str, str, str]]:
    if view.trouble:
        remedy = (
            "run the agent as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, in the PID namespace of the host"
        )
        return [("GPU times", view.trouble, remedy)]
    if view.is_silent:
        return _reasons_of_silence(view)
    return _reasons_of_gaps(view)


def _reasons_of_silence(view: View) -> list[tuple[str, str, str]]:
    settings, what = view.settings, "GPU times"
    if settings.is_for_prometheus:
        why = "NCCL Inspector writes means for Prometheus and no records"
        return [(what, why, "set NCCL_INSPECTOR_PROM_DUMP=0 for new jobs")]
    if not view.has_file and not settings.is_on:
        return [(what, "NCCL Inspector is not switched on", SWITCH_ON)]
    if settings.is_on and settings.interval_us < 0:
        why = "NCCL Inspector writes when communicators end, if at all: no interval is set"
        return [(what, why, "set NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=500000 for new jobs")]
    return [(what, *_silence(view))] if view.age_ns >= GRACE_NS else []


def _silence(view: View) -> tuple[str, str]:
    if not view.has_file:
        why = f"NCCL Inspector is switched on, but process {view.pid} has no file in {view.settings.folder}"
        remedy = "see that NCCL is 2.28 or newer, that NCCL_PROFILER_PLUGIN names the plug-in, that the folder is "
        return why, remedy + "writable, and what NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,PROFILE says"
    if view.counts.not_on_gpu:
        why = "NCCL Inspector has timed operations on the host alone"
        return why, "run a driver and an NCCL that give kernels' time stamps (timing source kernel_gpu)"
    why = "NCCL Inspector has written no record that can be used for a minute"
    return why, "see whether the job runs, and that operations are larger than its minimum size"


def _reasons_of_gaps(view: View) -> list[tuple[str, str, str]]:
    found = []
    settings, counts = view.settings, view.counts
    if view.unplaced > 0.02 * view.records:
        why = (
            f"of {view.records} records {view.unplaced} do not say when the operation ran, and the host's call is not "
        )
        why += "known" if view.has_calls else "observed"
        found.append(
            ("some GPU times", why, "set NCCL_INSPECTOR_DUMP_VERBOSE=1 for new jobs, or start the agent first")
        )
    if view.contradicting > 0.02 * view.records:
        why = f"of {view.records} records {view.contradicting} ran before the host made the call of that number: NCCL "
        why += "counts otherwise than the host calls, as it does where CUDA graphs replay them"
        found.append(("some GPU times", why, "none: operations within CUDA graphs cannot be told apart"))
    if view.gap_share > 0.02:
        why = f"{view.gap_share:.0%} of NCCL's numbers have no record (small operations, or NCCL 2.28 and 2.29)"
        found.append(("some GPU times", why, RAISE))
    elif view.age_ns >= GRACE_NS and view.on_calls < _ENOUGH * view.calls:
        why = f"{1 - view.on_calls / view.calls:.0%} of the host's calls have no record (small operations, or late)"
        found.append(("some GPU times", why, RAISE))
    elif settings.interval_us > 1_000_000:
        found.append(("GPU times", "records come too late to be joined with the calls", RAISE))
    if counts.dropped:
        why = f"NCCL Inspector had no room for {counts.dropped} records"
        found.append(("some GPU times", why, RAISE))
    if view.n_skipped:
        why = f"{view.n_skipped} bytes were left out, since the file grows faster than it is read"
        found.append(("some GPU times", why, "raise NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, or switch verbose records off"))
    n_bad = counts.garbage + counts.without_header
    if n_bad > 0.01 * (counts.records + n_bad):
        why = f"{n_bad} lines of NCCL Inspector could not be read"
        found.append(("some GPU times", why, "see whether something else writes to its files"))
    return found
