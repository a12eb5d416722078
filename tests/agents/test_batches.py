"""What collectors saw becomes one batch per job, whatever ranks the jobs of a node have in common."""

import numpy as np

from agents.batch_size import BYTES_MAX
from agents.batches import LINGER_FLUSHES, Assembler
from agents.collector import Observations, ProcessKey, RankProcess
from schemas.codec import decode_events, encode_events
from schemas.events import Calls, CallSource, Communicators, EventBatch, GpuSamples, PortSamples, Sensor, Syncs

FLUSH_NS = 1_000_000_000


def rank_process(job_id: str, rank: int, pid: int, gpu: int | None) -> RankProcess:
    return RankProcess(
        key=ProcessKey(pid, 7),
        job_id=job_id,
        incarnation="0",
        world_size=5,
        rank=rank,
        local_rank=0,
        namespace_pid=pid,
        start_ns=1,
        gpu=gpu,
        gpu_uuid=None,
    )


FIRST, SECOND, OTHER = rank_process("a", 0, 11, 2), rank_process("a", 3, 13, 3), rank_process("b", 0, 17, 5)


def assemble(
    assembler: Assembler, ranks: list[RankProcess], alive: list[RankProcess], *observations: Observations
) -> dict[str, EventBatch]:
    batches = assembler.assemble(
        ranks, alive, observations, sensors=Sensor.SYNC, flush_ns=FLUSH_NS, clock_error_ns=None
    )
    return {batch.job_id: decode_events(encode_events(batch)) for batch in batches}


def new_assembler() -> Assembler:
    return Assembler("node-1", agent_start_ns=1, flush_interval_ns=FLUSH_NS)


def test_rows_go_to_the_job_of_their_process_under_its_rank() -> None:
    syncs = Syncs.build(3, rank=np.array([2, 1, 0]), start_ns=np.array([23, 29, 31]), duration_ns=1)
    found = assemble(new_assembler(), [FIRST, SECOND, OTHER], [FIRST, SECOND, OTHER], Observations(syncs=syncs))
    assert found["a"].syncs.rank.tolist() == [3, 0]
    assert found["a"].syncs.start_ns.tolist() == [29, 31]
    assert found["b"].syncs.rank.tolist() == [0]
    assert found["b"].syncs.start_ns.tolist() == [23]
    assert [info.rank for info in found["a"].ranks] == [0, 3]
    assert found["a"].sensors == Sensor.SYNC
    assert assemble(new_assembler(), [OTHER], [OTHER])["b"].sensors == Sensor(0)


def test_a_job_is_told_of_its_own_gpus_and_of_all_while_it_is_not_known_which_they_are() -> None:
    samples = GpuSamples.build(3, gpu=np.array([2, 3, 5]), time_ns=7)
    homeless = rank_process("c", 0, 19, None)
    ranks = [FIRST, OTHER, homeless]
    found = assemble(new_assembler(), ranks, ranks, Observations(gpu_samples=samples))
    assert found["a"].gpu_samples.gpu.tolist() == [2]
    assert found["b"].gpu_samples.gpu.tolist() == [5]
    assert found["c"].gpu_samples.gpu.tolist() == [2, 3, 5]


def test_ports_are_told_to_every_job() -> None:
    ports = PortSamples.build(1, port=0, time_ns=7, is_active=1)
    found = assemble(new_assembler(), [FIRST, OTHER], [FIRST], Observations(ports=("mlx5_0/1",), port_samples=ports))
    assert [(b.ports, len(b.port_samples)) for b in found.values()] == [(("mlx5_0/1",), 1)] * 2


def test_a_membership_with_a_known_size_wins_over_one_without() -> None:
    from_calls = Communicators.build(2, rank=np.array([0, 0]), comm=np.array([83, 89]), comm_rank=9, size=0)
    from_files = Communicators.build(1, rank=0, comm=83, comm_rank=1, size=5)
    found = assemble(
        new_assembler(),
        [FIRST],
        [FIRST],
        Observations(communicators=from_calls),
        Observations(communicators=from_files),
    )
    table = found["a"].communicators
    assert sorted(zip(table.comm.tolist(), table.size.tolist(), strict=True)) == [(83, 5), (89, 0)]


