"""Scenario files: what is accepted, what is refused and how, and that labels do not travel."""

import tomllib
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from agents.simulated import Cluster, InvalidScenario, Scenario, load_scenario
from schemas import codec
from schemas.events import EventBatch

SCENARIOS = sorted((Path(__file__).resolve().parents[2] / "scenarios").glob("*.toml"))

SMALL = """
title = "small"
seed = 7
iterations = 11
micro_batches = 3
layout = { tp = 2, pp = 2, dp = 3, gpus_per_node = 4 }
agents.flush_interval_s = 0.1
agents.sample_interval_s = 0.13
"""


def encoded(scenario: Scenario) -> list[bytes]:
    return [codec.encode_events(batch) for batch in Cluster(scenario).batches()]


def without_labels(path: Path) -> Scenario:
    content = tomllib.loads(path.read_text())
    content.pop("expected", None)
    content["title"] = ""
    return msgspec.convert(content, Scenario)


def test_there_is_a_scenario_for_every_fault_and_every_disturbance() -> None:
    kinds = {part.kind for path in SCENARIOS for part in load_scenario(path).faults}
    disturbances = {type(part).__name__ for path in SCENARIOS for part in load_scenario(path).benign}
    assert kinds == {"slow_gpu", "slow_host", "slow_nic", "slow_link"}
    assert disturbances == {
        "WarmUp",
        "Checkpoint",
        "Evaluation",
        "VariableSequenceLength",
        "LongLastStage",
        "GcPauses",
        "Restart",
        "LostBatches",
        "DuplicatedBatches",
        "LateBatches",
    }


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_job_id_does_not_tell_what_is_wrong(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.job == f"simulated-{scenario.seed}"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_labels_do_not_travel(path: Path) -> None:
    labelled = msgspec.structs.replace(load_scenario(path), iterations=23, faults=(), benign=())
    faults = tuple(msgspec.structs.replace(f, onset=min(f.onset, 11), end=None) for f in load_scenario(path).faults)
    labelled = msgspec.structs.replace(labelled, faults=faults)
    bare = msgspec.structs.replace(without_labels(path), iterations=23, faults=faults, benign=())
    assert bare.expected == ()
    assert encoded(labelled) == encoded(bare)


def test_the_same_scenario_gives_the_same_bytes_and_another_seed_does_not() -> None:
    first = encoded(load_scenario(SMALL))
    assert first == encoded(load_scenario(SMALL))
    assert first != encoded(load_scenario(SMALL.replace("seed = 7", "seed = 11")))


def test_every_batch_can_be_read_back() -> None:
    for batch in Cluster(load_scenario(SMALL)).batches():
        read = codec.decode_events(codec.encode_events(batch))
        assert (read.calls, read.syncs, read.markers) == (batch.calls, batch.syncs, batch.markers)
        assert (read.node, read.seq, read.ranks, read.is_last) == (batch.node, batch.seq, batch.ranks, batch.is_last)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("speed = 3", "unknown field `speed`"),
        ("seed = -1", "seed must not be negative"),
        ("layout = { tp = 5, pp = 1, dp = 1 }", "do not fill nodes"),
        ("work.stage_ratios = [1.0]", "work.stage_ratios has 1 entries"),
        ("work.host_ratio = 1.5", "host_ratio must be between 0 and 1"),
        ("clocks.error_s = 0.001", "is no bound"),
        ('agents.sensors = ["telepathy"]', "telepathy"),
        ('faults = [{ kind = "slow_dns", factor = 2 }]', "slow_dns"),
        ('faults = [{ kind = "slow_gpu", factor = 0.5, node = 0, gpu = 0 }]', "factor must be at least 1"),
        ('faults = [{ kind = "slow_gpu", factor = 2, node = 3, gpu = 0 }]', "there is no node 3"),
        ('faults = [{ kind = "slow_gpu", factor = 2, node = 0, gpu = 4 }]', "there is no gpu 4"),
        ('faults = [{ kind = "slow_link", factor = 2, nodes = [1, 1] }]', "needs two nodes"),
        ('faults = [{ kind = "slow_host", factor = 2, node = 0, onset = 11 }]', "outside of the 11 iterations"),
        ('faults = [{ kind = "slow_host", factor = 2, node = 0, onset = 7, end = 7 }]', "onset < end"),
        ('benign = [{ kind = "restart", at_iteration = 5, pause_s = 0.1 }]', "three flush intervals"),
        ('benign = [{ kind = "restart", at_iteration = 11 }]', "between the first and the last iteration"),
        ("agents.late = [{ node = 9, at_iteration = 3 }]", "there is no node 9"),
    ],
)
def test_a_wrong_scenario_is_refused_with_the_name_of_what_is_wrong(change: str, complaint: str) -> None:
    key = change.split(" = ", maxsplit=1)[0]
    kept = [line for line in SMALL.splitlines() if not line.startswith(f"{key} = ")]
    with pytest.raises(InvalidScenario, match=r"^the scenario: ") as refusal:
        load_scenario("\n".join([change, *kept]))
    assert complaint in str(refusal.value)


def test_a_missing_file_and_a_file_that_is_not_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidScenario, match=r"cannot read .*absent\.toml.*scenarios/ has examples"):
        load_scenario(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("title = ")
    with pytest.raises(InvalidScenario, match=r"broken\.toml is not TOML"):
        load_scenario(str(tmp_path / "broken.toml"))


def test_a_large_job_is_made_iteration_by_iteration() -> None:
    scenario = load_scenario(
        'title = "large"\nseed = 5\niterations = 2\nlayout = { tp = 8, pp = 8, dp = 160 }\n'
        "agents.flush_interval_s = 0.5"
    )
    nodes: dict[str, int] = {}
    ranks = np.zeros(10_240, bool)
    batches: list[EventBatch] = []
    for batch in Cluster(scenario).batches():
        nodes[batch.node] = nodes.get(batch.node, 0) + len(batch.calls)
        ranks[batch.calls.rank] = True
        batches = [*batches[-1:], batch]
    assert len(nodes) == 1_280
    assert ranks.all()
    # Twice a source, iteration and GPU: 16 computes, 3 collectives, and 16 messages a neighbour.
    first_stage, second_stage = 8 * 2 * 2 * (16 + 3 + 16), 8 * 2 * 2 * (16 + 3 + 32)
    assert (nodes["node0000"], nodes["node0160"]) == (first_stage, second_stage)


def test_the_documentation_names_every_field_and_kind() -> None:
    page = (SCENARIOS[0].parents[1] / "docs" / "scenarios.md").read_text()
    pending: list[type[msgspec.Struct]] = [Scenario]
    names: set[str] = set()
    while pending:
        struct = pending.pop()
        for field in msgspec.structs.fields(struct):
            names.add(field.name)
            parts = [field.type, *get_args(field.type)]
            parts += [part for one in parts for part in get_args(one)]
            pending += [p for p in parts if isinstance(p, type) and issubclass(p, msgspec.Struct)]
        names.add(str(struct.__struct_config__.tag or "seed"))
    assert len(names) > 60
    assert sorted(name for name in names if f"`{name}" not in page and f"[{name}]" not in page) == []
