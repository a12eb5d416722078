"""Where the fields of the running kernel's structures and trace records lie: from its BTF, and from tracefs."""

import re
import struct
from pathlib import Path

BTF = Path("/sys/kernel/btf/vmlinux")
TRACEFS = Path("/sys/kernel/tracing")

_MAGIC, _HEADER_BYTES = 0xEB9F, 24
_STRUCT = 4
# Bytes that follow the twelve of a type: a fixed number, and some for each of its members (linux/btf.h).
_FIXED = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_FIELD = re.compile(r"field:[^;]*?(\w+)(?:\[\w*\])?;\s*offset:(\d+);")


def member_offset(name: str, member: str, btf: bytes) -> int | None:
    """Return where a member of a struct begins, in bytes; None where the type information does not say.

    `btf` is the content of /sys/kernel/btf/vmlinux; members inside unnamed structs and bit fields are not found.
    """
    if len(btf) < _HEADER_BYTES:
        return None
    magic, _, _, header, types_at, types_size, names_at, _ = struct.unpack_from("<HBBIIIII", btf)
    names_at += header
    wanted = btf.find(b"\0" + name.encode() + b"\0", names_at) + 1 - names_at
    if magic != _MAGIC or wanted < 0:
        return None
    at = header + types_at
    end = at + types_size
    fields = struct.Struct("<III").unpack_from
    while at < end:
        name_at, info, _ = fields(btf, at)
        kind, n_members, at = info >> 24 & 0x1F, info & 0xFFFF, at + 12
        if kind == _STRUCT and name_at == wanted:
            text = member.encode() + b"\0"
            for place in range(at, at + 12 * n_members, 12):
                member_at, _, bits = fields(btf, place)
                if btf.startswith(text, names_at + member_at):
                    return int(bits & 0xFFFFFF if info >> 31 else bits) // 8
            return None
        at += _FIXED.get(kind, 0) + _EACH.get(kind, 0) * n_members
    return None


def record_offsets(group: str, event: str, tracefs: Path = TRACEFS) -> dict[str, int]:
    """Return where the fields of a tracepoint's record lie, by name; empty where this kernel has no such tracepoint."""
    try:
        text = (tracefs / "events" / group / event / "format").read_text()
    except OSError:
        return {}
    return {name: int(offset) for name, offset in _FIELD.findall(text)}
