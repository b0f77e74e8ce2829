"""Backward operators and their forward operators, against a search of all pairs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom.core.schema import TABLES
from etloom.linker.thread_dependencies import match_forward_operators

OPERATORS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 3)),  # seq_id
        st.sampled_from([None, 0, 0, 1, 2]),  # fwd_tid
        st.integers(0, 9),  # ts
        st.integers(0, 2),  # depth
        st.integers(1, 3),  # tid
    ),
    max_size=14,
)


def search(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Return {backward row: forward row}, from the definition."""
    backward = [i for i, row in enumerate(rows) if row["seq_id"] is not None and (row["fwd_tid"] or 0) > 0]
    forward = [i for i, row in enumerate(rows) if row["seq_id"] is not None and not (row["fwd_tid"] or 0) > 0]
    numbers = {(rows[i]["tid"], rows[i]["seq_id"]) for i in forward}
    votes: dict[int, Counter[int]] = {}
    for thread, number in {(rows[i]["fwd_tid"], rows[i]["seq_id"]) for i in backward}:
        votes.setdefault(thread, Counter()).update(tid for tid, other in numbers if other == number)
    pairs = {}
    for i in backward:
        row, counts = rows[i], votes[rows[i]["fwd_tid"]]
        track = min(counts, key=lambda tid: (-counts[tid], tid), default=None)
        able = [
            j
            for j in forward
            if (rows[j]["tid"], rows[j]["seq_id"]) == (track, row["seq_id"]) and rows[j]["ts"] <= row["ts"]
        ]
        if able:
            pairs[i] = max(able, key=lambda j: (rows[j]["ts"], rows[j]["depth"], j))
    return pairs


@pytest.mark.slow
@given(OPERATORS)
def test_backward_operators_are_matched_as_by_a_search_of_all_pairs(operators: list[tuple[Any, ...]]) -> None:
    operators = sorted(operators, key=lambda row: row[2])
    rows = [dict(zip(("seq_id", "fwd_tid", "ts", "depth", "tid"), row, strict=True)) for row in operators]
    columns = {name: [row[name] for row in rows] for name in ("seq_id", "fwd_tid", "ts", "depth", "tid")}
    events = TABLES["events"].conform(
        pl.DataFrame(
            {"id": range(len(rows)), "cat": ["cpu_op"] * len(rows), "pid": [7] * len(rows), **columns}
        )
    )
    backward, forward, unknown = match_forward_operators(events)
    expected = search(rows)
    assert dict(zip(backward.tolist(), forward.tolist(), strict=True)) == expected
    total = sum(row["seq_id"] is not None and (row["fwd_tid"] or 0) > 0 for row in rows)
    assert unknown == total - len(expected)
