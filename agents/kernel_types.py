"""Where the fields of the running kernel's structures and trace records lie: from its BTF, and from tracefs."""

import re
import struct
from pathlib import Path
from typing import NamedTuple

BTF = Path("/sys/kernel/btf/vmlinux")
TRACEFS = Path("/sys/kernel/tracing")

STRUCT, TYPEDEF = 4, 8  # kinds of types

_MAGIC = 0xEB9F
_HEADER, _WORDS = struct.Struct("<HBBIIIII"), struct.Struct("<III")
# Bytes that follow the twelve of a type: a fixed number, and some for each of its members (linux/btf.h).
_FIXED = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_FIELD = re.compile(r"field:[^;]*?(\w+)(?:\[\w*\])?;\s*offset:(\d+);")


class Type(NamedTuple):
    """One type of the kernel, by its number, and where its members are told of."""

    number: int
    members_at: int
    n_members: int
    has_bit_fields: bool


def find_type(name: str, kind: int, btf: bytes) -> Type | None:
    """Return the first type of a kind with a name; None where the type information has none.

    `btf` is the content of /sys/kernel/btf/vmlinux.
    """
    if len(btf) < _HEADER.size:
        return None
    magic, _, _, header, types_at, types_size, names_at, _ = _HEADER.unpack_from(btf)
    names_at += header
    wanted = btf.find(b"\0" + name.encode() + b"\0", names_at) + 1 - names_at
    if magic != _MAGIC or wanted < 0:
        return None
    at = header + types_at
    end = at + types_size
    number = 0  # of void, which is not told of
    while at < end:
        name_at, info, _ = _WORDS.unpack_from(btf, at)
        its_kind, n_members, at, number = info >> 24 & 0x1F, info & 0xFFFF, at + _WORDS.size, number + 1
        if its_kind == kind and name_at == wanted:
            return Type(number, at, n_members, bool(info >> 31))
        at += _FIXED.get(its_kind, 0) + _EACH.get(its_kind, 0) * n_members
    return None


def member_offset(name: str, member: str, btf: bytes) -> int | None:
    """Return where a member of a struct begins, in bytes; None where the type information does not say.

    Members inside unnamed structs are not found.
    """
    found = find_type(name, STRUCT, btf)
    if found is None:
        return None
    _, _, _, header, _, _, names_at, _ = _HEADER.unpack_from(btf)
    text = member.encode() + b"\0"
    for place in range(found.members_at, found.members_at + _WORDS.size * found.n_members, _WORDS.size):
        name_at, _, bits = _WORDS.unpack_from(btf, place)
        if btf.startswith(text, header + names_at + name_at):
            return int(bits & 0xFFFFFF if found.has_bit_fields else bits) // 8
    return None


def record_offsets(group: str, event: str, tracefs: Path = TRACEFS) -> dict[str, int]:
    """Return where the fields of a tracepoint's record lie, by name; empty where this kernel has no such tracepoint."""
    try:
        text = (tracefs / "events" / group / event / "format").read_text()
    except OSError:
        return {}
    return {name: int(offset) for name, offset in _FIELD.findall(text)}
