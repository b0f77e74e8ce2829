"""Reports of NCCL's RAS (``ncclras``): which ranks of each communicator answer, and how much they have launched.

Supported: the JSON form (NCCL 2.28.7 and later, also RCCL), and the text form (2.24 and later), with or without
``-v``. A report is of the whole job, so that its trace has no rank; it has one row of groups per communicator, and no
events. `etloom hangs` reads the report itself.

NCCL 2.28.9 leaves out a comma in the JSON form when a rank is missing: it is added and counted. From truncated JSON the
complete communicators and ranks are read.

Format: src/ras/client_support.cc of NCCL: the text form of 2.24, and both forms of two later versions. The missing
comma of 2.28.9 is known from a test of Ray.
"""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from etloom.core.communicators import RasReport
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io.compression import SizeLimit, read_content
from etloom.formats.nccl_ras.json_form import parse_json
from etloom.formats.nccl_ras.text_form import parse_text
from etloom.formats.tables.building import build_trace

__all__ = ["read", "read_report", "sniff"]

_JSON_KEYS = (b'"communicators_count"', b'"communicators"')
_BANNER = re.compile(rb"^\s*[NR]CCL version \S", re.MULTILINE)
"""Matches the first line of the text form; RCCL writes it before JSON, too."""
_SUMMARY = re.compile(rb"^\s*(?:Job summary\r?$|Communicators\.\.\.)", re.MULTILINE)
_START = 1 << 12
"""The report begins within these bytes; answers of RAS to other commands, and a banner, may come first."""


def sniff(head: bytes) -> bool:
    """Return whether a file is a report of RAS, judging from its first bytes ``head``."""
    if head.lstrip()[:1] == b"{":
        return all(key in head[:_START] for key in _JSON_KEYS)
    start = head[:_START]
    is_text = b"\0" not in start and _BANNER.search(start) is not None
    return is_text and (all(key in start for key in _JSON_KEYS) or _SUMMARY.search(start) is not None)


def read(path: Path, *, limit: SizeLimit = 256 << 20) -> Trace:
    """Read a report as a Trace without events: the communicators are rows of groups.

    Raises:
        ReadError: If the file cannot be read or is not a report.
        LimitError: If the file is too large.
    """
    report = read_report(path, limit=limit)
    rows = [
        {"pg_name": f"0x{state.name}", "size": state.size} for state in report.communicators if state.size
    ]
    schema = {"pg_name": pl.String, "size": pl.Int64}
    meta = {
        "formats": ["nccl_ras"],
        "files": [str(path)],
        "schema_version": report.version,
        "world_size": report.gpus,
    }
    return build_trace({"groups": pl.DataFrame(rows, schema=schema)}, meta, list(report.stats))


def read_report(path: Path, *, limit: int = 256 << 20) -> RasReport:
    """Read the state of all communicators.

    Args:
        path: the report.
        limit: the largest accepted size of the decompressed file in bytes.

    Raises:
        ReadError: the file cannot be read or is not a report.
        LimitError: the file is too large.
    """
    content, damage = read_content(path, limit)
    stats = [] if damage is None else [Stat("read.truncated", "data_loss", 1, damage)]
    text = content.decode("utf-8", "replace")
    start = text.find("{", 0, _START)
    is_json = start >= 0 and '"communicators_count"' in text[start : start + _START]
    report = parse_json(text[start:], stats) if is_json else parse_text(text, stats)
    if report is None:
        raise ReadError("is not a report of NCCL's RAS", where=path, remedy="save it with: ncclras -f json")
    return report
