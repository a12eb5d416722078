"""`failslow-agent bench`: its own library can be loaded and probed, its figures mean what their names say."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from elftools.elf.elffile import ELFFile

from agents.__main__ import main
from agents.config import AgentConfig
from agents.ebpf.symbols import read_image
from agents.overhead import measuring, rates
from agents.overhead.costs import Cost, cost, share
from agents.overhead.machine_code import BY_MACHINE
from agents.overhead.measuring import CALL_LIKE, CALL_UNLIKE, GROUP, LAUNCH, SWITCH, SWITCH_OTHER, SYNC
from agents.overhead.program_runs import counted_runs, runs_by_name
from agents.overhead.specimen import FUNCTIONS, Specimen
from tests.agents.probed import Victim, build_library, open_tracer
from tests.conftest import REPOSITORY, give_up

OVERHEAD = REPOSITORY / "agents" / "overhead"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def run_json(*arguments: str) -> Any:
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return msgspec.json.decode(result.stdout)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Victim(build_library(tmp_path_factory.mktemp("probed"))) as victim:
        yield victim


@pytest.mark.parametrize("machine", sorted(BY_MACHINE))
def test_the_machine_code_is_what_its_source_assembles_to(machine: str, tmp_path: Path) -> None:
    if shutil.which("clang") is None:
        give_up("no clang: install Debian's clang")
    source, built = OVERHEAD / f"native.{machine}.s", tmp_path / "code.o"
    subprocess.run(["clang", "-target", f"{machine}-linux-gnu", "-c", str(source), "-o", str(built)], check=True)
    with built.open("rb") as file:
        text: Any = ELFFile(file).get_section_by_name(".text")
        assert text.data() == BY_MACHINE[machine].text


def test_the_specimen_has_its_functions_where_its_table_says_and_they_can_be_probed_cheaply() -> None:
    with Specimen() as specimen:
        image = read_image(specimen.library.path, FUNCTIONS)
        assert set(image.symbols) == set(FUNCTIONS)
        assert all(symbol.is_cheap is not False for symbol in image.symbols.values())
        assert {symbol.first for symbol in image.symbols.values()} == {specimen.code.text[:16]}
        assert [getattr(specimen._observed, name)() for name in FUNCTIONS] == [0] * len(FUNCTIONS)


@pytest.mark.kernel
def test_the_specimen_makes_the_calls_that_it_is_told_to() -> None:
    tracer = open_tracer(count_launches=True)
    try:
        with Specimen() as specimen:
            assert tracer.attach(specimen.library) == []
            specimen.difference_ns("ncclAllReduce", "ncclAllReduce", 101)
            specimen.difference_ns("cudaStreamSynchronize", "cudaStreamSynchronize", 11)
            specimen.difference_ns("ncclAllReduce", "ncclAllReduce", 13, step=1)
            specimen.difference_ns("cudaLaunchKernel", "cudaLaunchKernel", 17, cold=True)
            with counted_runs() as is_counted:
                assert is_counted
                specimen.difference_ns("ncclGroupStart", "ncclGroupEnd", 14)
                runs = runs_by_name()
            records = tracer.take()
    finally:
        tracer.close()
    assert records.runs["count"].sum() == 101 + 13
    assert (records.runs["bytes"][-13:] // 4).tolist() == list(range(1, 14))
    assert not records.runs["depth"].any()
    assert len(records.syncs) == 11
    assert list(records.launches.values()) == [17]
    assert [runs[name] for name in rates.GROUP_PROGRAMS] == [7, 7]


@pytest.mark.kernel
def test_a_short_run_says_what_each_probe_costs_and_what_that_adds_up_to() -> None:
    found = run_json("--rounds", "5", "--seconds", "0", "--calls-per-s", "1009", "--switches-per-s", "101")
    assert [limit for limit in found["limits"] if limit["what"].startswith("the cost of")] == []
    assert set(found["ns"]) == set(measuring.TITLES)
    assert set(found["ns_cold"]) == set(measuring.TITLES) - {SWITCH, SWITCH_OTHER}
    for interval in (*found["ns"].values(), *found["ns_cold"].values()):
        assert interval["low"] <= interval["value"] <= interval["high"]
    # Orders of magnitude only: a probe is an exception and some, a function that is not probed is a nanosecond.
    for name in (CALL_LIKE, CALL_UNLIKE, SYNC, GROUP, LAUNCH):
        assert 50 < found["ns"][name]["value"] < 100_000
    (rank,) = found["ranks"]
    assert not rank["is_observed"]
    assert rank["hits_per_s"] == {CALL_UNLIKE: 1009, GROUP: 201.8, SYNC: 20, SWITCH: 101, SWITCH_OTHER: 101}
    expected = sum(rate * found["ns"][name]["value"] for name, rate in rank["hits_per_s"].items()) / 1e9
    assert found["iteration_share_mean"] == pytest.approx(expected)
    assert found["iteration_share_mean"] <= found["iteration_share_upper95"] == rank["share"]["high"]


@pytest.mark.kernel
def test_the_tables_show_every_probe_and_the_sum() -> None:
    result = run("--rounds", "5", "--seconds", "0")
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.replace("│", " ").split())
    assert "an assumed rank, all together: 0." in said
    assert "No process here calls NCCL" in said
    for title in measuring.TITLES.values():
        assert title.split()[0] in said


@pytest.mark.kernel
def test_the_rates_of_a_job_are_those_of_its_calls(victim: Victim) -> None:
    victim.tell(
        """
        for turn in range(1_000_000):
            for _ in range(13):
                me.library.ncclAllReduce(None, None, turn, 7, 0, 1, None)
            me.library.ncclGroupStart(); me.library.ncclGroupEnd()
            me.cuda.cudaDeviceSynchronize()
            time.sleep(0.05)
        """
    )
    found = rates.observe(AgentConfig(), seconds=1.5)
    (own,) = (each for each in found if f"process {victim.pid}" in each.title)
    assert own.is_observed
    hits = own.hits_per_s
    assert hits[CALL_LIKE] + hits[CALL_UNLIKE] > 0
    # One row each turn, unless a pause of the machine's broke one.
    assert hits[CALL_LIKE] / hits[CALL_UNLIKE] == pytest.approx(12, rel=0.35)
    assert hits[SYNC] == pytest.approx((hits[CALL_LIKE] + hits[CALL_UNLIKE]) / 13, rel=0.35)
    assert hits[SWITCH] == hits[SWITCH_OTHER] > 0


def test_a_machine_that_cannot_be_measured_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.overhead.machine_code.platform.machine", lambda: "riscv64")
    result = run("--seconds", "0", "--rounds", "5")
    assert result.exit_code == 2
    assert "measure on x86-64 or aarch64" in result.stderr


@pytest.mark.kernel
def test_whoever_may_not_probe_is_told_so() -> None:
    command = [sys.executable, "-m", "agents", "bench", "--seconds", "0", "--rounds", "5"]
    if shutil.which("setpriv") is None:
        give_up("no setpriv: install Debian's util-linux")
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run([*bare, *command], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 2
    assert "nothing can be measured" in done.stderr
    assert "run it as root, or give it CAP_BPF" in done.stderr


def of(*samples: float) -> Cost:
    return cost(samples)


def test_a_cost_is_the_median_of_its_blocks_and_its_interval_lies_among_them() -> None:
    steady, shaken = of(*[1009.0] * 23), of(*np.linspace(900, 1100, 23), 50_000)
    assert (steady.ns.low, steady.ns.value, steady.ns.high) == (1009, 1009, 1009)
    assert 900 <= shaken.ns.low < shaken.ns.value < shaken.ns.high <= 1100


def test_a_share_adds_up_hits_and_keeps_the_wider_interval_of_what_is_less_well_known() -> None:
    costs = {CALL_UNLIKE: of(*[1000.0] * 23), SWITCH: of(*np.linspace(100, 300, 23))}
    found = share(costs, {CALL_UNLIKE: 2000, SWITCH: 1000, LAUNCH: 20_000})
    assert found.value == pytest.approx(2000e-6 + 200e-6)
    assert 2100e-6 < found.low < found.value < found.high < 2300e-6


def test_switches_are_counted_by_the_names_of_threads() -> None:
    before = {7: ("python", 100), 11: ("stub-gpu", 1000), 13: ("ended", 5)}
    after = {7: ("python", 123), 11: ("stub-gpu", 1101), 17: ("stub-gpu", 3)}
    assert rates.switched(before, after) == {"python": 23, "stub-gpu": 104}


def test_a_row_is_one_call_unlike_the_last_and_the_rest_are_like_it() -> None:
    assert rates.call_hits(calls=1009, rows=101, seconds=2) == {CALL_LIKE: 454, CALL_UNLIKE: 50.5}
