"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from places import ROOT

from etloom import cli

DOCS = ROOT / "docs"


def test_the_page_of_analyses_is_what_they_say_of_themselves() -> None:
    page = runpy.run_path(str(DOCS / "analyses.py"))["page"]()
    assert (DOCS / "analyses.md").read_text(encoding="utf-8") == page, "run python docs/analyses.py"


def test_the_page_of_exit_statuses_has_every_verb_once() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "exit-status.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = [verb for row in rows for verb in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(cli._VERBS)
