"""The messages of a Chakra file as they are, and the files of the ranks of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.formats import chakra
from etloom.formats.chakra import protobuf as pb
from etloom.formats.io.compression import read_content

_RANK_PATTERN = re.compile(r"^(?P<name>.+)\.(?P<rank>\d+)\.et(?:\.gz)?$")
_SUFFIXES = (".et", ".et.gz")


@dataclass(frozen=True, eq=False)
class ChakraNode:
    """A node and its attributes by name."""

    message: Any

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return pb.decode_attributes(self.message.attr)

    @property
    def id(self) -> int:
        return int(self.message.id)

    @property
    def name(self) -> str:
        return str(self.message.name)

    @property
    def type(self) -> int:
        return int(self.message.type)

    @property
    def on(self) -> set[int]:
        """The ids of all that it depends on."""
        return {*self.message.data_deps, *self.message.ctrl_deps}

    @property
    def runs_on_host(self) -> bool:
        """What does not say so runs on the device, as simulators take it."""
        return bool(self.attributes.get("is_cpu_op", False))


@dataclass(frozen=True, eq=False)
class ChakraFile:
    """``metadata``: None where the file begins with a node. ``damaged``: messages that are no nodes. ``cut``: why the
    file ends early, None where it does not."""

    path: Path
    metadata: Any
    nodes: list[ChakraNode]
    damaged: int
    cut: str | None


def load_file(path: Path, limit: int = 4 << 30) -> ChakraFile:
    """The messages of a .et file, packed or not. Raises ReadError, LimitError."""
    data, cut = read_content(path, limit)
    messages, lost = pb.split_messages(data, cut)
    metadata = pb.parse_metadata(messages[0]) if messages else None
    if metadata is None and not chakra.sniff(data):
        raise ReadError("is no Chakra execution trace", where=path)
    found = [pb.parse_node(message) for message in messages[metadata is not None :]]
    nodes = [ChakraNode(message) for message in found if message is not None]
    return ChakraFile(path, metadata, nodes, len(found) - len(nodes), lost[0][3] if lost else None)


def strip_suffix(path: Path) -> str:
    """The name without .et or .et.gz."""
    return path.name.removesuffix(".gz").removesuffix(".et")


def path_of_rank(path: Path, rank: int) -> Path:
    """NAME.et -> NAME.RANK.et."""
    return path.with_name(f"{strip_suffix(path)}.{rank}{path.name.removeprefix(strip_suffix(path))}")


def write_messages(path: Path, metadata: Any, nodes: Iterable[Any]) -> None:
    """Write messages as a .et file."""
    with path.open("wb") as file:
        for message in (metadata, *nodes):
            file.write(pb.delimit_message(message))


def find_rank_files(path: Path) -> dict[int, Path]:
    """Rank -> file: of a folder the files NAME.RANK.et in it, of a file its own.

    Raises ReadError for a folder without any, and for one with several NAMEs.
    """
    if not path.is_dir():
        match = _RANK_PATTERN.match(path.name)
        return {int(match["rank"]) if match else 0: path}
    ranked = [(match, file) for file in sorted(path.iterdir()) if (match := _RANK_PATTERN.match(file.name))]
    names = sorted({match["name"] for match, _ in ranked})
    if len(names) > 1:
        raise ReadError(
            f"holds files of several jobs: {', '.join(names)}", where=path, remedy="give a folder for each"
        )
    if ranked:
        return {int(match["rank"]): file for match, file in ranked}
    alone = [file for file in sorted(path.iterdir()) if file.name.endswith(_SUFFIXES)]
    if len(alone) == 1:
        return {0: alone[0]}
    raise ReadError("holds no file NAME.RANK.et", where=path, remedy="name a folder of them, or one file")
