"""A file turned into Parquet part by part gives the very tables that reading it whole gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom import loading
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.formats import kineto
from etloom.formats.kineto.large_file import convert_large_file


def assert_spills_as_it_reads(source: Path, folder: Path, part_rows: int) -> Trace:
    folder.mkdir()
    meta = convert_large_file(source, folder, part_rows=part_rows)
    whole = kineto.read(source)
    assert meta == dict(whole.meta)
    for name, table in TABLES.items():
        file = folder / f"{name}.parquet"
        found = table.conform(pl.read_parquet(file)) if file.exists() else table.empty()
        assert found.equals(whole.table(name)), name
    return whole


@pytest.mark.parametrize("part_rows", [1000, 7777, 10**9])
@pytest.mark.parametrize(
    "name",
    [
        "nccl_ddp/kineto_trace_0.json.gz",  # collectives, flows
        "tracelens/h100_qwen.json.gz",  # memory, Python frames, pretty-printed
        "critical_path/alexnet.json.gz",  # synchronisations
    ],
)
@pytest.mark.slow
def test_real_traces(data: Path, tmp_path: Path, name: str, part_rows: int) -> None:
    assert_spills_as_it_reads(data / name, tmp_path / "out", part_rows)


@pytest.mark.slow
def test_equal_times_and_a_trace_without_events(tmp_path: Path) -> None:
    rows = [
        {
            "ph": "X",
            "name": f"op{n % 7}",
            "cat": "cpu_op",
            "ts": n // 500,
            "dur": 1 + n % 3,
            "pid": 1,
            "tid": 1,
        }
        for n in range(3000)
    ]
    for number, events in enumerate((rows, [])):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 5}, indent=1))
        whole = assert_spills_as_it_reads(file, tmp_path / f"out{number}", 400)
        assert whole.events.height == len(events)


@pytest.mark.slow
def test_a_truncated_file_is_read_up_to_the_cut(tmp_path: Path, data: Path) -> None:
    text = gzip.decompress((data / "critical_path/alexnet.json.gz").read_bytes())
    file = tmp_path / "cut.json"
    file.write_bytes(text[: len(text) // 2])
    whole = assert_spills_as_it_reads(file, tmp_path / "out", 100)
    assert "read.truncated" in whole.stats["name"].to_list()


@pytest.mark.slow
def test_convert_spills_above_a_size(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = data / "critical_path/alexnet.json.gz"
    monkeypatch.setattr(loading.file_reading, "SPILL_BYTES", 1)
    etloom.convert(source, tmp_path / "spilled.parquet")
    (tmp_path / "spilled.parquet" / "kernels.parquet").rename(tmp_path / "kernels.parquet")
    with pytest.raises(ReadError, match=r"kernels\.parquet: is missing: \d+ rows were saved"):
        etloom.read(tmp_path / "spilled.parquet")
    (tmp_path / "kernels.parquet").rename(tmp_path / "spilled.parquet" / "kernels.parquet")
    monkeypatch.setattr(loading.file_reading, "SPILL_BYTES", 10**12)
    etloom.convert(source, tmp_path / "whole.parquet")
    one, other = etloom.read(tmp_path / "spilled.parquet"), etloom.read(tmp_path / "whole.parquet")
    assert isinstance(one, Trace)
    assert isinstance(other, Trace)
    assert one.meta == other.meta
    for name in TABLES:
        assert one.table(name).equals(other.table(name)), name
