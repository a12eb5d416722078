"""Where functions lie in a library, and what a probe at their first instruction costs.

The kernel replaces that instruction by a breakpoint. Some instructions it then emulates; any other it has to execute
out of line in single steps, which takes another exception and makes a hit about twenty times dearer.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from agents.ebpf.records import Rows

_FIRST_BYTES = 16
_SYMBOL_DTYPE = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("address", "<u8"), ("size", "<u8")]
)  # Elf64_Sym
_FUNCTION = 2  # STT_FUNC


class NotALibrary(Exception):
    """A file that cannot be read as ELF; the message says why."""


class Unreadable(NotALibrary):
    """A file that could not be read, which says nothing of what is in it: later, or on another way, it may be."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function in a file."""

    name: str
    offset: int  # in the file, of its first instruction
    first: bytes  # its first bytes
    machine: str  # as ELF names it: x64, AArch64

    @property
    def is_cheap(self) -> bool | None:
        """Whether the kernel emulates its first instruction; None where that is not known."""
        return _is_emulated(self.first) if self.machine == "x64" else None


@dataclass(frozen=True, slots=True)
class Image:
    """What was asked about one file."""

    symbols: dict[str, Symbol]
    build_id: str | None


def read_image(path: str, names: Collection[str]) -> Image:
    """Look functions up by their names in a file's tables of symbols. Raises NotALibrary, or its kind Unreadable."""
    try:
        with open(path, "rb") as file:
            elf = ELFFile(file)
            if not elf.num_sections():
                raise NotALibrary(f"{path} has no table of sections")
            return Image(_find(elf, file, names), _build_id(elf))
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error}") from error
    except (ELFError, ValueError) as error:
        raise NotALibrary(f"{path} cannot be read: {error}") from error


def _find(elf: ELFFile, file: IO[bytes], names: Collection[str]) -> dict[str, Symbol]:
    machine = str(elf.get_machine_arch())
    found: dict[str, Symbol] = {}
    for section in elf.iter_sections():
        if not isinstance(section, SymbolTableSection):
            continue
        table = np.frombuffer(section.data(), _SYMBOL_DTYPE)
        table = table[((table["info"] & 0xF) == _FUNCTION) & (table["section"] != 0)]
        strings = elf.get_section(section["sh_link"]).data()
        for name in names:
            if name not in found and (address := _address(table, strings, name)) is not None:
                offset = _to_offset(elf, address)
                if offset is not None:
                    file.seek(offset)
                    found[name] = Symbol(name, offset, file.read(_FIRST_BYTES), machine)
    return found


def _address(table: Rows, strings: bytes, name: str) -> int | None:
    """Return a function's address; a name may share its end with a longer one, so each place it ends at is tried."""
    wanted = name.encode() + b"\0"
    for place in _places(strings, wanted):
        rows = np.flatnonzero(table["name"] == place)
        if len(rows):
            return int(table["address"][rows[0]])
    return None


def _places(strings: bytes, wanted: bytes) -> Iterator[int]:
    place = strings.find(wanted)
    while place >= 0:
        yield place
        place = strings.find(wanted, place + 1)


def _to_offset(elf: ELFFile, address: int) -> int | None:
    for segment in elf.iter_segments("PT_LOAD"):
        if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
            return int(address - segment["p_vaddr"] + segment["p_offset"])
    return None


def _build_id(elf: ELFFile) -> str | None:
    section = elf.get_section_by_name(".note.gnu.build-id")
    if not isinstance(section, NoteSection):
        return None
    return next((str(note["n_desc"]) for note in section.iter_notes() if note["n_type"] == "NT_GNU_BUILD_ID"), None)


def _is_emulated(first: bytes) -> bool:
    """Whether the kernel's arch/x86/kernel/uprobes.c emulates an instruction: pushes, nops, near jumps and calls."""
    rest = first.lstrip(b"\x66") if first[:1] == b"\x66" else first
    is_push = 0x50 <= first[0] <= 0x57 or (first[0] == 0x41 and 0x50 <= first[1] <= 0x57)
    is_nop = rest[0] == 0x90 or rest[:2] == b"\x0f\x1f"
    is_branch = first[0] in {0xE8, 0xE9, 0xEB} or 0x70 <= first[0] <= 0x7F
    return is_push or is_nop or is_branch
