"""Reading the lines of NCCL's Inspector plug-in, in every shape that it has had."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.inspector_records import LINE_BYTES_MAX, Member, Parser, Record
from schemas.events import Op
from tests.agents.inspector_lines import COMM, EPOCH_US, collective, header, line, metadata, stats, transfer, v40, v43

HASH = int(COMM, 16)
PROXY = {"proxy_trace": {"record_type": "proxy_step", "record_sn": 41, "parent_type": "coll", "parent_sn": 5}}


def test_a_record_of_the_first_format_is_read() -> None:
    parser = Parser()
    (record,) = parser.feed(v40(collective(1407, size=17179869184, took_us=61974)))
    assert record == Record(
        comm=HASH,
        op=int(Op.ALL_REDUCE),
        number=1407,
        peer=None,
        bytes=17179869184,
        duration_ns=61_974_000,
        start_ns=None,
        dump_ns=EPOCH_US * 1000,
    )
    assert parser.memberships == {HASH: Member(rank=2, size=7)}
    assert parser.version == "v4.0"


def test_a_number_that_looks_like_a_fraction_and_unknown_keys_are_read() -> None:
    body = collective(3, took_us=5663.0)
    body["coll_perf"] |= {"coll_algo": "RING", "coll_proto": "LL", "of_a_later_version": [1, {"a": None}]}
    (record,) = Parser().feed(v40(body))
    assert record.duration_ns == 5_663_000


def test_a_send_has_the_peer_and_the_plug_ins_own_number() -> None:
    (record,) = Parser().feed(v40(transfer(13, peer=5)))
    assert (record.op, record.number, record.peer, record.bytes) == (int(Op.SEND), 13, 5, 65536)


@pytest.mark.parametrize("version", ["v4.1", "v4.2"])
def test_a_line_of_statistics_is_no_record_and_tells_what_was_dropped(version: str) -> None:
    parser = Parser()
    content = v40(stats(2, dropped=17), version=version)
    content += v40(collective(7), version=version) + v40(collective(8), version=version)
    assert [r.number for r in parser.feed(content)] == [7, 8]
    assert (parser.counts.dropped, parser.counts.garbage) == (17, 0)


def test_lines_without_a_header_belong_to_the_marker_before_them() -> None:
    parser = Parser()
    first = v43([collective(0), PROXY, transfer(1), PROXY], dump_us=EPOCH_US + 5)
    second = v43([collective(3), collective(4)], comm="0x11", rank=6, dump_us=EPOCH_US + 7)
    records = parser.feed(first + second)
    assert [(r.comm, r.number, r.dump_ns) for r in records] == [
        (HASH, 0, (EPOCH_US + 5) * 1000),
        (HASH, 1, (EPOCH_US + 5) * 1000),
        (0x11, 3, (EPOCH_US + 7) * 1000),
        (0x11, 4, (EPOCH_US + 7) * 1000),
    ]
    assert parser.memberships[0x11] == Member(rank=6, size=7)
    assert parser.counts.garbage == parser.counts.without_header == 0


def test_lines_without_a_header_beyond_the_markers_count_are_nobodys() -> None:
    parser = Parser()
    records = parser.feed(v43([collective(0)]) + line(collective(1)))
    assert [r.number for r in records] == [0]
    assert parser.counts.without_header == 1


def test_lines_without_a_marker_are_counted_and_not_guessed() -> None:
    parser = Parser()
    assert parser.feed(line(collective(5)) + line(transfer(6))) == []
    assert parser.counts.without_header == 2


def test_the_start_is_that_of_the_channel_that_began_first() -> None:
    starts = [EPOCH_US + 31, EPOCH_US + 23, 0, EPOCH_US + 29]
    (record,) = Parser().feed(v40(collective(1, starts_us=starts)))
    assert record.start_ns == (EPOCH_US + 23) * 1000
    (record,) = Parser().feed(v40(collective(1, starts_us=[0])))
    assert record.start_ns is None
    (record,) = Parser().feed(v40(transfer(1, start_us=EPOCH_US + 3)))
    assert record.start_ns == (EPOCH_US + 3) * 1000


def test_times_of_the_host_alone_are_no_gpu_times() -> None:
    parser = Parser()
    records = parser.feed(
        v40(collective(0, source="collective_cpu"))
        + v40(collective(1, source="kernel_cpu"))
        + v40(collective(2, source=None))
        + v40(collective(3, source="a_later_one"))
    )
    assert [r.number for r in records] == [1, 2]
    assert parser.counts.not_on_gpu == 2


def test_functions_that_are_not_told_apart_are_counted() -> None:
    parser = Parser()
    names = ["AllGather", "ReduceScatter", "Broadcast", "Reduce", "All2All", "AllGatherV", "Invalid", "Send"]
    records = parser.feed(b"".join(v40(collective(i, name=name)) for i, name in enumerate(names)))
    assert [Op(r.op) for r in records] == [Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.REDUCE, Op.ALL_TO_ALL]
    assert parser.counts.other == 3


def test_the_size_of_bytes_without_a_sign_is_got_back_from_its_overflow() -> None:
    (record,) = Parser().feed(v40(collective(0, size=(1 << 64) - 12289)))
    assert record.bytes == 12289


def test_infinite_bandwidth_does_not_cost_the_record() -> None:
    content = v40(collective(0, took_us=0)).replace(b"277.210914", b"inf").replace(b"485.119099", b"-nan")
    parser = Parser()
    (record,) = parser.feed(content)
    assert (record.duration_ns, parser.counts.garbage) == (0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\x00\n",
        b'{"header": 3}\n',
        b"[]\n",
        b"{}\n",
        b'{"neither":"nor"}\n',
        v40(collective(0))[:150] + b"\n",
        v40(collective(0)).replace(b'"coll_sn":0', b'"coll_sn":"x"'),
        v40(collective(0)).replace(b'"coll_sn":0', b'"coll_sn":-4'),
        v40(collective(0, took_us=-3)),
        v40(collective(0, size=-5)),
        v40(transfer(4, peer=-1)),
    ],
)
def test_a_damaged_line_is_counted_and_harms_no_other(damage: bytes) -> None:
    parser = Parser()
    records = parser.feed(v40(collective(5)) + damage + v40(collective(6)))
    assert [r.number for r in records] == [5, 6]
    assert parser.counts.garbage == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "no number", "rank": 0, "n_ranks": 2},
        {"id": "0x5", "rank": 2, "n_ranks": 2},
        {"id": "-0x5", "rank": 0, "n_ranks": 2},
    ],
)
def test_a_header_that_makes_no_sense_is_no_membership(bad: dict[str, object]) -> None:
    parser = Parser()
    assert parser.feed(line({"header": bad, "metadata": metadata(), **collective(3)})) == []
    assert parser.counts.without_header == 1
    assert parser.memberships == {}


def test_one_process_may_have_two_places_in_turn() -> None:
    parser = Parser()
    parser.feed(v40(collective(0), rank=3) + v40(collective(1), rank=5))
    assert parser.memberships == {HASH: Member(rank=5, size=7)}


STREAM = (
    v40(collective(0))
    + v43([collective(1), PROXY, transfer(1)])
    + b"not JSON\n\n"
    + v40(stats(0))
    + v40(collective(2, starts_us=[EPOCH_US]))
    + v43([collective(3), collective(4), transfer(2)], comm="0x3")
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=11))
def test_how_a_file_is_cut_into_pieces_does_not_matter(cuts: list[int]) -> None:
    whole, pieces = Parser(), Parser()
    expected = whole.feed(STREAM)
    places = [0, *sorted(cuts), len(STREAM)]
    found = [r for a, b in itertools.pairwise(places) for r in pieces.feed(STREAM[a:b])]
    assert found == expected
    assert len(expected) == 7
    assert pieces.counts == whole.counts


@given(st.integers(1, len(STREAM) - 1))
def test_a_reader_that_begins_within_a_line_leaves_that_line_out(start: int) -> None:
    parser = Parser()
    parser.restart(is_cut=True)
    found = parser.feed(STREAM[start:])
    assert all(record in Parser().feed(STREAM) for record in found)
    assert parser.counts.garbage <= 1  # the line of the stream that is none


def test_a_cut_last_line_is_kept_until_it_is_complete() -> None:
    parser = Parser()
    content = v40(collective(0)) + v40(collective(1))
    assert [r.number for r in parser.feed(content[:-1])] == [0]
    assert parser.n_kept == len(v40(collective(1))) - 1
    assert [r.number for r in parser.feed(b"\n")] == [1]
    assert parser.n_kept == 0


def test_after_a_leap_lines_without_a_header_are_nobodys_until_the_next_marker() -> None:
    parser = Parser()
    content = v43([collective(0), collective(1), collective(2)])
    parser.feed(content[: content.index(b'"coll_sn":1')])
    parser.restart(is_cut=False)
    assert parser.feed(line(collective(9))) == []
    assert parser.counts.without_header == 1


def test_a_line_that_never_ends_is_dropped_and_the_next_one_read() -> None:
    parser = Parser()
    for _ in range(2 * LINE_BYTES_MAX // 65521 + 1):
        assert parser.feed(b"x" * 65521) == []
    assert parser.n_kept <= LINE_BYTES_MAX
    assert [r.number for r in parser.feed(b"\n" + v40(collective(9)))] == [9]
    assert parser.counts.garbage >= 1


def test_the_hole_of_a_truncated_file_is_skipped() -> None:
    parser = Parser()
    records = parser.feed(v40(collective(0)) + b"\0" * 4099 + v40(collective(1)))
    assert [r.number for r in records] == [0, 1]
    assert parser.counts.garbage == 0


def test_a_reader_goes_on_where_another_one_stopped() -> None:
    first, second = Parser(), Parser()
    content = v43([collective(0), collective(1), collective(2)])
    cut = content.index(b'"coll_sn":1')
    assert [r.number for r in first.feed(content[:cut])] == [0]
    second.restart(is_cut=False)
    second.context = first.context
    assert [r.number for r in second.feed(content[cut - first.n_kept :])] == [1, 2]
    assert second.counts.without_header == 0


def test_the_header_may_lack_what_is_not_needed() -> None:
    content = line({"header": {k: v for k, v in header().items() if k != "comm_name"}, **collective(4)})
    (record,) = Parser().feed(content)
    assert (record.number, record.dump_ns) == (4, None)
