"""The seam between the tracer and what compiles and loads its programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

SOURCES = Path(__file__).resolve().parent
HEADERS = SOURCES / "headers"


class Backend(Protocol):
    """Programs and maps in the kernel, for as long as it is open."""

    name: str

    def load(self, source: Path, defines: Sequence[str], programs: Sequence[str]) -> None:
        """Compile and load a source file with definitions such as "RAW" or "RING_BYTES=4096".

        Raises NotAvailable, which names what is missing.
        """

    def program_fd(self, name: str) -> int:
        """Return the file descriptor of a loaded program."""

    def map_fd(self, name: str) -> int:
        """Return the file descriptor of a map."""

    def close(self) -> None:
        """Unload everything; may be called twice, and without load()."""
