"""All nodes call a job, its starts and its ranks alike, whoever launched it."""

import msgspec
import pytest

from agents.job_identity import IdentityConfig
from agents.nccl_hash import unique_id_hash
from agents.rank_gpu import Gpu
from tests.agents.identity_node import Node, a_process, an_id, names, run_torchrun, torchrun


def test_a_process_becomes_a_rank_with_the_hash_of_its_world_communicator_as_incarnation() -> None:
    node = Node()
    process = a_process(torchrun(3, 4))
    node.start(process)
    assert node.look() == [], "it has not called NCCL yet"
    node.make(process, 17, rank=1, size=2)
    assert node.look() == [], "this is not the world's communicator"
    assert "world communicator is not known" in node.discovery.limits()[0].why
    node.make(process, 19, rank=3, size=4)
    (rank,) = node.look()
    assert rank.incarnation == f"{unique_id_hash(an_id(19)):016x}"
    assert (rank.rank, rank.world_size, rank.local_rank) == (3, 4, 1)
    assert (rank.key, rank.namespace_pid, rank.start_ns) == (process.key, process.key.pid % 97, process.start_ns)
    assert node.discovery.limits() == []


def test_nodes_whose_processes_start_minutes_apart_agree() -> None:
    first, second = Node("node-1"), Node("node-2", now_s=1400.0)
    first.start(*(early := [a_process(torchrun(rank, 4), started_s=1000) for rank in (0, 1)]))
    for _ in range(400):
        assert first.look() == []
    late = [a_process(torchrun(rank, 4), started_s=1395) for rank in (2, 3)]
    second.start(*late)
    for node, processes in ((first, early), (second, late)):
        for process in processes:
            node.make(process, 23, rank=int(process.environment["RANK"]), size=4)
    assert names(first.look()) == names(second.look())
    assert len(names([*first.look(), *second.look()])) == 1


def test_two_jobs_with_run_id_none_on_one_node_are_two_jobs() -> None:
    node = Node()
    run_torchrun(node, (0, 1), 2, seed=29)
    run_torchrun(node, (0, 1), 2, seed=31, MASTER_PORT="29501")
    ranks = node.look()
    assert len({rank.job_id for rank in ranks}) == 2
    assert [rank.rank for rank in ranks] == [0, 1, 0, 1]
    assert node.discovery.disagreements() == []


def test_a_restart_by_torchrun_in_one_slurm_job_is_another_incarnation_of_the_same_job_on_all_nodes() -> None:
    nodes = [Node("node-1"), Node("node-2")]
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    seen: list[tuple[str, str]] = []
    for start, seed in enumerate((37, 41)):
        for place, node in enumerate(nodes):
            node.processes = []
            # The node that had the failure counts a restart, the other does not.
            counts = {"TORCHELASTIC_RESTART_COUNT": str(start if place else 0)}
            run_torchrun(node, (2 * place, 2 * place + 1), 4, seed, **slurm, **counts)
        found = names([rank for node in nodes for rank in node.look()])
        assert len(found) == 1
        seen += found
    assert [job for job, _ in seen] == ["slurm-4711.0"] * 2
    assert len({incarnation for _, incarnation in seen}) == 2


def test_a_requeued_slurm_job_is_another_incarnation_known_at_once() -> None:
    node = Node()
    for count, expected in (({}, "0"), ({"SLURM_RESTART_COUNT": "1"}, "1")):
        environment = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "2",
            "SLURM_LOCALID": "0",
        } | count
        process = a_process(environment)
        node.processes = [process]
        node.registry.note_call(process.key)
        (rank,) = node.look()
        assert (rank.job_id, rank.incarnation, rank.rank, rank.world_size) == ("slurm-4711.0", expected, 2, 4)


def test_an_elastic_change_of_the_world_size_is_another_incarnation() -> None:
    node = Node()
    run_torchrun(node, (0, 1), 4, seed=43, TORCHELASTIC_RUN_ID="llama")
    before = names(node.look())
    node.processes = []
    run_torchrun(node, (0, 1), 2, seed=47, TORCHELASTIC_RUN_ID="llama")
    ranks = node.look()
    assert {rank.world_size for rank in ranks} == {2}
    assert {job for job, _ in before | names(ranks)} == {"llama"}
    assert len(before | names(ranks)) == 2


