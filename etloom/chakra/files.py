"""The messages of a Chakra file as they are, and the files of the ranks of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from etloom.errors import ReadError
from etloom.readers import _chakra_pb as pb
from etloom.readers import chakra
from etloom.readers._files import content

_RANKED = re.compile(r"^(?P<name>.+)\.(?P<rank>\d+)\.et(?:\.gz)?$")
_ENDS = (".et", ".et.gz")


@dataclass(frozen=True, eq=False)
class Node:
    """A node and its attributes by name."""

    message: Any

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return pb.attributes(self.message.attr)

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
    def on_cpu(self) -> bool:
        """What does not say so runs on the device, as simulators take it."""
        return bool(self.attributes.get("is_cpu_op", False))


@dataclass(frozen=True, eq=False)
class File:
    """``metadata``: None where the file begins with a node. ``damaged``: messages that are no nodes. ``cut``: why the
    file ends early, None where it does not."""

    path: Path
    metadata: Any
    nodes: list[Node]
    damaged: int
    cut: str | None


def load(path: Path, limit: int = 4 << 30) -> File:
    """The messages of a .et file, packed or not. Raises ReadError, LimitError."""
    data, cut = content(path, limit)
    messages, lost = pb.messages(data, cut)
    metadata = pb.metadata(messages[0]) if messages else None
    if metadata is None and not chakra.sniff(data):
        raise ReadError("is no Chakra execution trace", where=path)
    found = [pb.node(message) for message in messages[metadata is not None :]]
    nodes = [Node(message) for message in found if message is not None]
    return File(path, metadata, nodes, len(found) - len(nodes), lost[0][3] if lost else None)


def stem(path: Path) -> str:
    """The name without .et or .et.gz."""
    return path.name.removesuffix(".gz").removesuffix(".et")


def of_rank(path: Path, rank: int) -> Path:
    """NAME.et -> NAME.RANK.et."""
    return path.with_name(f"{stem(path)}.{rank}{path.name.removeprefix(stem(path))}")


def save(path: Path, metadata: Any, nodes: Iterable[Any]) -> None:
    """Write messages as a .et file."""
    with path.open("wb") as file:
        for message in (metadata, *nodes):
            file.write(pb.delimited(message))


def of_job(path: Path) -> dict[int, Path]:
    """Rank -> file: of a folder the files NAME.RANK.et in it, of a file its own.

    Raises ReadError for a folder without any, and for one with several NAMEs.
    """
    if not path.is_dir():
        match = _RANKED.match(path.name)
        return {int(match["rank"]) if match else 0: path}
    ranked = [(match, file) for file in sorted(path.iterdir()) if (match := _RANKED.match(file.name))]
    names = sorted({match["name"] for match, _ in ranked})
    if len(names) > 1:
        raise ReadError(
            f"holds files of several jobs: {', '.join(names)}", where=path, remedy="give a folder for each"
        )
    if ranked:
        return {int(match["rank"]): file for match, file in ranked}
    alone = [file for file in sorted(path.iterdir()) if file.name.endswith(_ENDS)]
    if len(alone) == 1:
        return {0: alone[0]}
    raise ReadError("holds no file NAME.RANK.et", where=path, remedy="name a folder of them, or one file")
