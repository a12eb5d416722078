"""Communicators are called as NCCL calls them. The expected numbers come from NCCL's own functions, compiled."""

from pathlib import Path

import pytest

from agents.nccl_hash import (
    child_hash,
    grown_hash,
    grown_magic,
    library_version,
    old_child_hash,
    old_unique_id_hash,
    unique_id_hash,
    unique_id_magic,
)

UNIQUE_ID = bytes((place * 37 + 101) % 256 for place in range(128))
WORLD = 0xC34408BA29FAF0BC


def test_a_communicator_made_from_a_unique_id_has_the_hash_that_nccl_gives_it() -> None:
    assert unique_id_hash(UNIQUE_ID) == WORLD


@pytest.mark.parametrize(
    ("count", "color", "expected"),
    [(1, 0, 0x2F5D5315B6678A28), (3, 29, 0xCEDBB051FE25F8D0), (0, 0, 0xBAAD231B28518357)],
)
def test_a_child_is_named_after_its_parent_the_count_of_children_and_its_color(
    count: int, color: int, expected: int
) -> None:
    assert child_hash(WORLD, count, color) == expected


def test_a_grown_communicator_is_named_after_its_magic_and_its_size() -> None:
    assert unique_id_magic(UNIQUE_ID) == 0x68431EF9D4AF8A65
    magic = grown_magic(unique_id_magic(UNIQUE_ID), 2)
    assert magic == 0x0EDF274535F670A8
    assert grown_hash(magic, 23) == 0xDAC608936ECE4A08


def test_a_library_before_2_26_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.nccl_hash._SIGN_EXTENSION", 0xFFFFFFFFFFFFFF00)  # as on x86-64
    assert old_unique_id_hash(UNIQUE_ID) == 0xCC84E569F3135D85
    assert old_child_hash(0xCC84E569F3135D85, 7) == 0x3E2D85A25C8D2167


@pytest.mark.parametrize("n_bytes", [0, 127, 129])
def test_a_unique_id_of_another_length_is_refused(n_bytes: int) -> None:
    with pytest.raises(ValueError, match="128 bytes"):
        unique_id_hash(bytes(n_bytes))


def test_a_library_says_its_version_itself(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(bytes(4099) + b"\0NCCL version 2.25.1+cuda12.2\0" + bytes(97))
    assert library_version(str(library)) == (2, 25, 1)


@pytest.mark.parametrize("content", [b"", b"no version", b"NCCL version 2.x"])
def test_a_library_that_does_not_say_its_version_has_none(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(content)
    assert library_version(str(library)) is None
    assert library_version(str(tmp_path / "missing")) is None
