"""Runs random scripts under random options and compares them with the script alone: python soak.py SECONDS

Ends with status 1 after the first difference, and prints the seed with which it can be repeated.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # support

from etloom.collector.observer import build_library
from support.script_runs import EXCEPTED, NAMES, OPTIONS, STARTING, Comparison, serve

_STARTING_SHARE = 0.05  # each takes as long as twenty of the others
_FULL_END_SHARE = 0.1  # of the forking and threading runs; the end of an interpreter costs more than they do
_CHILDREN = "60"  # of the script that forks
_FIRST_CHILDREN = ("0", "1", "2", *["3"] * 9)  # the children below 3 end their interpreters


class Soak:
    """Random runs, and how many of each script there were."""

    def __init__(self, choices: random.Random, forked: Comparison, started: Comparison) -> None:
        self.choices, self.forked, self.started = choices, forked, started
        self.counts = Counter[str]()

    def run_any(self) -> None:
        """Run any script under any options."""
        name, options = self.choices.choice(NAMES), self.choices.choice(list(OPTIONS))
        is_started = name in STARTING or self.choices.random() < _STARTING_SHARE
        if (name, options) in EXCEPTED or (name in STARTING and self.choices.random() > _STARTING_SHARE):
            return
        comparison = self.started if is_started else self.forked
        comparison.compare(name, options, *([_CHILDREN] if name == "fork" else []))
        self.counts[name] += 1

    def run_race(self) -> None:
        """Run the script that forks or the one with threads under any options, as short as they can be."""
        name, options = self.choices.choice(["fork", "threads"]), self.choices.choice(list(OPTIONS))
        assert self.forked.server is not None
        self.forked.server.ends_early = self.choices.random() > _FULL_END_SHARE
        self.forked.compare(
            name, options, *(["2", self.choices.choice(_FIRST_CHILDREN)] if name == "fork" else [])
        )
        self.counts[f"{name} under {options}"] += 1

    @property
    def differences(self) -> list[str]:
        return self.forked.differences + self.started.differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, help="stop after this time")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the random choices")
    parser.add_argument("--races", type=int, default=0, help="only this many runs that fork or begin threads")
    args = parser.parse_args()
    build_library()
    deadline, runs = time.monotonic() + args.seconds, 0
    with tempfile.TemporaryDirectory() as scratch, serve() as server:
        soak = Soak(random.Random(args.seed), Comparison(Path(scratch), server), Comparison(Path(scratch)))
        while time.monotonic() < deadline and not (0 < args.races <= runs):
            soak.run_race() if args.races else soak.run_any()
            runs = soak.counts.total()
            if soak.differences:
                print(f"seed {args.seed}:", *soak.differences, sep="\n    ")
                return 1
            if runs and runs % 100 == 0:
                print(f"{runs:,} runs", file=sys.stderr)
    recorded = soak.forked.recorded + soak.started.recorded
    print(f"seed {args.seed}: {runs} runs without a difference, {recorded} of them recorded")
    print(", ".join(f"{name} {count}" for name, count in sorted(soak.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
