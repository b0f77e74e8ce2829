"""The interface of mlcommons/chakra's converter: ``chakra_converter PyTorch`` and ``chakra_converter Text``.

The intended differences are listed in docs/coming-from-chakra.md: above all, GPU activity has successors, and
``--simulate`` reports how long the nodes take.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import polars as pl

from etloom import formats
from etloom.compat._command import run_command
from etloom.compat.chakra_text import convert_text
from etloom.core.errors import EtloomError
from etloom.core.paths import expand_home
from etloom.core.trace import Job, Trace
from etloom.exports import chakra
from etloom.exports.chakra_lint.list_schedule import schedule_nodes
from etloom.formats.chakra.et_files import load_file
from etloom.linker import link


def convert(source: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Convert an ET+ file, or any trace of one rank, to a Chakra .et file.

    Raises ReadError, LinkError, EtloomError.
    """
    trace = formats.read(source)
    if isinstance(trace, Job):
        raise EtloomError(
            f"contains {len(trace)} ranks; the converter writes one",
            where=source,
            remedy="use etloom export, which writes one file per rank",
        )
    linked = _link_etplus(trace) if "etplus" in trace.meta.get("formats", ()) else link(trace)
    rank = linked.rank or 0
    chakra.write_ranks({rank: linked}, {rank: expand_home(target)})


def _link_etplus(trace: Trace) -> Trace:
    """Link the Trace of an ET+ file; its operators replace the launch calls, which an ET+ file does not contain."""
    events = trace.events
    device = trace.launches.select(id="device_event", called=pl.col("operator").cast(pl.Int64) + 1)
    callers = (
        device.select(id=(pl.col("called") - 1).cast(pl.UInt32), calls="called").unique("id").drop_nulls()
    )
    correlations = events.select("id").join(device, on="id", how="left", maintain_order="left")
    correlations = correlations.join(callers, on="id", how="left", maintain_order="left")
    linked = link(
        trace.replace(
            events=events.with_columns(correlation=pl.coalesce(correlations["called"], correlations["calls"]))
        )
    )
    node_events = trace.links.unique("node", keep="first")
    waits = (
        trace.dependencies.filter(pl.col("kind").cast(pl.String) == "sync")
        .join(node_events.select("node", "event"), on="node")
        .join(node_events.select(on="node", device="event"), on="on")
        .select("event", on="device", kind=pl.lit("Stream Sync"), sync="event", how=pl.lit("recorded"))
    )
    return linked.replace(sync_dependencies=waits)


def describe_schedule(path: Path) -> str:
    """Return a line with the simulated time of the nodes of a .et file, and the number of nodes that never start.

    At most one operator, one computation and one communication run at a time.
    """
    nodes = load_file(path).nodes
    schedule = schedule_nodes(nodes)
    stuck = f"; {len(schedule.stuck):,} never start" if schedule.stuck else ""
    return f"{len(schedule.end):,} nodes take {schedule.makespan_ns / 1e6:.3f} ms{stuck}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_converter``: exit status 0, 1 for an error reported in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="chakra_converter",
        description="Convert traces to the Chakra format (etloom's replacement for the command of mlcommons/chakra).",
    )
    parser.add_argument("--log-filename", help="accepted and ignored: messages go to stderr")
    kinds = parser.add_subparsers(dest="kind", required=True)
    torch = kinds.add_parser("PyTorch", help="an ET+ of chakra_trace_link, or any trace that etloom reads")
    torch.add_argument("--input", required=True, help="the ET+")
    torch.add_argument("--output", required=True, help="the .et to write; compressed if its name ends in .gz")
    torch.add_argument("--simulate", action="store_true", help="print how long the nodes take")
    text = kinds.add_parser("Text", help="a layer description in the format of ASTRA-sim 1.0")
    text.add_argument("--input", required=True, help="the text")
    text.add_argument("--output", required=True, help="writes OUTPUT.NPU.et for each NPU")
    text.add_argument("--num-npus", type=int, required=True)
    text.add_argument("--num-passes", type=int, required=True)
    args = parser.parse_args(arguments)

    def work() -> None:
        if args.kind == "Text":
            convert_text(expand_home(args.input), expand_home(args.output), args.num_npus, args.num_passes)
            return
        convert(args.input, args.output)
        if args.simulate:
            print(describe_schedule(expand_home(args.output)))

    return run_command("chakra_converter", work)
