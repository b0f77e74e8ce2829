"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import re
import runpy

import pytest

from etloom import cli
from support.paths import ROOT

DOCS = ROOT / "docs"


GENERATED = runpy.run_path(str(DOCS / "generate_reference.py"))["PAGES"]


FILES = [
    pytest.param(name, marks=pytest.mark.slow) if page.__name__ == "gallery_page" else name
    for name, page in GENERATED.items()
    if (DOCS / "reference" / name).exists()
]


@pytest.mark.parametrize("file", FILES)
def test_generated_pages_are_up_to_date(file: str) -> None:
    page = (DOCS / "reference" / file).read_text(encoding="utf-8")
    assert page == GENERATED[file](), "run python docs/generate_reference.py"


def test_the_page_of_exit_statuses_has_every_verb_once() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "exit-status.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = [verb for row in rows for verb in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(cli._VERBS)


def test_the_tests_that_the_security_page_names_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 15
    for file, test in named:
        content = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in content, f"{file}::{test}"


def test_the_files_that_the_architecture_page_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+/[\w.]+\.py)`", text)
    assert len(named) > 20
    places = (ROOT / "src" / "etloom", ROOT / "src", ROOT)
    assert [name for name in named if not any((place / name).is_file() for place in places)] == []
