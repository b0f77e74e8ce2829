"""Find memcpys that overlap neither computation nor communication and belong to neither host_copies nor checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from etloom.analyses.findings.finding import DEVICE, Finding, describe_place, sum_places
from etloom.analyses.findings.patterns.copies.host_copies import list_copies
from etloom.analyses.findings.rank_view import RankView
from etloom.core.text import count_noun

COPY = r"(?i)memcpy|copy(?:Host|Device|Buffer)"
INSIDE_DEVICE = re.compile(r"(?i)DtoD|DeviceToDevice")
TO_HOST = re.compile(r"(?i)DtoH|DeviceToHost")
ON_DEVICE_ADVICE = (
    "write the result directly to its destination (out=, views, in-place operators), and remove clones that are not "
    "needed"
)
TO_DEVICE_ADVICE = (
    "keep reused data on the device; copy the next part during the current computation, from pinned memory, with "
    "non_blocking=True on a separate stream; copy less (a narrower type, a part)"
)

FROM_DEVICE_ADVICE = (
    "keep data on the device if it is used there, copy back less, less often, to pinned memory with "
    "non_blocking=True on a separate stream, and wait only where the host needs the data"
)


def find(view: RankView) -> Iterator[Finding]:
    if not (view.activities["kind"] == "memory").any():
        return
    columns = ("id", "name", "ts", "end", "step", "stream", "launch")
    copies = view.activities.select(columns).filter(view.activities["kind"] == "memory")
    reported = copies["id"].is_in(view.compute_once(list_copies)["id"].implode())
    copies = copies.filter(view.match_activities(copies, COPY) & ~reported)
    hidden = view.busy_computing | view.saving  # a copy during a save is part of it
    alone = (copies["end"] - copies["ts"]).to_numpy() - hidden.covered(copies["ts"], copies["end"])
    rows = copies.select("step", "stream", "name", "end", start="ts", cost_ns=alone, event="launch")
    yield from sum_places(
        view,
        rows,
        lambda row: (
            f"{count_noun(row['count'], 'memcpy')} without concurrent computation or communication"
            f"{describe_place(row, 'name', ': ')}"
        ),
        confidence="medium",
        advice=lambda row: _advise(str(row["name"])),
        tracks=DEVICE,
        by="name",
        kind="memcpy",
        hidden=hidden,
    )


def _advise(name: str) -> str:
    """Return the advice on a memcpy, whose direction is inferred from its name."""
    if INSIDE_DEVICE.search(name):
        return ON_DEVICE_ADVICE
    return FROM_DEVICE_ADVICE if TO_HOST.search(name) else TO_DEVICE_ADVICE
