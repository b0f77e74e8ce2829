"""Writes tables as text, JSON, CSV or Parquet, to stdout or a file, and shows the progress bar."""

from __future__ import annotations

import enum
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from etloom.cli.command import Flag
from etloom.cli.error_handling import make_printable, print_message
from etloom.cli.findings_text import format_findings, is_findings_table
from etloom.cli.output_files import check_writable, writing_locally
from etloom.core.errors import EtloomError, InvalidValue

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console
    from rich.table import Table

    from etloom.reports.formatting import ColumnFormat, RawFormat
    from etloom.reports.monitoring import Metric

MIN_TEXT_WIDTH = 24
"""Minimum width of a text column in a narrow terminal; longer text is wrapped."""


class Format(str, enum.Enum):
    """The formats in which commands can write a table."""

    table = "table"
    json = "json"
    csv = "csv"
    parquet = "parquet"


class MonitoringFormat(str, enum.Enum):
    """The output formats of commands that can also write metrics for monitoring systems."""

    table = "table"
    json = "json"
    csv = "csv"
    parquet = "parquet"
    prometheus = "prometheus"
    otlp = "otlp"


OutFile = Annotated[Path | None, "Write to this file instead of stdout.", Flag("-o")]
MetricsFormat = Annotated[
    MonitoringFormat | None,
    "Format; prometheus and otlp are metrics for monitoring (docs/fleet.md). Default: from the ending of --out, "
    "else table.",
    Flag("-f"),
]


@dataclass(frozen=True)
class TableOptions:
    """Options of commands that print a table: the output file and the table format."""

    format: Annotated[
        Format | None, "Format of the table; default: from the ending of --out, else table.", Flag("-f")
    ] = None
    out: OutFile = None


def write_table(frame: pl.DataFrame, format: Format | None, out: Path | None, *, raw: bool = False) -> None:
    """Write a table in a format to the file ``out``, or to stdout if it is None.

    Args:
        raw: show values as they are: the names of the columns are a user's and state no unit.

    Raises:
        EtloomError: Parquet would be written to a terminal.
    """
    selected = choose_format(format, out)
    if selected is Format.parquet and out is None and sys.stdout.isatty():
        raise EtloomError("refusing to write Parquet to a terminal", where="stdout", remedy="add --out FILE")
    if selected is Format.table and not raw and is_findings_table(frame):
        write_text(format_findings(frame, out is None and sys.stdout.isatty()), out)
    elif selected is Format.table:
        empty = [name for name in frame.columns if 0 < frame.height == frame[name].null_count()]
        if empty:
            print_message(f"columns without values are not shown: {', '.join(empty)}")
            frame = frame.drop(empty)
        terminal = out is None and sys.stdout.isatty()
        write_text(render_text(build_table(frame, raw)) if terminal else format_lines(frame, raw), out)
    elif selected is Format.json:
        write_text(to_json(frame) + "\n", out)
    elif selected is Format.csv:
        write_text(_flatten(frame).write_csv(), out)
    elif out is None:
        frame.write_parquet(sys.stdout.buffer)
    else:
        with writing_locally(out) as file:
            from etloom.formats.io.atomic_file import replacing

            with replacing(file) as partial, partial.open("wb") as stream:
                frame.write_parquet(stream)  # of a path, a full disk would be an error of polars
    if out is not None:
        print_message(f"wrote {frame.height:,} rows to {out}")


def format_metrics(metrics: Sequence[Metric], run: Path | str, format: MonitoringFormat) -> str:
    """Return metrics as Prometheus text or OTLP."""
    import time

    from etloom.reports import monitoring

    name = make_printable(str(run))
    if format is MonitoringFormat.prometheus:
        return monitoring.format_prometheus(metrics, name)
    return monitoring.format_otlp(metrics, name, time.time_ns())


def write_metrics(
    metrics: Sequence[Metric], run: Path | str, format: MonitoringFormat, out: Path | None = None
) -> None:
    """Write metrics as Prometheus text or OTLP to the file ``out``, or to stdout if it is None."""
    write_text(format_metrics(metrics, run, format), out)


def split_format(format: MonitoringFormat | None) -> tuple[Format | None, MonitoringFormat | None]:
    """Split a format into (table format, None) or (None, metrics format); (None, None) if it is None."""
    if format in (MonitoringFormat.prometheus, MonitoringFormat.otlp):
        return None, format
    return None if format is None else Format(format.value), None


def to_json(frame: pl.DataFrame) -> str:
    """Return a JSON list with one object and line per row; NaN and infinities, which JSON lacks, become null."""
    import polars as pl
    import polars.selectors as cs

    finite = frame.with_columns(pl.when(cs.float().is_finite()).then(cs.float()))
    rows = (json.dumps(row, ensure_ascii=False) for row in finite.iter_rows(named=True))
    return "[" + ",\n ".join(rows) + "]"


