"""Builds tables of nodes, tensors, comms, dependencies, events and links from nodes added in turn (Chakra and ET+)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import polars as pl

from etloom.core.categories import itemsize
from etloom.core.schema import TABLES, Stat
from etloom.formats.tables.building import build_frame, build_series, sort_events

_TENSOR_TYPE = re.compile(r"Tensor\(((?:[^()]|\([^()]*\))*)\)")
_TENSOR_LENGTH = 6  # tensor_id, storage_id, offset, numel, itemsize, device

# The values that the recorder writes for none.
_NONE: dict[str, tuple[Any, ...]] = {
    "fw_parent": (0,),
    "fw_tid": (0,),
    "seq_id": (-1, 0xFFFFFFFFFFFFFFFF),
    "op_schema": ("",),
    "kernel_backend": ("",),
    "kernel_file": ("",),
}
NODE_ATTRIBUTES = ("rf_id", "seq_id", "scope", "tid", "fw_tid", "fw_parent", *list(_NONE)[3:])
"""Attributes of a node that have a column of the same name."""


_ENCODER = json.JSONEncoder(allow_nan=False, default=str)
_MAX_DEPTH = 64


def to_json(value: Any) -> str:
    """Return a value as JSON text; parts that JSON cannot represent (NaN, infinity, bytes) become strings."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_replace_nonfinite(value))
    except RecursionError:
        return '"nested too deeply"'


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(item) for item in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


