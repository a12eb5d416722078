"""What is missing is said by name, with what to do about it; and nothing is imported before it is needed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.collector import NotAvailable
from agents.ebpf import bcc_backend, probes, requirements
from agents.ebpf.backend import SOURCES
from agents.ebpf.bcc_backend import BccBackend
from agents.ebpf.libraries import Identity, Library
from agents.ebpf.tracer import Tracer
from tests.conftest import REPOSITORY

ROOT, NOBODY, BPF_AND_PERFMON, BPF_ALONE = "000001ffffffffff", "0", "000000c000000000", "0000008000000000"


@pytest.fixture
def without_bcc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept = {name: module for name, module in sys.modules.items() if name == "bcc" or name.startswith("bcc.")}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name == "bcc" or name.startswith("bcc.")]:
        del sys.modules[name]


def status(folder: Path, capabilities: str) -> Path:
    path = folder / "status"
    path.write_text(f"Name:\tpython\nCapPrm:\t{ROOT}\nCapEff:\t{capabilities}\n")
    return path


@pytest.mark.parametrize("capabilities", [NOBODY, BPF_ALONE])
def test_without_rights_the_remedy_names_them(tmp_path: Path, capabilities: str) -> None:
    with pytest.raises(NotAvailable, match=r"may not load BPF programs.*root.*CAP_BPF, CAP_PERFMON"):
        requirements.require(status(tmp_path, capabilities))


@pytest.mark.parametrize("capabilities", [ROOT, BPF_AND_PERFMON])
def test_enough_rights_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str) -> None:
    monkeypatch.setattr(requirements, "_FIRST_PID_NAMESPACE", tmp_path.stat().st_ino)
    requirements.require(status(tmp_path, capabilities), namespace=tmp_path)


def test_in_a_pid_namespace_of_its_own_the_agent_would_name_the_wrong_processes(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable, match=r"PID namespace.*hostPID"):
        requirements.require(status(tmp_path, ROOT), namespace=tmp_path)


def test_on_another_machine_the_probes_do_not_know_the_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(NotAvailable, match=r"riscv64.*x86_64 or aarch64"):
        Tracer().open()


def test_a_kernel_without_uprobes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_TYPE", tmp_path / "type")
    with pytest.raises(NotAvailable, match=r"no uprobes.*CONFIG_UPROBE_EVENTS"):
        probes.Prober()


@pytest.mark.usefixtures("without_bcc")
def test_a_missing_bcc_is_said_with_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcc_backend, "_PLACES", (str(tmp_path),))
    with pytest.raises(NotAvailable, match="apt install python3-bpfcc"):
        BccBackend().load(SOURCES / "nccl.bpf.c", [], [])


@pytest.mark.usefixtures("without_bcc")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("class Lattice: pass\n", "is not the BPF Compiler Collection"),
        ("raise OSError('libbcc.so.0: cannot open shared object file')\n", "libbcc.so.0: cannot open"),
        ("def broken(:\n", "invalid syntax"),
    ],
)
def test_another_or_a_broken_bcc_is_told_from_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "__init__.py").write_text(content)
    monkeypatch.setattr(bcc_backend, "_PLACES", (str(tmp_path),))
    with pytest.raises(NotAvailable, match=said):
        bcc_backend.import_bcc()
    assert "bcc" not in sys.modules


@pytest.mark.kernel
def test_a_source_that_does_not_compile_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "broken.bpf.c"
    source.write_text("#include <failslow/portable.h>\nPROGRAM int f(struct pt_regs *ctx) { return nothing; }\n")
    backend = BccBackend()
    with pytest.raises(NotAvailable, match=r"could not load broken\.bpf\.c"):
        backend.load(source, [], ["f"])
    backend.close()


@pytest.mark.kernel
def test_a_program_that_the_kernel_refuses_is_said_with_its_reason(tmp_path: Path) -> None:
    source = tmp_path / "refused.bpf.c"
    source.write_text("#include <failslow/portable.h>\nPROGRAM int f(struct pt_regs *ctx) { return *(int *)8; }\n")
    backend = BccBackend()
    with pytest.raises(NotAvailable, match=r"f: .*invalid mem access"):
        backend.load(source, [], ["f"])
    backend.close()


def test_importing_the_tracer_does_not_import_bcc() -> None:
    source = "import sys, agents.ebpf.tracer; sys.exit('bcc' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], cwd=REPOSITORY, check=True)


def test_a_tracer_that_was_never_open_can_be_asked_and_closed() -> None:
    tracer = Tracer()
    tracer.poll()
    tracer.forget(1)
    tracer.detach(Library("/lib/libnccl.so.2", Identity(1, 2, 3, None), "nccl"))
    assert not len(tracer.take().runs)
    assert tracer.limits() == []
    tracer.close()
    tracer.close()
