"""Writes the JSON document of an execution trace: header members, the list of nodes, finish_ts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from etloom.formats.io.atomic_file import open_atomic
from etloom.formats.io.json_text import join_lines

SEPARATOR = ",\n"
"""The text before each node but the first."""


def write_document(path: Path, header: Mapping[str, Any], chunks: Iterable[np.ndarray | pl.Series]) -> None:
    """Write an execution trace as a JSON file, gzip-compressed if its name ends in .gz.

    Args:
        path: The file; it appears under its name when it is complete.
        header: The members of the document. ``finish_ts`` follows the nodes, all others precede them.
        chunks: The nodes as JSON objects: one text per node, or the bytes of all with `SEPARATOR` before each.
    """
    head = {name: value for name, value in header.items() if name != "finish_ts"}
    end = f', "finish_ts": {json.dumps(header["finish_ts"])}' if "finish_ts" in header else ""
    with open_atomic(path) as file:
        file.write((json.dumps(head)[:-1] + ', "nodes": [\n').encode())
        skipped = len(SEPARATOR)
        for nodes in chunks:
            if isinstance(nodes, pl.Series):
                nodes = np.frombuffer(SEPARATOR.encode() + join_lines(nodes), np.uint8)
            file.write(nodes[skipped:].data)
            skipped = 0
        file.write(f"\n]{end}}}\n".encode())
