"""NCCL's name for a communicator: the 64-bit hash in its logs, its RAS answers and the Inspector's `id`.

Every member computes it from what all members have alike, so agents on all nodes get the same number without talking to
each other. Source: NVIDIA/nccl, src/include/bitops.h (eatHash, digestHash, getHash), src/init.cc
(ncclCommInitRankFunc: of a unique id, of a split or shrunk child, of a grown communicator), src/misc/utils.cc
(hashCombine).

It is computed so since NCCL 2.26. Libraries up to 2.25 used DJB2a, and a child's name did not say which split made it
(seen in the wheels of 2.23.4, 2.24.3, 2.25.1 and 2.26.2); they have RAS since 2.24, but no Inspector.
"""

import mmap
import platform
import re

UNIQUE_ID_BYTES = 128
NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR: takes part in a split, gets no communicator

_MASK = (1 << 64) - 1
_WORD = 8
# The old hash takes bytes as char, which has a sign on x86-64 and none on aarch64.
_SIGN_EXTENSION = _MASK & ~0xFF if platform.machine() in {"x86_64", "AMD64"} else 0
_VERSION_MARK = b"NCCL version 2."
_VERSION = re.compile(rb"NCCL version (\d+)\.(\d+)\.(\d+)")
_VERSION_BYTES_MAX = 64 << 20  # constants come before the GPU code that makes the library large
NEW_HASH_SINCE = (2, 26, 0)


def unique_id_hash(unique_id: bytes) -> int:
    """Return the hash of a communicator made from an ncclUniqueId; of several ids (scalable init) the first counts."""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(f"an ncclUniqueId has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
    return _hash(unique_id)


def child_hash(parent: int, child_count: int, color: int) -> int:
    """Return the hash of a child: of the `child_count`-th split of its parent, from 1; a shrunk one has 0 and 0."""
    return _hash(_unsigned(parent, 8), _unsigned(child_count, 4), _unsigned(color, 4))


def unique_id_magic(unique_id: bytes) -> int:
    """Return the number by which members of a communicator made from this id recognise each other."""
    return int.from_bytes(unique_id[:_WORD], "little")


def grown_magic(parent_magic: int, child_count: int) -> int:
    """Return the magic of a communicator that is its parent's `child_count`-th child, from 1, and larger than it."""
    return _hash(_unsigned(parent_magic, 8), _unsigned(child_count, 8))


def grown_hash(magic: int, n_ranks: int) -> int:
    """Return the hash of a grown communicator of n_ranks members."""
    return _hash(_unsigned(magic, 8), _unsigned(n_ranks, 8))


def _unsigned(value: int, size: int) -> bytes:
    return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _hash(*parts: bytes) -> int:
    """Return the digest of parts; where one ends and the next begins makes a difference."""
    low, high = 1, 1
    for part in parts:
        low ^= len(part)
        for start in range(0, len(part), _WORD):
            low = (low + high) & _MASK
            high ^= low
            low ^= low >> 31
            low = (low * 0x9DE62BBC8CEF3CE3) & _MASK
            high ^= high >> 32
            high = (high * 0x485CD6311B599E79) & _MASK
            low = (low + int.from_bytes(part[start : start + _WORD], "little")) & _MASK
    digest = low ^ (low >> 31)
    digest = (digest * 0xBAC3BD562846DE6B + high) & _MASK
    digest ^= digest >> 32
    return (digest * 0x995A187A14E7B445) & _MASK


def old_unique_id_hash(unique_id: bytes) -> int:
    """Return what libraries before 2.26 call a communicator made from an ncclUniqueId."""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(f"an ncclUniqueId has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
    result = 5381
    for byte in unique_id:
        result = (result * 33 & _MASK) ^ (byte | _SIGN_EXTENSION if byte > 127 else byte)
    return result


def old_child_hash(parent: int, color: int) -> int:
    """Return what libraries before 2.26 call a child; alike for all splits of one parent by the same color."""
    return old_unique_id_hash(f"{parent:016x}-{color}".encode().ljust(UNIQUE_ID_BYTES, b"\0"))


def library_version(path: str) -> tuple[int, int, int] | None:
    """Return the NCCL version that a library says of itself; None where it cannot be read or does not say."""
    try:
        with open(path, "rb") as library, mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ) as text:
            start = text.find(_VERSION_MARK, 0, _VERSION_BYTES_MAX)
            found = None if start < 0 else _VERSION.match(text[start : start + 64])
    except (OSError, ValueError):
        return None
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))
