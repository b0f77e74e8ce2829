"""A Chakra execution trace as JSON: the same nodes as of a .et, to be looked at.

One object, whatever the number of nodes; see `etloom.formats.chakra.json_layout` for the layout. An .et file becomes it as it is by
``etloom convert x.et x.chakra.json``.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.exports import chakra
from etloom.exports.chakra.group_numbering import number_groups
from etloom.formats.chakra import json_layout
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file
from etloom.formats.io.atomic_file import open_atomic
from etloom.linker import link

SUFFIX = (".chakra.json", ".chakra.json.gz")


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write the linked Trace of one rank. Raises EtloomError for several, and for a rank without timed events."""
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(f"one file holds one rank, not {len(trace)}", where=path, remedy="add --rank")
        trace = next(iter(trace.values()))
    chakra.check_exportable(trace, path)
    linked = trace if trace.meta.get("linked") else link(trace)
    messages, _ = pb.split_messages(chakra.encode_trace(linked, number_groups([linked])))
    with open_atomic(Path(path)) as file:
        for line in json_layout.format_lines(
            pb.parse_metadata(messages[0]), map(pb.parse_node, messages[1:])
        ):
            file.write(line)


def convert(source: Path, path: Path) -> None:
    """Write the messages of an .et file. Raises ReadError, LimitError."""
    found = load_file(source)
    with open_atomic(path) as file:
        for line in json_layout.format_lines(found.metadata, (node.message for node in found.nodes)):
            file.write(line)
