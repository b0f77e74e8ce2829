"""Find devices of a rank that are idle while its other devices are busy.

Devices of a rank that idle while its other devices work; all other figures of a rank count it as busy if any
device is.

Cost: the gain if the work were evenly spread.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import union
from etloom.timeline.activity import to_intervals

MIN_USED_SHARE = 0.01
"""A device that is busy for a smaller share of the time is not used intentionally: a context was opened by mistake."""

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.activities["device"].drop_nulls().n_unique() < 2:
        return
    activities = view.activities.drop_nulls("device")
    busy = {
        int(device): to_intervals(group)
        for (device,), group in activities.group_by("device", maintain_order=True)
    }
    least = MIN_USED_SHARE * union(busy.values()).total
    busy = {device: time for device, time in busy.items() if time.total > least}
    if len(busy) < 2:
        return
    busy_anywhere = union(busy.values())
    # The same work, evenly distributed over all devices.
    even_share = sum(time.total for time in busy.values()) / len(busy)
    if not (cost := round(busy_anywhere.total - even_share)):
        return
    device = min(busy, key=lambda device_id: (busy[device_id].total, device_id))
    share = busy[device].total / busy_anywhere.total
    in_step_intervals = busy_anywhere & view.step_intervals
    in_steps = in_step_intervals.total - sum(
        (time & view.step_intervals).total for time in busy.values()
    ) / len(busy)
    first = activities.filter(pl.col("device") == device).row(0, named=True)
    yield Finding(
        f"device {device}, one of {len(busy)} of the rank, is busy for only {100 * share:.0f} % of the time in which "
        "any of them is",
        cost,
        "low",
        "distribute the work evenly and concurrently: one process per device (DistributedDataParallel) instead of "
        "one for all, or more micro-batches in a pipeline. Other analyses count a rank as busy if any of its "
        "devices is",
        busy_anywhere,
        DEVICE,
        step=first["step"],
        stream=first["stream"],
        name=str(first["name"]),
        event=first["launch"],
        start_ns=int(activities["ts"].min()),  # type: ignore[arg-type]
        end_ns=int(activities["end"].max()),  # type: ignore[arg-type]
        in_steps_ns=round(in_steps),
    )
