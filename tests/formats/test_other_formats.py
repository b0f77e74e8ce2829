"""Each format that is not read is named by `etloom info`, with its tool and the export that is read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from etloom.cli import app
from etloom.formats.io.other_formats import OTHER_FORMATS, OtherFormat


def write_file(folder: Path, other: OtherFormat) -> Path:
    """Write a small file that has what the format is known by."""
    path = folder / f"recording{other.suffixes[0] if other.suffixes else '.db' if other.tables else '.csv'}"
    if other.tables:
        with closing(sqlite3.connect(path)) as db:
            for table in sorted(other.tables):
                db.execute(f'CREATE TABLE "{table.replace("*", "KERNEL")}" (id INTEGER)')
            db.commit()
    elif other.columns:
        names = sorted(other.columns)
        path.write_text(",".join(names) + "\n" + ",".join("1" * len(names)) + "\n")
    else:
        path.write_bytes(
            other.magic + b"\0" * 8 * (not other.inside) + b"\n" + other.inside + b"\n" + b"x" * 64
        )
    return path


@pytest.mark.parametrize("other", OTHER_FORMATS, ids=lambda other: other.name)
def test_info_names_the_format_and_the_export_that_is_read(tmp_path: Path, other: OtherFormat) -> None:
    result = CliRunner().invoke(app, ["info", str(write_file(tmp_path, other))])
    assert result.exit_code != 0
    assert f"is {other.name}" in result.output + result.stderr
    assert other.remedy in result.output + result.stderr


def test_the_report_of_unitrace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "app.1234"
    path.write_text(
        "\n=== Device Timing Summary ===\n\n                Total Execution Time (ns):           5580956648\n\n"
        "== L0 Backend ==\n\n   Kernel,       Calls,           Time (ns), Time (%),        Average (ns)\n"
    )
    result = CliRunner().invoke(app, ["info", str(path)])
    assert (
        "is a summary of Intel's unitrace, without times, which is not read" in result.output + result.stderr
    )
