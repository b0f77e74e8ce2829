"""The document around the nodes of an execution trace: header, nodes, end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from etloom.formats.io.atomic_file import open_atomic
from etloom.formats.io.json_text import join_lines


def write_document(path: Path, header: Mapping[str, Any], chunks: Iterable[pl.Series]) -> None:
    """Write an execution trace, gzip if the name ends in .gz.

    Args:
        path: The file; it appears under its name when it is complete.
        header: The members of the document. ``finish_ts`` follows the nodes, all others precede them.
        chunks: The nodes as texts of JSON objects.
    """
    head = {name: value for name, value in header.items() if name != "finish_ts"}
    end = f', "finish_ts": {json.dumps(header["finish_ts"])}' if "finish_ts" in header else ""
    with open_atomic(path) as file:
        file.write((json.dumps(head)[:-1] + ', "nodes": [\n').encode())
        separator = b""
        for texts in chunks:
            file.write(separator)
            file.write(join_lines(texts))
            separator = b",\n"
        file.write(f"\n]{end}}}\n".encode())
