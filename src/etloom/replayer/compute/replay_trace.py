"""Converts a computation replay to a Trace: from a profiled pass, or from the times of the trial run.

The recorded step annotations are reproduced, so that steps of the replay compare with steps of the recording.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from torch.autograd.profiler import profile, record_function

from etloom import formats, linker
from etloom.core.steps import STEP_PREFIX, format_step
from etloom.core.trace import Trace
from etloom.replayer.compute.executor import Executor
from etloom.replayer.compute.progress import NOT_TRIED
from etloom.timeline.activity import find_step_nodes, find_steps


def profile_pass(executor: Executor, recording: Trace) -> Trace:
    """Run one more pass under torch's profiler, and return its linked trace."""
    # Not torch.profiler, which imports torch._inductor when it starts: seconds of work.
    device = "cuda" if executor.device.type == "cuda" else None
    parts = _split_by_step(recording, [step.node for step in executor.program.steps])
    ends = [first for _, first in parts[1:]]
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        file = Path(folder) / "replay.json"
        with profile(use_device=device, use_kineto=True, record_shapes=True) as profiler:
            for (number, _), end in zip(parts, [*ends, None], strict=True):
                with contextlib.nullcontext() if number is None else record_function(format_step(number)):
                    executor.advance(end) if end is not None else executor.run()
        profiler.export_chrome_trace(str(file))
        trace = formats.read(file)
    assert isinstance(trace, Trace)
    return linker.link(trace.replace(meta={"rank": recording.rank or 0, "path": None}))


def trial_run_trace(executor: Executor, recording: Trace) -> Trace:
    """Return the trial run's operators as a linked trace, without the operators they call and without GPU activity."""
    parts = _split_by_step(recording, [step.node for step in executor.program.steps])
    first_nodes = pl.DataFrame(parts, schema={"step": pl.Int64, "node": pl.Int64}, orient="row")
    pairs = zip(executor.program.steps, executor.outcomes, strict=True)
    tried = [
        (
            step.node,
            step.name,
            outcome.started_ns,
            outcome.duration_ns,
            (outcome.reason or "").startswith(NOT_TRIED),
        )
        for step, outcome in pairs
    ]
    schema = {"node": pl.Int64, "name": pl.String, "ts": pl.Int64, "dur": pl.Int64, "missing": pl.Boolean}
    rows = pl.DataFrame(tried, schema=schema, orient="row").join_asof(first_nodes, on="node")
    ran = rows.filter(pl.col("ts") > 0)
    spans = _complete_step_spans(rows, ran)
    events = pl.concat((spans, ran.select("name", "ts", "dur", cat=pl.lit("cpu_op"))))
    events = (
        events.sort("ts", "dur", descending=(False, True), maintain_order=True)
        .with_columns(pl.col("ts") - pl.col("ts").min(), ph=pl.lit("X"), pid=pl.lit(0), tid=pl.lit(1))
        .with_row_index("id")
        .with_columns(position=pl.col("id"))
    )
    meta = {"rank": recording.rank or 0, "clock": "relative", "formats": ["replay"], "files": []}
    linked = linker.link(Trace({"events": events}, meta))
    return linked.count("replay.trial_run", ran.height, "times are those of the first run of each operator")


def _complete_step_spans(rows: pl.DataFrame, ran: pl.DataFrame) -> pl.DataFrame:
    """Return step annotations (events) for the recorded steps whose operators were all tried in the trial run."""
    end = pl.col("ts") + pl.col("dur")
    complete = (
        rows.group_by("step").agg(pl.col("missing").any()).filter(~pl.col("missing")).drop_nulls("step")
    )
    return (
        ran.join(complete, on="step", how="semi")
        .group_by("step")
        .agg(pl.col("ts").min(), dur=end.max() - pl.col("ts").min())
        .select(
            pl.format(f"{STEP_PREFIX}{{}}", "step").alias("name"), "ts", "dur", cat=pl.lit("user_annotation")
        )
    )


def _split_by_step(recording: Trace, nodes: Sequence[int]) -> list[tuple[int | None, int]]:
    """Split a sequence of nodes into consecutive parts, each within a single recorded training step.

    Returns:
        (step, first node) of each part, in the order of the nodes; None outside of the recorded steps. The first part
        begins with the first node.
    """
    parts: list[tuple[int | None, int]] = []
    last = -1
    for node, number in zip(nodes, _step_numbers(recording, nodes), strict=True):
        # One of two threads may be slightly ahead of the other.
        step = number if number is not None and number >= 0 else None
        if not parts or (step != parts[-1][0] and (step is None or step > last)):
            parts.append((step, node))
            last = last if step is None else step
    return parts or [(None, 0)]


def _step_numbers(recording: Trace, nodes: Sequence[int]) -> list[int | None]:
    """Return the step of each node by its recorded time or, without times, by the execution trace's annotations."""
    table = pl.DataFrame({"node": nodes}, schema={"node": pl.Int64})
    spans = find_steps(recording)
    starts = (
        recording.links.select(pl.col("node").cast(pl.Int64), "event")
        .unique("node", keep="first")
        .join(recording.events.select("ts", event="id"), on="event")
    )
    timed = table.join(starts, on="node", how="left", maintain_order="left")
    if spans.height and timed["ts"].count():
        joined = (
            timed.with_row_index("index")
            .sort("ts")
            .join_asof(spans.sort("start"), left_on="ts", right_on="start")
        )
        within = pl.when(pl.col("ts") < pl.col("end")).then("step").otherwise(-1)
        # A node without a time belongs to the step of the node before it.
        step = pl.when(pl.col("ts").is_not_null()).then(within).forward_fill()
        numbers = joined.sort("index").select(step)
    else:
        annotations = find_step_nodes(recording.nodes)
        annotations = annotations.select("step", node=pl.col("id").cast(pl.Int64)).sort("node")
        numbers = table.join_asof(annotations, on="node").select("step")
    return numbers.to_series().to_list()