def format_lines(frame: pl.DataFrame, raw: bool = False) -> str:
    """Format a table as plain text like `build_table`, without colors, wrapping and rich, which is slow to import."""
    columns, rows = _format_cells(frame, raw)
    headers = [make_printable(column.header) for column in columns]
    widths = [max(map(_display_width, cells)) for cells in zip(headers, *rows, strict=True)]
    lines = []
    for cells in (headers, *rows):
        padded = []
        for column, cell, width in zip(columns, cells, widths, strict=True):
            space = " " * (width - _display_width(cell))
            padded.append(space + cell if column.number else cell + space)
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def _display_width(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _format_cells(
    frame: pl.DataFrame, raw: bool
) -> tuple[Sequence[ColumnFormat | RawFormat], list[list[str]]]:
    """Return the display format of each column of a table, and the texts of the cells in each row."""
    import polars as pl

    from etloom.reports.formatting import RawFormat, choose_column_format, convert_to_own_units
    from etloom.reports.kernel_labels import SEQUENCE_SEPARATOR, shorten_labels

    columns: Sequence[ColumnFormat | RawFormat]
    if raw:
        columns = [RawFormat(name, dtype.is_numeric()) for name, dtype in frame.schema.items()]
    else:
        frame = convert_to_own_units(frame)
        columns = [choose_column_format(frame, name) for name in frame.columns]
    texts = {
        name: frame[name] if dtype == pl.String else frame[name].list.join(SEQUENCE_SEPARATOR)
        for name, dtype in frame.schema.items()
        if dtype in (pl.String, pl.List(pl.String))
    }
    frame = frame.with_columns(
        pl.Series(name, shorten_labels(column.to_list())) for name, column in texts.items()
    )
    return columns, [
        [make_printable(column.text(value)) or "-" for column, value in zip(columns, row, strict=True)]
        for row in frame.iter_rows()
    ]


def build_table(frame: pl.DataFrame, raw: bool = False) -> Table:
    """Build a rich table from a data frame: numbers right-aligned, a common unit per column, null as a dash.

    On a terminal the headers of number columns are wrapped, and the table is always wide enough for all numbers.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    columns, rows = _format_cells(frame, raw)
    least = 2 * (len(columns) - 1)
    for column, cells in zip(columns, zip(*rows, strict=True) if rows else [()] * len(columns), strict=True):
        header, widest = make_printable(column.header), max(map(len, cells), default=0)
        if column.number and sys.stdout.isatty():
            header = "\n".join(textwrap.wrap(header, max(widest, *map(len, header.split()))))
        widest = max(widest, *map(len, header.split("\n")))
        least += widest if column.number else min(widest, MIN_TEXT_WIDTH)
        side: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(Text(header), justify=side, vertical="top", no_wrap=column.number, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    table.min_width = least
    return table


def render_text(*parts: Any, out: Path | None = None) -> str:
    """Render rich objects one below the other as text.

    For a terminal the text is colored and as wide as the terminal, or as the widest table needs; else it is plain and
    not wrapped.
    """
    console = _make_console(out)
    console.width = max(console.width, *(getattr(part, "min_width", None) or 0 for part in parts))
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().split("\n"))


def _make_console(out: Path | None) -> Console:
    from rich.console import Console

    terminal = out is None and sys.stdout.isatty()
    return Console(
        force_terminal=terminal,
        width=None if terminal else 10_000,
        soft_wrap=False,
        highlight=False,
        emoji=False,
    )


def choose_format(format: Format | None, out: Path | None) -> Format:
    """Return ``format``, else the format of the file suffix of ``out``, else table; to be called before any work.

    Raises:
        EtloomError: ``out`` has an unknown ending (wrong usage), or cannot be written.
    """
    suffix = out.suffix[1:].lower() if out else ""
    if out is not None and (out.is_dir() or out.is_file() or not out.exists()):  # else a pipe or a device
        check_writable(out, "--out", in_place=True)
    if format is not None or suffix in ("", "txt"):
        return format or Format.table
    if suffix not in Format.__members__:
        ends = ", ".join(f".{name}" for name in Format.__members__ if name != "table")
        raise InvalidValue(
            f"{out}: unknown ending .{suffix}",
            remedy=f"expected {ends} or .txt, or add --format",
            option="out",
        )
    return Format(suffix)


def _flatten(frame: pl.DataFrame) -> pl.DataFrame:
    """Convert the nested columns of a table to JSON text, because CSV cannot represent lists and structs."""
    import polars as pl

    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    return frame.with_columns(
        pl.Series(name, [None if value is None else json.dumps(value) for value in frame[name].to_list()])
        for name in nested
    )


def write_text(text: str, out: Path | None) -> None:
    """Write text to the file ``out``, creating missing folders, or to stdout if it is None."""
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        with writing_locally(out) as file:
            from etloom.formats.io.atomic_file import write_atomically

            write_atomically(file, text)


@contextmanager
def show_progress(description: str) -> Iterator[Callable[[Path, int], None]]:
    """Show a progress bar on stderr while the block runs: bytes read of all files reported so far.

    It appears after one second, and only if stderr is a terminal.

    Args:
        description: of the work.

    Yields:
        A function ``update(file, bytes)``, to be called with 0 bytes to report a file before it is read.
    """
    if not sys.stderr.isatty():
        yield lambda file, read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(description, total=None)
    sizes: dict[Path, int] = {}
    lock = threading.Lock()  # the ranks of a job are read in threads

    def update(file: Path, read: int) -> None:
        with lock:
            if file not in sizes:
                sizes[file] = file.stat().st_size if file.is_file() else 0
            total = sum(sizes.values()) or None
        bar.update(task, description=make_printable(file.name), advance=read, total=total)

    later = threading.Timer(1.0, bar.start)
    later.daemon = True
    later.start()
    try:
        yield update
    finally:
        later.cancel()
        later.join()
        bar.stop()
