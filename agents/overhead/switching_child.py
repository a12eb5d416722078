"""One of two processes that pass a byte to and fro: run as a script, by itself.

For each number that it reads, it makes its two system calls so many times in turn, and answers with what was left to
do.
"""

import ctypes
import os
import sys


def main() -> None:
    """Pass bytes on until there is nothing more to read."""
    library_fd, cpu, *arguments = (int(each) for each in sys.argv[1:])
    os.sched_setaffinity(0, {cpu})
    pass_on = ctypes.CDLL(f"/proc/self/fd/{library_fd}").pass_on
    pass_on.argtypes, pass_on.restype = [ctypes.c_uint64] * 5, ctypes.c_uint64
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(f"{pass_on(*arguments, int(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
