"""Find copies to the device from pageable memory, and many small copies to the device."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import BOTH, Finding, describe_place, format_times, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.text import count_noun

SMALL_BYTES = 64 << 10
MIN_COPIES = 16
PINNED_ADVICE = (
    "pin the memory (pin_memory=True in the data loader, tensor.pin_memory()) and copy with non_blocking=True; create "
    "constants on the device"
)


def find(view: RankView) -> Iterator[Finding]:
    copies, hidden = view.compute_once(list_copies), view.busy_computing
    yield from sum_places(
        view,
        copies.filter("is_pageable"),
        lambda row: (
            f"the host is blocked in {count_noun(row['count'], 'copy', 'copies')} from pageable memory to the "
            f"device{describe_place(row)}"
        ),
        confidence="medium",
        advice=PINNED_ADVICE,
        tracks=BOTH,
        kind="pageable",
        hidden=hidden,
    )
    yield from sum_places(
        view,
        view.select_gaps("copy").drop_nulls("step"),
        lambda row: (
            f"the device waits for the host {format_times(row['count'])} after copies from pageable memory"
        ),
        confidence="medium",
        advice=PINNED_ADVICE,
        tracks=BOTH,
        kind="after pageable",
    )
    yield from sum_places(
        view,
        copies.filter(~pl.col("is_pageable")),
        lambda row: (
            f"{row['count']:,} copies of less than {SMALL_BYTES >> 10} KiB to the device{describe_place(row)}"
        ),
        confidence="medium",
        advice="combine them into one tensor and copy that, or compute them on the device",
        tracks=BOTH,
        kind="small",
        hidden=hidden,
    )


def list_copies(view: RankView) -> pl.DataFrame:
    """Return the copies to the device from pageable memory and, if there are many, the small copies.

    A copy costs the time in which nothing else runs: a call that waits for kernels does not make these longer.

    Returns:
        id, is_pageable, and the columns for `sum_places`.
    """
    copies = view.activities.filter(view.match_activities(view.activities, r"(?i)HtoD|HostToDevice"))
    facts = view.trace.kernels.select("bytes", id="event")
    copies = copies.with_columns(
        take_rows(facts["bytes"], rows_of_ids(facts, copies["id"])),
        is_pageable=view.match_activities(copies, "(?i)pageable"),
    )
    is_small = ~copies["is_pageable"] & (copies["bytes"] < SMALL_BYTES).fill_null(False)
    copies = copies.filter(copies["is_pageable"] | (is_small & (is_small.sum() >= MIN_COPIES)))
    # The call blocks until the data has left pageable memory.
    call_is_longer = pl.col("launch_end") - pl.col("launch_ts") > pl.col("dur")
    start, end = (
        pl.when(call_is_longer).then(call_column).otherwise(copy_column)
        for call_column, copy_column in (("launch_ts", "ts"), ("launch_end", "end"))
    )
    copies = copies.with_columns(start=start, end=end)
    hidden = view.busy_computing.covered(copies["start"], copies["end"])
    return copies.select(
        *("id", "is_pageable", "step", "stream", "name", "start", "end"),
        cost_ns=pl.col("end") - pl.col("start") - pl.Series(hidden, dtype=pl.Int64),
        event="launch",
    )
