"""The kernel programs for host signals also build without bcc, for both platforms that the agent runs on."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from agents.ebpf.backend import HEADERS
from agents.host_programs import FILTER_SIZE, PROCESS, PROCESSES_MAX, SOURCE, THREAD, THREADS_MAX
from agents.host_tracer import BLOCKED, RUNNABLE, RUNNING, SLEEPING, STOPPED, UNKNOWN
from tests.conftest import give_up

CHECKS = """
#include "{source}"
_Static_assert(sizeof(struct thread) == {thread}, "thread");
_Static_assert(__builtin_offsetof(struct thread, since) == {since}, "since");
_Static_assert(__builtin_offsetof(struct thread, state) == {state}, "state");
_Static_assert(__builtin_offsetof(struct thread, process) == {process_at}, "process");
_Static_assert(sizeof(struct process) == {process}, "sums of a process");
_Static_assert(__builtin_offsetof(struct process, io_requests) == {requests}, "requests");
_Static_assert(THREADS_MAX == {threads_max} && PROCESSES_MAX == {processes_max}, "sizes");
_Static_assert(FILTER_SIZE == {filter_size}, "filter");
_Static_assert(RUNNING == {states[0]} && RUNNABLE == {states[1]} && SLEEPING == {states[2]}, "states");
_Static_assert(BLOCKED == {states[3]} && STOPPED == {states[4]} && UNKNOWN == {states[5]}, "states");
"""


def offset(dtype: np.dtype[np.void], name: str) -> int:
    assert dtype.fields is not None
    return int(dtype.fields[name][1])


@pytest.mark.parametrize("target", ["x86", "arm64"])
def test_the_source_builds_by_clang_and_agrees_with_what_reads_its_maps(tmp_path: Path, target: str) -> None:
    if shutil.which("clang") is None:
        give_up("no clang: install Debian's clang")
    checked = tmp_path / "checked.bpf.c"
    checked.write_text(
        CHECKS.format(
            source=SOURCE,
            thread=THREAD.itemsize,
            since=offset(THREAD, "since"),
            state=offset(THREAD, "state"),
            process_at=offset(THREAD, "process"),
            process=PROCESS.itemsize,
            requests=offset(PROCESS, "io_requests"),
            threads_max=THREADS_MAX,
            processes_max=PROCESSES_MAX,
            filter_size=FILTER_SIZE,
            states=(RUNNING, RUNNABLE, SLEEPING, BLOCKED, STOPPED, UNKNOWN),
        )
    )
    offsets = sorted(set(re.findall(r"\b(?!NAME_AT)[A-Z_]+_AT\b", SOURCE.read_text())))
    options = ["-g", "-O2", "-Wall", "-Werror", "-mcpu=v3", "-target", "bpf", f"-D__TARGET_ARCH_{target}"]
    built = tmp_path / "host.bpf.o"
    subprocess.run(
        [
            "clang",
            *options,
            *(f"-D{name}=8" for name in offsets),
            "-I",
            HEADERS / "include",
            "-c",
            checked,
            "-o",
            built,
        ],
        check=True,
    )
    with built.open("rb") as file:
        names = {section.name for section in ELFFile(file).iter_sections()}
    assert {"tp_btf/sched_switch", "tp_btf/sched_wakeup", "tp/sched/sched_switch", "tp/task/task_newtask"} <= names
    assert {"tp/sched/sched_process_exit", "tp/block/block_io_start", "tp/block/block_rq_complete", ".maps"} <= names
