"""Each slot of the JSON and YAML files next to traces, replaced by each odd value: exhaustive where fuzzing is random."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ODD_VALUES: tuple[Any, ...] = (None, True, -1, 1 << 200, 0.5, "text", "\ud800", [], [1], {}, {"a": [1]}, [{}])
SIDE_FILES = ("meta.json", "run.json", "rank_*.json", "*.yaml", "facts.json")
_LONGEST_LIST = 2
"""Items of a list, or of an object that maps names to numbers, of which each is replaced."""


def find_side_files(folder: Path) -> list[Path]:
    """Return the files next to the traces of a folder that state facts about the run."""
    return sorted({file for pattern in SIDE_FILES for file in folder.rglob(pattern)})


def read_tree(file: Path) -> Any:
    """Return the content of a JSON or YAML file."""
    text = file.read_text(encoding="utf-8")
    return yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)


def write_tree(file: Path, tree: Any) -> None:
    """Write a content as JSON, which is also YAML."""
    file.write_text(json.dumps(tree), encoding="utf-8")


def list_slots(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in a tree: the keys and indices that lead to it."""
    yield place
    if isinstance(tree, dict):
        is_map = all(type(value) is int for value in tree.values())
        for key in list(tree)[: _LONGEST_LIST if is_map else None]:
            yield from list_slots(tree[key], (*place, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree[:_LONGEST_LIST]):
            yield from list_slots(value, (*place, index))


def replace_slot(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a tree with another value at a place."""
    if not place:
        return value
    tree = copy.deepcopy(tree)
    owner = tree
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    return tree
