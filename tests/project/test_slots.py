"""Each slot of each side file, replaced by each odd value, ends in an answer or one line."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fuzzing.cases import build_seeds
from fuzzing.commands import Command
from fuzzing.seeds import SEEDS
from fuzzing.slots import ODD_VALUES, find_side_files, list_slots, read_tree, replace_slot, write_tree

FORMATS = ("parquet", "stored-run", "card")
COMMANDS = (
    Command("info", ("info", "{run}", "--format", "json")),
    Command("analyze", ("analyze", "breakdown", "{run}")),
)
_QUICK_CASES = 60


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    build_seeds(folder)
    return folder


def check_slots(format: str, seeds: Path, folder: Path, count: int | None) -> list[str]:
    """Return the faults of the commands on each changed file of a format, or on ``count`` random ones."""
    faults = []
    run = shutil.copytree(seeds / format, folder / format)
    files = {file: read_tree(file) for file in find_side_files(run)}
    cases = [
        (file, place, value)
        for file, tree in files.items()
        for place in list_slots(tree)
        for value in ODD_VALUES
    ]
    assert cases
    for file, place, value in random.Random(7).sample(cases, min(count or len(cases), len(cases))):
        content = file.read_bytes()
        write_tree(file, replace_slot(files[file], place, value))
        for command in COMMANDS:
            fault = command.check(run / SEEDS[format].root, file, folder)
            if fault:
                faults.append(f"{command.name} {file.name} {place} {value!r}: {fault}")
        file.write_bytes(content)
    return faults


@pytest.mark.parametrize("format", FORMATS)
def test_an_odd_value_of_some_slots_is_one_line(format: str, seeds: Path, tmp_path: Path) -> None:
    assert check_slots(format, seeds, tmp_path, _QUICK_CASES) == []


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.slow
def test_each_odd_value_of_each_slot_is_one_line(format: str, seeds: Path, tmp_path: Path) -> None:
    assert check_slots(format, seeds, tmp_path, None) == []
