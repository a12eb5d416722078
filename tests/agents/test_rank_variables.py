"""What launchers put into the environment gives rank and job: alike on all nodes, different between jobs."""

import pytest

from agents.rank_gpu import Gpu, find_gpu
from agents.rank_variables import (
    JOB_ID_CHARACTERS_MAX,
    Claim,
    expand,
    fit,
    job_name,
    launch_name,
    read_claim,
    template_names,
)

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node-1-4099@1",
}


def job(environment: dict[str, str], node: str = "node-2") -> str | None:
    return job_name(environment, read_claim(environment), node)


def launch(environment: dict[str, str]) -> str | None:
    return launch_name(environment, read_claim(environment))


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (TORCHRUN, "torch"),
        (SRUN, "slurm"),
        (MPIRUN, "openmpi"),
        (
            {"MV2_COMM_WORLD_RANK": "11", "MV2_COMM_WORLD_SIZE": "16", "MV2_COMM_WORLD_LOCAL_RANK": "3"},
            "mvapich",
        ),
        ({"PMI_RANK": "11", "PMI_SIZE": "16", "MPI_LOCALRANKID": "3"}, "mpich"),
        ({"PMI_RANK": "11", "PMI_SIZE": "16", "PALS_LOCAL_RANKID": "3"}, "mpich"),
        ({"FLUX_TASK_RANK": "11", "FLUX_JOB_SIZE": "16", "FLUX_TASK_LOCAL_ID": "3"}, "flux"),
        (
            {"JSM_NAMESPACE_RANK": "11", "JSM_NAMESPACE_SIZE": "16", "JSM_NAMESPACE_LOCAL_RANK": "3"},
            "jsrun",
        ),
    ],
)
def test_each_launcher_spells_ranks_its_own_way(environment: dict[str, str], launcher: str) -> None:
    assert read_claim(environment) == Claim(launcher=launcher, rank=11, world_size=16, local_rank=3)


def test_a_rank_set_for_the_process_comes_before_the_one_of_the_launcher_around_it() -> None:
    inside = TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_claim(inside).rank == 11


@pytest.mark.parametrize("rank", ["", "-1", "16", "x", "1.0", "٣", "9" * 23])
def test_a_rank_that_cannot_be_is_none(rank: str) -> None:
    assert read_claim({"RANK": rank, "WORLD_SIZE": "16"}) == Claim(launcher="torch", world_size=16)


def test_parts_of_a_claim_are_kept() -> None:
    assert read_claim({"WORLD_SIZE": "4", "LOCAL_RANK": "2"}) == Claim(launcher="torch", world_size=4, local_rank=2)
    assert read_claim({}) == Claim()


def test_a_scheduler_names_the_job() -> None:
    assert job(SRUN) == "slurm-4711.0"
    assert job(SRUN | {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "7"}) == "slurm-4700_7.0"
    assert job(TORCHRUN | {"PBS_JOBID": "123.server"}) == "pbs-123.server"
    assert job(TORCHRUN | {"LSB_JOBID": "99", "LSB_JOBINDEX": "0"}) == "lsf-99"
    assert job(TORCHRUN | {"LSB_JOBID": "99", "LSB_JOBINDEX": "5"}) == "lsf-99_5"
    assert job(TORCHRUN | {"JOB_ID": "5", "SGE_ROOT": "/opt/sge", "SGE_TASK_ID": "undefined"}) == "sge-5"
    assert job(TORCHRUN | {"JOB_ID": "5"}) != "sge-5", "anybody may have a variable of that name"


def test_all_components_of_a_heterogeneous_job_are_one_job() -> None:
    leader = TORCHRUN | {"SLURM_JOB_ID": "4711", "SLURM_JOB_ID_HET_GROUP_0": "4711"}
    second = TORCHRUN | {"SLURM_JOB_ID": "4712", "SLURM_JOB_ID_HET_GROUP_0": "4711"}
    assert job(leader) == job(second) == "slurm-4711"


