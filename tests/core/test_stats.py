"""The names of ``stats`` that the code uses are those that etloom/core/stats.py declares."""

from __future__ import annotations

import re

from places import ROOT

from etloom.core.schema import SEVERITIES
from etloom.core.stats import DECLARED_STATS

LITERAL = re.compile(r"""["']((?:read|link|job)\.[a-z0-9_]+)["']""")


def used_names() -> set[str]:
    names = set()
    for path in (ROOT / "etloom").rglob("*.py"):
        if path.name != "stats.py":
            names |= set(LITERAL.findall(path.read_text(encoding="utf-8")))
    return names


def test_every_name_is_declared_once() -> None:
    names = [stat.name for stat in DECLARED_STATS]
    assert len(names) == len(set(names))
    assert all(stat.severity in SEVERITIES and stat.meaning and stat.remedy for stat in DECLARED_STATS)


def test_the_code_uses_declared_names_only() -> None:
    assert used_names() <= {stat.name for stat in DECLARED_STATS}
