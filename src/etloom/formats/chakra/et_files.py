"""Reads and writes the messages of a .et file unchanged, and finds the files of the ranks of a job."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.formats import chakra
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra import workload_json
from etloom.formats.io.atomic_file import replacing
from etloom.formats.io.compression import read_content
from etloom.formats.io.limits import check_rows

_RANK_PATTERN = re.compile(r"^(?P<name>.+)\.(?P<rank>\d+)\.et(?:\.gz)?$")
_SUFFIXES = (".et", ".et.gz")


class ChakraNode:
    """A Node message, with the values that are read often.

    Args:
        message: The message.
        names: The attributes that will be read; default: all.

    Attributes:
        message: The message.
        id: Node id.
        type: Node type, a key of `protobuf.NODE_TYPES`.
    """

    __slots__ = ("_attributes", "_names", "id", "message", "type")

    def __init__(self, message: Any, names: Container[str] | None = None) -> None:
        self.message, self._names = message, names
        self.id: int = message.id
        self.type: int = message.type
        self._attributes: dict[str, Any] | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the node by name, as `protobuf.decode_attributes` returns them."""
        if self._attributes is None:
            self._attributes = pb.decode_attributes(self.message.attr, self._names)
        return self._attributes

    @property
    def name(self) -> str:
        """Node name."""
        return str(self.message.name)

    @property
    def dependencies(self) -> set[int]:
        """Ids of the nodes on which the node depends, by data or control dependency."""
        return {*self.message.data_deps, *self.message.ctrl_deps}

    @property
    def runs_on_host(self) -> bool:
        """True if the attribute is_cpu_op is true; a node without it counts as GPU work, as in simulators."""
        return bool(self.attributes.get("is_cpu_op", False))


@dataclass(frozen=True, eq=False)
class ChakraFile:
    """The messages of one .et file.

    Attributes:
        path: The file.
        metadata: GlobalMetadata message; None where the file starts with a node.
        nodes: Its nodes in the order of the file.
        damaged: Number of messages that are not nodes.
        truncation: Why the file ends early; None where it is complete.
    """

    path: Path
    metadata: Any
    nodes: list[ChakraNode]
    damaged: int
    truncation: str | None


def load_file(path: Path, limit: int = 4 << 30, names: Container[str] | None = None) -> ChakraFile:
    """Read all messages of a .et file, compressed or not.

    Args:
        path: The file.
        limit: Maximum size in bytes after decompression.
        names: The attributes that will be read; default: all.

    Raises:
        ReadError: The file is not a Chakra execution trace.
        LimitError: It is larger than ``limit``.
    """
    data, truncation = read_content(path, limit)
    if workload_json.is_workload(data):
        data = workload_json.encode_workload(data, path)
    messages, losses = pb.split_messages(data, truncation)
    check_rows(len(messages), path)
    metadata = pb.parse_metadata(messages[0]) if messages else None
    if metadata is None and not chakra.sniff(data):
        raise ReadError("not a Chakra execution trace", where=path)
    parsed = [pb.parse_node(message) for message in messages[metadata is not None :]]
    nodes = [ChakraNode(message, names) for message in parsed if message is not None]
    return ChakraFile(path, metadata, nodes, len(parsed) - len(nodes), losses[0].example if losses else None)


def write_messages(path: Path, metadata: Any, nodes: Iterable[Any]) -> None:
    """Write a GlobalMetadata and Node messages as an uncompressed .et file."""
    with replacing(path) as partial, partial.open("wb") as file:
        for message in (metadata, *nodes):
            file.write(pb.delimit_message(message))


def strip_suffix(path: Path) -> str:
    """Return the file name without .et or .et.gz."""
    return path.name.removesuffix(".gz").removesuffix(".et")


def job_name(path: Path) -> str:
    """Return the job's name: NAME for a file NAME.et or NAME.RANK.et, compressed or not."""
    match = _RANK_PATTERN.match(path.name)
    return match["name"] if match else strip_suffix(path)


def rank_path(path: Path, rank: int) -> Path:
    """Return the path NAME.RANK.et of a rank, from the path of another file of the job; .gz is preserved."""
    suffix = ".et.gz" if path.name.endswith(".gz") else ".et"
    return path.with_name(f"{job_name(path)}.{rank}{suffix}")


def combine_rank_files(paths: Sequence[Path]) -> dict[int, Path]:
    """Map each rank of a job to its .et file, sorted by rank; ``paths`` lists the files and folders of the job.

    Raises:
        ReadError: see `find_rank_files`; or two files are of one rank.
    """
    by_rank: dict[int, Path] = {}
    for path in paths:
        for rank, file in find_rank_files(path).items():
            if by_rank.setdefault(rank, file) != file:
                raise ReadError(
                    f"is a second file of rank {rank}; the first is {by_rank[rank]}",
                    where=file,
                    remedy="name the files of one job, NAME.RANK.et",
                )
    return dict(sorted(by_rank.items()))


def find_rank_files(path: Path) -> dict[int, Path]:
    """Map each rank to its .et file: the files NAME.RANK.et of a folder, or a single file (by default rank 0).

    Raises:
        ReadError: The folder contains no such file, or files with several NAMEs.
    """
    if not path.is_dir():
        match = _RANK_PATTERN.match(path.name)
        return {int(match["rank"]) if match else 0: path}
    files = sorted(path.iterdir())
    ranked = [(match, file) for file in files if (match := _RANK_PATTERN.match(file.name))]
    names = sorted({match["name"] for match, _ in ranked})
    if len(names) > 1:
        raise ReadError(
            f"contains files of several jobs: {', '.join(names)}",
            where=path,
            remedy="put each job in a separate folder",
        )
    if ranked:
        return {int(match["rank"]): file for match, file in ranked}
    unranked = [file for file in files if file.name.endswith(_SUFFIXES)]
    if len(unranked) == 1:
        return {0: unranked[0]}
    raise ReadError(
        "contains no file NAME.RANK.et", where=path, remedy="specify a folder that does, or one file"
    )
