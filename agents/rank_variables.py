"""What launchers tell a process by its environment: its rank, and which job it belongs to.

Sources: torchrun (torch/distributed/run.py, "Environment Variables"), Slurm (srun(1), "OUTPUT ENVIRONMENT VARIABLES"),
Open MPI (mpirun(1)), MPICH's Hydra and PMI, MVAPICH, Flux, IBM's jsrun, HPE's PALS, PBS, LSF and Grid Engine.

An environment is inherited: a wrapper script, a launcher and a data loader have the same variables as the rank between
them, so a variable alone makes no rank.
"""

import hashlib
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass

JOB_ID_CHARACTERS_MAX = 128
_LOOPBACK = re.compile(r"localhost(\..*)?|127\..*|::1|\[::1\]|ip6-localhost")
_UNFIT = re.compile(r"[^A-Za-z0-9._:@+-]")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one launcher spells it."""

    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]


TORCH = "torch"
SLURM = "slurm"
# In the order of trust: what is set for one process comes before what is inherited from further up.
SPELLINGS = (
    Spelling(TORCH, ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)),
    Spelling("openmpi", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    Spelling("mvapich", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",)),
    Spelling("jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",)),
    Spelling("flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",)),
    Spelling("mpich", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")),
    Spelling(SLURM, ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",)),
)
_OTHERS = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID",
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID_HET_GROUP_0",
    "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_RESTART_COUNT", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS",
    "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "JOB_ID", "SGE_TASK_ID", "SGE_ROOT", "FLUX_JOB_ID",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip
NAMES = frozenset(_OTHERS).union(*((*s.rank, *s.world_size, *s.local_rank) for s in SPELLINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an environment says of a rank; None where it does not say."""

    launcher: str | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it says which rank of how many."""
        return self.rank is not None and self.world_size is not None


def read_claim(environment: Mapping[str, str], spellings: tuple[Spelling, ...] = SPELLINGS) -> Claim:
    """Return the first spelling that gives a rank of a world size, or else the parts that any gives."""
    partial = Claim()
    for spelling in spellings:
        rank = _number(environment, spelling.rank)
        world_size = _number(environment, spelling.world_size)
        local_rank = _number(environment, spelling.local_rank)
        if rank is not None and world_size is not None and rank < world_size:
            if local_rank is None:
                local_rank = partial.local_rank
            return Claim(launcher=spelling.launcher, rank=rank, world_size=world_size, local_rank=local_rank)
        if partial.launcher is None and (world_size or local_rank is not None):
            partial = Claim(launcher=spelling.launcher, world_size=world_size or None, local_rank=local_rank)
    return partial


def job_name(environment: Mapping[str, str], claim: Claim, node: str) -> str | None:
    """Return the job's name, alike on all of its nodes; None where the environment has none.

    node: named in jobs that no other node can see, since their master is this very node.
    """
    scheduled = _scheduled(environment)
    run = _run_id(environment)
    if scheduled is not None:
        kind, number = scheduled
        parts = [f"{kind}-{number}"]
        step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
        if kind == SLURM and step and _step_holds_job(environment, claim):
            parts.append(step)
        if run is not None and run not in {number, environment.get("SLURM_JOB_ID")}:
            parts.append(run)
        if run is None and not _is_elastic(environment) and (launch := _launch(environment)):
            parts.append(digest(launch))
        return fit(".".join(parts))
    if run is not None:
        return fit(run)
    master, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if master:
        place = node if _LOOPBACK.fullmatch(master.lower()) else environment.get("KUBERNETES_NAMESPACE", "")
        return fit(f"{master}-{port or 'default'}-{digest(master, port or '', place)}")
    launch = _launch(environment)
    return fit(f"{claim.launcher or 'launch'}-{launch}") if launch else None


def launch_name(environment: Mapping[str, str], claim: Claim) -> str | None:
    """Return what tells one start of the job from the next, alike on all nodes; None: only communicators can.

    torchrun counts a restart on the node that had the failure, and not on the others, so its count is none.
    """
    if _is_elastic(environment) or claim.launcher in {None, TORCH}:
        return None
    if claim.launcher == "flux" and environment.get("FLUX_JOB_ID"):
        return "0"
    if launch := _launch(environment):
        return digest(launch)
    if _scheduled(environment) is not None and _step_holds_job(environment, claim):
        return environment.get("SLURM_RESTART_COUNT") or "0"
    return None


def guessed_launch_name(environment: Mapping[str, str], claim: Claim) -> str:
    """Return the most that is alike on all nodes of a launch where its communicators are unknown."""
    parts = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    if claim.world_size is not None and environment.get("LOCAL_WORLD_SIZE") == str(claim.world_size):
        parts.append(environment.get("TORCHELASTIC_RESTART_COUNT", ""))
    return f"guess-{digest(*parts, str(claim.world_size))}"


def expand(template: str, environment: Mapping[str, str]) -> str | None:
    """Return a template with variables in braces put in; None where one of them is not set."""
    try:
        return fit(template.format_map(environment))
    except KeyError:
        return None


def template_names(template: str) -> set[str]:
    """Return the variables that a template uses. Raises ValueError where it is no template."""
    names = set()
    for _, name, format_spec, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if format_spec or conversion or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{{{name}}} is not the name of an environment variable")
        names.add(name)
    return names


def fit(name: str) -> str:
    """Return a name that may be a key, a label and part of a file name; what is cut or replaced leaves a digest."""
    clean = _UNFIT.sub("_", name)
    if clean == name and len(name) <= JOB_ID_CHARACTERS_MAX:
        return name
    return f"{clean[: JOB_ID_CHARACTERS_MAX - 9]}-{digest(name)}"


def digest(*parts: str) -> str:
    """Return eight hexadecimal digits that stand for texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environment.get(name, "").strip()
        if text.isascii() and text.isdecimal() and len(text) <= 9:
            return int(text)
    return None


