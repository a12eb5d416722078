"""Equal-length numpy columns under typed names: the in-memory and on-the-wire form of every event family.

A column goes over the wire as its raw little-endian bytes (docs/decisions/0003-batch-format.md): decoding is a view.
Readers ignore columns that they do not know and fill in a column that an older writer did not send with that column's
"missing" value; a column without one is required.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class InvalidTable(ValueError):
    """Columns that are missing, of unequal length, or not a whole number of items."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """How one column is stored; `missing` stands for a column that the writer did not send, None if it is required."""

    dtype: np.dtype[Any]
    missing: float | None


def column(dtype: str, *, missing: float | None = None) -> Any:
    """Declare one column of a Table, stored as the little-endian numpy `dtype`."""
    return field(metadata={"column": ColumnSpec(np.dtype(dtype).newbyteorder("<"), missing)})


def column_specs(table: Any) -> Mapping[str, ColumnSpec]:
    """Return the columns of a table class by name, in their order of declaration."""
    return _column_specs(table)


@cache
def _column_specs(table: Any) -> Mapping[str, ColumnSpec]:
    return {f.name: f.metadata["column"] for f in fields(table)}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Base of all tables: a frozen dataclass whose fields are one-dimensional arrays of one length.

    Arrays that come from the wire are read-only views; take() and concatenate() copy.
    """

    def __len__(self) -> int:
        for name in column_specs(type(self)):
            return len(getattr(self, name))
        return 0

    def __eq__(self, other: object) -> bool:
        """Compare value by value; a missing value (NaN) equals a missing value."""
        if type(other) is not type(self):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=spec.dtype.kind == "f")
            for name, spec in column_specs(type(self)).items()
        )

    def __hash__(self) -> int:
        """Refuse: arrays are not hashable, and so their table is not."""
        raise TypeError(f"{type(self).__name__} is not hashable")

    @classmethod
    def build(cls, n_rows: int, **columns: Any) -> Self:
        """Make a table of `n_rows` from arrays or scalars, casting each to its column's type.

        Columns left out take their missing value. Raises InvalidTable where a required column is missing, a name is
        unknown, or a length is wrong.
        """
        specs = column_specs(cls)
        unknown = columns.keys() - specs.keys()
        if unknown:
            raise InvalidTable(f"{cls.__name__} has no column {sorted(unknown)}")
        return cls(**{name: _built(cls, name, spec, columns.get(name), n_rows) for name, spec in specs.items()})

    @classmethod
    def empty(cls) -> Self:
        """Return the table without rows."""
        return cls(**{name: np.empty(0, spec.dtype) for name, spec in column_specs(cls).items()})

    @classmethod
    def concatenate(cls, tables: "Sequence[Self]") -> Self:
        """Return the rows of all `tables`, in order."""
        if len(tables) == 1:
            return tables[0]
        if not tables:
            return cls.empty()
        return cls(**{name: np.concatenate([getattr(t, name) for t in tables]) for name in column_specs(cls)})

    def take(self, rows: AnyArray) -> Self:
        """Return the rows that an index array or a boolean mask selects, as a copy."""
        return type(self)(**{name: getattr(self, name)[rows] for name in column_specs(type(self))})

    def replace(self, **columns: Any) -> Self:
        """Return a table with the given columns (arrays or scalars) put in place of its own."""
        kept = {name: getattr(self, name) for name in column_specs(type(self)) if name not in columns}
        return self.build(len(self), **kept, **columns)

    def to_wire(self) -> dict[str, bytes]:
        """Return each column's bytes."""
        return {name: np.ascontiguousarray(getattr(self, name)).tobytes() for name in column_specs(type(self))}

    @classmethod
    def from_wire(cls, n_rows: int, columns: Mapping[str, bytes | memoryview]) -> Self:
        """View the wire's bytes as a table. Raises InvalidTable, naming the column, where they do not fit `n_rows`."""
        return cls(
            **{name: _viewed(cls, name, spec, columns.get(name), n_rows) for name, spec in column_specs(cls).items()}
        )


TableT = TypeVar("TableT", bound=Table)


def _missing(cls: type[Table], name: str, spec: ColumnSpec, n_rows: int) -> AnyArray:
    if spec.missing is None:
        raise InvalidTable(f"{cls.__name__} lacks the required column {name!r}")
    return np.full(n_rows, spec.missing, spec.dtype)


def _built(cls: type[Table], name: str, spec: ColumnSpec, value: Any, n_rows: int) -> AnyArray:
    if value is None:
        return _missing(cls, name, spec, n_rows)
    # A list is cast at once: numpy makes floats of integers around 2**63 first, and they lose their last bits.
    array = np.asarray(value, spec.dtype if isinstance(value, list | tuple) else None)
    if array.ndim == 0:
        return np.full(n_rows, array, spec.dtype)
    if array.shape != (n_rows,):
        raise InvalidTable(f"{cls.__name__}.{name} has shape {array.shape}, expected ({n_rows},)")
    return array.astype(spec.dtype, copy=False)


def _viewed(cls: type[Table], name: str, spec: ColumnSpec, content: bytes | memoryview | None, n_rows: int) -> AnyArray:
    if content is None:
        return _missing(cls, name, spec, n_rows)
    if len(content) != n_rows * spec.dtype.itemsize:
        raise InvalidTable(
            f"{cls.__name__}.{name} has {len(content)} bytes, expected {n_rows} rows of {spec.dtype.itemsize}"
        )
    return np.frombuffer(content, spec.dtype)
