"""Words that stand for a verb: names of analyses and paths of runs; `etloom run`; the answers to unknown words."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from etloom import cli
from etloom.core import registry
from support import small_traces

Outcome = tuple[int, str, str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shorthands") / "run"
    small_traces.write_run(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["top-ops", "RUN", "--top", "3"], ["analyze", "top-ops", "RUN", "--top", "3"]),
        (["top_ops", "RUN"], ["analyze", "top-ops", "RUN"]),
        (["findings", "RUN", "--format", "json"], ["analyze", "findings", "RUN", "--format", "json"]),
        (["RUN"], ["report", "RUN"]),
        (["RUN", "--out", "PAGE"], ["report", "RUN", "--out", "PAGE"]),
        (["steps", "--help"], ["analyze", "steps", "--help"]),
    ],
)
def test_a_shorthand_is_the_long_command(
    short: list[str], long: list[str], run: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    names = {"RUN": str(run), "PAGE": str(tmp_path / "page.html")}
    outcomes = [call(*(names.get(word, word) for word in words)) for words in (short, long)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == 0


@pytest.mark.slow
def test_a_verb_comes_before_an_analysis_and_an_analysis_before_a_path(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Outcome]
) -> None:
    assert {"hangs"} == set(cli._VERBS) & set(registry.list_plugins("analyses"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps").symlink_to(run)
    assert "missing" in call("steps")[2].lower()
    assert call("./steps")[0] == 0


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("straglers", "did you mean 'etloom stragglers RUN'?"),
        ("kernels", "did you mean 'etloom kernel-breakdown RUN'?"),
        ("reportt", "did you mean 'etloom report'?"),
        ("colect", "unknown command 'colect'; did you mean 'etloom collect'?"),
        ("no/such/folder", "unknown command 'no/such/folder', and no such file or folder; etloom --help"),
        ("run1", "unknown command 'run1', and no such file or folder; etloom --help"),
        (
            "collec.py",
            "unknown command 'collec.py', and no such file or folder; did you mean 'etloom collectives RUN'?",
        ),
        ("steps2", "unknown command 'steps2', and no such file or folder; did you mean 'etloom steps RUN'?"),
        ("xyzzy", "unknown command 'xyzzy'; etloom --help lists the commands"),
    ],
)
def test_an_unknown_word_is_answered_with_the_command(
    word: str, answer: str, call: Callable[..., Outcome]
) -> None:
    status, out, err = call(word, "x")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert answer in err


@pytest.mark.parametrize("word", ["xyzzy", "~no-such-user/run", "no/such/folder"])
def test_completion_after_an_unknown_word_is_silent(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    completion = ShellComplete(cli.app, {}, "etloom", "_ETLOOM_COMPLETE")
    assert completion.get_completions([word], "") is not None
    assert [item.value for item in completion.get_completions([], "repo")] == ["report"]
    assert capsys.readouterr() == ("", "")


def test_run_without_a_command_names_the_report_of_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Outcome]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "etloom report run" not in call("run")[2]
    (tmp_path / "run").mkdir()
    status, out, err = call("run")
    assert (status, out) == (2, "")
    assert "missing the command to run" in err and "etloom report run" in err


def test_run_watches_when_nothing_of_an_earlier_run_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    (folder / ".watch").mkdir(parents=True)
    (folder / "run.json").write_text('{"returncode": 0}')
    seen: list[list[str]] = []
    monkeypatch.setattr(
        importlib.import_module("etloom.cli.run"),
        "_watch",
        lambda run, _: seen.append(
            [path.name for path in run.iterdir() if ".watch" in path.name or path.suffix]
        ),
    )
    words = ["--with", "kineto", "--", sys.executable, "-c", "pass"]
    assert cli.main(["run", "--out", str(folder), *words]) == 1  # contains an earlier run
    assert not seen
    assert cli.main(["run", "--out", str(folder), "--overwrite", *words]) == 0
    assert seen == [[]]


@pytest.mark.slow
@pytest.mark.torch
def test_run_records_watches_and_reports_with_the_status_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, torch\n"
        "model = torch.nn.Linear(8, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(8):\n"
        "    optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step(); time.sleep(0.3)\n"
        "print('done'); sys.exit(3)\n"
    )
    assert cli.main(["run", "--", sys.executable, str(script)]) == 3
    out, err = capfd.readouterr()
    (folder,) = (tmp_path / "etloom-runs").iterdir()
    assert (folder / "report.html").is_file() and (folder / ".watch").is_dir()
    assert "Top operator" in out and out.startswith("done")
    assert "steps, step time" in err and f"in etloom-runs/{folder.name}" in err
