"""Read source, destination, tag and size of send and receive nodes, by which simulators match sends with receives."""

from __future__ import annotations

from etloom.formats.chakra.et_files import ChakraNode
from etloom.formats.chakra.protobuf import TYPE_NUMBERS

_SEND = TYPE_NUMBERS["COMM_SEND_NODE"]


def get_message_ends(rank: int, node: ChakraNode) -> tuple[int | None, int | None, int]:
    """Return source rank, destination rank and tag of a send or receive node.

    As in Chakra's feeder, the source of a send and the destination of a receive are by default the rank, the tag is 0.
    """
    source, destination, tag = (_get_number(node, f"comm_{part}") for part in ("src", "dst", "tag"))
    if node.type == _SEND:
        source = rank if source is None else source
    else:
        destination = rank if destination is None else destination
    return source, destination, 0 if tag is None else tag


def get_message_key(rank: int, node: ChakraNode) -> tuple[int | None, int | None, int, str]:
    """Return (source, destination, tag, size) of a send or receive node; equal for a send and its receive."""
    return (*get_message_ends(rank, node), str(node.attributes.get("comm_size")))


def _get_number(node: ChakraNode, name: str) -> int | None:
    value = node.attributes.get(name)
    return value if isinstance(value, int) else None