def test_wrappers_launchers_and_data_loaders_are_no_ranks() -> None:
    node = Node()
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711"}
    shell = a_process(slurm, libraries=())
    agent = a_process(slurm, parent=shell.key.pid)
    rank = a_process(slurm | torchrun(1, 2), parent=agent.key.pid)
    loaders = [a_process(slurm | torchrun(1, 2), parent=rank.key.pid) for _ in range(7)]
    node.start(shell, agent, rank, *loaders)
    node.make(rank, 53, rank=1, size=2)
    for _ in range(200):
        (found,) = node.look()
        assert found.key == rank.key
        assert found.rank == 1


def test_where_calls_cannot_be_observed_the_uppermost_process_that_could_call_is_the_rank() -> None:
    node = Node(observes_calls=False)
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711"}
    shell = a_process(slurm, libraries=())
    agent = a_process(slurm, parent=shell.key.pid)
    ranks = [a_process(slurm | torchrun(rank, 2), parent=agent.key.pid) for rank in range(2)]
    loaders = [a_process(dict(r.environment), parent=r.key.pid) for r in ranks for _ in range(3)]
    node.start(shell, agent, *ranks, *loaders)
    assert node.look() == []
    found = [rank for _ in range(100) for rank in node.look()]
    assert {rank.key for rank in found} == {process.key for process in ranks}
    assert {rank.incarnation[:6] for rank in found} == {"guess-"}


def test_ranks_spawned_by_one_program_have_the_ranks_of_their_communicator() -> None:
    node = Node()
    pod = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-master-0", "MASTER_PORT": "23456"}
    program = a_process(pod)
    ranks = [a_process(pod, parent=program.key.pid) for _ in range(3)]
    node.start(program, *ranks)
    node.make(ranks[2], 59, rank=2, size=3)
    assert node.look() == []
    for place in range(2):
        node.make(ranks[place], 59, rank=place, size=3)
    for _ in range(7):
        found = node.look()
    assert {(rank.key, rank.rank, rank.local_rank, rank.world_size) for rank in found} == {
        (process.key, place, place, 3) for place, process in enumerate(ranks)
    }
    said = node.discovery.disagreements()
    assert [limit.what for limit in said] == [f"rank of process {process.key.pid}" for process in ranks]
    assert said[2].why.startswith("its environment says rank 0 of 1, its communicator 2 of 3")


def test_an_inherited_rank_is_not_believed_even_where_the_sizes_fit() -> None:
    node = Node()
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-master-0"}
    ranks = [a_process(pod) for _ in range(2)]
    node.start(*ranks)
    node.make(ranks[0], 61, rank=0, size=2)
    assert node.look() == [], "its sibling says the same of itself"
    node.make(ranks[0], 67, rank=2, size=4)
    node.make(ranks[1], 67, rank=3, size=4)
    found = [rank for _ in range(7) for rank in node.look()]
    assert {(rank.key, rank.rank) for rank in found} == {(ranks[0].key, 2), (ranks[1].key, 3)}


def test_processes_without_any_variables_are_ranks_of_their_largest_communicator() -> None:
    node = Node()
    ranks = [a_process({}) for _ in range(2)]
    node.start(*ranks)
    for place, process in enumerate(ranks):
        node.make(process, 71, rank=0, size=1)
        node.make(process, 73, rank=place, size=2)
    assert node.look() == [], "a larger one may follow"
    found = node.look(after_s=5.0)
    world = unique_id_hash(an_id(73))
    assert names(found) == {(f"nccl-{world:016x}", f"{world:016x}")}
    assert [(rank.rank, rank.local_rank) for rank in found] == [(0, 0), (1, 1)]


