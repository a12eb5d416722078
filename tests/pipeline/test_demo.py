"""The demo itself, on a small job: a fault is flagged and resolved by real processes, and the replay is identical."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.recording import read_recording
from schemas.topics import ALERTS, EVENTS, ITERATIONS

pytestmark = pytest.mark.broker

SCENARIO = """
title = "a slow GPU in a small job"
seed = 17
iterations = 210
micro_batches = 2
layout = { tp = 1, pp = 1, dp = 6, gpus_per_node = 2 }
faults = [{ kind = "slow_gpu", node = 1, gpu = 0, factor = 1.6, onset = 83, end = 149 }]
agents = { flush_interval_s = 0.25 }
"""
DEADLINE_S = 120


def demo(folder: Path, scenario: str) -> "subprocess.CompletedProcess[str]":
    (folder / "job.toml").write_text(scenario)
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "demo", "--scenario", "job.toml", "--out", "job.fsr"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_fault_is_injected_flagged_and_resolved_and_the_recording_replays_identically(tmp_path: Path) -> None:
    done = demo(tmp_path, SCENARIO)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    shown = [
        said.index("injected slow_gpu of GPU-"),
        said.index("FIRING   warning  slow_gpu job simulated-17: GPU-"),
        said.index("RESOLVED"),
        said.index("what was injected, and what was found"),
    ]
    assert shown == sorted(shown)
    assert re.search(r"replayed \d+ records of failslow.iterations in .*alerts identical, byte for byte\n", said)
    assert re.search(r"replayed \d+ records of failslow.events in .*alerts identical, byte for byte\n", said)
    assert "every fault was flagged right and resolved" in said
    recording = read_recording(tmp_path / "job.fsr")
    assert {record.topic for record in recording} == {EVENTS, ITERATIONS, ALERTS}
    assert recording.truncated is None


def test_a_scenario_that_cannot_be_simulated_ends_the_demo_with_one_sentence(tmp_path: Path) -> None:
    done = demo(tmp_path, "mood = 'cheerful'\n")
    assert done.returncode == 2
    assert "job.toml" in done.stderr
    assert len(done.stderr.splitlines()) == 1
