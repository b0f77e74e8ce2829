"""Limits of rows, bytes and ratio: each reader of tables holds them before it reads the rows."""

from __future__ import annotations

import importlib.util
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from etloom import formats
from etloom.core import machine
from etloom.core.errors import EtloomError, LimitError
from etloom.formats.chakra import protobuf as pb
from etloom.formats.io import limits, parquet_input, sqlite_file
from support.ascend_traces import write_database, write_kernel_table
from support.xspaces import write_gpus

ROWS = 3_000_000


def write_metrics(folder: Path, rows: int = 100) -> Path:
    table = pl.select(timestamp=pl.lit(1_700_000_000_000), v=pl.lit(1.0), name=pl.lit("a" * 40))
    path = folder / "gpu.parquet"
    pl.concat([table.select(pl.all().repeat_by(rows).explode())]).write_parquet(path, compression="zstd")
    return path


def write_pipeline(folder: Path, rows: int = 100) -> Path:
    integers = ("rank", "dp_rank", "stage", "step", "seq_id", "mb_id")
    columns = {name: pl.lit(0).repeat_by(rows).explode() for name in integers}
    columns |= {name: pl.lit(0.5).repeat_by(rows).explode() for name in ("start_ts", "duration")}
    path = folder / "job.parquet"
    pl.select(**columns, optype=pl.lit("forward-compute").repeat_by(rows).explode()).write_parquet(path)
    return path


