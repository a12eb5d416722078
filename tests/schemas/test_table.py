"""Tables are equal-length columns of known types; a missing value is never mistaken for a number."""

import numpy as np
import pytest

from schemas.events import Calls, Communicators, GpuSamples, Syncs
from schemas.table import InvalidTable


def syncs(n_rows: int = 5) -> Syncs:
    return Syncs.build(n_rows, rank=np.arange(n_rows), start_ns=np.arange(n_rows) * 7, duration_ns=3)


def test_scalars_fill_a_column_and_columns_get_their_type() -> None:
    table = syncs()
    assert table.duration_ns.tolist() == [3] * 5
    assert table.rank.dtype == np.dtype("<u4")


def test_columns_left_out_are_missing() -> None:
    table = GpuSamples.build(2, gpu=[0, 1], time_ns=0)
    assert np.isnan(table.power_w).all()
    assert table.throttle_known.tolist() == [0, 0]


def test_missing_values_equal_each_other_and_nothing_else() -> None:
    table = GpuSamples.build(2, gpu=[0, 1], time_ns=0)
    assert table == GpuSamples.build(2, gpu=[0, 1], time_ns=0)
    assert table != table.replace(power_w=0.0)
    assert table != syncs(2)


def test_a_table_is_not_hashable() -> None:
    with pytest.raises(TypeError, match="Syncs is not hashable"):
        hash(syncs())


def test_unknown_missing_and_unequal_columns_are_refused_by_name() -> None:
    with pytest.raises(InvalidTable, match=r"Syncs has no column \['mood'\]"):
        Syncs.build(1, rank=0, start_ns=0, duration_ns=0, mood=1)
    with pytest.raises(InvalidTable, match="Syncs lacks the required column 'duration_ns'"):
        Syncs.build(1, rank=0, start_ns=0)
    with pytest.raises(InvalidTable, match=r"Syncs.rank has shape \(2,\), expected \(3,\)"):
        Syncs.build(3, rank=[0, 1], start_ns=0, duration_ns=0)


def test_rows_are_taken_by_index_or_mask_as_copies() -> None:
    table = syncs()
    assert table.take(np.array([4, 1])).start_ns.tolist() == [28, 7]
    assert table.take(table.rank > 2).start_ns.tolist() == [21, 28]
    table.take(np.array([0])).start_ns[0] = 99
    assert table.start_ns[0] == 0


def test_tables_are_concatenated_in_order() -> None:
    assert Syncs.concatenate([syncs(2), syncs(3)]).start_ns.tolist() == [0, 7, 0, 7, 14]
    assert len(Syncs.concatenate([])) == 0
    assert len(Calls.empty()) == 0


def test_large_integers_in_a_list_keep_their_last_bits() -> None:
    comms = [2**63 + 1, 5]
    table = Communicators.build(2, rank=[0, 1], comm=comms, comm_rank=[0, 0], size=[1, 1])
    assert table.comm.tolist() == comms
