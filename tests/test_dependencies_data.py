"""Data dependencies between operators: by hand, against a slow reference, and on recordings."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.dependencies.data import data_dependencies
from etloom.trace import Trace

Touch = tuple[int, int, int]
"""Node, 0 read or 1 written, storage."""


def trace(touches: list[Touch], parents: dict[int, int] | None = None, nodes: int = 8) -> Trace:
    ids = range(nodes)
    return Trace(
        {
            "nodes": pl.DataFrame({"id": ids, "parent": [(parents or {}).get(n) for n in ids]}),
            "tensors": pl.DataFrame(
                [
                    {"node": n, "io": io, "storage_id": s, "tensor_id": 90 + s, "numel": 10 * (n + 1)}
                    | {"itemsize": 4}
                    for n, io, s in touches
                ],
                schema_overrides={"storage_id": pl.Int64},
                infer_schema_length=None,
            ),
        }
    )


def pairs(frame: pl.DataFrame) -> list[tuple[int, int, str]]:
    return frame.select("node", "on", "kind").rows()


def test_a_reader_needs_the_last_writer() -> None:
    found = data_dependencies(trace([(0, 1, 5), (1, 0, 5), (2, 1, 5), (3, 0, 5), (4, 0, 5)]))
    assert pairs(found.filter(pl.col("kind") == "read")) == [(1, 0, "read"), (3, 2, "read"), (4, 2, "read")]
    assert pairs(found.filter(pl.col("kind") == "overwrite")) == [(2, 0, "overwrite"), (2, 1, "overwrite")]
    assert found.filter(pl.col("kind") == "read")["bytes"].to_list() == [80, 160, 200]


def test_an_operator_that_changes_in_place_needs_who_came_before() -> None:
    found = data_dependencies(trace([(0, 1, 5), (1, 0, 5), (1, 1, 5), (2, 0, 5)]))
    assert pairs(found) == [(1, 0, "overwrite"), (1, 0, "read"), (2, 1, "read")]


def test_only_the_innermost_operators_touch_data_and_other_storages_are_no_matter() -> None:
    touches = [(0, 1, 5), (1, 0, 5), (2, 0, 5), (3, 0, 6), (4, 0, 0)]
    assert pairs(data_dependencies(trace(touches, parents={2: 1}))) == [(2, 0, "read")]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1), st.integers(1, 3)), max_size=24))
def test_as_the_slow_reference(touches: list[Touch]) -> None:
    expected = set()
    for node, io, storage in set(touches):
        writers = [n for n, i, s in touches if i == 1 and s == storage and n < node]
        last = max(writers, default=None)
        if last is not None:
            expected.add((node, last, "read" if io == 0 else "overwrite"))
        if io == 1:
            readers = [n for n, i, s in touches if i == 0 and s == storage and n < node]
            between = [n for n in readers if last is None or n >= last]
            # Who reads and then writes is followed as a writer.
            expected |= {(node, n, "overwrite") for n in between if (n, 1, storage) not in touches}
    assert set(pairs(data_dependencies(trace(touches)))) == expected


@pytest.mark.parametrize(("name", "reads"), [("simple_add", 12), ("nccl_ddp", 7291), ("cpu/ddp_2", 2667)])
def test_recordings(name: str, reads: int, data: Path) -> None:
    one = etloom.open(data / name, use_cache=False)[0]
    found = data_dependencies(one)
    assert (found["node"] > found["on"]).all()
    assert (found["kind"] == "read").sum() == reads
