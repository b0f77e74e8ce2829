"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_analyses_is_what_they_say_of_themselves() -> None:
    page = runpy.run_path(str(DOCS / "analyses.py"))["page"]()
    assert (DOCS / "analyses.md").read_text(encoding="utf-8") == page, "run python docs/analyses.py"
