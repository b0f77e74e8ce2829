"""Pair operators of an execution trace with profiler events by an id that both recorded.

rf_id: nodes.rf_id is Kineto's "Record function id" (in an Nsight trace the op_id of the NVTX text). Kineto's "External
id" is used only if the file has no Record function id at all, as in 2023. A join is accepted or rejected as a whole, by
the share of names that agree, because some ids of different runs are equal by chance. Kineto's "Ev Idx" is an index
into its own file and links nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting

MIN_AGREEMENT = 0.9
"""Least share of the pairs whose names agree. By chance, up to 0.25 do (docs/decisions/0011)."""


_MIN_PAIRS = 16


@dataclass(frozen=True)
class IdJoin:
    """The rows of nodes and events joined by one recorded id, and on how many pairs the names are equal."""

    how: str
    node: np.ndarray
    event: np.ndarray
    joined: int  # pairs by id
    agreed: int  # of these, pairs of one name; `node` and `event` hold these
    repeated: int  # ids that one side holds twice, which pair nothing
    least: int  # pairs below which an agreement may be chance
    example: str | None  # two names that one id has

    @property
    def accepted(self) -> bool:
        return self.joined > 0 and self.agreed >= MIN_AGREEMENT * self.joined and self.joined >= self.least


def join_by_id(nodes: pl.DataFrame, events: pl.DataFrame, formats: list[str]) -> IdJoin:
    """Join nodes with events by the id that both tables contain (rf_id, op_id or External id); may have no pairs."""
    if events.select((pl.col("rf_id") > 0).any()).item():
        return _join_on("op_id" if "nsys" in formats else "rf_id", "rf_id", nodes, events)
    return _join_on("external_id", "external_id", nodes, events)


def is_linkable(nodes: pl.DataFrame) -> np.ndarray:
    """Return a mask of the nodes that a profiler records too: not process and thread roots, nor process groups."""
    is_internal = arrays.match_text(
        nodes["name"],
        lambda name: name.str.starts_with("[pytorch|") | name.str.contains("process_group:init"),
    )
    return ~is_internal


def encode_names(nodes: pl.DataFrame, events: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return a code for each name of nodes and events, ignoring overloads: ``aten::add_.Tensor`` is ``aten::add_``."""
    distinct = pl.concat([nodes["name"].unique(), events["name"].unique()]).unique().drop_nulls()
    plain = distinct.cast(pl.String).str.replace(r"^(\w+::\w+)\.\w+$", "$1")
    code_by_name = pl.DataFrame({"name": distinct, "code": plain.rank("dense").cast(pl.Int32)})

    def codes(frame: pl.DataFrame) -> np.ndarray:
        joined = frame.select("name").join(code_by_name, on="name", how="left", maintain_order="left")
        return arrays.to_array(joined["code"], -1)

    return codes(nodes), codes(events)


def _join_on(id_name: str, key: str, nodes: pl.DataFrame, events: pl.DataFrame) -> IdJoin:
    recorded = np.flatnonzero(categories.mask_events(events, nesting.RECORD_FUNCTION_CATEGORIES))
    sides = [
        arrays.make_frame({"id": ids, row: rows}).filter(pl.col("id") > 0)
        for ids, row, rows in (
            (nodes["rf_id"], "node", np.arange(nodes.height)),
            (arrays.take_rows(events[key], recorded), "event", recorded),
        )
    ]
    once = [side.unique("id", keep="none", maintain_order=True) for side in sides]
    repeated = sum(side["id"].n_unique() - unique.height for side, unique in zip(sides, once, strict=True))
    pairs = once[0].join(once[1], on="id", how="inner", maintain_order="left")
    node, event = pairs["node"].to_numpy(), pairs["event"].to_numpy()
    node_codes, event_codes = encode_names(nodes, events)
    same = node_codes[node] == event_codes[event]
    other = np.flatnonzero(~same)
    example = None
    if other.size:
        at = int(other[0])
        example = f"{id_name} {pairs['id'][at]}: {nodes['name'][int(node[at])]} and {events['name'][int(event[at])]}"
    least = min(_MIN_PAIRS, -(-min(side.height for side in sides) // 2))
    return IdJoin(id_name, node[same], event[same], len(node), int(same.sum()), repeated, least, example)
