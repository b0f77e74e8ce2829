"""Identifiers and docstrings are plain English with the field's terms.

A value is a noun ("events", not "found"), a function a verb with an object ("match_collectives"), a docstring a
sentence that begins with a verb or names the thing.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from support.paths import ROOT

EMPTY_WORDS = frozenset(
    "found told said say given one own asked made kept met some there taken left held seen meant wanted known drawn "
    "shown looked put came come gone took got here had done beside among apart anew alone whole mine whose who whom "
    "of what why where which how thing things nothing somebody".split()
)
"""Words that say nothing of what a value holds."""
WRONG_WORDS = frozenset(
    "anew mend mended mends beside rehearse rehearsal stranger strangers reckon weave woven lane lanes".split()
)
"""Words of the dialect of version 0.1, and a term that is not the field's, in docstrings, comments and messages."""
HEADLESS = re.compile(r"(What|Of|Where|Whether|Which|How|Whose|Who|By|As)\b")
MAX_NAMES, MAX_FUNCTIONS, MAX_DOCSTRINGS = 0.005, 0.01, 0.01
FILES = sorted((ROOT / "src" / "etloom").rglob("*.py"))
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def nodes() -> tuple[tuple[Path, ast.AST], ...]:
    """Every node of the syntax trees, with its file."""
    return tuple(
        (path, node) for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.alias):
        return node.asname
    return node.name if isinstance(node, ast.ExceptHandler) else None


def is_empty(name: str) -> bool:
    return not EMPTY_WORDS.isdisjoint(name.lower().split("_"))


def share(wrong: list[str], all_count: int) -> float:
    return len(wrong) / max(all_count, 1)


def test_names_of_values_are_nouns() -> None:
    names = [(path, name) for path, node in nodes() if (name := bound_name(node))]
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in names if is_empty(name)]
    assert share(wrong, len(names)) <= MAX_NAMES, wrong


def test_names_of_functions_begin_with_verbs() -> None:
    names = [
        (path, node.name)
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in names if is_empty(name)]
    assert share(wrong, len(names)) <= MAX_FUNCTIONS, wrong


def test_docstrings_are_sentences() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        (path, text)
        for path, node in nodes()
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    wrong = [f"{path.relative_to(ROOT)}: {text[:60]}" for path, text in texts if HEADLESS.match(text)]
    assert share(wrong, len(texts)) <= MAX_DOCSTRINGS, wrong


def test_no_word_of_the_dialect() -> None:
    wrong = {
        str(path.relative_to(ROOT)): words
        for path in (*FILES, *DOCS)
        if (
            words := WRONG_WORDS.intersection(re.findall(r"[a-z]+", path.read_text(encoding="utf-8").lower()))
        )
    }
    assert not wrong
