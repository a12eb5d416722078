"""Lines as NCCL's Inspector writes them, in each of its shapes."""

from typing import Any

import msgspec

EPOCH_US = 1_790_000_000_000_000
COMM = "0x7f8c496ae9f661"


def line(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


def header(comm: str = COMM, *, rank: int = 2, size: int = 7) -> dict[str, Any]:
    return {"id": comm, "comm_name": "unknown", "rank": rank, "n_ranks": size, "nnodes": 1}


def metadata(dump_us: int = EPOCH_US, *, version: str = "v4.0") -> dict[str, Any]:
    return {
        "inspector_output_format_version": version,
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": dump_us,
        "hostname": "node-11",
        "pid": 1639,
    }


def collective(
    number: int,
    *,
    name: str = "AllReduce",
    size: int = 8192,
    took_us: float = 113,
    source: str | None = "kernel_gpu",
    starts_us: list[int] | None = None,
) -> dict[str, Any]:
    perf: dict[str, Any] = {"coll": name, "coll_sn": number, "coll_msg_size_bytes": size, "coll_exec_time_us": took_us}
    if source is not None:
        perf["coll_timing_source"] = source
    perf |= {"coll_algobw_gbs": 277.210914, "coll_busbw_gbs": 485.119099}
    if starts_us is not None:
        events = [
            {"channel_id": i, "kernel_start_ts": start, "kernel_stop_ts": start + round(took_us)}
            for i, start in enumerate(starts_us)
        ]
        perf["event_trace_ts"] = {"coll_start_ts": 1, "coll_stop_ts": 2, "kernel_events": events}
    return {"coll_perf": perf}


def transfer(
    number: int, *, name: str = "Send", peer: int = 3, size: int = 65536, took_us: int = 71, start_us: int | None = None
) -> dict[str, Any]:
    perf: dict[str, Any] = {
        "p2p": name,
        "p2p_sn": number,
        "p2p_peer": peer,
        "p2p_msg_size_bytes": size,
        "p2p_exec_time_us": took_us,
        "p2p_timing_source": "kernel_gpu",
        "p2p_algobw_gbs": 1.5,
        "p2p_busbw_gbs": 1.5,
    }
    if start_us is not None:
        perf["event_trace_ts"] = {"p2p_start_ts": 1, "kernel_events": [{"channel_id": 0, "kernel_start_ts": start_us}]}
    return {"p2p_perf": perf}


def stats(coll: int, p2p: int = 0, *, dropped: int = 0, **more: int) -> dict[str, Any]:
    counts = {
        "coll_records": coll,
        "coll_dropped_total": dropped,
        "coll_dropped_since_last_dump": dropped,
        "p2p_records": p2p,
        "p2p_dropped_total": 0,
        "p2p_dropped_since_last_dump": 0,
    }
    return {"dump_stats": counts | more}


def v40(
    body: dict[str, Any], *, dump_us: int = EPOCH_US, comm: str = COMM, rank: int = 2, version: str = "v4.0"
) -> bytes:
    return line({"header": header(comm, rank=rank), "metadata": metadata(dump_us, version=version), **body})


def v43(
    bodies: list[dict[str, Any]], *, dump_us: int = EPOCH_US, comm: str = COMM, rank: int = 2, dropped: int = 0
) -> bytes:
    n_coll = sum("coll_perf" in body for body in bodies)
    n_p2p = sum("p2p_perf" in body for body in bodies)
    n_proxy = len(bodies) - n_coll - n_p2p
    marker = v40(
        stats(n_coll, n_p2p, dropped=dropped, proxy_records=n_proxy),
        dump_us=dump_us,
        comm=comm,
        rank=rank,
        version="v4.3",
    )
    return marker + b"".join(line(body) for body in bodies)
