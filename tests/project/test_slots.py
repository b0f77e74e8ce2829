"""Each slot of each side file, replaced by each odd value, ends in an answer or one line."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from fuzzing.cases import build_seeds
from fuzzing.commands import Command
from fuzzing.seeds import SEEDS
from fuzzing.slots import ODD_VALUES, find_side_files, list_slots, read_tree, replace_slot, write_tree
from support.examples import is_quick

Place = tuple[Any, ...]
Slot = tuple[Place, Any]
FORMATS = ("parquet", "stored-run", "card")
COMMANDS = (
    Command("info", ("info", "{run}", "--format", "json")),
    Command("analyze", ("analyze", "temporal-breakdown", "{run}")),
)
_QUICK_BATCHES, _MORE_BATCHES = 3, 20
_BATCH = 16
"""Slots of a file that are replaced together."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    build_seeds(folder)
    return folder


def list_batches(tree: Any, alone: Set[Place]) -> Iterator[list[Slot]]:
    """Yield all slots of a tree with all odd values, in groups of which none contains another.

    Args:
        tree: the content of a file.
        alone: places to be replaced alone; may grow.
    """
    generator = random.Random(7)
    for value in generator.sample(ODD_VALUES, len(ODD_VALUES)):
        rest = list(list_slots(tree))
        generator.shuffle(rest)
        while rest:
            batch = rest[:1]
            for place in rest[1:] if batch[0] not in alone else ():
                is_apart = not any(_contains(a, place) or _contains(place, a) for a in batch)
                if len(batch) < _BATCH and is_apart and place not in alone:
                    batch.append(place)
            rest = [place for place in rest if place not in batch]
            yield [(place, value) for place in batch]


def _contains(place: Place, other: Place) -> bool:
    return other[: len(place)] == place


def list_files(folder: Path) -> dict[Path, Any]:
    """Return {file: content} of the side files, without those that only belong to another rank."""
    files: dict[Any, tuple[Path, Any]] = {}
    for file in find_side_files(folder):
        tree = read_tree(file)
        kind = re.sub(r"\d+", "N", str(file)), tuple(list_slots(tree))
        files.setdefault(kind, (file, tree))
    return dict(files.values())


def check_batch(
    batch: Sequence[Slot], file: Path, tree: Any, run: Path, out: Path, alone: set[Place]
) -> list[str]:
    """Replace slots of a file and run the commands; return their faults.

    Where a command ends with an error, each slot is replaced alone; those that cause it are added to ``alone``.
    """
    changed = tree
    for place, value in batch:
        changed = replace_slot(changed, place, value)
    write_tree(file, changed)
    faults: list[str] = []
    for command in COMMANDS:
        status, *texts = command.run(run, file, out)
        if fault := command.judge(status, *texts):
            faults.append(f"{command.name} {file.name} {batch}: {fault}")
        if status == 0:
            continue
        if len(batch) == 1:
            alone.add(batch[0][0])
        else:
            singles = (check_batch([slot], file, tree, run, out, alone) for slot in batch)
            faults = [fault for single in singles for fault in single] or faults
        break  # the other commands read the same
    return faults


def check_slots(format: str, seeds: Path, folder: Path, count: int | None) -> list[str]:
    """Return the faults of the commands on each changed file of a format, or on ``count`` batches of slots per file."""
    faults = []
    run = shutil.copytree(seeds / format, folder / format)
    files = list_files(run)
    assert files
    for file, tree in files.items():
        content = file.read_bytes()
        alone: set[Place] = set()
        for batch in itertools.islice(list_batches(tree, alone), count):
            faults += check_batch(batch, file, tree, run / SEEDS[format].root, folder, alone)
        file.write_bytes(content)
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_an_odd_value_of_some_slots_is_one_line(format: str, seeds: Path, tmp_path: Path) -> None:
    assert check_slots(format, seeds, tmp_path, _QUICK_BATCHES) == []


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.slow
def test_each_odd_value_of_each_slot_is_one_line(format: str, seeds: Path, tmp_path: Path) -> None:
    """All of them in pytest alone."""
    assert check_slots(format, seeds, tmp_path, _MORE_BATCHES if is_quick() else None) == []
