"""Runs a program under an allow-list of system calls, as systemd's SystemCallFilter does: others fail with EPERM.

Run as a program: allow_calls.py NUMBERS COMMAND..., where NUMBERS is the list, separated by commas.
"""

import ctypes
import os
import struct
import sys

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of classic BPF
_ALLOW, _FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001


def main() -> None:
    """Confine this process and become the program."""
    numbers = [int(number) for number in sys.argv[1].split(",")]
    instructions = [(_LOAD, 0, 0, 0)]  # the number of the call
    for number in numbers:
        instructions += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    instructions.append((_RETURN, 0, 0, _FAIL_WITH_EPERM))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        raise SystemExit("no filter of system calls can be set")
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 (the test's own program)


if __name__ == "__main__":
    main()
