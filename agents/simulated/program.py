"""What every rank of a pipeline stage does in one iteration, and an order in which the whole job can be worked out.

Source: 1F1B (one forward, one backward) of Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
2021, non-interleaved: stage p begins with min(PP - 1 - p, M) forwards, then alternates, then drains. A send and the
receive that follows it from the same neighbour go out as one group, as in Megatron-LM; one after the other they would
wait for each other for ever.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from agents.simulated.layout import Axis
from agents.simulated.scenario import Scenario
from schemas.events import Op, SpanKind


@dataclass(frozen=True, slots=True)
class Row:
    """One row of Calls: a call, or a run of equal calls."""

    axis: Axis
    op: Op
    bytes: int
    count: int = 1
    peer: int = 0  # stage of the other side


@dataclass(frozen=True, slots=True)
class Message:
    """One micro-batch's way over the edge between stage `edge` and the next; the activations forward, or back."""

    edge: int
    is_forward: bool
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Compute:
    """A piece of work on the GPU, its tensor-parallel all-reduces (row None: there are none) interleaved."""

    kind: SpanKind
    micro_batch: int
    index: int  # among the stage's computes
    row: int | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One or two messages that go out together; (message, row) of each."""

    messages: tuple[tuple[Message, int], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over the data-parallel or the world communicator."""

    axis: Axis
    row: int


Item = Compute | Exchange | Collective


@dataclass(slots=True)
class StageProgram:
    """The items of one stage in the order of their launch, and the Calls rows that they make."""

    items: list[Item] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    item_of_row: list[int] = field(default_factory=list)
    computes: list[Compute] = field(default_factory=list)

    def add_row(self, row: Row) -> int:
        """Add a row of the item that comes next; return its number."""
        self.rows.append(row)
        self.item_of_row.append(len(self.items))
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """A stage computes."""

    stage: int
    number: int  # of the item in the stage's program, here and below
    item: Compute


@dataclass(frozen=True, slots=True)
class ArriveStep:
    """A stage starts to send or receive, or both."""

    stage: int
    number: int
    item: Exchange


@dataclass(frozen=True, slots=True)
class TransferStep:
    """A message goes through, since both sides are there: (stage, row) of each."""

    message: Message
    sides: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LeaveStep:
    """A stage goes on after all messages of an exchange."""

    stage: int
    item: Exchange


@dataclass(frozen=True, slots=True)
class RingStep:
    """The data-parallel groups of a stage run a collective."""

    stage: int
    number: int
    row: int


@dataclass(frozen=True, slots=True)
class WorldStep:
    """All ranks run a collective: (number, row) by stage."""

    places: tuple[tuple[int, int], ...]


Step = ComputeStep | ArriveStep | TransferStep | LeaveStep | RingStep | WorldStep


@dataclass(frozen=True, slots=True)
class Program:
    """The stages' programs, and all their steps in an order that respects every dependency."""

    stages: tuple[StageProgram, ...]
    steps: tuple[Step, ...]
    micro_batches: int


def training(scenario: Scenario) -> Program:
    """Return the program of an ordinary iteration."""
    n_stages, micro_batches = scenario.layout.pp, scenario.micro_batches
    stages = []
    for stage in range(n_stages):
        program = StageProgram()
        warm_up = min(n_stages - 1 - stage, micro_batches)
        _add_passes(program, scenario, stage, _one_forward_one_backward(warm_up, micro_batches))
        _add_collective(program, scenario, Axis.DP, Op.REDUCE_SCATTER, scenario.network.dp_bytes)
        _add_collective(program, scenario, Axis.WORLD, Op.ALL_REDUCE, 4)
        _add_compute(program, scenario, SpanKind.OPTIMIZER, -1)
        _add_collective(program, scenario, Axis.DP, Op.ALL_GATHER, scenario.network.dp_bytes)
        stages.append(program)
    return Program(tuple(stages), tuple(_Order(stages).steps()), micro_batches)


def evaluation(scenario: Scenario, micro_batches: int) -> Program:
    """Return the program of forward-only passes."""
    stages = []
    for stage in range(scenario.layout.pp):
        program = StageProgram()
        _add_passes(program, scenario, stage, [(SpanKind.FORWARD, m) for m in range(micro_batches)])
        stages.append(program)
    return Program(tuple(stages), tuple(_Order(stages).steps()), micro_batches)


