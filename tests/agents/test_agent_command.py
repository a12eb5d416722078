"""The node's command: simulated agents publish what the scenario says, and say clearly what is wrong."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from agents.__main__ import main
from agents.config import AgentConfig, InvalidConfig, load, override
from agents.simulated import Cluster, load_scenario
from pipeline.broker import EmbeddedBroker
from pipeline.subscription import Subscription
from schemas.codec import decode_events, encode_events
from schemas.framing import Deframer
from schemas.topics import EVENTS, TOPICS, events_key

SCENARIO = """
title = "a small job"
seed = 5
iterations = 23
layout = { tp = 1, pp = 1, dp = 4, gpus_per_node = 2 }
faults = [{ kind = "slow_gpu", node = 1, gpu = 0, factor = 1.5, onset = 13 }]
"""


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments), env={"KAFKA_BOOTSTRAP": None})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def test_a_simulation_writes_every_batch_to_the_pipe(scenario: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "agents", "simulate", str(scenario)], capture_output=True, check=True)
    messages = [msgspec.msgpack.decode(message) for message in Deframer().feed(done.stdout)]
    batches = list(Cluster(load_scenario(scenario)).batches())
    assert messages == [[b.flush_ns, events_key(b.job_id, b.node), encode_events(b)] for b in batches]


def test_labels_name_the_right_answer_and_its_time(scenario: Path) -> None:
    (label,) = msgspec.json.decode(run("simulate", str(scenario), "--labels").output)
    assert (label["kind"], label["onset_iteration"], label["end_iteration"]) == ("slow_gpu", 13, None)
    assert [name["node"] for name in label["candidates"]] == ["node1"]
    assert label["end_s"] is None
    begins_s: Any = Cluster(load_scenario(scenario)).truth().start_s
    assert label["onset_s"] == pytest.approx(begins_s[13])


@pytest.mark.broker
def test_simulated_agents_publish_what_the_scenario_says(scenario: Path) -> None:
    expected = Counter(encode_events(batch) for batch in Cluster(load_scenario(scenario)).batches())
    with EmbeddedBroker(TOPICS) as broker:
        where = ("--bootstrap", broker.bootstrap)
        result = run("run", "--simulate", str(scenario), *where, "--speed", "0", "--epoch", "scenario")
        assert result.exit_code == 0
        assert f"{expected.total()} batches delivered" in result.output
        with Subscription(broker.bootstrap, [EVENTS], from_beginning=True) as subscription:
            values: list[bytes] = []
            while len(values) < expected.total():
                values += [record.value for record in subscription.poll()]
    assert Counter(values) == expected


@pytest.mark.broker
def test_a_job_begins_when_it_is_told_to(scenario: Path) -> None:
    epoch_ns = 1_800_000_000_000_000_000
    with EmbeddedBroker(TOPICS) as broker:
        where = ("--bootstrap", broker.bootstrap)
        run("run", "--simulate", str(scenario), *where, "--speed", "0", "--epoch", str(epoch_ns))
        with Subscription(broker.bootstrap, [EVENTS], from_beginning=True) as subscription:
            records = list(subscription.poll())
            while not records:
                records = list(subscription.poll())
    assert abs(decode_events(records[0].value).flush_ns - epoch_ns) < 60 * 10**9


def test_a_scenario_that_cannot_be_simulated_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(SCENARIO + "mood = 'cheerful'\n")
    for arguments in (("simulate", str(path)), ("run", "--simulate", str(path), "--bootstrap", "127.0.0.1:1")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "mood" in result.output
        assert len(result.output.splitlines()) == 1


def test_an_epoch_that_is_none_is_bad_usage(scenario: Path) -> None:
    result = run("run", "--simulate", str(scenario), "--bootstrap", "127.0.0.1:1", "--epoch", "yesterday")
    assert result.exit_code == 2
    assert "neither now, nor scenario" in result.output


def test_settings_come_from_a_file_and_options_win(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('[agent]\nbootstrap = "kafka:9092"\nbuffer_bytes_max = 2097152\n')
    assert load(path) == AgentConfig(bootstrap="kafka:9092", buffer_bytes_max=1 << 21)
    assert override(load(path), bootstrap="other:9092", buffer_bytes_max=None).bootstrap == "other:9092"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[agent]\nmood = 1\n", "mood"),
        ("[agent]\nbootstrap = ''\n", "bootstrap is empty"),
        ("[agent]\nbuffer_bytes_max = 5\n", "at least 1048576"),
        ("[agent", "agent.toml"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=reason):
        load(path)
