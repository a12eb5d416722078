"""Functions are found in files by their names, and their first instructions judged as the kernel would."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agents.ebpf.symbols import NotALibrary, Symbol, read_image
from tests.agents.probed import build_library
from tests.conftest import give_up


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("probed"))


def tool(name: str) -> str:
    return shutil.which(name) or give_up(f"no {name}: install Debian's binutils")


def test_offsets_are_those_that_binutils_finds(library: Path) -> None:
    lines = subprocess.run([tool("nm"), "-D", library], check=True, capture_output=True, text=True).stdout.splitlines()
    addresses = {
        fields[2]: int(fields[0], 16) for line in lines if len(fields := line.split()) == 3 and fields[1] == "T"
    }
    assert len(addresses) > 20
    image = read_image(str(library), list(addresses))
    # In what our compiler makes, code lies in the file where it lies in memory.
    assert {name: symbol.offset for name, symbol in image.symbols.items()} == addresses
    content = library.read_bytes()
    assert all(content[s.offset : s.offset + 16] == s.first for s in image.symbols.values())


def test_the_build_id_is_that_of_the_file(library: Path) -> None:
    notes = subprocess.run([tool("readelf"), "-n", library], check=True, capture_output=True, text=True).stdout
    build_id = read_image(str(library), []).build_id
    assert build_id
    assert build_id in notes


def test_names_that_are_not_there_are_not_found(library: Path) -> None:
    names = ["AllReduce", "ncclAllReduc", "ncclAllReduce2", "", "probed_delay_ns", "nanosleep", "ncclAllReduce"]
    assert list(read_image(str(library), names).symbols) == ["ncclAllReduce"]


def test_a_name_is_found_that_the_linker_keeps_only_as_the_end_of_another(tmp_path: Path) -> None:
    source = tmp_path / "names.c"
    source.write_text("int pncclSend(void) { return 1; }\nint ncclSend(void) { return 2; }\n")
    built = tmp_path / "names.so"
    subprocess.run([tool("cc"), "-shared", "-fPIC", "-Wl,-O2", "-o", built, source], check=True)
    names = read_image(str(built), ["ncclSend", "pncclSend"]).symbols
    assert names["ncclSend"].offset != names["pncclSend"].offset


def test_functions_of_a_static_executable_are_found_until_it_is_stripped(tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text(
        "__attribute__((noinline)) int ncclSend(int n) { return n * 3; }\nint main(int n) { return ncclSend(n); }\n"
    )
    built = tmp_path / "program"
    subprocess.run([tool("cc"), "-static", "-o", built, source], check=True)
    (symbol,) = read_image(str(built), ["ncclSend"]).symbols.values()
    assert built.read_bytes()[symbol.offset : symbol.offset + 16] == symbol.first
    subprocess.run([tool("strip"), built], check=True)
    assert not read_image(str(built), ["ncclSend"]).symbols


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF", b"\x7fELF\x02\x01\x01" + bytes(100)])
def test_what_is_no_library_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(content)
    with pytest.raises(NotALibrary, match="libnccl"):
        read_image(str(path), ["ncclSend"])
    with pytest.raises(NotALibrary, match="missing"):
        read_image(str(tmp_path / "missing"), ["ncclSend"])


def test_a_library_that_was_cut_off_is_refused(library: Path, tmp_path: Path) -> None:
    content = library.read_bytes()
    for n in range(16, len(content), max(1, len(content) // 41)):
        cut = tmp_path / "cut.so"
        cut.write_bytes(content[:n])
        with pytest.raises(NotALibrary):
            read_image(str(cut), ["ncclSend"])


@pytest.mark.parametrize(
    ("first", "is_cheap"),
    [
        ("55", True),  # push %rbp
        ("41 57", True),  # push %r15
        ("90", True),  # nop
        ("66 90", True),
        ("0f 1f 44 00 00", True),  # nop, of five bytes
        ("e9 00 00 00 00", True),  # jmp
        ("f3 0f 1e fa", False),  # endbr64
        ("48 83 ec 08", False),  # sub $8,%rsp
        ("48 89 5c 24 08", False),  # mov
        ("48 b8", False),  # movabs
        ("41 89 c0", False),  # mov, with the same prefix as push %r15
        ("53", True),  # push %rbx
        ("31 c0", False),  # xor
    ],
)
def test_first_instructions_are_cheap_if_the_kernel_emulates_them(first: str, *, is_cheap: bool) -> None:
    content = bytes.fromhex(first).ljust(16, b"\xcc")
    assert Symbol("ncclSend", 0, content, "x64").is_cheap is is_cheap
    assert Symbol("ncclSend", 0, content, "AArch64").is_cheap is None


def test_nothing_is_left_open(library: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read_image(str(library), ["ncclSend"])
    assert len(os.listdir("/proc/self/fd")) == before
