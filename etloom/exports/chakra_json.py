"""A Chakra execution trace as JSON: the same nodes as of a .et, to be looked at.

One object, whatever the number of nodes; see `etloom.chakra.as_json` for the layout. An .et file becomes it as it is by
``etloom convert x.et x.chakra.json``.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from etloom.chakra import as_json
from etloom.chakra.files import load
from etloom.errors import EtloomError
from etloom.exports import chakra
from etloom.exports._comm_groups import numbered
from etloom.exports._files import replacing
from etloom.linker import link
from etloom.readers import _chakra_pb as pb
from etloom.trace import Job, Trace

SUFFIX = (".chakra.json", ".chakra.json.gz")


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write the linked Trace of one rank. Raises EtloomError for several, and for a rank without timed events."""
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(f"one file holds one rank, not {len(trace)}", where=path, remedy="add --rank")
        trace = next(iter(trace.values()))
    chakra.check(trace, path)
    linked = trace if trace.meta.get("linked") else link(trace)
    messages, _ = pb.messages(chakra.encoded(linked, numbered([linked])))
    with replacing(Path(path)) as file:
        for line in as_json.lines(pb.metadata(messages[0]), map(pb.node, messages[1:])):
            file.write(line)


def convert(source: Path, path: Path) -> None:
    """Write the messages of an .et file. Raises ReadError, LimitError."""
    found = load(source)
    with replacing(path) as file:
        for line in as_json.lines(found.metadata, (node.message for node in found.nodes)):
            file.write(line)
