"""`failslow import`: other tools' files, as recordings."""

from pathlib import Path

import click

from pipeline.commands.options import command as declare_command
from pipeline.commands.options import examples, force_option, max_bytes_option, out_option, refuse_to_replace, size_text
from pipeline.importers.straggler_analysis import InvalidTrace, read_trace
from pipeline.record import Record
from pipeline.recording import Header, write_recording
from pipeline.terminal import Problem, printable, progress
from schemas.codec import encode_events
from schemas.topics import EVENTS, events_key


@click.group(name="import")
def command() -> None:
    """Write a recording of another tool's file, to be judged by `failslow replay`."""


@command.add_command
@declare_command(
    name="straggler-analysis",
    epilog=examples(
        "failslow import straggler-analysis trace-AR.parquet --out ar.fsr",
        "failslow replay ar.fsr",
    ),
)
@click.argument("parquet", type=click.Path(path_type=Path, dir_okay=False))
@out_option
@force_option
@max_bytes_option
def straggler_analysis(parquet: Path, out: Path, *, force: bool, max_bytes: int | None) -> None:
    """Import a trace of ByteDance's StragglerAnalysis.

    PARQUET holds every operation of sampled iterations of one job; a file meta-*.yaml beside it says how many ranks
    the job had. Nodes and GPUs are unknown in it, so each recorded rank stands for a node of its own. Its iterations
    are sampled, and numbered here from 0 as they are recorded; the recording's header has their own numbers as "steps".
    """
    refuse_to_replace(out, force=force)
    try:
        trace = read_trace(parquet)
    except InvalidTrace as error:
        raise Problem(str(error)) from error
    for name, count in trace.ignored_operations.items():
        click.echo(f"left out: {count} operations of unknown kind {printable(name)!r}", err=True)
    header = Header(source=f"straggler-analysis {parquet.name}", topics=(EVENTS,), configuration={"steps": trace.steps})
    with write_recording(out, header, max_bytes=max_bytes) as writer:
        for offset, batch in enumerate(progress(trace.batches(), doing="importing", total=len(trace))):
            key = events_key(batch.job_id, batch.node)
            writer.write(Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch)))
    click.echo(
        f"{out}: {writer.n_records} batches of {len(trace.ranks)} ranks, {size_text(out.stat().st_size)}"
        + (f"; {writer.n_dropped} dropped by --max-bytes" if writer.n_dropped else "")
    )