def write_kernels(folder: Path, rows: int = 100) -> Path:
    """Write an Nsight Systems export as a folder of Parquet."""
    names = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "shortName")
    folder = folder / "run_pqtdir"
    folder.mkdir(exist_ok=True)
    columns = {name: pl.lit(7).repeat_by(rows).explode() for name in names}
    pl.select(**columns).write_parquet(folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet")
    pl.DataFrame({"id": [7], "value": ["k"]}).write_parquet(folder / "StringIds.parquet")
    return folder


def write_saved(folder: Path, rows: int = 100) -> Path:
    (folder / "meta.json").write_text(
        '{"etloom": "1", "layout": 1, "kind": "trace", "meta": {"formats": [], "files": []}, "tables": {}}'
    )
    ids = pl.int_range(rows, dtype=pl.UInt32) * 0
    pl.select(id=ids, name=pl.lit("x"), ts=pl.lit(5), dur=pl.lit(5)).write_parquet(folder / "events.parquet")
    return folder


def write_sqlite(folder: Path, own: Path) -> Path:
    spec = importlib.util.spec_from_file_location("make_nsys", own / "nsys" / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(folder / "run.sqlite")
    return folder / "run.sqlite"


def write_chakra(folder: Path) -> Path:
    nodes = [pb.Node(id=i, name="op", type=4) for i in range(100)]
    (folder / "x.0.et").write_bytes(b"".join(map(pb.delimit_message, nodes)))
    return folder / "x.0.et"


PARQUET = {
    "metrics": write_metrics,
    "pipeline": write_pipeline,
    "nsys": write_kernels,
    "saved": write_saved,
}


@pytest.mark.parametrize("kind", [*PARQUET, "sqlite", "ascend", "ascend-kernels", "chakra", "xplane"])
def test_the_limit_of_rows_holds_for_every_reader(
    kind: str, tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: dict[str, Any] = {
        **PARQUET,
        "sqlite": lambda folder: write_sqlite(folder, own),
        "ascend": lambda folder: write_database(folder / "a.db"),
        "ascend-kernels": lambda folder: write_kernel_table(folder / "kernel_details.csv"),
        "chakra": write_chakra,
        "xplane": write_gpus,
    }
    path = writers[kind](tmp_path)
    formats.read(path)
    monkeypatch.setenv("ETLOOM_MAX_ROWS", "2")
    with pytest.raises(LimitError, match=r"more than 2 rows.*ETLOOM_MAX_ROWS"):
        formats.read(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARQUET)
def test_repeated_values_are_refused_by_the_footer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = PARQUET[kind](tmp_path, ROWS)
    monkeypatch.setattr(pl, "read_parquet", lambda *_, **__: pytest.fail("the table was read"))
    with pytest.raises(LimitError, match="ETLOOM_MAX_RATIO"):
        formats.read(path)
    monkeypatch.setenv("ETLOOM_MAX_RATIO", "1000000")
    monkeypatch.setenv("ETLOOM_MAX_BYTES", "1000000")
    with pytest.raises(LimitError, match=r"more than 1,000,000 bytes"):
        formats.read(path)


def test_a_small_file_of_three_million_rows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data / "cases/turn3/samples_3M_rows.parquet"
    with pytest.raises(LimitError, match="ETLOOM_MAX_RATIO"):
        formats.read(path)
    monkeypatch.setenv("ETLOOM_MAX_ROWS", "100000")
    with pytest.raises(LimitError, match="more than 100,000 rows"):
        formats.read(path)


def test_long_texts_that_rows_of_a_database_share(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sqlite(tmp_path, own)
    monkeypatch.setattr(limits, "MIN_CHECKED_BYTES", 100)
    monkeypatch.setattr(sqlite_file, "_CHECK_BYTES", 1)
    monkeypatch.setenv("ETLOOM_MAX_RATIO", "0")
    with pytest.raises(LimitError, match="ETLOOM_MAX_RATIO"):
        formats.read(path)


def write_nulls(path: Path, rows: int, columns: int, *values: Any) -> None:
    """Write a table of values and of columns of nulls."""
    nulls = {f"n{index}": pl.lit(None, dtype=pl.Int64).repeat_by(rows).explode() for index in range(columns)}
    pl.select(*values, **nulls).write_parquet(path, compression="zstd")


@pytest.mark.slow
def test_columns_without_values_are_no_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, path = 200_000, tmp_path / "gpu.parquet"
    hashes = pl.int_range(rows).hash().cast(pl.UInt8, strict=False, wrap_numerical=True).alias("v")
    write_nulls(path, rows, 100, pl.int_range(rows).alias("timestamp"), hashes)
    assert rows * 8 * 100 > limits.MAX_RATIO * path.stat().st_size
    parquet_input.check_parquet(path, path)
    monkeypatch.setattr(parquet_input, "max_table_bytes", lambda: 100 << 20)  # nulls take memory
    with pytest.raises(LimitError, match="ETLOOM_MAX_BYTES"):
        parquet_input.check_parquet(path, path)


def test_a_file_of_nulls_alone_cannot_have_any_number_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "gpu.parquet"
    write_nulls(path, 1_100_000, 2)
    with pytest.raises(LimitError, match="ETLOOM_MAX_RATIO"):
        parquet_input.check_parquet(path, path)


@pytest.mark.slow
def test_a_damaged_footer_is_an_error(tmp_path: Path) -> None:
    """Whatever bytes of the footer change, it is read, refused or damaged, within a moment."""
    path = write_metrics(tmp_path)
    content, generator = path.read_bytes(), random.Random(5)
    length = int.from_bytes(content[-8:-4], "little") + 8
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(generator.randrange(1, 4)):
            damaged[-generator.randrange(1, length + 1)] = generator.randrange(256)
        try:
            parquet_input.check_parquet(bytes(damaged), path)
        except (EtloomError, ValueError):
            continue


@pytest.mark.parametrize("names", [[[b"ts"]], [{1: b"ts"}], [7], b"ts", None])
def test_names_of_columns_in_a_footer_of_another_type(names: Any) -> None:
    group = {1: [{3: {1: 1, 3: names, 5: 1, 6: 1}}]}
    for columns in ({b"ts"}, None):
        with pytest.raises(ValueError, match="field 3"):
            parquet_input._sum_decoded_bytes({4: [group]}, columns)


TYPES = {
    "struct": pl.struct(a=pl.lit(1)),
    "list": pl.concat_list(pl.lit(1)),
    "array": pl.concat_list(pl.lit(1)).cast(pl.Array(pl.Int64, 1)),
    "binary": pl.lit(b"\xff"),
    "text": pl.lit("x"),
    "boolean": pl.lit(True),
    "decimal": pl.lit(1).cast(pl.Decimal(10, 2)),
    "date": pl.lit(1).cast(pl.Date),
    "duration": pl.lit(1).cast(pl.Duration("ns")),
    "category": pl.lit("x").cast(pl.Categorical),
    "null": pl.lit(None),
    "integer of 128 bits": pl.lit(1 << 100, dtype=pl.Int128),
    "not a number": pl.lit(float("nan")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARQUET)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_column_of_each_other_type(kind: str, dtype: str, tmp_path: Path) -> None:
    """Each column of each table is read as null and counted, or refused in one line."""
    path = PARQUET[kind](tmp_path)
    for file in [path] if path.is_file() else sorted(path.glob("*.parquet")):
        table, content = pl.read_parquet(file), file.read_bytes()
        for column in table.columns:
            table.with_columns(TYPES[dtype].alias(column)).write_parquet(file)
            try:
                read = formats.read(path)
            except EtloomError:
                continue
            finally:
                file.write_bytes(content)
            for trace in [read] if hasattr(read, "tables") else list(read.values()):
                for name in trace.tables:
                    trace.table(name)


def write_groups(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "4000\n",
                "sys/fs/cgroup/job/memory.current": "3000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 500\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
            },
            1500,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/5\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 0\ntotal_inactive_file 0\n",
            },
            0,
        ),
        ({"proc/self/cgroup": "damaged\n", "proc/meminfo": "MemAvailable: 3 kB\n"}, 3072),
    ],
)
def test_the_available_memory_is_that_of_the_control_group(
    files: dict[str, str], free: int, tmp_path: Path
) -> None:
    assert machine.available_memory(write_groups(tmp_path, files)) == free


@pytest.mark.slow
def test_the_available_memory_is_that_of_the_process(tmp_path: Path) -> None:
    limit = 8 << 30
    script = "from etloom.core.machine import available_memory; print(available_memory())"
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert 0 < int(run.stdout) < limit