def test_two_steps_in_one_allocation_are_two_jobs() -> None:
    assert job(SRUN) != job(SRUN | {"SLURM_STEP_ID": "1"})
    torchrun = TORCHRUN | {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert job(torchrun | {"SLURM_STEP_ID": "0"}) == "slurm-4711.0"
    assert job(torchrun | {"SLURM_STEP_ID": "1"}) == "slurm-4711.1"


def test_a_job_that_a_script_starts_by_one_step_for_each_node_is_one_job() -> None:
    torchrun = TORCHRUN | {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "1"}
    steps = [torchrun | {"SLURM_STEP_ID": step} for step in ("0", "1")]
    batch = TORCHRUN | {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2"}  # started by the batch script itself
    assert {job(e) for e in (*steps, batch)} == {"slurm-4711"}
    assert {job(e | {"TORCHELASTIC_RUN_ID": "llama"}) for e in (*steps, batch)} == {"slurm-4711.llama"}


def test_a_run_id_that_is_the_schedulers_own_is_not_repeated() -> None:
    assert job(TORCHRUN | {"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "4711"}) == "slurm-4711"


def test_mpirun_in_an_allocation_names_the_job_alike_whether_it_or_srun_started_the_rank() -> None:
    here = MPIRUN | {"SLURM_JOB_ID": "4711"}
    there = here | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16"}
    again = here | {"PMIX_NAMESPACE": "prterun-node-1-5003@1"}
    assert job(here) == job(there)
    assert job(here) != job(again)
    assert launch(here) == launch(there)
    assert launch(here) != launch(again)


def test_srun_with_pmix_is_srun() -> None:
    plain = SRUN | {"PMIX_NAMESPACE": "slurm.pmix.4711.0", "PMI_JOBID": "4711.0"}
    assert (job(plain), launch(plain)) == (job(SRUN), launch(SRUN))


def test_torchruns_run_id_names_the_job_unless_it_is_none() -> None:
    assert job(TORCHRUN | {"TORCHELASTIC_RUN_ID": "llama-7b"}) == "llama-7b"
    for empty in ("none", "None", "", " "):
        name = job(TORCHRUN | {"TORCHELASTIC_RUN_ID": empty})
        assert name is not None
        assert name.startswith("node-1-29500-")


def test_two_jobs_with_run_id_none_differ_by_their_master_and_each_is_alike_on_its_nodes() -> None:
    first, second = (TORCHRUN | {"MASTER_PORT": port} for port in ("29500", "29501"))
    assert job(first, "node-1") == job(first | {"RANK": "3", "LOCAL_RANK": "3"}, "node-2")
    assert job(first) != job(second)
    assert job(first) != job(first | {"MASTER_ADDR": "node-7"})


def test_jobs_of_one_name_in_two_kubernetes_namespaces_are_two() -> None:
    pods = [TORCHRUN | {"MASTER_ADDR": "llama-master-0", "KUBERNETES_NAMESPACE": team} for team in ("a", "b")]
    assert job(pods[0]) != job(pods[1])
    assert job(pods[0], "node-1") == job(pods[0], "node-2")


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "localhost.localdomain"])
def test_jobs_on_two_nodes_that_both_call_their_master_localhost_are_two(master: str) -> None:
    environment = TORCHRUN | {"MASTER_ADDR": master}
    assert job(environment, "node-1") != job(environment, "node-2")


def test_an_environment_without_a_name_has_none() -> None:
    assert job({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert job({}) is None


def test_srun_counts_requeues_and_its_ranks_need_no_communicator_to_be_told_apart() -> None:
    assert launch(SRUN) == "0"
    assert launch(SRUN | {"SLURM_RESTART_COUNT": "3"}) == "3"


def test_torchrun_does_not_count_alike_on_all_nodes_so_communicators_tell_its_starts_apart() -> None:
    assert launch(TORCHRUN) is None
    assert launch(TORCHRUN | SRUN | {"SLURM_RESTART_COUNT": "3"}) is None
    assert launch({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}) is None


def test_names_fit_into_keys_labels_and_files() -> None:
    assert fit("llama-7b_v1.2:a@b+c") == "llama-7b_v1.2:a@b+c"
    odd = [fit(name) for name in ("a/b", "a b", "ä", "x" * 997, "x" * 998)]
    assert len(set(odd)) == len(odd)
    assert all(len(name) <= JOB_ID_CHARACTERS_MAX and name.isascii() and "/" not in name for name in odd)


def test_a_template_is_filled_from_the_environment_or_not_at_all() -> None:
    assert template_names("{CLUSTER}-{JOB}") == {"CLUSTER", "JOB"}
    assert expand("{CLUSTER}-{JOB}", {"CLUSTER": "a", "JOB": "7"}) == "a-7"
    assert expand("{CLUSTER}-{JOB}", {"CLUSTER": "a"}) is None
    for wrong in ("{", "{}", "{A.b}", "{A[0]}", "{A!r}", "{A:9}"):
        with pytest.raises(ValueError, match=r".+"):
            template_names(wrong)


GPUS = [Gpu(index, f"GPU-{index}{index}ab-cdef") for index in range(7)]


@pytest.mark.parametrize(
    ("used", "environment", "local_rank", "expected"),
    [
        ([5], {}, 3, 5),
        ([5], {"CUDA_VISIBLE_DEVICES": "1"}, 0, 5),
        ([0, 3], {}, 3, 3),
        ([0, 3], {}, 5, None),
        ([0, 3], {}, None, None),
        ([], {}, 3, 3),
        ([], {}, None, None),
        ([], {}, 7, None),
        ([], {"CUDA_VISIBLE_DEVICES": "4,5,6"}, 1, 5),
        ([], {"CUDA_VISIBLE_DEVICES": "4"}, 3, 4),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, 3, None),
        ([], {"CUDA_VISIBLE_DEVICES": "9"}, 0, None),
        ([], {"CUDA_VISIBLE_DEVICES": "GPU-44ab-cdef,GPU-2"}, 1, 2),
        ([], {"CUDA_VISIBLE_DEVICES": "GPU-"}, 0, None),
        ([], {"CUDA_VISIBLE_DEVICES": "MIG-GPU-33ab-cdef/1/0"}, 0, 3),
        ([], {"CUDA_VISIBLE_DEVICES": "MIG-12345678"}, 0, None),
        ([], {"NVIDIA_VISIBLE_DEVICES": "GPU-66ab-cdef,GPU-44ab-cdef"}, 0, 4),
        ([], {"NVIDIA_VISIBLE_DEVICES": "4,6", "CUDA_VISIBLE_DEVICES": "1"}, 0, 6),
        ([], {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia"}, 0, None),
        ([], {"NVIDIA_VISIBLE_DEVICES": "all"}, 2, 2),
        ([], {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "4,5"}, 1, 5),
        ([], {"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_STEP_GPUS": "4,5"}, 1, 5),
        ([], {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "4,5"}, 1, None),
    ],
)
def test_a_ranks_gpu_is_the_one_it_uses_or_else_the_one_it_was_given(
    used: list[int], environment: dict[str, str], local_rank: int | None, expected: int | None
) -> None:
    found = find_gpu([GPUS[index] for index in used], environment, local_rank, GPUS)
    assert (None if found is None else found.index) == expected


def test_without_nvml_an_index_is_still_known() -> None:
    assert find_gpu([], {"CUDA_VISIBLE_DEVICES": "4,5"}, 1, []) == Gpu(5, None)
    assert find_gpu([], {}, 1, []) is None
