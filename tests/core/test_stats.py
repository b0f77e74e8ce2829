"""The names of ``stats`` that the code uses are those that src/etloom/core/stats.py declares."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from etloom.core.schema import SEVERITIES
from etloom.core.stats import DECLARED_STATS
from etloom.formats import memory_snapshot, observer
from etloom.formats.io import native_parser
from support.paths import ROOT

LITERAL = re.compile(r"""["']((?:read|link|job|replay)\.[a-z0-9_]+)["']""")


def used_names() -> set[str]:
    names = set()
    for path in (ROOT / "src" / "etloom").rglob("*.py"):
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
    for path in (ROOT / "src" / "etloom").rglob("*.py"):
        if path.name != "stats.py":
            words |= set(re.findall(r"[a-z0-9_]+", path.read_text(encoding="utf-8")))
    unused = {stat.name for stat in DECLARED_STATS} - used_names()
    assert {
        name for name in unused if name.rpartition(".")[2].removeprefix("rejected_") not in words
    } == set()


def find_severities() -> dict[str, set[str]]:
    """Return the severities next to each declared name, as arguments of a call or items of a tuple in the code."""
    declared = {stat.name for stat in DECLARED_STATS}
    severities: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "src" / "etloom").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: statement.value.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if path.name == "stats.py" or not isinstance(node, (ast.Call, ast.Tuple)):
                continue
            arguments = node.args if isinstance(node, ast.Call) else node.elts
            values = {item.value for item in arguments if isinstance(item, ast.Constant)}
            values |= {constants.get(item.id) for item in arguments if isinstance(item, ast.Name)}
            for name in values & declared:
                severities[str(name)] |= {str(value) for value in values & set(SEVERITIES)}
    return severities


def test_the_declared_severity_is_that_of_the_code() -> None:
    severities = find_severities()
    assert len(severities) > 50
    declared = {stat.name: stat.severity for stat in DECLARED_STATS}
    wrong = {name for name, used in severities.items() if used and declared[name] not in used}
    # Native parsers report these as data_loss, and the native observer's file distinguishes.
    assert wrong <= {"read.end_without_begin", "read.negative_duration"}
    assert declared["read.missing_gpu_events"] == "error"
