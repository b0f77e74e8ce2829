"""Copies to the device from pageable memory, or many small ones."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, describe_place, group_by_place
from etloom.analyses.findings.rank_view import RankView
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.text import count_noun

SMALL_BYTES = 64 << 10
MIN_COPIES = 16

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    copies = view.activities.filter(view.match_activities(view.activities, r"(?i)HtoD|HostToDevice"))
    facts = view.trace.kernels.select("bytes", id="event")
    copies = copies.with_columns(take_rows(facts["bytes"], rows_of_ids(facts, copies["id"])))
    # The call blocks until the data has left pageable memory.
    call_is_longer = pl.col("launch_end") - pl.col("launch_ts") > pl.col("dur")
    start, end = (
        pl.when(call_is_longer).then(call_column).otherwise(copy_column)
        for call_column, copy_column in (("launch_ts", "ts"), ("launch_end", "end"))
    )
    copies = copies.select(
        "step", "stream", "name", "bytes", start=start, end=end, cost_ns=end - start, event="launch"
    )
    is_pageable = view.match_activities(copies, "(?i)pageable")
    pageable = copies.filter(is_pageable)
    yield from group_by_place(
        view,
        pageable.drop("bytes"),
        lambda row: (
            f"the host is blocked in {count_noun(row['count'], 'copy', 'copies')} from pageable memory to the "
            f"device{describe_place(row)}"
        ),
        confidence="medium",
        advice="pin the memory (pin_memory=True in the data loader, tensor.pin_memory()) and copy with "
        "non_blocking=True; create constants on the device",
        kind="pageable",
    )
    small = copies.filter(~is_pageable & (pl.col("bytes") < SMALL_BYTES))
    if small.height >= MIN_COPIES:
        yield from group_by_place(
            view,
            small.drop("bytes"),
            lambda row: (
                f"{row['count']:,} copies of less than {SMALL_BYTES >> 10} KiB to the device{describe_place(row)}"
            ),
            confidence="medium",
            advice="combine them into one tensor and copy that, or compute them on the device",
            kind="small",
        )
