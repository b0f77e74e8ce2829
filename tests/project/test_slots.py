"""Each slot of each side file, replaced by each odd value, ends in an answer or one line."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fuzzing.cases import build_seeds
from fuzzing.commands import Command
from fuzzing.seeds import SEEDS
from fuzzing.slots import ODD_VALUES, find_side_files, list_slots, read_tree, replace_slot, write_tree

Place = tuple[Any, ...]
Slot = tuple[Place, Any]
FORMATS = ("parquet", "stored-run", "card")
COMMANDS = (
    Command("info", ("info", "{run}", "--format", "json")),
    Command("analyze", ("analyze", "temporal-breakdown", "{run}")),
)
_QUICK_BATCHES = 8
_BATCH = 8
"""Slots of a file that are replaced together; where a command then ends with an error, each is replaced alone."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    build_seeds(folder)
    return folder


def list_batches(tree: Any) -> Iterator[list[Slot]]:
    """Yield all slots of a tree with all odd values, in groups of which none contains another."""
    generator = random.Random(7)
    for value in ODD_VALUES:
        rest = list(list_slots(tree))
        generator.shuffle(rest)
        while rest:
            batch: list[Place] = []
            for place in rest:
                if len(batch) < _BATCH and not any(_contains(a, place) or _contains(place, a) for a in batch):
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


def check_batch(batch: Sequence[Slot], file: Path, tree: Any, run: Path, out: Path) -> list[str]:
    """Replace slots of a file and run the commands; return their faults."""
    changed = tree
    for place, value in batch:
        changed = replace_slot(changed, place, value)
    write_tree(file, changed)
    results = [(command, command.run(run, file, out)) for command in COMMANDS]
    judged = [(command.name, command.judge(*result)) for command, result in results]
    faults = [f"{name} {file.name} {batch}: {fault}" for name, fault in judged if fault]
    if len(batch) > 1 and any(status != 0 for _, (status, *_) in results):
        faults = [fault for slot in batch for fault in check_batch([slot], file, tree, run, out)] or faults
    return faults


def check_slots(format: str, seeds: Path, folder: Path, count: int | None) -> list[str]:
    """Return the faults of the commands on each changed file of a format, or on ``count`` random batches of slots."""
    faults = []
    run = shutil.copytree(seeds / format, folder / format)
    files = list_files(run)
    batches = [(file, batch) for file, tree in files.items() for batch in list_batches(tree)]
    assert batches
    for file, batch in random.Random(7).sample(batches, min(count or len(batches), len(batches))):
        content = file.read_bytes()
        faults += check_batch(batch, file, files[file], run / SEEDS[format].root, folder)
        file.write_bytes(content)
    return faults


@pytest.mark.parametrize("format", FORMATS)
def test_an_odd_value_of_some_slots_is_one_line(format: str, seeds: Path, tmp_path: Path) -> None:
    assert check_slots(format, seeds, tmp_path, _QUICK_BATCHES) == []


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.slow
def test_each_odd_value_of_each_slot_is_one_line(format: str, seeds: Path, tmp_path: Path) -> None:
    assert check_slots(format, seeds, tmp_path, None) == []
