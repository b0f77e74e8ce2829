"""Write docs/analyses.md from what the analyses say of themselves: python docs/analyses.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from etloom.core import registry
from etloom.core.schema import UNITS

PAGE = Path(__file__).with_suffix(".md")
_HEAD = """\
# Analyses

What each table of `etloom analyze NAME run/` says, in which units, and where its definition comes from and differs
from the peer's. `etloom analyze NAME --help` explains its columns and options; [flops.md](flops.md) has the formulas,
[findings.md](findings.md) the patterns, [coming-from-hta.md](coming-from-hta.md) the same by HTA's names.

| analysis | of | says | units, definition |
|---|---|---|---|
"""
_COLUMNS = """
## Columns

What is not known is null. A name ends in its unit: {units}. Numbers of other columns count or name something.

"""


def page() -> str:
    """The page: a row an analysis, of the sentences of its docstring from "Units:" or "Definition:" on."""
    rows = []
    for name in registry.list_plugins("analyses"):
        module = registry.get("analyses", name)
        text = inspect.cleandoc(module.__doc__ or "")
        said = " ".join(
            " ".join(part.split())
            for part in text.split("\n\n")
            if re.match(r"(?:Units|Definitions?):", part)
        )
        cells = (f"`{name}`", module.SCOPE, registry.get_summary("analyses", name), said)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    units = ", ".join(f"`{end}` {unit}" for end, unit in UNITS.items())
    columns = [
        f"- `{name}`: {', '.join(registry.get('analyses', name).COLUMNS)}\n"
        for name in registry.list_plugins("analyses")
    ]
    return _HEAD + "".join(rows) + _COLUMNS.format(units=units) + "".join(columns)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
