"""Libraries are found in the processes that map them, each file once, under every name and on every way."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.ebpf import libraries
from agents.ebpf.libraries import LibraryFinder, find_libraries, identify
from agents.ebpf.symbols import Unreadable, read_image
from tests.agents.probed import Victim, attach, build_library, open_tracer, take_all
from tests.conftest import give_up

NO_PROCESS = 2**22 + 1  # more than the kernel's largest number


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("probed"))


@pytest.fixture
def victim(library: Path) -> Iterator[Victim]:
    with Victim(library) as victim:
        yield victim


def test_a_process_is_found_with_both_libraries(victim: Victim, library: Path) -> None:
    found = {each.kind: each for each in find_libraries([victim.pid])[victim.pid]}
    assert found.keys() == {"nccl", "cudart"}
    nccl, stat = found["nccl"], library.stat()
    assert os.path.samefile(nccl.path, library)
    assert nccl.name == str(library)
    assert nccl.pids == (victim.pid,)
    assert nccl.identity[:3] == (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    assert nccl.identity.build_id


def test_one_file_has_one_identity_in_all_processes(victim: Victim, library: Path, tmp_path: Path) -> None:
    copy = tmp_path / library.name
    shutil.copy(library, copy)
    with Victim(library) as same, Victim(copy) as other:
        found = find_libraries([victim.pid, same.pid, other.pid])
    identities = {pid: next(each for each in own if each.kind == "nccl").identity for pid, own in found.items()}
    assert identities[victim.pid] == identities[same.pid] != identities[other.pid]
    assert found[victim.pid][0].pids == (victim.pid, same.pid)


def test_processes_without_libraries_and_without_existence_say_nothing() -> None:
    finder = LibraryFinder()
    assert finder.find([os.getpid(), NO_PROCESS]) == {os.getpid(): []}
    assert finder.limits == []


def test_an_executable_with_nccl_inside_is_found(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        give_up("no C compiler: install Debian's gcc and libc6-dev")
    source = tmp_path / "program.c"
    source.write_text(
        "#include <unistd.h>\n"
        "int ncclAllReduce(void) { return 1; }\n"
        'int main(void) { return write(1, "ready", 5) + pause(); }\n'
    )
    program = tmp_path / "trainer"
    subprocess.run(["cc", "-o", program, source], check=True)
    with subprocess.Popen([program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(5) == b"ready"
            (found,) = find_libraries([process.pid])[process.pid]
        finally:
            process.kill()
    assert (found.kind, found.name) == ("nccl-static", str(program))


def test_a_large_library_with_nccl_inside_is_found(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "libtorch_cuda.so"
    shutil.copy(library, inside)
    with Victim(inside) as victim:
        assert find_libraries([victim.pid])[victim.pid] == []
        monkeypatch.setattr(libraries, "STATIC_BYTES_MIN", inside.stat().st_size)
        found = {each.name: each.kind for each in find_libraries([victim.pid])[victim.pid]}
    assert found == {str(inside): "nccl-static"}


def test_a_broken_library_of_one_process_hurts_no_other(victim: Victim, library: Path, tmp_path: Path) -> None:
    """A file may be written to after it was mapped."""
    broken = tmp_path / library.name
    shutil.copy(library, broken)
    with Victim(broken) as other:
        with broken.open("r+b") as file:
            file.write(b"\0" * 64)
        finder = LibraryFinder()
        found = finder.find([other.pid, victim.pid])
    assert found[other.pid] == []
    assert {each.kind for each in found[victim.pid]} == {"nccl", "cudart"}
    (limit,) = finder.limits
    assert str(other.pid) in limit.what


def test_a_process_that_may_not_be_read_is_reported(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)
    finder = LibraryFinder()
    assert finder.find([victim.pid]) == {}
    (limit,) = finder.limits
    assert str(victim.pid) in limit.what
    assert "CAP_SYS_PTRACE" in limit.remedy


def test_files_are_looked_into_once(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def note(path: str, names: tuple[str, ...]) -> object:
        looked.append(path)
        return read_image(path, names)

    monkeypatch.setattr(libraries, "read_image", note)
    finder = LibraryFinder()
    first = finder.find([victim.pid])
    n = len(looked)
    assert finder.find([victim.pid]) == first
    assert len(looked) == n


@contextlib.contextmanager
def mounted(kind: str, at: Path, *options: str) -> Iterator[Path]:
    """Mount a file system. Gives the test up where that is not allowed."""
    at.mkdir()
    made = subprocess.run(["mount", "-t", kind, *options, "none", str(at)], capture_output=True, text=True, check=False)
    if made.returncode:
        give_up(f"mounting {kind} takes root: {made.stderr}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.kernel
def test_equal_files_on_two_file_systems_are_two_libraries(library: Path, tmp_path: Path) -> None:
    """Fresh file systems of one kind give equal copies equal inode numbers."""
    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(mounted("tmpfs", tmp_path / name)) / library.name for name in "ab"]
        for copy in copies:
            shutil.copy2(library, copy)
        victims = [stack.enter_context(Victim(copy)) for copy in copies]
        first, second = (victim.nccl().identity for victim in victims)
        assert first[:4] == second[:4], "the test needs equal inodes"
        assert first != second
        tracer = open_tracer()
        stack.callback(tracer.close)
        for victim in victims:
            attach(tracer, victim)
        for victim in victims:
            victim.do("for count in range(7, 18): me.call('ncclAllReduce', count=count)")
            assert len(take_all(tracer, victim).runs) == 11


@pytest.mark.kernel
def test_a_layer_that_two_overlays_share_is_one_library(library: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        layers = f"lowerdir={library.parent}:{tmp_path}"
        mounts = [stack.enter_context(mounted("overlay", tmp_path / name, "-o", layers)) for name in "ab"]
        assert os.stat(mounts[0]).st_dev != os.stat(mounts[1]).st_dev
        victims = [stack.enter_context(Victim(mount / library.name)) for mount in mounts]
        assert victims[0].nccl().identity == victims[1].nccl().identity
        tracer = open_tracer()
        stack.callback(tracer.close)
        attach(tracer, victims[0])
        for victim in victims:
            victim.do("for count in range(7, 18): me.call('ncclAllReduce', count=count)")
            assert len(take_all(tracer, victim).runs) == 11


def test_a_library_is_known_before_a_process_uses_it(victim: Victim, library: Path) -> None:
    assert identify(str(library), read_image(str(library), ()).build_id) == victim.nccl().identity


def test_a_library_that_cannot_be_read_for_once_is_read_the_next_time(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, names: tuple[str, ...]) -> object:
        raise Unreadable(f"{path} cannot be read: Too many open files") from OSError(24, "Too many open files")

    finder = LibraryFinder()
    with monkeypatch.context() as patch:
        patch.setattr(libraries, "read_image", fail)
        assert finder.find([victim.pid]) == {victim.pid: []}
    assert "open files" in finder.limits[0].why
    assert {each.kind for each in finder.find([victim.pid])[victim.pid]} == {"nccl", "cudart"}
    assert finder.limits == []


def test_a_library_that_goes_while_it_is_read_is_no_library() -> None:
    with pytest.raises(Unreadable):
        read_image(f"/proc/{NO_PROCESS}/root/libnccl.so.2", ())