def test_a_process_without_variables_joins_the_job_of_those_in_its_communicator() -> None:
    node = Node()
    main = a_process({})
    child = a_process({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1"}, parent=main.key.pid)
    run_torchrun(node, (0, 1), 2, seed=83, TORCHELASTIC_RUN_ID="another")
    node.start(main, child)
    node.make(main, 79, rank=0, size=2)
    node.make(child, 79, rank=1, size=2)
    node.look()
    found = [rank for rank in node.look(after_s=7.0) if rank.job_id != "another"]
    assert [rank.key for rank in found] == [main.key, child.key]
    assert len(names(found)) == 1
    assert found[0].job_id.startswith("node-1-default-")


def test_ranks_come_in_the_same_order_whatever_order_the_processes_have() -> None:
    node = Node()
    run_torchrun(node, (3, 0, 2, 1), 4, seed=113)
    first = node.look()
    node.processes.reverse()
    assert node.look() == first
    assert [rank.rank for rank in first] == [0, 1, 2, 3]
    del node.processes[1]
    assert len(node.look()) == 3


def test_two_processes_of_one_rank_are_said_and_one_is_observed() -> None:
    node = Node()
    (first, second) = (a_process(torchrun(1, 2, LOCAL_RANK=place)) for place in ("0", "1"))
    node.start(first, second)
    for process in (first, second):
        node.make(process, 127, rank=1, size=2)
    assert [rank.key for rank in node.look()] == [first.key]
    (limit,) = node.discovery.disagreements()
    assert limit.what.startswith("rank 1 of node-1-29500-")


def test_two_starts_of_a_job_at_the_same_time_are_said() -> None:
    node = Node()
    run_torchrun(node, (0, 1), 2, seed=131, TORCHELASTIC_RUN_ID="100")
    run_torchrun(node, (0, 1), 2, seed=137, TORCHELASTIC_RUN_ID="100", MASTER_PORT="29501")
    assert len(node.look()) == 4
    (limit,) = node.discovery.disagreements()
    assert limit.what == "job 100"
    assert "--rdzv-id" in limit.remedy


def test_the_driver_says_which_gpu_a_rank_uses_even_after_it_became_one() -> None:
    node = Node()
    (process,) = run_torchrun(node, (1,), 2, seed=139, CUDA_VISIBLE_DEVICES="4,5")
    assert [rank.gpu for rank in node.look()] == [5]
    (rank,) = node.look(gpus={process.key.pid: [Gpu(6, "GPU-6")]})
    assert (rank.gpu, rank.gpu_uuid) == (6, "GPU-6")
    (rank,) = node.look()
    assert (rank.gpu, rank.gpu_uuid) == (6, "GPU-6"), "the driver did not answer this time"


def test_the_configuration_decides_what_a_rank_and_a_job_are_called() -> None:
    config = IdentityConfig(
        select={"TEAM": "llm"}, job_id="{CLUSTER}/{RUN}", rank="MY_RANK", world_size="MY_SIZE", local_rank="MY_LOCAL"
    )
    node = Node(config=config)
    mine = {"TEAM": "llm", "CLUSTER": "a", "RUN": "7", "MY_RANK": "1", "MY_SIZE": "2", "MY_LOCAL": "5", "RANK": "0"}
    processes = [a_process(mine), a_process(mine | {"TEAM": "cv"}), a_process({"MY_RANK": "0", "MY_SIZE": "2"})]
    node.start(*processes)
    for process in processes:
        node.make(process, 149, rank=1, size=2)
    (rank,) = node.look()
    assert (rank.job_id[:4], rank.rank, rank.world_size, rank.local_rank) == ("a_7-", 1, 2, 5)
    assert {"TEAM", "CLUSTER", "RUN", "MY_RANK", "MY_SIZE", "MY_LOCAL", "RANK"} <= config.names


def test_a_template_that_cannot_be_filled_is_said_and_the_job_still_has_a_name() -> None:
    node = Node(config=IdentityConfig(job_id="{CLUSTER}-{RUN}"))
    run_torchrun(node, (0,), 2, seed=151)
    (rank,) = node.look()
    assert rank.job_id.startswith("node-1-29500-")
    assert "{CLUSTER}-{RUN}" in node.discovery.disagreements()[0].why


@pytest.mark.parametrize(
    "text",
    ['job_id = "{"', 'rank = "A"', 'world_size = "A"', "wait_s = -1", "settle_s = nan", 'rnak = "A"', "select = 3"],
)
def test_a_configuration_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(text.encode(), type=IdentityConfig)