def _is_elastic(environment: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment


def _run_id(environment: Mapping[str, str]) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID", "").strip()
    return None if run.lower() in {"", "none"} else run


def _launch(environment: Mapping[str, str]) -> str | None:
    """Return what one mpirun calls itself, on all nodes alike; srun is none: it calls itself after job and step."""
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PMI_JOBID"):
        value = environment.get(name, "")
        is_of_srun = value.startswith("slurm.") or value.partition(".")[0] == environment.get("SLURM_JOB_ID")
        if value and not is_of_srun:
            return value
    return None


def _scheduled(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return scheduler and number of the job that it started."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return SLURM, f"{array}_{task}"
    slurm_names = ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")
    for kind, names in ((SLURM, slurm_names), ("pbs", ("PBS_JOBID",)), ("flux", ("FLUX_JOB_ID",))):
        for name in names:
            if number := environment.get(name):
                return kind, number
    for kind, name, index in (("lsf", "LSB_JOBID", "LSB_JOBINDEX"), ("sge", "JOB_ID", "SGE_TASK_ID")):
        number, place = environment.get(name), environment.get(index, "")
        if number and (kind != "sge" or "SGE_ROOT" in environment):
            return kind, f"{number}_{place}" if place not in {"", "0", "undefined"} else number
    return None


def _step_holds_job(environment: Mapping[str, str], claim: Claim) -> bool:
    """Whether all of the job runs in one Slurm step: not where a script starts one step, or one ssh, for each node."""
    if not _is_elastic(environment) and _launch(environment):
        return False  # mpirun starts the first node's ranks itself and the others by srun
    n_tasks = _number(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
    has_step = "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment
    n_starts = _number(environment, ("GROUP_WORLD_SIZE",)) if _is_elastic(environment) else claim.world_size
    return has_step and n_tasks is not None and n_starts is not None and n_tasks >= n_starts
