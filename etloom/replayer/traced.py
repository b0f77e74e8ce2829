"""A replay of computation as a Trace: one pass profiled, or what the rehearsal took."""

from __future__ import annotations

import tempfile
from pathlib import Path

import polars as pl
from torch.autograd.profiler import profile, record_function

from etloom import linker, readers
from etloom.replayer.machine import Machine
from etloom.trace import Trace


def profiled(machine: Machine, rank: int | None) -> Trace:
    """One more pass, as torch's profiler sees it."""
    # Not torch.profiler, whose start imports torch._inductor: seconds of work.
    on = "cuda" if machine.device.type == "cuda" else None
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        file = Path(folder) / "replay.json"
        with (
            profile(use_device=on, use_kineto=True, record_shapes=True) as profiler,
            record_function("ProfilerStep#0"),
        ):
            machine.run()
        profiler.export_chrome_trace(str(file))
        read = readers.read(file)
    assert isinstance(read, Trace)
    return linker.link(read.replace(meta={"rank": rank or 0, "path": None}))


def rehearsed(machine: Machine, rank: int | None) -> Trace:
    """The operators that ran in the rehearsal: their first run, without what they call and without device work."""
    pairs = zip(machine.program.steps, machine.outcomes, strict=True)
    ran = [(step.name, one.began_ns, one.took_ns) for step, one in pairs if one.result != "skipped"]
    schema = {"name": pl.String, "ts": pl.Int64, "dur": pl.Int64}
    events = pl.DataFrame(ran, schema=schema, orient="row").filter(pl.col("ts") > 0)
    events = (
        events.with_columns(
            pl.col("ts") - pl.col("ts").min(),
            ph=pl.lit("X"),
            cat=pl.lit("cpu_op"),
            pid=pl.lit(0),
            tid=pl.lit(1),
        )
        .with_row_index("id")
        .with_columns(position=pl.col("id"))
    )
    meta = {"rank": rank or 0, "clock": "relative", "formats": ["replay"], "files": []}
    linked = linker.link(Trace({"events": events}, meta))
    return linked.count("replay.rehearsed", events.height, "times of operators are of their first run")
