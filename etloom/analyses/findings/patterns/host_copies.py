"""Copies to the device from pageable memory, or many small ones."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, counted, describe_place, group_by_place
from etloom.analyses.findings.rank_view import View
from etloom.core.arrays import rows_of_ids, take_rows

SMALL_BYTES = 64 << 10
MANY = 16

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    copies = view.work.filter(view.named(view.work, r"(?i)HtoD|HostToDevice"))
    facts = view.trace.kernels.select("bytes", id="event")
    copies = copies.with_columns(take_rows(facts["bytes"], rows_of_ids(facts, copies["id"])))
    # The host stands in the call until the data has left pageable memory.
    calls = pl.col("launch_end") - pl.col("launch_ts") > pl.col("dur")
    start, end = (
        pl.when(calls).then(of_call).otherwise(of_copy)
        for of_call, of_copy in (("launch_ts", "ts"), ("launch_end", "end"))
    )
    copies = copies.select(
        "step", "stream", "name", "bytes", start=start, end=end, cost_ns=end - start, event="launch"
    )
    is_pageable = view.named(copies, "(?i)pageable")
    pageable = copies.filter(is_pageable)
    yield from group_by_place(
        view,
        pageable.drop("bytes"),
        lambda row: (
            f"the host waits in {counted(row['count'], 'copy', 'copies')} from pageable memory to the device{describe_place(row)}"
        ),
        confidence="medium",
        advice="pin the memory (pin_memory=True in the data loader, tensor.pin_memory()) and copy with "
        "non_blocking=True; create constants on the device",
        kind="pageable",
    )
    small = copies.filter(~is_pageable & (pl.col("bytes") < SMALL_BYTES))
    if small.height >= MANY:
        yield from group_by_place(
            view,
            small.drop("bytes"),
            lambda row: (
                f"{row['count']:,} copies of less than {SMALL_BYTES >> 10} KiB to the device{describe_place(row)}"
            ),
            confidence="medium",
            advice="put them into one tensor and copy that, or compute them on the device",
            kind="small",
        )
