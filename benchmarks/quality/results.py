"""The file of results, build/quality.json: each command replaces its own sections and leaves the others alone."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec


def read(path: Path) -> dict[str, Any]:
    """Return what has been written so far."""
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    return found


def write(path: Path, sections: Mapping[str, Any]) -> None:
    """Put sections in the place of those of the same name; of a table, only the keys that are given."""
    known = read(path)
    for name, section in sections.items():
        is_table = isinstance(section, Mapping) and isinstance(known.get(name), dict)
        known[name] = known[name] | section if is_table else section
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_finite(msgspec.to_builtins(known))), indent=1) + b"\n")


def _finite(value: Any) -> Any:
    """Return numbers that are none as null, which JSON has, and NaN it has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
