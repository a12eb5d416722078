"""Writes the smallest file that the system's loader takes for a library: code, names for it, and nothing else."""

import struct
from collections.abc import Mapping

_PAGE = 0x10000  # the largest that processors of either kind use
_HEADER, _SEGMENT, _SECTION, _SYMBOL = 64, 56, 64, 24
_N_SEGMENTS = 4
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READ_EXECUTE, _READ_WRITE = 5, 6
_GLOBAL_FUNCTION = 0x12
_SECTION_NAMES = b"\0.dynsym\0.dynstr\0.text\0.shstrtab\0"


def shared_object(machine: int, text: bytes, functions: Mapping[str, int]) -> bytes:
    """Return an ELF file whose functions are at these offsets in the text."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in functions)
    n_symbols = len(functions) + 1
    # One bucket: every name is looked for in the whole chain, as long as that is.
    chain = [*range(2, n_symbols), 0] if functions else []
    hashes = struct.pack(f"<{4 + len(chain)}I", 1, n_symbols, min(1, len(functions)), 0, *chain)
    at_hashes = _HEADER + _N_SEGMENTS * _SEGMENT
    at_symbols = _aligned(at_hashes + len(hashes))
    at_names = at_symbols + n_symbols * _SYMBOL
    at_text = _aligned(at_names + len(names))
    at_dynamic = _aligned(at_text + len(text))
    dynamic = _dynamic(at_hashes, at_symbols, at_names, len(names))
    at_section_names = at_dynamic + len(dynamic)
    at_sections = _aligned(at_section_names + len(_SECTION_NAMES))
    symbols = bytes(_SYMBOL) + b"".join(
        struct.pack("<IBBHQQ", names.index(b"\0" + name.encode() + b"\0") + 1, _GLOBAL_FUNCTION, 0, 3, at_text + at, 1)
        for name, at in functions.items()
    )
    segments = [
        _segment(_LOAD, _READ_EXECUTE, 0, at_dynamic, shift=0),
        # The loader writes addresses into it.
        _segment(_LOAD, _READ_WRITE, at_dynamic, len(dynamic), shift=_PAGE),
        _segment(_DYNAMIC, _READ_WRITE, at_dynamic, len(dynamic), shift=_PAGE),
        _segment(_STACK, _READ_WRITE, 0, 0, shift=0),
    ]
    sections = [
        bytes(_SECTION),
        _section(".dynsym", 11, 2, at_symbols, len(symbols), link=2, entry=_SYMBOL),
        _section(".dynstr", 3, 2, at_names, len(names)),
        _section(".text", 1, 6, at_text, len(text)),
        _section(".shstrtab", 3, 0, at_section_names, len(_SECTION_NAMES)),
    ]
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, _HEADER, at_sections, 0,
        _HEADER, _SEGMENT, len(segments), _SECTION, len(sections), 4,
    )  # fmt: skip
    image = bytearray(at_sections)
    for at, piece in (
        (0, header + b"".join(segments)),
        (at_hashes, hashes),
        (at_symbols, symbols),
        (at_names, names),
        (at_text, text),
        (at_dynamic, dynamic),
        (at_section_names, _SECTION_NAMES),
    ):
        image[at : at + len(piece)] = piece
    return bytes(image) + b"".join(sections)


def _aligned(at: int) -> int:
    return at + -at % 16


def _segment(kind: int, flags: int, at: int, size: int, *, shift: int) -> bytes:
    align = 16 if kind != _LOAD else _PAGE
    address = at + shift if size else 0
    return struct.pack("<IIQQQQQQ", kind, flags, at, address, address, size, size, align)


def _section(name: str, kind: int, flags: int, at: int, size: int, *, link: int = 0, entry: int = 0) -> bytes:
    place = _SECTION_NAMES.index(b"\0" + name.encode() + b"\0") + 1
    address = at if flags else 0
    return struct.pack("<IIQQQQIIQQ", place, kind, flags, address, at, size, link, 1 if entry else 0, 16, entry)


def _dynamic(at_hashes: int, at_symbols: int, at_names: int, n_names: int) -> bytes:
    entries = ((4, at_hashes), (5, at_names), (6, at_symbols), (10, n_names), (11, _SYMBOL), (0, 0))
    return b"".join(struct.pack("<QQ", tag, value) for tag, value in entries)