def test_every_job_hears_of_losses_since_nobody_knows_whose_they_were() -> None:
    found = assemble(new_assembler(), [FIRST, OTHER], [FIRST], Observations(lost_events=3), Observations(lost_events=2))
    assert [b.lost_events for b in found.values()] == [5, 5]


def test_a_loss_of_a_known_rank_is_told_to_its_job_alone() -> None:
    found = assemble(new_assembler(), [FIRST, OTHER], [FIRST, OTHER], Observations(lost_events=3, lost_by_rank={1: 7}))
    assert {job: b.lost_events for job, b in found.items()} == {"a": 3, "b": 10}


def test_a_job_that_starts_again_under_its_name_is_another_incarnation() -> None:
    assembler = new_assembler()
    for start in ("0", "0.2", "0.3"):
        assert assemble(assembler, [FIRST], [FIRST])["a"].incarnation == start
        said = [assemble(assembler, [FIRST], []) for _ in range(LINGER_FLUSHES + 1)]
        assert said[-1]["a"].is_last
        assert {b["a"].incarnation for b in said} == {start}


def test_a_rank_that_was_started_again_hides_the_process_that_ended() -> None:
    again = rank_process("a", 0, 23, 4)
    found = assemble(new_assembler(), [again, FIRST], [again])
    assert [(info.pid, info.gpu) for info in found["a"].ranks] == [(23, 4)]


def test_a_job_that_has_ended_says_so_once_after_its_files_could_be_read_to_the_end() -> None:
    assembler = new_assembler()
    assert not assemble(assembler, [FIRST], [FIRST])["a"].is_last
    said = [assemble(assembler, [FIRST], []) for _ in range(LINGER_FLUSHES + 1)]
    assert [b["a"].is_last for b in said] == [False] * LINGER_FLUSHES + [True]
    assert [b["a"].seq for b in said] == list(range(1, LINGER_FLUSHES + 2))
    assert assemble(assembler, [], []) == {}


def test_a_job_without_events_still_has_a_pulse() -> None:
    assembler = new_assembler()
    assert [assemble(assembler, [FIRST], [FIRST])["a"].seq for _ in range(3)] == [0, 1, 2]


def test_a_job_claims_gpu_times_waits_and_markers_only_once_it_has_some_of_its_own() -> None:
    assembler = new_assembler()
    call = Calls.build(
        1,
        rank=0,
        comm=97,
        op=0,
        source=int(CallSource.GPU),
        bytes=8,
        count=1,
        first_seq=0,
        seq_known=1,
        start_ns=5,
        end_ns=7,
        duration_ns=2,
        duration_min_ns=2,
    )
    every = Sensor.HOST | Sensor.SYNC | Sensor.GPU | Sensor.MARKER
    for calls in (call, Calls.empty()):
        batches = assembler.assemble(
            [FIRST, OTHER],
            [FIRST, OTHER],
            [Observations(calls=calls)],
            sensors=every,
            flush_ns=FLUSH_NS,
            clock_error_ns=None,
        )
        assert {b.job_id: b.sensors for b in batches} == {"a": Sensor.HOST | Sensor.GPU, "b": Sensor.HOST}


def test_a_flush_that_is_too_large_for_one_message_becomes_several_with_numbers_that_go_on() -> None:
    assembler = new_assembler()
    n = 400_009
    many = Syncs.build(n, rank=0, start_ns=np.arange(n), duration_ns=1)
    found = assembler.assemble(
        [FIRST],
        [FIRST],
        [Observations(syncs=many, lost_events=3)],
        sensors=Sensor.SYNC,
        flush_ns=FLUSH_NS,
        clock_error_ns=None,
    )
    assert len(found) > 1
    assert max(len(encode_events(batch)) for batch in found) <= BYTES_MAX
    assert [batch.seq for batch in found] == list(range(len(found)))
    assert sum(len(batch.syncs) for batch in found) == n
    assert sum(batch.lost_events for batch in found) == 3
    assert assemble(assembler, [FIRST], [FIRST])["a"].seq == len(found)
