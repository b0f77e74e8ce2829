"""Forward operators repeated during the backward pass: the cost of activation checkpointing.

One row per repeated operator and the backward operator in which it ran; times include callees. host_pct and
device_pct: share of the time of all backward operators of the trace (or step), so that their sums are the share of
recomputation in the backward pass. No rows: nothing was repeated.

PyTorch assigns a sequence number to an operator when autograd records it, which happens in the forward pass but not in
a backward pass. Therefore an operator inside a backward operator that has its own sequence number was repeated (the
outermost such operator is counted) if

- how checkpoint: it ran in the backward of a CheckpointFunction, or below a Python frame of torch/utils/checkpoint.py;
- how repeated: the backward operator's own work was not recorded by autograd, and the recorded operators inside it
  include the forward operator it belongs to, or consist of operators which that one called. So a backward pass that is
  to be differentiated again (create_graph) is not mistaken for recomputation.

Fused kernels of torch.compile that recompute, and modules that recompute without autograd, are not detected.

Units: ns, percent. Definition: TraceLens' detect_recompute.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import Step, check_step, conform_columns, require_linked
from etloom.analyses.helpers.operator_times import Rows, sum_device_time
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, select_device_events

SCOPE = "rank"
EMPTY_MESSAGE = "no forward operator was repeated in the backward pass"
COLUMNS = {
    "operator": pl.String,
    "backward": pl.String,
    "how": pl.String,
    "count": pl.Int64,
    "host_ns": pl.Int64,
    "host_pct": pl.Float64,
    "device_ns": pl.Int64,
    "device_pct": pl.Float64,
}
_CHECKPOINT_BACKWARD = rf"^{categories.WORD}*Checkpoint{categories.WORD}*Backward$"
_CHECKPOINT_FRAME = r"torch/utils/checkpoint\.py\("


def analyze(trace: Trace, *, step: Step = None) -> pl.DataFrame:
    require_linked(trace)
    check_step(trace, step)
    events = trace.events
    operator = categories.mask_events(events, categories.OPERATOR_CATEGORIES) & arrays.is_present(
        events["depth"]
    )
    backward = operator & (arrays.to_array(events["fwd_tid"], 0) > 0)
    if not backward.any():
        raise AnalysisError(
            "the trace contains no backward operators with a link to their forward operators",
            where=describe_rank(trace),
            remedy="record a training step with torch.profiler, forward and backward",
        )
    parent = rows_of_ids(events, events["parent"])
    device = sum_device_time(trace, parent)
    in_step = (
        np.ones(events.height, np.bool_)
        if step is None
        else (events["step"] == step).fill_null(False).to_numpy()
    )
    rows, backward_rows, is_checkpoint = find_recomputed(trace, parent, operator, backward)
    is_checkpoint, rows, backward_rows = (
        part[in_step[rows]] for part in (is_checkpoint, rows, backward_rows)
    )
    outermost = np.flatnonzero(backward & in_step)
    outermost = outermost[_find_ancestor(parent, backward, outermost) < 0]
    durations = arrays.to_array(events["dur"], 0)
    names = events["name"].cast(pl.String)
    repeated = pl.DataFrame(
        {
            "operator": names[rows],
            "backward": names[backward_rows],
            "how": np.where(is_checkpoint, "checkpoint", "repeated"),
            "host_ns": durations[rows],
            "device_ns": device[rows],
        },
        schema_overrides={"how": pl.String},
    )
    totals = {"host": int(durations[outermost].sum()), "device": int(device[outermost].sum())}
    table = (
        repeated.group_by("operator", "backward", "how")
        .agg(pl.len().alias("count"), pl.col("host_ns", "device_ns").sum())
        .with_columns(
            (100.0 * pl.col(f"{basis}_ns") / time if time else pl.lit(None, pl.Float64)).alias(f"{basis}_pct")
            for basis, time in totals.items()
        )
        .sort("device_ns", "host_ns", "operator", "backward", descending=[True, True, False, False])
    )
    if not select_device_events(trace).height:
        table = table.with_columns(pl.lit(None, pl.Int64).alias("device_ns"))
    return conform_columns(table, COLUMNS)


def _find_ancestor(parent: Rows, mask: np.ndarray, rows: Rows) -> Rows:
    """Return the row (int64) of the nearest event of ``mask`` that encloses each of ``rows``, -1 for none."""
    return nesting.find_nearest_ancestor(parent, mask, parent[rows])


def find_recomputed(
    trace: Trace, parent: Rows, operator: np.ndarray, backward: np.ndarray
) -> tuple[Rows, Rows, np.ndarray]:
    """Return the forward operators repeated in the backward pass; of nested ones the outermost.

    Returns:
        Their rows, the rows of their enclosing backward operators, and whether a checkpoint is the evidence.
    """
    events = trace.events
    numbered = operator & (arrays.to_array(events["seq_id"], -1) >= 0)
    rows = np.flatnonzero(numbered & ~backward)
    above = _find_ancestor(parent, numbered, rows)
    rows, above = rows[above >= 0], above[above >= 0]
    rows, above = rows[backward[above]], above[backward[above]]
    checkpoint = categories.match_names(events, _CHECKPOINT_BACKWARD)
    frame = categories.match_names(events, _CHECKPOINT_FRAME)
    nearest = _find_ancestor(parent, frame | backward, rows)
    is_checkpoint = checkpoint[above] | frame[nearest]
    repeating = _find_repeating(trace, parent, operator, numbered, rows, above)
    keep = is_checkpoint | _mask_rows(repeating, events.height)[above]
    return rows[keep], above[keep], is_checkpoint[keep]


def _find_repeating(
    trace: Trace, parent: Rows, operator: np.ndarray, numbered: np.ndarray, rows: Rows, above: Rows
) -> Rows:
    """Return the backward operators (rows in ``above``) in which the operators ``rows`` repeat work of the forward
    pass."""
    events = trace.events
    # Operators of a backward operator itself have no sequence number, unless recorded for differentiation.
    callers = _find_ancestor(parent, operator, np.flatnonzero(operator & ~numbered))
    unrecorded = _mask_rows(callers, events.height)[above]
    joins = trace.thread_dependencies.filter(pl.col("kind") == "fwd_bwd")
    forward = np.full(events.height, -1, np.int64)
    forward[rows_of_ids(events, joins["event"])] = rows_of_ids(events, joins["after"])
    has_forward = unrecorded & (forward[above] >= 0)
    rows, above = rows[has_forward], above[has_forward]
    names = events["name"].to_physical().cast(pl.Int64).fill_null(-1).to_numpy()

    backward_rows = np.unique(above)
    forward_keys = _pack_key(backward_rows, names[forward[backward_rows]])
    repeating = backward_rows[
        np.isin(forward_keys, _pack_calls(parent, np.flatnonzero(operator & numbered), backward_rows, names))
    ]
    called = _pack_calls(parent, np.flatnonzero(operator), np.unique(forward[backward_rows]), names)
    not_called = ~np.isin(_pack_key(forward[above], names[rows]), called)
    return np.union1d(repeating, np.setdiff1d(backward_rows, above[not_called]))


def _mask_rows(rows: Rows, count: int) -> np.ndarray:
    """Return a mask that is true for ``rows``; it has one more entry than ``count``: index -1 (no row) is False."""
    mask = np.zeros(count + 1, np.bool_)
    mask[rows] = True
    mask[-1] = False
    return mask


def _pack_calls(parent: Rows, rows: Rows, callers: Rows, names: Rows) -> Rows:
    """Return a packed (caller, name) key for each distinct name of the operators ``rows`` that a caller calls, at any
    depth."""
    keys = [np.zeros(0, np.int64)]
    above = parent[rows]
    is_caller = _mask_rows(callers, len(parent))
    while callers.size and (inside := above >= 0).any():
        rows, above = rows[inside], above[inside]
        hit = is_caller[above]
        keys.append(np.unique(_pack_key(above[hit], names[rows[hit]])))
        above = parent[above]
    return np.concatenate(keys)


def _pack_key(row: Rows, name: Rows) -> Rows:
    return (row.astype(np.int64) << 32) | name
