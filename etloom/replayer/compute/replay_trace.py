"""A replay of computation as a Trace: one pass profiled, or what the rehearsal took. The steps that the recording marks
are marked in it too, so that a step is compared with a step."""

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


def profile_pass(machine: Executor, recording: Trace) -> Trace:
    """One more pass, as torch's profiler sees it."""
    # Not torch.profiler, whose start imports torch._inductor: seconds of work.
    on = "cuda" if machine.device.type == "cuda" else None
    parts = _split_by_step(recording, [step.node for step in machine.program.steps])
    ends = [first for _, first in parts[1:]]
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        file = Path(folder) / "replay.json"
        with profile(use_device=on, use_kineto=True, record_shapes=True) as profiler:
            for (number, _), end in zip(parts, [*ends, None], strict=True):
                with contextlib.nullcontext() if number is None else record_function(format_step(number)):
                    machine.advance(end) if end is not None else machine.run()
        profiler.export_chrome_trace(str(file))
        read = formats.read(file)
    assert isinstance(read, Trace)
    return linker.link(read.replace(meta={"rank": recording.rank or 0, "path": None}))


def trial_run_trace(machine: Executor, recording: Trace) -> Trace:
    """The operators that ran in the rehearsal: their first run, without what they call and without device work."""
    parts = _split_by_step(recording, [step.node for step in machine.program.steps])
    firsts = pl.DataFrame(parts, schema={"step": pl.Int64, "node": pl.Int64}, orient="row")
    pairs = zip(machine.program.steps, machine.outcomes, strict=True)
    tried = [
        (step.node, step.name, one.began_ns, one.took_ns, (one.reason or "").startswith(NOT_TRIED))
        for step, one in pairs
    ]
    schema = {"node": pl.Int64, "name": pl.String, "ts": pl.Int64, "dur": pl.Int64, "left": pl.Boolean}
    rows = pl.DataFrame(tried, schema=schema, orient="row").join_asof(firsts, on="node")
    ran = rows.filter(pl.col("ts") > 0)
    end = pl.col("ts") + pl.col("dur")
    # A step that was not tried to its end is none to compare with.
    whole = rows.group_by("step").agg(pl.col("left").any()).filter(~pl.col("left")).drop_nulls("step")
    spans = (
        ran.join(whole, on="step", how="semi")
        .group_by("step")
        .agg(pl.col("ts").min(), dur=end.max() - pl.col("ts").min())
        .select(
            pl.format(f"{STEP_PREFIX}{{}}", "step").alias("name"), "ts", "dur", cat=pl.lit("user_annotation")
        )
    )
    events = pl.concat((spans, ran.select("name", "ts", "dur", cat=pl.lit("cpu_op"))))
    events = (
        events.sort("ts", "dur", descending=(False, True), maintain_order=True)
        .with_columns(pl.col("ts") - pl.col("ts").min(), ph=pl.lit("X"), pid=pl.lit(0), tid=pl.lit(1))
        .with_row_index("id")
        .with_columns(position=pl.col("id"))
    )
    meta = {"rank": recording.rank or 0, "clock": "relative", "formats": ["replay"], "files": []}
    linked = linker.link(Trace({"events": events}, meta))
    return linked.count("replay.rehearsed", ran.height, "times of operators are of their first run")


def _split_by_step(recording: Trace, nodes: Sequence[int]) -> list[tuple[int | None, int]]:
    """(step, its first node), of nodes in their order; outside the recorded steps it is None, and the first part is of
    the first node. By the times of the recording, without such by the marks of its execution trace."""
    known = pl.DataFrame({"node": nodes}, schema={"node": pl.Int64})
    spans = find_steps(recording)
    began = (
        recording.links.select(pl.col("node").cast(pl.Int64), "event")
        .unique("node", keep="first")
        .join(recording.events.select("ts", event="id"), on="event")
    )
    timed = known.join(began, on="node", how="left", maintain_order="left")
    if spans.height and timed["ts"].count():
        found = (
            timed.with_row_index("at")
            .sort("ts")
            .join_asof(spans.sort("start"), left_on="ts", right_on="start")
        )
        within = pl.when(pl.col("ts") < pl.col("end")).then("step").otherwise(-1)
        # What the recording does not time is of the step of the one before it.
        of = pl.when(pl.col("ts").is_not_null()).then(within).forward_fill()
        numbers = found.sort("at").select(of)
    else:
        marked = (
            find_step_nodes(recording.nodes).select("step", node=pl.col("id").cast(pl.Int64)).sort("node")
        )
        numbers = known.join_asof(marked, on="node").select("step")
    parts: list[tuple[int | None, int]] = []
    last = -1
    for node, number in zip(nodes, numbers.to_series().to_list(), strict=True):
        # Of two threads one may be ahead by a little.
        step = number if number is not None and number >= 0 else None
        if not parts or (step != parts[-1][0] and (step is None or step > last)):
            parts.append((step, node))
            last = last if step is None else step
    return parts or [(None, 0)]
