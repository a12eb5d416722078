"""The kernel programs also build without bcc, by clang alone, for both platforms that the agent runs on."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from agents.collector import NotAvailable
from agents.ebpf import functions
from agents.ebpf.backend import HEADERS, SOURCES
from agents.ebpf.bcc_backend import to_bcc
from agents.ebpf.libbpf_backend import LibbpfBackend
from tests.agents.probed import EVERY_FUNCTION, Victim, attach, build_library, check_times, open_tracer, take_all
from tests.conftest import give_up

SOURCE = SOURCES / "nccl.bpf.c"


def build(folder: Path, target: str, *defines: str) -> Path:
    if shutil.which("clang") is None:
        give_up("no clang: install Debian's clang")
    built = folder / "nccl.bpf.o"
    options = ["-g", "-O2", "-Wall", "-Werror", "-mcpu=v3", "-target", "bpf"]
    options += [f"-D{define}" for define in (f"__TARGET_ARCH_{target}", "RING_BYTES=8388608", *defines)]
    subprocess.run(["clang", *options, "-I", HEADERS / "include", "-c", SOURCE, "-o", built], check=True)
    return built


@pytest.mark.parametrize("target", ["x86", "arm64"])
@pytest.mark.parametrize("defines", [(), ("RAW",), ("ENTRY_ONLY",), ("RAW", "ENTRY_ONLY")])
def test_the_source_builds_by_clang_with_every_program_and_map(
    tmp_path: Path, target: str, defines: tuple[str, ...]
) -> None:
    with build(tmp_path, target, *defines).open("rb") as file:
        elf = ELFFile(file)
        sections = {section.name: section for section in elf.iter_sections()}
        table = sections[".symtab"]
        assert isinstance(table, SymbolTableSection)
        names = {symbol.name for symbol in table.iter_symbols()}
        assert sections[".BTF"]["sh_size"] > 0
        assert sections[".maps"]["sh_size"] > 0
        assert sections["license"].data() == b"GPL\0"
    every = (*functions.NCCL, functions.BCAST, *functions.SYNCS, *functions.LAUNCHES)
    assert {name for f in every for name in (f.entry, f.leave) if name} <= names
    assert {"runs", "creations", "processes", "threads", "counters", "launches", "lost", "reported"} <= names


def test_functions_have_the_numbers_that_the_source_gives_them() -> None:
    text = SOURCE.read_text()
    declared = next(line for line in text.splitlines() if line.startswith("enum { INIT_RANK,"))
    numbered = declared.removeprefix("enum { ").removesuffix(" };").split(", ")
    spelled = [name.removeprefix("ncclComm") for name in functions.COMMUNICATOR_FUNCTIONS]
    assert [name.replace("_", "").lower() for name in numbered] == [name.lower() for name in spelled]


def test_map_functions_are_spelled_in_bccs_way_and_nothing_else_is_changed() -> None:
    ours = (
        "x = LOOKUP(threads, &id); UPDATE(a, b(), c); DELETE(a, &b); OUTPUT(runs, run, sizeof(*run), FLAG); lookup(y)"
    )
    theirs = "x = threads.lookup(&id); a.update(b(), c); a.delete(&b); "
    theirs += "runs.ringbuf_output(run, sizeof(*run), FLAG); lookup(y)"
    assert to_bcc(ours) == theirs
    assert to_bcc(theirs) == theirs
    assert not np.any([word in to_bcc(SOURCE.read_text()) for word in ("LOOKUP(", "UPDATE(", "DELETE(", "OUTPUT(")])


@pytest.mark.kernel
@pytest.mark.parametrize("aggregate", [True, False])
def test_what_libbpf_loads_sees_the_same(tmp_path: Path, *, aggregate: bool) -> None:
    tracer = open_tracer(backend=LibbpfBackend(), aggregate=aggregate)
    try:
        with Victim(build_library(tmp_path)) as victim:
            attach(tracer, victim)
            comm = victim.do("comm = me.create(7, 5); answer = comm")
            victim.do(EVERY_FUNCTION)
            victim.do("for _ in range(101): me.call('ncclAllReduce', comm=comm)")
            victim.do("me.cuda.cudaStreamSynchronize(None); me.library.ncclCommDestroy(comm)")
            truth = victim.truth()
            seen = take_all(tracer, victim)
    finally:
        tracer.close()
    assert seen.keys == [each.key for each in truth]
    check_times(seen.runs, truth)
    assert len(seen.syncs) == 1
    assert [each.comm for each in seen.communicators] == [comm, comm]
    assert seen.lost_calls == 0


def test_a_missing_libbpf_or_clang_is_said_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LibbpfBackend()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(NotAvailable, match="apt install clang"):
        backend.load(SOURCE, [], [])
    monkeypatch.setattr("agents.ebpf.libbpf_backend._LIBRARY", "libbpf.so.0.missing")
    with pytest.raises(NotAvailable, match="apt install libbpf1"):
        backend.load(SOURCE, [], [])
    backend.close()


def test_what_clang_says_of_a_broken_source_is_passed_on(tmp_path: Path) -> None:
    if shutil.which("clang") is None:
        give_up("no clang: install Debian's clang")
    source = tmp_path / "broken.bpf.c"
    source.write_text("#include <failslow/portable.h>\nPROGRAM int f(void) { return nothing; }\n")
    with pytest.raises(NotAvailable, match="undeclared identifier 'nothing'"):
        LibbpfBackend().load(source, [], ["f"])
