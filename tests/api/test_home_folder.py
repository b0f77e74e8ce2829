"""A leading ~ is the home folder wherever a path enters, and no folder called ~ appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import pytest

import etloom
from etloom.api.arguments import Run, StrPath, verb
from etloom.collector.options import expand_folder_name
from etloom.core.errors import EtloomError
from etloom.core.paths import expand_home
from support import small_traces


class Options(TypedDict, total=False):
    """Keywords of a verb."""

    width: int


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    small_traces.write_run(folder / "run")
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path / "work")
    return folder


def test_paths_are_recognized_next_to_types_that_are_not_imported(home: Path) -> None:
    @verb
    def show(
        run: Run | Elsewhere,  # type: ignore[name-defined]  # noqa: F821
        *more: Sequence[elsewhere.Thing | StrPath],  # type: ignore[name-defined]  # noqa: F821
        name: str = "~",
        **options: Unpack[Options],  # type: ignore[name-defined]  # noqa: F821
    ) -> object:
        return run, more, name

    assert show("~/run", ["~/x"]) == (home / "run", ([home / "x"],), "~")
    with pytest.raises(EtloomError, match="has no option 'widt'; did you mean 'width'"):
        show("~/run", widt=3)


@pytest.mark.slow
def test_verbs_take_paths_in_the_home_folder(home: Path) -> None:
    job = etloom.open("~/run", use_cache=False)
    assert len(job) == 2
    files = sorted((home / "run").iterdir())
    assert etloom.open({0: f"~/run/{files[0].name}", 1: [f"~/run/{files[1].name}"]}, use_cache=False).ranks
    assert etloom.info("~/run")["ranks"] == job.ranks
    assert etloom.export(job, "~/out/x.json") == home / "out" / "x.json"
    assert etloom.report(Path("~/run"), "~/report.html").is_file()
    assert not list(Path.cwd().iterdir())


def test_commands_take_paths_in_the_home_folder(
    home: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    assert call("export", "~/run", "--out=~/y.json")[0] == 0
    assert (home / "y.json").is_file() and not list(Path.cwd().iterdir())


def test_the_folder_of_a_recording_may_be_in_the_home_folder(home: Path) -> None:
    assert expand_folder_name("~/runs/x") == str(home / "runs" / "x")


def test_an_unknown_user_is_left_as_it_is() -> None:
    assert expand_home("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert expand_home("a/~/b") == Path("a/~/b")