def _one_forward_one_backward(warm_up: int, micro_batches: int) -> list[tuple[SpanKind, int]]:
    passes = [(SpanKind.FORWARD, m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        passes += [(SpanKind.FORWARD, warm_up + m), (SpanKind.BACKWARD, m)]
    return passes + [(SpanKind.BACKWARD, m) for m in range(micro_batches - warm_up, micro_batches)]


def _add_passes(program: StageProgram, scenario: Scenario, stage: int, passes: list[tuple[SpanKind, int]]) -> None:
    messages: list[tuple[Message, Op, int]] = []  # waiting to go out, as one group if they are a send and its answer
    last = scenario.layout.pp - 1
    for kind, micro_batch in passes:
        is_forward = kind == SpanKind.FORWARD
        source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if 0 <= source <= last:
            messages.append((Message(min(stage, source), is_forward, micro_batch), Op.RECV, source))
        _add_exchanges(program, scenario, messages)
        _add_compute(program, scenario, kind, micro_batch)
        if 0 <= target <= last:
            messages.append((Message(min(stage, target), is_forward, micro_batch), Op.SEND, target))
    _add_exchanges(program, scenario, messages)


def _add_exchanges(program: StageProgram, scenario: Scenario, messages: list[tuple[Message, Op, int]]) -> None:
    is_group = len(messages) == 2 and messages[0][2] == messages[1][2]
    for group in [messages] if is_group else [[message] for message in messages]:
        rows = tuple(
            (message, program.add_row(Row(Axis.PP, op, scenario.network.p2p_bytes, peer=peer)))
            for message, op, peer in group
        )
        program.items.append(Exchange(rows))
    messages.clear()


def _add_compute(program: StageProgram, scenario: Scenario, kind: SpanKind, micro_batch: int) -> None:
    has_calls = scenario.layout.tp > 1 and kind != SpanKind.OPTIMIZER
    calls = Row(Axis.TP, Op.ALL_REDUCE, scenario.network.tp_bytes, count=scenario.work.tp_calls)
    compute = Compute(kind, micro_batch, len(program.computes), program.add_row(calls) if has_calls else None)
    program.computes.append(compute)
    program.items.append(compute)


def _add_collective(program: StageProgram, scenario: Scenario, axis: Axis, op: Op, size: int) -> None:
    members = scenario.layout.world_size if axis == Axis.WORLD else scenario.layout.dp
    if members > 1:
        program.items.append(Collective(axis, program.add_row(Row(axis, op, size))))


class _Order:
    """Lets every stage run until it has to wait for another."""

    def __init__(self, stages: list[StageProgram]) -> None:
        self._stages = stages
        self._position = [0] * len(stages)
        self._waiting_for = [0] * len(stages)
        self._arrived: dict[Message, tuple[int, int]] = {}  # stage and row of the side that is there already
        self._at_world: dict[int, tuple[int, int]] = {}

    def steps(self) -> Iterator[Step]:
        """Yield all steps, each after those that it depends on."""
        while any(position < len(stage.items) for position, stage in zip(self._position, self._stages, strict=True)):
            has_progressed = False
            for p, stage in enumerate(self._stages):
                while self._position[p] < len(stage.items) and not self._waiting_for[p]:
                    has_progressed = True
                    yield from self._start(p, stage.items[self._position[p]])
            assert has_progressed, "the stages wait for each other for ever"

    def _start(self, p: int, item: Item) -> Iterator[Step]:
        number = self._position[p]
        match item:
            case Compute():
                yield ComputeStep(p, number, item)
                self._position[p] += 1
            case Exchange(messages=messages):
                self._waiting_for[p] = len(messages)
                yield ArriveStep(p, number, item)
                for message, row in messages:
                    yield from self._meet(p, message, row)
            case Collective(axis=Axis.WORLD, row=row):
                self._waiting_for[p] = 1
                self._at_world[p] = (number, row)
                if len(self._at_world) == len(self._stages):
                    yield WorldStep(tuple(place for _, place in sorted(self._at_world.items())))
                    self._waiting_for = [0] * len(self._stages)
                    self._position = [position + 1 for position in self._position]
            case Collective(row=row):
                yield RingStep(p, number, row)
                self._position[p] += 1

    def _meet(self, p: int, message: Message, row: int) -> Iterator[Step]:
        if message not in self._arrived:
            self._arrived[message] = (p, row)
            return
        other = self._arrived.pop(message)
        yield TransferStep(message, ((p, row), other))
        for stage in (p, other[0]):
            self._waiting_for[stage] -= 1
            if not self._waiting_for[stage]:
                exchange = self._stages[stage].items[self._position[stage]]
                assert isinstance(exchange, Exchange)
                yield LeaveStep(stage, exchange)
                self._position[stage] += 1
