"""Ranges of a host backend that begin after later calls belong to the calls that made their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

import etloom
from etloom.collectives import list_participations


def test_a_range_belongs_to_the_call_that_recorded_it(tmp_path: Path) -> None:
    """Two asynchronous calls, whose ranges begin on workers after both."""

    def event(name: str, ts: int, dur: int, record: int, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {
            "ph": "X", "cat": "user_annotation" if "gloo" in name else "cpu_op",
            "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": {"Record function id": record, **args},
        }  # fmt: skip

    document = {
        "traceEvents": [
            event("c10d::allreduce_", 0, 5, 10),
            event("c10d::allreduce_", 10, 5, 20),
            event("gloo:all_reduce", 20, 30, 11, 2),
            event("gloo:all_reduce", 21, 40, 21, 3),
        ]
    }
    (tmp_path / "trace.json").write_text(json.dumps(document))
    trace = etloom.link(etloom.read(tmp_path / "trace.json"))
    found = list_participations(trace, 0)
    calls = trace.events.filter(pl.col("name").cast(pl.String) == "c10d::allreduce_").sort("ts")["id"]
    assert found.sort("event")["issuer"].to_list() == calls.to_list()
