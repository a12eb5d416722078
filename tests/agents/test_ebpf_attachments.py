"""A library whose probes could not be placed is tried again: by way of another process at once, the same way later."""

import errno
import os
import time
from collections.abc import Sequence
from typing import cast

import pytest

from agents.ebpf import attachments as module
from agents.ebpf.attachments import RETRY_S, Attachments
from agents.ebpf.backend import Backend
from agents.ebpf.libraries import Identity, Library
from agents.ebpf.probes import Prober
from agents.ebpf.symbols import Image, Symbol, Unreadable

IDENTITY = Identity(7, 11, 13, "ab", 17)


def by_way_of(pid: int) -> Library:
    return Library(f"/proc/{pid}/root/libnccl.so.2", IDENTITY, "nccl", name="/libnccl.so.2")


class Programs:
    """A backend that has every program."""

    def program_fd(self, name: str) -> int:
        return 3


class Kernel(Prober):
    """One that takes no probes on some ways; what it gives out are numbers that mean nothing."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.refuses_entries = False
        self.asked: list[str] = []

    def attach(self, program_fd: int, path: str, offsets: Sequence[int], *, is_return: bool, pid: int = 0) -> list[int]:
        self.asked.append(path)
        if self.refuses_entries and not is_return:
            raise OSError(errno.EMFILE, "Too many open files")
        if path in self.errors:
            raise OSError(self.errors[path], "no")
        return [-len(self.asked)]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    def read(path: str, names: Sequence[str]) -> Image:
        return Image({name: Symbol(name, 64, b"\x55" * 16, "x64") for name in names}, "ab")

    monkeypatch.setattr(module, "read_image", read)
    monkeypatch.setattr(module, "close_all", lambda _: None)
    return Kernel()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [101.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def attachments(kernel: Kernel) -> Attachments:
    return Attachments(cast("Backend", Programs()), kernel, has_returns=True, count_launches=False, probe_dear=False)


def test_what_failed_by_way_of_one_process_is_tried_by_way_of_the_next(
    attachments: Attachments, kernel: Kernel
) -> None:
    gone, alive = by_way_of(2**22 + 1), by_way_of(2**22 + 3)
    kernel.errors = {gone.path: errno.ENOENT}
    assert attachments.attach(gone) == []
    assert not attachments.is_attached(alive)
    assert attachments.limits() == [], "a process that has ended is no limit"
    assert attachments.attach(alive) == []
    assert attachments.is_attached(gone)
    n = len(kernel.asked)
    assert attachments.attach(gone) == attachments.attach(alive) == []
    assert len(kernel.asked) == n


def test_the_same_way_is_tried_again_after_a_while(
    attachments: Attachments, kernel: Kernel, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    library = by_way_of(7)
    kernel.errors = {library.path: errno.EMFILE}
    assert "cannot be probed" in attachments.attach(library)[0].why
    assert attachments.limits()
    n = len(kernel.asked)
    kernel.errors = {}
    clock[0] += RETRY_S / 2
    attachments.attach(library)
    assert len(kernel.asked) == n
    clock[0] += RETRY_S / 2
    assert attachments.attach(library) == attachments.limits() == []
    assert attachments.is_attached(library)


def test_a_file_that_cannot_be_read_now_is_tried_again(
    attachments: Attachments, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, names: Sequence[str]) -> Image:
        raise Unreadable(f"{path} cannot be read: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_image", fail)
        attachments.attach(by_way_of(7))
    assert not attachments.is_attached(by_way_of(7))
    clock[0] += RETRY_S
    attachments.attach(by_way_of(7))
    assert attachments.is_attached(by_way_of(7))


def test_returns_without_entries_are_no_success(attachments: Attachments, kernel: Kernel) -> None:
    kernel.refuses_entries = True
    attachments.attach(by_way_of(7))
    assert not attachments.is_attached(by_way_of(7))
    kernel.refuses_entries = False
    attachments.attach(by_way_of(11))
    assert attachments.is_attached(by_way_of(11))


def test_what_is_detached_may_be_attached_again_at_once(attachments: Attachments, kernel: Kernel) -> None:
    library = by_way_of(7)
    kernel.errors = {library.path: errno.EIO}
    attachments.attach(library)
    kernel.errors = {}
    attachments.detach(library)
    attachments.attach(library)
    assert attachments.is_attached(library)
    attachments.detach(library)
    assert not attachments.is_attached(library)
