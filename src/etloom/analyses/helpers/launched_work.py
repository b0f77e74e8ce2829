"""GPU activities with their launch call and the operator around it."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import require_linked
from etloom.core import arrays, categories, nesting
from etloom.core.errors import AnalysisError
from etloom.core.steps import is_step
from etloom.core.trace import Trace
from etloom.timeline import activity
from etloom.timeline.activity import describe_rank, has_device_events

_MODULE_NAME = r'"module_fqn": ?"((?:[^"\\]|\\.)+)"'
_ANNOTATION = r'"(?:annotation|str|name)": ?"((?:[^"\\]|\\.)+)"'


def read_graph_annotations(trace: Trace, device_events: pl.Series) -> pl.DataFrame:
    """Return what torch.cuda's graph annotations (torch 2.12 and later) state of each device event (ids).

    Returns:
        A row per id. Columns: module (the qualified name of the nn.Module) and annotation; null if not stated.
    """
    rows = arrays.rows_of_ids(trace.events, device_events)
    texts = arrays.take_rows(trace.events["args"], rows)
    nodes = trace.kernels.drop_nulls("graph_node_id")["event"]
    in_graph = device_events.is_in(nodes.implode())
    texts = pl.select(pl.when(in_graph).then(texts)).to_series()
    return pl.DataFrame(
        {
            "module": arrays.map_text(texts, lambda text: text.str.extract(_MODULE_NAME)),
            "annotation": arrays.map_text(texts, lambda text: text.str.extract(_ANNOTATION)),
        }
    )


def select_launched_work(trace: Trace, *columns: str) -> pl.DataFrame:
    """Return GPU activities with their launch call, reduced to the columns ``columns`` (see `select_launched_events`).

    Raises:
        AnalysisError: The trace has no GPU activity, or is not linked.
    """
    require_linked(trace)
    if not has_device_events(trace):
        raise AnalysisError(
            "the trace contains no GPU activity",
            where=describe_rank(trace),
            remedy="record with the profiler's CUDA activity",
        )
    return activity.select_launched_events(trace, *columns)


def find_annotations(trace: Trace, launches: pl.Series) -> np.ndarray:
    """Return the row of the innermost annotation around each event (ids, may be null), -1 for none.

    Steps and the ranges of communication backends do not count.
    """
    events = trace.events
    is_annotation = categories.mask_events(events, categories.ANNOTATION_CATEGORIES) & ~arrays.match_text(
        events["name"],
        lambda name: is_step(name) | categories.is_backend_range(name),
    )
    parents = arrays.rows_of_ids(events, events["parent"])
    return nesting.find_nearest_ancestor(parents, is_annotation, arrays.rows_of_ids(events, launches))
