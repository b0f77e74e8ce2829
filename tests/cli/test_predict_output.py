"""etloom predict prints a table that a person can read, whatever the number of ranks."""

from __future__ import annotations

import pytest

from etloom import cli
from support.paths import ROOT

RUN = str(ROOT / "tests" / "data" / "ddp_2")


@pytest.mark.parametrize(("options", "rows"), [(["--top", "5"], 5), ([], 2 + 8 + 16)])
def test_the_first_rows_are_shown(options: list[str], rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["predict", RUN, "--ranks", "8", "--format", "csv", *options])
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1 + rows
    assert ("--top 0 shows all" in output.err) == (rows == 5)


def test_a_person_reads_twenty_rows(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["predict", RUN, "--ranks", "8"])
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1 + 20
    assert "6 more rows; --top 0 shows all" in output.err
