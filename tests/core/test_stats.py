"""The names of ``stats`` that the code uses are those that etloom/core/stats.py declares."""

from __future__ import annotations

import re

from etloom.core.schema import SEVERITIES
from etloom.core.stats import DECLARED_STATS
from etloom.formats import memory_snapshot, observer
from etloom.formats.io import native_parser
from support.paths import ROOT

LITERAL = re.compile(r"""["']((?:read|link|job|replay)\.[a-z0-9_]+)["']""")


def used_names() -> set[str]:
    names = set()
    for path in (ROOT / "etloom").rglob("*.py"):
        if path.name != "stats.py":
            names |= set(LITERAL.findall(path.read_text(encoding="utf-8")))
    for problems in (native_parser._MEANING, memory_snapshot._PROBLEMS):
        names |= {f"read.{name}" for name in problems}
    names -= {"replay.json", "replay.parquet"}  # files
    return names | {f"read.observer_{name}" for name, _, _ in observer._COUNTERS}


def test_every_name_is_declared_once() -> None:
    names = [stat.name for stat in DECLARED_STATS]
    assert len(names) == len(set(names))
    assert all(stat.severity in SEVERITIES and stat.meaning and stat.remedy for stat in DECLARED_STATS)


def test_the_code_uses_declared_names_only() -> None:
    assert used_names() <= {stat.name for stat in DECLARED_STATS}


def test_every_declared_name_is_used() -> None:
    """Names that are put together in code occur there by their part after the dot."""
    words = set()
    for path in (ROOT / "etloom").rglob("*.py"):
        if path.name != "stats.py":
            words |= set(re.findall(r"[a-z0-9_]+", path.read_text(encoding="utf-8")))
    unused = {stat.name for stat in DECLARED_STATS} - used_names()
    assert {
        name for name in unused if name.rpartition(".")[2].removeprefix("rejected_") not in words
    } == set()
