"""Kernels of expert-parallel libraries are communication in every analysis."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from support import small_traces

NCCL = "ncclDevKernel_AllReduce_Sum"


def analyze_with(folder: Path, kernel: str) -> dict[str, pl.DataFrame]:
    folder.mkdir()
    document = small_traces.kineto(world=1)
    for event in document["traceEvents"]:
        if event["name"] == NCCL:
            event["name"] = kernel
    path = folder / "kineto_trace_0.json"
    path.write_text(json.dumps(document))
    job = etloom.open(path)
    return {name: etloom.analyze(job, name) for name in ("temporal-breakdown", "comm-overlap", "collectives")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("void dpsk::ep::internode::dispatch<false, 4>(int4*, float*)", "all_to_all"),
        ("void dpsk::ep::intranode::combine<__nv_bfloat16, 8>(int4*)", "all_to_all"),
        ("void dpsk::ep::internode::notify_dispatch<false, 4>(int const*)", None),
    ],
)
def test_deepep_is_communication(tmp_path: Path, kernel: str, collective: str | None) -> None:
    expected, tables = analyze_with(tmp_path / "nccl", NCCL), analyze_with(tmp_path / "deepep", kernel)
    for name in ("temporal-breakdown", "comm-overlap"):
        assert tables[name].equals(expected[name])
    assert tables["comm-overlap"]["communication_ns"].max() == 250_000
    assert tables["collectives"]["collective"].to_list() == [collective]
