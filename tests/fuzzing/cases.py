"""Cases: a seed trace, mutated, and the commands to run on it. A case is determined by its number."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from fuzzing.commands import COMMANDS, Command
from fuzzing.documents import mutate_file
from fuzzing.seeds import SEEDS

COMMANDS_PER_CASE = 4


@dataclass(frozen=True)
class Case:
    """An input and the commands to run on it."""

    number: int
    format: str
    folder: Path
    file: Path  # the mutated file
    commands: list[Command]


def build_case(seed: int, number: int, seeds: Path, folder: Path, format: str | None = None) -> Case:
    """Write the input of a case.

    Args:
        seed: Seed of the run.
        number: Number of the case.
        seeds: The folder with the seed traces, see `build_seeds`.
        folder: A folder that is emptied.
        format: One of `SEEDS`; by default each number has its own.
    """
    rng = random.Random(f"{seed}:{number}")
    names = sorted(SEEDS)
    format = format or names[number % len(names)]
    shutil.rmtree(folder, ignore_errors=True)
    run = folder / "run"
    shutil.copytree(seeds / format, run)
    file = rng.choice(sorted(run.glob(rng.choice(SEEDS[format].files))))
    for _ in range(rng.choice((1, 1, 1, 2))):
        file = mutate_file(rng, file)
    commands = rng.sample(COMMANDS, COMMANDS_PER_CASE)
    return Case(number, format, run / SEEDS[format].root, file, commands)


def build_seeds(folder: Path) -> None:
    """Write the seed traces of all formats, each in a folder of its own."""
    for name, seed in SEEDS.items():
        place = folder / name
        place.mkdir(parents=True)
        seed.write(place)
