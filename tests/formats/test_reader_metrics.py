"""Metrics beside a trace: what the tools write, on the clock of the run."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Trace
from etloom.formats import metrics
from support.examples import examples

SECOND = 10**9
EPOCH = 1_779_630_015  # 2026-05-24 13:40:15 UTC

SMI = """timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W]
2026/05/24 13:40:15.000, 0, NVIDIA H100 80GB HBM3, 45 %, 1234 MiB, 310.25 W
2026/05/24 13:40:15.003, 1, NVIDIA H100 80GB HBM3, 99 %, 2000 MiB, [N/A]
2026/05/24 13:40:16.000, 0, NVIDIA H100 80GB HBM3, 46 %, 1235 MiB, 311.00 W
"""


def read(tmp_path: Path, text: str | bytes, **options: Any) -> Trace:
    path = tmp_path / "unknown"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return metrics.read(path, **options)


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    frame = trace.counters.with_columns(pl.col(pl.Categorical).cast(pl.String))
    assert frame["id"].to_list() == list(range(frame.height))
    return frame.select("ts", "name", "series", "value").rows()


def stats(trace: Trace) -> dict[str, tuple[str, int]]:
    return {name: (severity, count) for name, severity, count, _ in trace.stats.rows()}


SMI_ROWS = [
    (EPOCH * SECOND, "utilization.gpu [%]", "0", 45.0),
    (EPOCH * SECOND, "memory.used [MiB]", "0", 1234.0),
    (EPOCH * SECOND, "power.draw [W]", "0", 310.25),
    (EPOCH * SECOND + 3_000_000, "utilization.gpu [%]", "1", 99.0),
    (EPOCH * SECOND + 3_000_000, "memory.used [MiB]", "1", 2000.0),
    ((EPOCH + 1) * SECOND, "utilization.gpu [%]", "0", 46.0),
    ((EPOCH + 1) * SECOND, "memory.used [MiB]", "0", 1235.0),
    ((EPOCH + 1) * SECOND, "power.draw [W]", "0", 311.0),
]


def test_nvidia_smi(tmp_path: Path) -> None:
    assert metrics.sniff(SMI.encode())
    trace = read(tmp_path, SMI)
    assert sorted(rows(trace)) == sorted(SMI_ROWS)
    assert [row[0] for row in rows(trace)] == sorted(row[0] for row in SMI_ROWS)
    assert trace.meta["clock"] == "epoch"
    assert stats(trace) == {"read.metrics_assumed_utc": ("info", 3)}


def test_nvidia_smi_without_units(tmp_path: Path) -> None:
    trace = read(tmp_path, SMI.replace(" %,", ",").replace(" MiB,", ",").replace(" W\n", "\n"))
    assert sorted(rows(trace)) == sorted(SMI_ROWS)


def test_nvidia_smi_without_a_header_keeps_the_units(tmp_path: Path) -> None:
    text = SMI.split("\n", 1)[1]
    assert metrics.sniff(text.encode())
    trace = read(tmp_path, text)
    assert {row[1] for row in rows(trace)} == {"column_2", "column_4 [%]", "column_5 [MiB]", "column_6 [W]"}
    assert {row[3] for row in rows(trace) if row[1] == "column_6 [W]"} == {310.25, 311.0}


def test_a_time_zone_is_in_the_file_or_an_option(tmp_path: Path) -> None:
    shifted = read(tmp_path, SMI, utc_offset=8)
    assert rows(shifted)[0][0] == (EPOCH - 8 * 3600) * SECOND
    assert stats(shifted) == {}
    zoned = read(tmp_path, "time,x\n2026-05-24T15:40:15.5+02:00,1\n2026-05-24T13:40:16Z,2\n")
    assert [row[0] for row in rows(zoned)] == [EPOCH * SECOND + SECOND // 2, (EPOCH + 1) * SECOND]
    assert stats(zoned) == {}


def test_dcgm_samples(tmp_path: Path) -> None:
    text = (
        "Timestamp,gpu,Hostname,DCGM_FI_DEV_GPU_UTIL,DCGM_FI_PROF_SM_ACTIVE\n"
        f"{EPOCH},0,node-a,45,0.5\n{EPOCH + 1},1,node-b,oops,0.75\n{EPOCH + 2},0,node-a,,\n"
    )
    trace = read(tmp_path, text)
    assert rows(trace) == [
        (EPOCH * SECOND, "DCGM_FI_DEV_GPU_UTIL", "0 node-a", 45.0),
        (EPOCH * SECOND, "DCGM_FI_PROF_SM_ACTIVE", "0 node-a", 0.5),
        ((EPOCH + 1) * SECOND, "DCGM_FI_PROF_SM_ACTIVE", "1 node-b", 0.75),
    ]
    assert stats(trace) == {"read.metrics_invalid_number": ("data_loss", 1)}


@pytest.mark.parametrize(
    ("time", "ns"),
    [
        ("1779630015", EPOCH * SECOND),
        ("1779630015.25", EPOCH * SECOND + SECOND // 4),
        ("1779630015250", EPOCH * SECOND + SECOND // 4),
        ("1779630015250001", EPOCH * SECOND + SECOND // 4 + 1000),
        ("1779630015250001002", EPOCH * SECOND + SECOND // 4 + 1002),
    ],
)
def test_the_unit_of_an_epoch_follows_from_its_size(time: str, ns: int, tmp_path: Path) -> None:
    assert rows(read(tmp_path, f"ts,x\n{time},1\n")) == [(ns, "x", None, 1.0)]


def test_a_relative_time_needs_its_unit(tmp_path: Path) -> None:
    text = "elapsed,x\n0.5,1\n2,3\n"
    with pytest.raises(
        ReadError,
        match=r"no column has a name that is used for times; .* --time-column NAME, one of: elapsed, x",
    ):
        read(tmp_path, text)
    with pytest.raises(ReadError, match="unknown unit of 'elapsed'"):
        read(tmp_path, text, time_column="elapsed")
    trace = read(tmp_path, text, time_column="elapsed", unit="ms")
    assert rows(trace) == [(500_000, "x", None, 1.0), (2_000_000, "x", None, 3.0)]
    assert trace.meta["clock"] == "relative"
    assert rows(read(tmp_path, "time_us,x\n7,1\n")) == [(7_000, "x", None, 1.0)]
    with pytest.raises(ReadError, match="has no column 'when'; columns: elapsed, x"):
        read(tmp_path, text, time_column="when")
    with pytest.raises(ReadError, match="unknown unit 'h'; expected one of ns, us, ms, s"):
        read(tmp_path, text, time_column="elapsed", unit="h")


def test_long_tables(tmp_path: Path) -> None:
    trace = read(tmp_path, "time_s,host,metric,value\n2,b,temp,50\n1,a,power,7\n3,a,power,n/k\n")
    assert rows(trace) == [(SECOND, "power", "a", 7.0), (2 * SECOND, "temp", "b", 50.0)]
    assert stats(trace) == {"read.metrics_invalid_number": ("data_loss", 1)}


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        json.dumps({"timestamp": EPOCH + 1, "phase": "decode", "tokens_per_s": 12.5}),
        '{"timestamp": 17',
        json.dumps({"timestamp": EPOCH, "phase": "prefill", "tokens_per_s": 10, "late": 1}),
        json.dumps({"timestamp": None, "tokens_per_s": 3}),
        "[1]",
    ]
    text = "\n".join(lines)
    assert metrics.sniff(text.encode())
    trace = read(tmp_path, text)
    assert rows(trace) == [
        (EPOCH * SECOND, "tokens_per_s", "prefill", 10.0),
        (EPOCH * SECOND, "late", "prefill", 1.0),
        ((EPOCH + 1) * SECOND, "tokens_per_s", "decode", 12.5),
    ]
    assert stats(trace) == {
        "read.metrics_invalid_line": ("data_loss", 2),
        "read.metrics_invalid_time": ("data_loss", 1),
    }


@pytest.mark.parametrize("unit", ["ns", "us", "ms"])
def test_parquet_with_a_temporal_column(unit: Any, tmp_path: Path) -> None:
    when = dt.datetime(2026, 5, 24, 13, 40, 15, 250_000, tzinfo=dt.timezone.utc)
    frame = pl.DataFrame(
        {"time": pl.Series([when], dtype=pl.Datetime(unit, "UTC")), "gpu": [3], "power": [7]}
    )
    frame.write_parquet(tmp_path / "x.parquet")
    assert metrics.sniff((tmp_path / "x.parquet").read_bytes())
    trace = metrics.read(tmp_path / "x.parquet")
    assert rows(trace) == [(EPOCH * SECOND + SECOND // 4, "power", "3", 7.0)]
    assert stats(trace) == {}


def test_a_table_without_columns_of_values_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"time": [[1, 2], [3]]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(ReadError, match="has no columns of numbers or text"):
        metrics.read(tmp_path / "x.parquet")


def test_vllms_latency_benchmark(tmp_path: Path) -> None:
    text = json.dumps({"avg_latency": 1.5, "latencies": [1.0, 2.0], "percentiles": {"10": 1.1, "90": 1.9}})
    assert metrics.sniff(text.encode())
    trace = read(tmp_path, text)
    assert rows(trace) == [
        (None, "latency [s]", "mean", 1.5),
        (None, "latency [s]", "p10", 1.1),
        (None, "latency [s]", "p90", 1.9),
        (None, "latency [s]", "iteration", 1.0),
        (None, "latency [s]", "iteration", 2.0),
    ]
    assert stats(trace) == {"read.metrics_without_time": ("info", 5)}


def test_a_stray_quote_costs_its_line(tmp_path: Path) -> None:
    trace = read(tmp_path, 'time_s,x\n1,2\n2,"3\n3,4\n4,5,6\n5\n6,7\n')
    assert [row[0] // SECOND for row in rows(trace)] == [1, 2, 3, 6]
    assert stats(trace) == {"read.metrics_invalid_line": ("data_loss", 2)}


def test_a_header_without_samples_is_an_empty_trace(tmp_path: Path) -> None:
    assert read(tmp_path, "timestamp,x\n").tables == {}


def test_gzip_cut_off_keeps_the_rows_before(tmp_path: Path) -> None:
    lines = "".join(f"{EPOCH + i},{i}\n" for i in range(10))
    packed = gzip.compress(("timestamp,x\n" + lines).encode())
    trace = read(tmp_path, packed[:-5])
    assert len(rows(trace)) == 10
    assert stats(trace) == {"read.truncated": ("data_loss", 1)}


@pytest.mark.parametrize(
    "text",
    ["", "\n", "a", "time,x,x\n1,2,3\n", "time,x\nyesterday,3\n", "PAR1 but not really", '{"time": {}}'],
    ids=range(7),
)
def test_a_file_that_is_not_a_table_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ReadError) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x80\x02}q",
        b'{"schemaVersion": 1}',
        b"# a note, a time\nx\n",
        b"import os, time\nprint(1)\n",
        b"SQLite format 3\0",
    ],
)
def test_other_files_are_not_taken_for_metrics(head: bytes) -> None:
    assert not metrics.sniff(head)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.text(alphabet='0123456789.,-"{}[]:/ \n\tabctime%', max_size=120))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    for prefix in ("", "time_s,x\n"):
        path.write_text(prefix + text)
        metrics.sniff((prefix + text).encode())
        try:
            metrics.read(path)
        except EtloomError as error:
            assert "\n" not in str(error)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(-(2**62), 2**62), st.floats(allow_nan=False, width=32)), min_size=1, max_size=20
    )
)
def test_nanoseconds_and_values_are_exact(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[int, float]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "exact.csv"
    path.write_text("ts,x\n" + "".join(f"{time},{value!r}\n" for time, value in samples))
    trace = metrics.read(path, unit="ns")
    finite = [(time, value) for time, value in samples if abs(value) != float("inf")]
    assert trace.counters.select("ts", "value").rows() == sorted(finite, key=lambda sample: sample[0])
