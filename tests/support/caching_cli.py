"""The command line with a cache that keeps every run, however quickly it is read."""

from __future__ import annotations

from collections.abc import Sequence

from etloom import cli
from etloom.loading import executor, plan


def main(words: Sequence[str]) -> int:
    executor.MIN_SECONDS_TO_CACHE = 0.0
    plan.MIN_TEXT_BYTES_TO_CACHE = 0
    return cli.main(words)