class NodeTableBuilder:
    """Collects nodes in file order; `build_tables` sorts them by id and resolves references to ids."""

    def __init__(self) -> None:
        self._nodes: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._comms: list[dict[str, Any]] = []
        self._edges: list[tuple[int, str, int]] = []  # place in the file, kind, number of ids in _on
        self._on: list[int] = []  # et_ids
        self._events: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def add(
        self, et_id: int, name: str, parent: int | None, columns: dict[str, Any], attrs: dict[str, Any]
    ) -> int:
        """Add a node and return its position in the file, by which the other methods refer to it.

        Args:
            et_id: Its id in the file.
            name: Its name.
            parent: The id of its parent.
            columns: Values of `NODE_ATTRIBUTES`.
            attrs: All other attributes.
        """
        place = len(self._nodes)
        row = {key: value for key, value in columns.items() if value not in _NONE.get(key, ())}
        self._nodes.append(
            {
                **row,
                "et_id": et_id,
                "name": name,
                "recorded_parent": parent,
                "file_order": place,
                "attrs": to_json(attrs) if attrs else None,
            }
        )
        return place

    def add_arguments(
        self, place: int, io: int, values: list[Any], shapes: list[Any], types: list[Any], strides: list[Any]
    ) -> None:
        """Add a node's inputs (io 0) or outputs (io 1) to its row of nodes, and their tensors to the tensors table."""
        plain: list[Any] = []
        for index, (value, shape, kind, stride) in enumerate(zip_longest(values, shapes, types, strides)):
            dtypes = iter(_TENSOR_TYPE.findall(kind)) if isinstance(kind, str) else iter(())
            plain.append(self._convert_argument((place, io, index), value, shape, stride, dtypes, None, 0))
        column = ("inputs", "outputs")[io]
        self._nodes[place][column] = to_json(plain)
        self._nodes[place][f"{column[:-1]}_types"] = to_json(types)

    def _convert_argument(
        self,
        slot: tuple[int, int, int],
        value: Any,
        shape: Any,
        stride: Any,
        dtypes: Iterator[str],
        items: list[int] | None,
        depth: int,
    ) -> Any:
        if not isinstance(value, list) or depth > _MAX_DEPTH:
            return value
        if len(value) == _TENSOR_LENGTH and isinstance(value[-1], str) and all(map(is_int, value[:-1])):
            tensor_id, storage_id, offset, numel, size, device = value
            dtype = next(dtypes, None)
            item = None
            if items is not None:
                item = items[0]
                items[0] += 1
            self._tensors.append(
                {
                    **dict(zip(("place", "io", "index"), slot, strict=True)),
                    "item": item,
                    "tensor_id": tensor_id,
                    "storage_id": storage_id,
                    "offset": offset,
                    "numel": numel,
                    "itemsize": size if size else itemsize(dtype),
                    "device": device,
                    "dtype": dtype,
                    "shape": None if shape is None else to_json(shape),
                    "stride": None if stride is None else to_json(stride),
                }
            )
            return None
        items = [0] if items is None else items
        shapes = shape if isinstance(shape, list) else []
        strides = stride if isinstance(stride, list) else []
        return [
            self._convert_argument(slot, item, item_shape, item_stride, dtypes, items, depth + 1)
            for item, item_shape, item_stride in zip_longest(
                value, shapes[: len(value)], strides[: len(value)]
            )
        ]

    def add_dependencies(self, place: int, on: Iterable[int], kind: str) -> None:
        """Add the nodes, by their ids in the file, that a node depends on; ``kind`` names the type of dependency."""
        count_before = len(self._on)
        self._on.extend(on)
        self._edges.append((place, kind, len(self._on) - count_before))

    def add_event(self, place: int, row: dict[str, Any]) -> None:
        """Add the row of the events table for a node that is also an event."""
        self._events.append({"place": place, **row})

    def add_comm(self, place: int, row: dict[str, Any]) -> None:
        """Add a row of the comms table for a node."""
        self._comms.append({"place": place, **row})

    def build_tables(self) -> tuple[dict[str, pl.DataFrame], list[Stat]]:
        """Return nodes, tensors, comms, dependencies, events and links; references to absent nodes are counted."""
        lost: list[Stat] = []
        nodes = build_frame("nodes", self._nodes, lost).sort("et_id", "file_order").drop("id", "parent")
        nodes = nodes.with_row_index("id")
        ids = nodes.group_by("et_id").agg(pl.col("id").first(), pl.len())
        repeated = ids.filter(pl.col("len") > 1)
        by_et_id = ids.select(recorded_parent="et_id", parent="id")
        nodes = nodes.join(by_et_id, on="recorded_parent", how="left", maintain_order="left")
        node_by_place = nodes.select(place="file_order", node="id")

        edges = self._build_edges()
        edges = edges.join(node_by_place, on="place", how="left", maintain_order="left").join(
            ids.select("et_id", on="id"), on="et_id", how="left", maintain_order="left"
        )
        dangling = edges.filter(pl.col("on").is_null())
        orphans = nodes.filter(pl.col("recorded_parent").is_not_null() & pl.col("parent").is_null())
        # PyTorch's root states itself as its parent.
        nodes = nodes.with_columns(pl.when(pl.col("parent") != pl.col("id")).then("parent").alias("parent"))
        stats = _count_problems(repeated, dangling, orphans)
        tables = {
            "nodes": nodes.select(*TABLES["nodes"].schema),
            "tensors": _replace_places("tensors", self._tensors, node_by_place, lost),
            "comms": _replace_places("comms", self._comms, node_by_place, lost),
            "dependencies": edges.filter(pl.col("on").is_not_null())
            .select("node", "on", "kind")
            .unique(maintain_order=True)
            .sort("node", maintain_order=True),
        }
        tables["comms"] = tables["comms"].drop("id").with_row_index("id")
        if self._events:
            tables["events"], tables["links"] = self._build_events(node_by_place, lost)
        return tables, [*stats, *lost]

    def _build_events(
        self, node_by_place: pl.DataFrame, lost: list[Stat]
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the events table, and the links between events and their nodes."""
        places = pl.Series("place", [row["place"] for row in self._events], dtype=pl.UInt32)
        position = pl.Series("position", range(len(places)), dtype=pl.UInt32)
        rows = build_frame("events", self._events, lost).drop("id").with_columns(places, position)
        events = sort_events(rows).with_row_index("id")
        links = events.select("place", event="id").join(
            node_by_place, on="place", how="left", maintain_order="left"
        )
        links = links.select("node", "event", how=pl.lit("file"), score=pl.lit(1.0)).sort("node")
        return events.drop("place"), links

    def _build_edges(self) -> pl.DataFrame:
        places, kinds, counts = zip(*self._edges, strict=True) if self._edges else ((), (), ())
        # An id outside of the range of the column becomes null, which is not the id of any node.
        on, _ = build_series("et_id", self._on, pl.Int64)
        return pl.DataFrame(
            {
                "place": np.repeat(np.array(places, dtype=np.uint32), counts),
                "et_id": on,
                "kind": np.repeat(np.array(kinds, dtype=object), counts).tolist(),
            },
            schema_overrides={"kind": pl.String},
        )


def _count_problems(repeated: pl.DataFrame, dangling: pl.DataFrame, orphans: pl.DataFrame) -> list[Stat]:
    """Return the stats of repeated ids, dependencies on absent nodes, and nodes with an absent parent."""

    def describe(frame: pl.DataFrame, text: str) -> str | None:
        return text.format(frame["et_id"][0]) if frame.height else None

    repeated_rows = int(repeated["len"].sum() or 0)
    repeated_text = describe(repeated, "node {}: references to it are resolved to the first")
    dangling_text = describe(dangling, "on node {}, which is not in the file")
    return [
        Stat("read.duplicate_node_id", "error", repeated_rows, repeated_text),
        Stat("read.dangling_dependency", "data_loss", dangling.height, dangling_text),
        Stat("read.missing_parent", "info", orphans.height, describe(orphans, "node {}")),
    ]


def _replace_places(
    table: str, rows: list[dict[str, Any]], node_by_place: pl.DataFrame, stats: list[Stat]
) -> pl.DataFrame:
    """Build a table, sorted by node, from rows that refer to nodes by position in the file instead of by id."""
    places = pl.DataFrame({"place": pl.Series([row["place"] for row in rows], dtype=pl.UInt32)})
    node = places.join(node_by_place, on="place", how="left", maintain_order="left")["node"]
    return build_frame(table, rows, stats).with_columns(node).sort("node", maintain_order=True)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
