"""The kernel's own list of TCP connections (sock_diag over netlink), in the network namespace of any process.

Written out here because a general netlink library takes ten times as long for each connection, and an agent reads all
of them every second.
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO, whose bit asks for it and whose number marks it
_ESTABLISHED, _CLOSE_WAIT = 1 << 1, 1 << 8
_CLONE_NEWNET = 0x40000000

_REQUEST = struct.Struct("=IHHII BBBxI 48x")
_HEADER = struct.Struct("=IHHII")
_REPLY_BYTES = 72  # struct inet_diag_msg
_ADDRESS_AT, _COOKIE_AT, _INODE_AT = 24, 44, 68
_INODE, _COOKIE = struct.Struct("=I"), struct.Struct("=Q")
_ATTRIBUTE = struct.Struct("=HH")
# struct tcp_info of linux/tcp.h: smoothed round trip and retransmissions, then what Linux 4.10 added.
_OLD_INFO, _INFO_SINCE_4_10 = struct.Struct("=68xI28xI"), struct.Struct("=68xI28xI56xQQQQ")
_MAPPED = bytes(10) + b"\xff\xff"  # makes an IPv6 address of an IPv4 one (RFC 4291)
_TIMEOUT_S: Final = 0.5  # replies are made while they are asked for: this is for a kernel that makes none
NAN = float("nan")

_libc = ctypes.CDLL(None, use_errno=True)


class Connection(NamedTuple):
    """One TCP connection. Totals are since it was made; what an old kernel does not count is NaN."""

    inode: int  # of its socket, as /proc/PID/fd names it
    cookie: int  # the same for its whole life, and of no other
    peer: bytes  # IPv6 address, 16 bytes; IPv4 is mapped
    round_trip_s: float
    retransmits: float
    delivery_bytes_per_s: float
    busy_s: float
    window_limited_s: float
    buffer_limited_s: float


class SocketDiag:
    """Lists the connections of one network namespace, which it keeps alive until it is closed."""

    def __init__(self, namespace: Path) -> None:
        """Enter the namespace, such as /proc/PID/ns/net, with a thread that ends at once. Raises OSError."""
        self._socket = _socket_in(namespace)
        self._socket.settimeout(_TIMEOUT_S)
        self._buffer = bytearray(1 << 17)
        self._n_requests = 0

    def close(self) -> None:
        """Let the namespace go."""
        self._socket.close()

    def read(self, wanted: Container[int]) -> tuple[set[int], list[Connection]]:
        """Return the inodes of all connected sockets, and the connections whose inodes are `wanted`.

        Raises OSError; ENOENT where the kernel has no tcp_diag.
        """
        inodes: set[int] = set()
        found: list[Connection] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for reply in self._dump(family):
                inode = _INODE.unpack_from(reply, _INODE_AT)[0]
                inodes.add(inode)
                if inode in wanted:
                    found.append(_connection(reply, family, inode))
        return inodes, found

    def _dump(self, family: int) -> Iterator[memoryview]:
        """Yield the replies, each valid until the next is asked for."""
        self._n_requests += 1
        request = (family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED | _CLOSE_WAIT)
        self._socket.send(
            _REQUEST.pack(_REQUEST.size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, self._n_requests, 0, *request)
        )
        view = memoryview(self._buffer)
        while True:
            end = self._socket.recv_into(view)
            at = 0
            while at + _HEADER.size <= end:
                length, kind, _, number, _ = _HEADER.unpack_from(view, at)
                if number == self._n_requests:  # else of a request that was given up
                    if kind == _DONE:
                        return
                    if kind == _ERROR:
                        error = -struct.unpack_from("=i", view, at + _HEADER.size)[0]
                        raise OSError(error, os.strerror(error))
                    yield view[at + _HEADER.size : at + length]
                at += (length + 3) & ~3


def _connection(reply: memoryview, family: int, inode: int) -> Connection:
    address = bytes(reply[_ADDRESS_AT : _ADDRESS_AT + 16])
    peer = _MAPPED + address[:4] if family == socket.AF_INET else address
    round_trip_s = retransmits = delivery = busy_s = window_s = buffer_s = NAN
    at = _REPLY_BYTES
    while at + _ATTRIBUTE.size <= len(reply):
        length, kind = _ATTRIBUTE.unpack_from(reply, at)
        info = at + _ATTRIBUTE.size
        if kind == _INFO and at + length >= info + _INFO_SINCE_4_10.size:
            trip, again, rate, busy, window, buffer = _INFO_SINCE_4_10.unpack_from(reply, info)
            round_trip_s, retransmits = trip / 1e6, float(again)
            delivery = float(rate) or NAN  # 0 is "no estimate yet"
            busy_s, window_s, buffer_s = busy / 1e6, window / 1e6, buffer / 1e6
        elif kind == _INFO and at + length >= info + _OLD_INFO.size:
            trip, again = _OLD_INFO.unpack_from(reply, info)
            round_trip_s, retransmits = trip / 1e6, float(again)
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    cookie = _COOKIE.unpack_from(reply, _COOKIE_AT)[0]
    return Connection(inode, cookie, peer, round_trip_s, retransmits, delivery, busy_s, window_s, buffer_s)


def _socket_in(namespace: Path) -> socket.socket:
    if namespace.stat().st_ino == Path("/proc/self/ns/net").stat().st_ino:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)  # needs no CAP_SYS_ADMIN
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(fd, _CLONE_NEWNET) != 0:
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error), str(namespace))
            finally:
                os.close(fd)
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="enter-network-namespace")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
