"""The Unix datagram socket on which training processes may say where they are.

The kernel tells the sender's process and the instant of sending. It keeps only about ten datagrams and then makes a
sender wait, so a thread takes them at once and never lets a training process wait for the agent's interval.
"""

import contextlib
import socket
import stat
import struct
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from agents.collector import NotAvailable
from agents.processes import read_parent

DATAGRAM_BYTES_MAX = 4096
MESSAGES_MAX = 20_000  # that wait to be collected
MESSAGES_PER_S_MAX = 5000
ANCESTORS_MAX = 8

_SO_TIMESTAMPNS = 35  # of asm-generic/socket.h; the socket module has no name for it
_CREDENTIALS = struct.Struct("3i")
_TIMESPEC = struct.Struct("qq")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_TIMESPEC.size)


@dataclass(frozen=True, slots=True)
class Message:
    """One datagram, with the sender's process and its ancestors, the nearest first."""

    text: bytes
    arrival_ns: int  # since the epoch
    pids: tuple[int, ...]


@dataclass(slots=True)
class MarkerSocket:
    """Receives datagrams; receive() runs in a thread of its own, take() wherever one likes."""

    path: Path
    n_dropped: int = 0  # for lack of room
    own_pids: Collection[int] = ()  # of rank processes, whose ancestors nobody needs
    _socket: socket.socket | None = None
    _inode: int = 0
    _messages: deque[Message] = field(default_factory=lambda: deque(maxlen=MESSAGES_MAX))

    def open(self) -> None:
        """Listen. Raises NotAvailable."""
        try:
            self._make_way()
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                listening.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                listening.bind(str(self.path))
                self.path.chmod(0o666)  # training processes are not root
                self._inode = self.path.stat().st_ino
            except BaseException:
                listening.close()
                raise
        except OSError as error:
            raise NotAvailable(
                f"no socket for markers at {self.path}: {error.strerror or error}",
                "set another path as socket in [agent.markers], or an empty one to go without",
            ) from error
        self._socket = listening

    def fileno(self) -> int:
        """Return what to wait for."""
        return -1 if self._socket is None else self._socket.fileno()

    def receive(self, n_messages_max: int) -> int:
        """Take what has come; returns how many messages that were."""
        n_messages = 0
        while self._socket is not None and n_messages < n_messages_max:
            try:
                text, ancillary, _, _ = self._socket.recvmsg(DATAGRAM_BYTES_MAX, _ANCILLARY_BYTES)
            except OSError:
                break
            n_messages += 1
            pid, arrival_ns = _read_ancillary(ancillary)
            if len(self._messages) == MESSAGES_MAX:
                self.n_dropped += 1
            self._messages.append(Message(text, arrival_ns, self._ancestry(pid)))
        return n_messages

    def take(self) -> list[Message]:
        """Return what was received since the last time."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._messages.popleft())
        return taken

    def close(self) -> None:
        """Stop, and remove the socket unless somebody has put another in its place."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _make_way(self) -> None:
        """Remove the socket of an agent that was killed."""
        try:
            mode = self.path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if not stat.S_ISSOCK(mode):
            raise FileExistsError(0, "there is a file that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            try:
                other.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
        raise FileExistsError(0, "another agent listens there")

    def _ancestry(self, pid: int) -> tuple[int, ...]:
        pids: list[int] = []
        while pid > 1 and len(pids) < ANCESTORS_MAX:
            pids.append(pid)
            if pid in self.own_pids:
                break
            pid = read_parent(pid) or 0
        return tuple(pids)


def _read_ancillary(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Return the sender's pid, 0 if it is in another PID namespace, and the time of sending."""
    pid, sent_ns = 0, 0
    for level, kind, content in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS and len(content) >= _CREDENTIALS.size:
            pid = _CREDENTIALS.unpack_from(content)[0]
        elif kind == _SO_TIMESTAMPNS and len(content) >= _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack_from(content)
            sent_ns = seconds * 1_000_000_000 + nanoseconds
    return pid, sent_ns
