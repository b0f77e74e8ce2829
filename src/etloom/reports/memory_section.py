"""The memory of caching allocators: a chart over time, what holds memory at a moment, and causes of waste."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from etloom.analyses.answers import answer
from etloom.analyses.helpers.memory_curves import MemoryCurve, measure_curves
from etloom.core.errors import AnalysisError
from etloom.core.text import count_noun, format_bytes, format_ranks
from etloom.core.trace import Job, Trace
from etloom.reports.page import fill_template, read_asset
from etloom.reports.time_shares import SummaryLine

MAX_CHARTS = 8
"""Devices with a chart, those with the highest peaks."""
COLORS = ("compute", "communication", "memory", "annotation", "runtime", "operator")
"""Colors of the parts of the allocated memory, classes in report.css; the rest has the next one."""
MORE_COLORS = ("python", "other")
MAX_HOLDERS = 12
"""Holders listed for a moment."""
OTHERS = "others"
_NAME = 160
"""Characters of the name of a holder."""


class DeviceMemory(NamedTuple):
    """The memory of a device of a rank over time."""

    rank: int
    curve: MemoryCurve

    @property
    def peak(self) -> int:
        return int(self.curve.reserved.max())


class RunMemory(NamedTuple):
    """The devices of a run whose allocator was recorded, highest peak first, and why ranks are left out."""

    devices: list[DeviceMemory]
    refused: dict[int, str]


def find_memory(job: Job) -> RunMemory:
    """Return the memory of the devices of a run over time; it is computed once per job."""
    return job.compute_once(_measure_job)


def _measure_job(job: Job) -> RunMemory:
    devices: list[DeviceMemory] = []
    refused = {}
    for rank, trace in job.items():
        if not trace.allocator.height:
            continue
        try:
            devices += [DeviceMemory(rank, curve) for curve in measure_curves(trace)]
        except AnalysisError as error:
            refused[rank] = error.what
    return RunMemory(sorted(devices, key=lambda device: (-device.peak, device.rank)), refused)


def is_memory_only(job: Job) -> bool:
    """Return whether the run consists of memory snapshots, at least one of which has a history."""
    return all(trace.is_snapshot for trace in job.values()) and bool(find_memory(job).devices)


def summarize_memory(job: Job) -> Iterator[SummaryLine]:
    """Yield the summary lines on memory: the first cause of waste, the peaks, their largest holder, free bytes, and
    what was read."""
    causes = answer(job, "memory-findings").table
    if causes.is_empty():
        yield SummaryLine(
            "Top finding", "nothing found", "no cause wastes 5 % of the peak of reserved memory"
        )
    else:
        cause = causes.sort("pct", descending=True, maintain_order=True).row(0, named=True)
        yield SummaryLine("Top finding", format_bytes(cause["bytes"]), f"{cause['title']}; {cause['advice']}")
    rank, curve = find_memory(job).devices[0]
    highest = f" of rank {rank}, the highest" if len(job) > 1 else ""
    at = _find_peak(curve)
    reserved, allocated = int(curve.reserved[at]), int(curve.allocated[at])
    yield SummaryLine(
        "Reserved", format_bytes(reserved), f"peak{highest}; {format_bytes(allocated)} in use then"
    )
    most = int(curve.allocated.argmax())
    requested = format_bytes(int(curve.requested[most]))
    yield SummaryLine(
        "In use",
        format_bytes(int(curve.allocated[most])),
        f"peak of blocks in use; {requested} of them requested",
    )
    holder = int(curve.holder_bytes[:, most].argmax()) if len(curve.holder_bytes) else None
    if holder is not None:
        size = int(curve.holder_bytes[holder, most])
        share = 100 * size / max(int(curve.allocated[most]), 1)
        yield SummaryLine(
            "Largest holder",
            format_bytes(size),
            f"{share:.1f} % of the peak: {_name(curve.holders.row(holder))}",
        )
    split = reserved - allocated - int(curve.releasable[at])
    text = f"free at the peak, but kept by live blocks; {format_bytes(int(curve.releasable[at]))} could be released"
    yield SummaryLine("Fragmented", format_bytes(split), text)
    operations = sum(int(each.operations[-1]) + 1 for _, each in find_memory(job).devices)
    yield SummaryLine("Read", count_noun(len(job), "rank"), f"{operations:,} requests and frees")


def render_memory(job: Job, zeros: Mapping[int, int]) -> str:
    """Render the chart of memory over time and the causes of waste as HTML; empty without a recorded allocator.

    Args:
        job: The ranks.
        zeros: The time that the timeline shows as zero, by rank; a rank without one counts from its first entry.
    """
    memory = find_memory(job)
    notes = [f"{format_ranks([rank])}: {reason}." for rank, reason in memory.refused.items()]
    notes += [f"{format_ranks([rank])}, {curve.doubt}." for rank, curve in memory.devices if curve.doubt]
    if not memory.devices:
        return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    charts = memory.devices[:MAX_CHARTS]
    if len(charts) < len(memory.devices):
        omitted = count_noun(len(memory.devices) - len(charts), "device")
        notes.append(f"The devices with the highest peaks are drawn; {omitted} with lower ones are not.")
    options = "".join(
        f'<option value="{i}">{escape(f"rank {rank}, device {curve.device}")}</option>'
        for i, (rank, curve) in enumerate(charts)
    )
    encoded = [_encode(device, _find_zero(job[device.rank], device, zeros)) for device in charts]
    data = json.dumps(encoded, separators=(",", ":"))
    return fill_template(
        read_asset("memory.html"),
        options=options,
        several="" if len(charts) > 1 else " hidden",
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        data=base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode(),
        causes=_render_causes(job),
    )


def _render_causes(job: Job) -> str:
    """Render the causes of waste as a list, the largest first; empty without any."""
    causes = answer(job, "memory-findings").table
    items = []
    for row in causes.iter_rows(named=True):
        parts = [
            f"{part['place']} {format_bytes(part['bytes'])}" for part in json.loads(row["parts"] or "[]")
        ]
        facts = [*([f"rank {row['rank']}"] if len(job) > 1 else []), f"{row['confidence']} confidence"]
        items.append(
            f'<li><div class="cost"><b>{escape(format_bytes(row["bytes"]))}</b>'
            f"<span>{row['pct']:.1f} % of the peak</span></div>"
            f'<div><p class="what">{escape(row["title"])}</p><p>{escape(row["advice"])}</p>'
            + (f'<p class="soft">{escape("; ".join(parts))}</p>' if parts else "")
            + f'<p class="soft">{escape(" · ".join(facts))} · <code>{escape(row["pattern"])}</code></p></div></li>'
        )
    return f'<h3>Causes of waste</h3><ol class="findings">{"".join(items)}</ol>' if items else ""


def _find_zero(trace: Trace, device: DeviceMemory, zeros: Mapping[int, int]) -> int | None:
    """Return the time that the timeline of the rank shows as zero; None if its events are of another time."""
    times, zero = device.curve.times, zeros.get(device.rank)
    if times is None or zero is None or trace.meta.get("clock") != "epoch":
        return None
    last = trace.events.select((pl.col("ts") + pl.col("dur").fill_null(0)).max()).item()
    is_concurrent = times[0] <= last and times[-1] >= trace.events["ts"].min()
    return zero if is_concurrent else None


def _encode(device: DeviceMemory, zero: int | None) -> dict[str, Any]:
    """Return a curve as data for JSON: sizes at each moment, parts of the allocated memory, and the largest holders.

    ``zero``: the time that the timeline shows as zero, None if the device is not linked with it.
    """
    rank, curve = device
    start = 0 if curve.times is None else int(curve.times[0])
    labels, parts = _stack_parts(curve)
    colors = [*COLORS, *MORE_COLORS][: len(labels)]
    if labels[-1:] == [OTHERS]:
        colors[-1] = MORE_COLORS[-1]
    order = np.argsort(-curve.holder_bytes, axis=0, kind="stable")[:MAX_HOLDERS]
    rows = []
    for moment, largest in enumerate(order.T.tolist()):
        present = [holder for holder in largest if curve.holder_bytes[holder, moment] > 0]
        rows.append(
            [[h, int(curve.holder_bytes[h, moment]), int(curve.holder_blocks[h, moment])] for h in present]
        )
    listed = sorted({row[0] for listed_holders in rows for row in listed_holders})
    number = {holder: place for place, holder in enumerate(listed)}
    return {
        "rank": rank,
        "device": curve.device,
        "exact": curve.is_exact,
        "peak": _find_peak(curve),
        "linked": zero is not None,
        "operations": curve.operations.tolist(),
        "times": None if curve.times is None else (curve.times - (start if zero is None else zero)).tolist(),
        **{
            name: getattr(curve, name).tolist()
            for name in ("reserved", "allocated", "requested", "releasable")
        },
        "groups": labels,
        "colors": colors,
        "parts": parts.tolist(),
        "holders": [[_cut(text) for text in curve.holders.row(holder)] for holder in listed],
        "held": [[[number[h], size, blocks] for h, size, blocks in row] for row in rows],
        "count": (curve.holder_bytes > 0).sum(axis=0).tolist(),
        "blocks": curve.holder_blocks.sum(axis=0).tolist(),
    }


def _find_peak(curve: MemoryCurve) -> int:
    """Return the moment with most reserved memory; of several the one with most memory in use."""
    return int(np.where(curve.reserved == curve.reserved.max(), curve.allocated, -1).argmax())


def _stack_parts(curve: MemoryCurve) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the parts of the allocated memory by kind, or without kinds by the largest holders: labels, and bytes of
    each (row) at each moment (column)."""
    has_kinds = curve.holders["kind"].null_count() < curve.holders.height
    if has_kinds:
        names = curve.holders["kind"].fill_null("unknown")
    else:
        names = pl.Series([_name(row) for row in curve.holders.iter_rows()], dtype=pl.String)
    labels = names.unique(maintain_order=True).to_list()
    sums = np.zeros((len(labels), len(curve.operations)), np.int64)
    places = {label: place for place, label in enumerate(labels)}
    np.add.at(sums, [places[name] for name in names], curve.holder_bytes)
    # Those that are in use longest come first, at the bottom.
    limit = len(COLORS) if len(labels) > len(COLORS) + len(MORE_COLORS) else len(labels)
    largest = np.argsort(-sums.max(axis=1, initial=0), kind="stable")[:limit]
    largest = largest[np.argsort(-sums[largest].min(axis=1, initial=1 << 62), kind="stable")]
    rest = np.delete(sums, largest, axis=0).sum(axis=0)
    if not rest.any():
        return [labels[i] for i in largest], sums[largest]
    return [*(labels[i] for i in largest), OTHERS], np.vstack([sums[largest], rest])


def _name(holder: tuple[Any, ...]) -> str:
    _, line, operator = holder
    return _cut(line if operator is None else f"{line}, {operator.removeprefix('at::_ops::')}") or ""


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= _NAME else f"{text[: _NAME - 1]}…"
