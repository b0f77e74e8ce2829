"""Write Chakra execution traces as JSON for people to read, with the same nodes as a .et file.

The file is one object; `etloom.formats.chakra.json_layout` describes it. ``etloom convert x.et x.json`` converts a .et
file message by message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.exports import chakra
from etloom.exports.chakra.group_numbering import number_groups
from etloom.formats.chakra import json_layout
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file
from etloom.formats.io.atomic_file import open_atomic
from etloom.linker import linked

SUFFIX = (".chakra.json", ".chakra.json.gz")


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write one rank as a Chakra trace in JSON; compressed if the name ends in .gz.

    A trace that is not linked is linked first.

    Raises:
        EtloomError: There are several ranks, or the rank has no timed events.
    """
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(
                f"a file contains one rank, not {len(trace)}", where=path, remedy="select one with --rank"
            )
        trace = next(iter(trace.values()))
    chakra.check_exportable(trace, path)
    linked_trace = linked(trace)
    messages, _ = pb.split_messages(chakra.encode_trace(linked_trace, number_groups([linked_trace])))
    _write_lines(Path(path), pb.parse_metadata(messages[0]), map(pb.parse_node, messages[1:]))


def find_converter(source: Path, reader: str | None) -> Callable[..., Any] | None:
    """Return a function (target, progress) that converts a Chakra .et file to JSON in bounded memory.

    None for files of other formats.
    """
    if formats.detect_format(source) != "chakra":
        return None
    return lambda target, progress: convert_messages(source, target)


def convert_messages(source: Path, target: Path) -> None:
    """Convert a Chakra .et file to JSON, message by message.

    Raises:
        ReadError: It is not a Chakra execution trace.
        LimitError: It is too large.
    """
    file = load_file(source)
    _write_lines(target, file.metadata, (node.message for node in file.nodes))


def _write_lines(path: Path, metadata: Any, nodes: Iterable[Any]) -> None:
    with open_atomic(path) as file:
        for line in json_layout.format_lines(metadata, nodes):
            file.write(line)
