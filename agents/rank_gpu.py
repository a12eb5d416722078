"""Which GPU a rank uses: by the driver's own list of processes, else by what its launcher made visible to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """A GPU of this node, as NVML counts them."""

    index: int
    uuid: str | None


GpusByPid = Mapping[int, Sequence[Gpu]]  # pid in the agent's PID namespace


def find_gpu(
    used: Sequence[Gpu], environment: Mapping[str, str], local_rank: int | None, gpus: Sequence[Gpu]
) -> Gpu | None:
    """Return the GPU of a rank; None where it cannot be told.

    used: those on which the process has memory; gpus: all of the node, as far as they are known.
    """
    if len(used) == 1:
        return used[0]
    visible = _visible(environment, gpus)
    meant = _meant(visible, local_rank)
    if not used:
        return meant
    # Many programs leave a few megabytes on the first GPU before they take their own.
    return meant if meant in used else None


def _visible(environment: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Gpu | None]:
    """Return what CUDA counts as its devices 0, 1, ...; nothing where that cannot be known."""
    own = _present(environment.get("NVIDIA_VISIBLE_DEVICES", "").strip(), gpus)
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if own is None or chosen is None:
        return list(own or ())
    items = [item.strip() for item in chosen.split(",") if item.strip()]
    if not all(item.isdecimal() for item in items):
        return [_named(item, gpus) for item in items]
    bound = [item for item in environment.get("SLURM_STEP_GPUS", "").split(",") if item.isdecimal()]
    if bound and sorted(bound) != sorted(items):
        # Slurm hides all other GPUs and counts those that are left from 0.
        return [_named(item, gpus) for item in bound] if len(bound) == len(items) else []
    if not own and not gpus:
        return [Gpu(int(item), None) for item in items]
    return [own[int(item)] if int(item) < len(own) else None for item in items]


def _present(listed: str, gpus: Sequence[Gpu]) -> list[Gpu] | None:
    """Return the GPUs that a container has; None where that cannot be known."""
    if listed in {"", "all", "none", "void"}:
        return list(gpus)
    if listed.startswith("/"):
        return None  # handed over as volume mounts
    inside = [_named(item, gpus) for item in listed.split(",")]
    known = sorted({g for g in inside if g is not None})
    return known if len(known) == len(inside) else None


def _named(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU of an index or a UUID, which CUDA lets people shorten; of a MIG slice the whole GPU."""
    if name.isdecimal():
        return next((g for g in gpus if g.index == int(name)), None if gpus else Gpu(int(name), None))
    if name.startswith("MIG-GPU-"):
        name = name.removeprefix("MIG-").split("/")[0]
    if not name.startswith("GPU-"):
        return None
    found = [g for g in gpus if g.uuid is not None and g.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _meant(visible: Sequence[Gpu | None], local_rank: int | None) -> Gpu | None:
    if not visible:
        return None
    if len(visible) == 1:
        return visible[0]
    return visible[local_rank] if local_rank is not None and local_rank < len(visible) else None
