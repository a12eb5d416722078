"""An imported StragglerAnalysis trace says what the file says, in our words, and nothing more."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline.__main__ import main
from pipeline.importers.straggler_analysis import InvalidTrace, read_trace
from schemas.alerts import ComponentName, ComponentType, Kind, Severity
from schemas.codec import decode_alert, decode_events, encode_events
from schemas.events import CallSource, EventBatch, Op, Sensor, SpanKind

# Two stages, two replicas and one tensor rank recorded of three: an iteration of each has these operations.
OPERATIONS = [
    # optype, start_ts, duration, mb_id; in s
    ("params-all-gather", 0.1, 0.1, -1),
    ("forward-compute", 0.3, 0.2, 0),
    ("forward-send", 0.5, 0.1, -1),
    ("backward-recv", 0.6, 0.1, -1),
    ("backward-compute", 0.7, 0.4, 0),
    ("layernorm-grads-all-reduce", 1.1, 0.1, -1),
    ("embedding-grads-all-reduce", 1.2, 0.1, -1),
    ("grads-reduce-scatter", 1.3, 0.1, -1),
    ("optimizer", 1.5, 0.2, -1),
]
STEPS = (7, 11, 13)
WORLD_SIZE = 12


def rows() -> list[dict[str, Any]]:
    return [
        {
            "dp_rank": dp_rank,
            "stage": stage,
            "rank": 3 * (dp_rank + 2 * stage),
            "step": step,
            "optype": optype,
            "start_ts": start,
            # The last replica ends each iteration a little later, and each iteration is longer than the one before.
            "duration": duration + (0.1 * place + 0.01 * dp_rank if optype == "optimizer" else 0),
            "mb_id": mb_id,
        }
        for place, step in enumerate(STEPS)
        for stage in range(2)
        for dp_rank in range(2)
        for optype, start, duration, mb_id in OPERATIONS
    ]


def written(folder: Path, content: list[dict[str, Any]], *, meta: str | None = "world_size: 12\npp_size: 2\n") -> Path:
    path = folder / "trace-XY.parquet"
    pq.write_table(pa.Table.from_pylist(content), path)
    if meta is not None:
        (folder / "meta-XY.yaml").write_text(meta)
    return path


def batches_of(path: Path) -> list[EventBatch]:
    return [decode_events(encode_events(batch)) for batch in read_trace(path).batches()]


@pytest.fixture
def batches(tmp_path: Path) -> list[EventBatch]:
    return batches_of(written(tmp_path, rows()))


def test_there_is_one_batch_for_each_recorded_rank_and_iteration(batches: list[EventBatch]) -> None:
    assert [(b.node, b.seq, int(b.markers.iteration[0])) for b in batches] == [
        (f"rank-{rank}", iteration, iteration) for iteration in range(3) for rank in (0, 3, 6, 9)
    ]
    assert [b.is_last for b in batches] == [False] * 8 + [True] * 4


def test_sampled_iterations_are_numbered_as_recorded_and_keep_their_own_numbers_aside(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, rows())).steps == STEPS


def test_only_recorded_ranks_are_declared_and_the_world_is_as_large_as_it_was(batches: list[EventBatch]) -> None:
    assert [[info.rank for info in b.ranks] for b in batches[:4]] == [[0], [3], [6], [9]]
    assert {(info.gpu, info.gpu_uuid) for b in batches for info in b.ranks} == {(None, None)}
    assert {b.world_size for b in batches} == {WORLD_SIZE}
    assert {b.sensors for b in batches} == {Sensor.GPU | Sensor.SPAN | Sensor.MARKER}


def test_iterations_are_laid_one_after_another(batches: list[EventBatch]) -> None:
    # The longest rank of each iteration takes 1.71, 1.81 and 1.91 s.
    np.testing.assert_allclose([b.flush_ns / 1e9 for b in batches[::4]], np.cumsum([1.71, 1.81, 1.91]), atol=1e-7)
    np.testing.assert_allclose(batches[4].calls.start_ns[0] / 1e9, 1.71 + 0.1, atol=1e-7)
    np.testing.assert_allclose(batches[4].markers.time_ns / 1e9, 1.71 + 1.8, atol=1e-7)
    np.testing.assert_allclose(batches[5].markers.time_ns / 1e9, 1.71 + 1.81, atol=1e-7)


def test_computation_becomes_spans(batches: list[EventBatch]) -> None:
    spans = batches[0].spans
    assert list(spans.kind) == [SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER]
    np.testing.assert_allclose(spans.start_ns / 1e9, [0.3, 0.7, 1.5], atol=1e-7)
    np.testing.assert_allclose(spans.duration_ns / 1e9, [0.2, 0.4, 0.2], atol=1e-7)


def test_communication_becomes_calls_in_order_of_their_start_with_gpu_times(batches: list[EventBatch]) -> None:
    calls = batches[0].calls
    assert list(calls.op) == [Op.ALL_GATHER, Op.SEND, Op.RECV, Op.ALL_REDUCE, Op.ALL_REDUCE, Op.REDUCE_SCATTER]
    assert set(calls.source) == {CallSource.GPU}
    np.testing.assert_allclose(calls.start_ns / 1e9, [0.1, 0.5, 0.6, 1.1, 1.2, 1.3], atol=1e-7)
    np.testing.assert_array_equal(calls.end_ns, calls.start_ns + calls.duration_ns)


def test_transfers_name_the_stage_on_the_other_side(tmp_path: Path) -> None:
    directions = ("forward-send", "forward-recv", "backward-send", "backward-recv")
    content = [
        {**rows()[0], "stage": stage, "rank": stage, "step": 7, "optype": optype, "start_ts": start / 10}
        for stage in range(5)
        for start, optype in enumerate(directions)
    ]
    batches = batches_of(written(tmp_path, content, meta=None))
    assert [batch.calls.op.tolist() for batch in batches] == [[Op.SEND, Op.RECV, Op.SEND, Op.RECV]] * 5
    middle = [batch.calls.peer.tolist() for batch in batches[1:4]]
    assert middle == [[2, 0, 0, 2], [3, 1, 1, 3], [4, 2, 2, 4]]


def test_communicators_follow_from_replica_and_stage(batches: list[EventBatch]) -> None:
    members: dict[int, list[tuple[int, int]]] = {}
    sizes = {}
    for batch in batches[:4]:
        table = batch.communicators
        for rank, comm, comm_rank, size in zip(table.rank, table.comm, table.comm_rank, table.size, strict=True):
            members.setdefault(int(comm), []).append((int(rank), int(comm_rank)))
            sizes[int(comm)] = int(size)
    # Twice pipelines, once for transfers and once for embeddings; replicas; and tensor groups with one rank recorded.
    assert Counter(tuple(m) for m in members.values()) == {
        ((0, 0), (6, 1)): 2,
        ((3, 0), (9, 1)): 2,
        ((0, 0), (3, 1)): 1,
        ((6, 0), (9, 1)): 1,
        ((0, 0),): 1,
        ((3, 0),): 1,
        ((6, 0),): 1,
        ((9, 0),): 1,
    }
    assert {sizes[comm] for comm, ranks in members.items() if len(ranks) == 1} == {3}
    assert {sizes[comm] for comm, ranks in members.items() if len(ranks) == 2} == {2}


def test_calls_are_on_communicators_that_their_rank_is_a_member_of(batches: list[EventBatch]) -> None:
    for batch in batches:
        assert set(batch.calls.comm.tolist()) == set(batch.communicators.comm.tolist())


def test_calls_of_a_communicator_and_function_are_counted_over_the_whole_trace(batches: list[EventBatch]) -> None:
    for rank in range(4):
        seqs: dict[tuple[int, int], list[int]] = {}
        for batch in batches[rank::4]:
            for comm, op, seq in zip(batch.calls.comm, batch.calls.op, batch.calls.first_seq, strict=True):
                seqs.setdefault((int(comm), int(op)), []).append(int(seq))
        assert len(seqs) == 6
        assert all(numbers == [0, 1, 2] for numbers in seqs.values())


def test_a_communicator_of_one_does_not_exist(tmp_path: Path) -> None:
    lone = [r for r in rows() if r["rank"] == 0]
    (first, *_) = batches_of(written(tmp_path, lone, meta=None))
    assert first.world_size == 1
    assert len(first.calls) == 0
    assert len(first.communicators) == 0
    assert len(first.spans) == 3


def test_all_tensor_ranks_may_be_recorded(tmp_path: Path) -> None:
    content = [{**r, "rank": r["rank"] + shard} for r in rows() for shard in range(3)]
    first = batches_of(written(tmp_path, content))[:12]
    sizes = Counter(int(size) for b in first for size in b.communicators.size)
    assert sizes == {2: 3 * 12, 3: 12}
    data = {
        tuple(sorted(int(r) for b in first for r in b.communicators.rank[b.communicators.comm == comm]))
        for comm in np.unique(first[0].communicators.comm)
    }
    assert data == {(0, 6), (0, 3), (0, 1, 2)}


def test_without_a_description_the_world_ends_at_the_highest_rank(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, rows(), meta=None)).world_size == 10


def test_a_rank_that_an_iteration_lacks_sends_a_pulse(tmp_path: Path) -> None:
    content = [r for r in rows() if not (r["rank"] == 3 and r["step"] == 11)]
    pulse = batches_of(written(tmp_path, content))[5]
    assert (pulse.node, pulse.seq) == ("rank-3", 1)
    assert len(pulse.calls) == len(pulse.spans) == len(pulse.markers) == 0


def test_operations_of_unknown_kind_are_left_out_and_counted(tmp_path: Path) -> None:
    content = [*rows(), {**rows()[0], "optype": "coffee-break"}]
    trace = read_trace(written(tmp_path, content))
    assert trace.ignored_operations == {"coffee-break": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"duration": float("nan")}, "column duration must hold seconds"),
        ({"start_ts": -0.5}, "column start_ts must hold seconds"),
        ({"rank": -1}, "column rank must not be negative"),
        ({"step": None}, "column step lacks 1 values"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_column(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidTrace, match=reason):
        read_trace(written(tmp_path, [{**rows()[0], **change}, *rows()[1:]]))


def test_missing_columns_are_named(tmp_path: Path) -> None:
    content = [{name: value for name, value in r.items() if name not in ("stage", "duration")} for r in rows()]
    with pytest.raises(InvalidTrace, match="has no column stage, duration; a StragglerAnalysis trace has"):
        read_trace(written(tmp_path, content))


def test_a_column_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="column stage is of type string"):
        read_trace(written(tmp_path, [{**r, "stage": "first"} for r in rows()]))


@pytest.mark.parametrize("content", [b"", b"not Parquet at all"])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace-XY.parquet"
    path.write_bytes(content)
    with pytest.raises(InvalidTrace, match="cannot be read as Parquet"):
        read_trace(path)


def test_a_trace_without_a_known_operation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="no operation that is known"):
        read_trace(written(tmp_path, [{**rows()[0], "optype": "coffee-break"}]))


@pytest.mark.parametrize("meta", ["world_size: 5\n", "world_size: many\n", "pp_size: 4\n"])
def test_a_description_that_contradicts_the_trace_is_refused(tmp_path: Path, meta: str) -> None:
    with pytest.raises(InvalidTrace, match="world_size is"):
        read_trace(written(tmp_path, rows(), meta=meta))


@pytest.mark.parametrize(
    ("name", "n_ranks", "n_iterations", "world_size"), [("AR", 16, 44, 64), ("ST", 8, 32, 8), ("SE", 64, 43, 128)]
)
def test_real_traces_are_read_whole(data: Path, name: str, n_ranks: int, n_iterations: int, world_size: int) -> None:
    trace = read_trace(data / "straggler-analysis" / f"trace-{name}.parquet")
    assert (len(trace.ranks), len(trace), trace.world_size) == (n_ranks, n_ranks * n_iterations, world_size)
    assert trace.ignored_operations == {}
    first = next(trace.batches())
    assert len(first.calls) > 0
    assert len(first.spans) > 0


@pytest.mark.parametrize(
    ("name", "kind", "component", "exit_code"),
    [
        ("AR", Kind.SLOW_RANK, ComponentName(type=ComponentType.RANK, node="rank-0", rank=0), 3),
        ("ST", Kind.STAGE_IMBALANCE, ComponentName(type=ComponentType.STAGE, stage=3), 0),
        ("SE", Kind.DATA_IMBALANCE, ComponentName(type=ComponentType.JOB), 0),
    ],
)
def test_real_traces_are_judged_right_and_nothing_else_is_said(
    data: Path, tmp_path: Path, name: str, kind: Kind, component: ComponentName, exit_code: int
) -> None:
    trace, out = data / "straggler-analysis" / f"trace-{name}.parquet", tmp_path / "a.fsr"
    runner = CliRunner()
    assert runner.invoke(main, ["import", "straggler-analysis", str(trace), "--out", str(out)]).exit_code == 0
    result = runner.invoke(main, ["replay", "--json", str(out)])
    assert result.exit_code == exit_code
    alerts = [decode_alert(line) for line in result.stdout_bytes.splitlines()]
    assert {(alert.kind, alert.component.candidates) for alert in alerts} == {(kind, (component,))}
    assert {alert.severity for alert in alerts} <= (
        {Severity.INFO} if exit_code == 0 else {*Severity} - {Severity.INFO}
    )
