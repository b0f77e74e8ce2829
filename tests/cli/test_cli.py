"""The command line: results on stdout, messages on stderr, exit statuses, one line for every kind of bad input."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import cli, collector
from etloom.cli import error_handling, output
from etloom.collector import CollectOptions, CollectResult
from etloom.core import registry
from etloom.core.errors import CollectError
from etloom.core.schema import TABLES
from support import small_traces

VERBS = ("collect", "info", "convert", "link", "analyze", "query", "report", "export")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_traces.write_run(tmp_path_factory.mktemp("cli") / "run")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ETLOOM_DEBUG", raising=False)


Outcome = tuple[int, str, str]


def etloom_process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "etloom", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


# -- help, usage


def test_version(call: Callable[..., Outcome]) -> None:
    assert call("--version") == (0, f"etloom {etloom.__version__}\n", "")


@pytest.mark.parametrize("verb", [*VERBS, *(f"analyze {name}" for name in registry.list_plugins("analyses"))])
def test_every_verb_has_help_with_examples_that_are_right(verb: str, call: Callable[..., Outcome]) -> None:
    status, out, err = call(*verb.split(), "--help")
    assert (status, err) == (0, "")
    examples = [line.partition(" #")[0] for line in out.splitlines() if line.startswith("    etloom ")]
    assert len(examples) >= (1 if verb.startswith("analyze ") else 2)
    for example in examples:
        words = shlex.split(example)
        assert words[1] == verb.split()[0]
        before_command = words[: words.index("--")] if "--" in words else words
        for flag in (word for word in before_command if word.startswith("--")):
            assert (
                flag
                in call(*words[1 : 3 if words[1] == "analyze" and words[2][0] != "-" else 2], "--help")[1]
            )


def test_lists_of_an_analysis_are_separate_paragraphs_in_its_help(call: Callable[..., Outcome]) -> None:
    lines = call("analyze", "graph-quality", "--help")[1].splitlines()
    for begins in ("  - shortfall_ns: ", "  - device_starts: ", "  - dropped_edges: "):
        (at,) = (number for number, line in enumerate(lines) if line.startswith(begins))
        assert not lines[at - 1]


def test_help_lists_the_verbs(call: Callable[..., Outcome]) -> None:
    status, out, _ = call("--help")
    assert status == 0
    for verb in VERBS:
        assert f"\n  {verb} " in out
    assert "..." not in out.partition("Commands:")[2], "every summary is short enough to be shown whole"


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["info"], ["info", "a", "b"], ["info", "--nonsense", "a"], ["info", "a", "--format", "xml"],
     ["analyze", "top-ops"], ["analyze", "top-ops", "a", "--top", "many"], ["link"], ["link", "a"],
     ["link", "a", "--host", "b", "--out", "c"], ["export", "a"], ["collect", "--out", "a"],
     ["info", "a", "--jobs", "0"], ["query", "a"]],
)  # fmt: skip
def test_wrong_usage_is_status_2_on_stderr(arguments: list[str], call: Callable[..., Outcome]) -> None:
    status, out, err = call(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("etloom: ") and err.count("\n") == 1
    assert "Traceback" not in err


def test_help_imports_nothing_heavy() -> None:
    """What makes ``etloom --help`` answer at once."""
    code = (
        "import sys, etloom.cli\n"
        "etloom.cli.main(['--help'])\n"
        "heavy = {'numpy', 'polars', 'pyarrow', 'torch', 'isal', 'google.protobuf', 'yaml'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: etloom" in done.stdout


# -- bad input


def bad_inputs(folder: Path) -> dict[str, Path]:
    contents = {
        "png": b"\x89PNG\r\n\x1a\n" + bytes(50),
        "empty": b"",
        "json": b'{"a": 1}',
        "null": b"null",
        "text": b"hello\nworld\n",
        "binary": bytes(range(256)) * 20,
        "cut.json.gz": gzip.compress(json.dumps(small_traces.kineto()).encode())[:18],
        "packed.png.gz": gzip.compress(b"\x89PNG\r\n\x1a\n" + bytes(50)),
    }
    paths = {}
    for name, content in contents.items():
        paths[name] = folder / name
        paths[name].write_bytes(content)
    (folder / "hollow").mkdir()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(contents["png"])
    return paths | {
        "absent": folder / "absent",
        "hollow": folder / "hollow",
        "pictures": folder / "pictures",
        "device": Path("/dev/null"),
    }


@pytest.mark.parametrize("verb", ["info", "query", "analyze", "report", "export", "link", "convert"])
def test_bad_input_is_status_1_and_one_line_that_names_the_file(
    verb: str, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    out = tmp_path / "out.parquet"
    for what, path in bad_inputs(tmp_path).items():
        arguments: list[object] = {
            "info": [path], "query": [path, "select 1"], "analyze": ["steps", path],
            "report": [path, "--out", tmp_path / "r.html"], "export": [path, "--out", out],
            "link": [path, "--out", out], "convert": [path, out],
        }[verb]  # fmt: skip
        status, stdout, err = call(verb, *arguments)
        assert (status, stdout) == (1, ""), what
        assert err.startswith(f"etloom: {path}: "), what
        assert err.count("\n") == 1, what
        assert "; " in err or "expected" in err or what == "cut.json.gz", f"{what}: no remedy in {err}"
        assert not out.exists()


def test_a_folder_instead_of_a_file_is_one_line(
    run: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    status, _, err = call("link", "--host", run, "--device", run, "--out", tmp_path / "x")
    assert status == 1
    assert err == f"etloom: {run}: is a folder, not a trace file; open it as a run (etloom.open), or " \
        "specify one file in it\n"  # fmt: skip


@pytest.mark.slow
def test_tables_and_reports_make_the_folders_that_they_lack(
    run: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    for number, arguments in enumerate((
        ("report", run, "--out", "r.html"),
        ("analyze", "top-ops", run, "--out", "a.csv"),
        ("query", run, "select 1 a from events", "--out", "a.parquet"),
        ("info", run, "--out", "a.json"),
    )):  # fmt: skip
        *rest, name = arguments
        out = tmp_path / str(number) / "inner" / str(name)
        assert call(*rest, out)[0] == 0
        assert out.stat().st_size


def test_unwritable_outputs_have_the_same_message_in_all_verbs(
    run: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    (tmp_path / "file").write_text("x")
    for verb in (("report", run), ("analyze", "top-ops", run), ("info", run)):
        out = tmp_path / "file" / "a.html" if verb[0] == "report" else tmp_path / "file" / "a.csv"
        status, printed, err = call(*verb, "--out", out)
        assert (status, printed) == (1, "")
        assert err == f"etloom: {out}: cannot be written: Not a directory; choose another path with --out\n"
        status, _, err = call(*verb, "--out", tmp_path)
        assert status == 1
        assert "is a folder; expected a file to write; choose another path with --out" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "{file}", "-o", "{file}"),
        ("convert", "{file}", "{file}"),
        ("convert", "{file}", "{link}"),
        ("report", "{run}", "-o", "{file}"),
        ("query", "{run}", "select * from stats", "-f", "csv", "-o", "{file}"),
        ("simulate", "{run}", "--set", "comm x0", "-o", "{file}"),
        ("export", "{run}", "-o", "{other}"),
        ("diff", "{run}", "{run}", "--html", "{file}"),
        ("check", "{run}", "--baseline", "{run}", "--junit", "{file}"),
    ],
)
def test_a_trace_to_read_is_not_overwritten(
    arguments: tuple[str, ...], tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    file, other = sorted(run.iterdir())[:2]
    link = tmp_path / "link.json"
    link.symlink_to(file)
    before = {path: path.read_bytes() for path in run.iterdir()}
    paths = {"run": run, "file": file, "other": other, "link": link}
    status, _, messages = call(*(argument.format_map(paths) for argument in arguments))
    assert status == 1
    assert messages.endswith("and would be overwritten; choose another path to write to\n")
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.slow
def test_a_folder_that_is_the_trace_to_read_is_not_overwritten(
    tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    saved = tmp_path / "saved.parquet"
    for _ in range(2):  # the second time over an earlier export
        assert call("export", run, "-o", saved)[0] == 0
    rank = next(saved.glob("rank=*"))
    for path, problem in ((saved, "is"), (rank, "contains"), (saved / "meta.json", "contains")):
        status, _, messages = call("export", path, "-o", saved)
        assert (status, messages.count("\n")) == (1, 1)
        assert f"{problem} the trace to read, and would be overwritten" in messages


@pytest.mark.slow
def test_linked_traces_in_a_folder_do_not_overwrite_what_was_read(
    tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    run, linked = small_traces.write_run(tmp_path / "run"), tmp_path / "linked"
    command = ("--to", "etplus", "--out", linked)
    for _ in range(2):
        assert call("link", run, *command)[0] == 0
    before = {path: path.read_bytes() for path in linked.iterdir()}
    status, _, messages = call("link", linked, *command)
    assert status == 1
    assert "is the trace to read, and would be overwritten" in messages
    assert {path: path.read_bytes() for path in linked.iterdir()} == before


@pytest.mark.slow
def test_a_report_and_a_table_next_to_the_traces_are_written_again(
    tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    for _ in range(2):
        assert call("report", run, "-o", run / "report.html")[0] == 0
        assert call("analyze", "steps", run, "-o", run / "steps.csv")[0] == 0
        assert call("export", run, "-o", run / "all.json.gz")[0] == 0


def test_a_pipe_is_written_once(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    """That it can be opened is not tried: its reader would see the end."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        assert call("analyze", "top-ops", run, "--format", "csv", "--out", tmp_path / "pipe")[0] == 0
        assert read.result(10).startswith("rank,name")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_one_may_not_read(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    secret = tmp_path / "kineto_trace_0.json"
    secret.write_bytes((run / "kineto_trace_0.json").read_bytes())
    secret.chmod(0)
    status, _, err = call("info", secret)
    assert status == 1
    assert err == f"etloom: {secret}: cannot be opened: Permission denied\n"


def test_a_cut_trace_is_read_and_counted_and_fatal_with_strict(
    tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    cut = tmp_path / "kineto_trace_0.json"
    text = json.dumps(small_traces.kineto(), indent=1)
    cut.write_text(text[: text.index("ncclDevKernel") + 3])
    status, out, err = call("info", cut, "--format", "json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["tables"]["events"] == 6
    assert [row["severity"] for row in told["stats"] if row["name"] == "read.truncated"] == ["data_loss"]
    assert (
        told["by_rank"][0]["lost"]
        == sum(row["count"] for row in told["stats"] if row["severity"] != "info")
        > 0
    )
    status, out, err = call("info", cut, "--strict")
    assert (status, out) == (1, "")
    assert err.startswith("etloom: rank 0: read.truncated: 1 (")
    assert err.count("\n") == 1


def test_a_fault_of_ours_is_one_line_and_status_70(
    run: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("of\nours")

    monkeypatch.setattr("etloom.api.open", broken)
    status, out, err = call("info", run)
    assert (status, out) == (70, "")
    assert err.count("\n") == 1
    assert "KeyError: 'of\\nours'" in err
    assert "ETLOOM_DEBUG=1" in err
    monkeypatch.setenv("ETLOOM_DEBUG", "1")
    assert "Traceback (most recent call last)" in call("info", run)[2]


def test_ctrl_c_is_status_130_and_silent(
    run: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("etloom.api.open", interrupted)
    assert call("info", run) == (130, "", "")


@pytest.mark.slow
def test_ctrl_c_in_a_separate_process() -> None:
    code = (
        "import sys, time, etloom.api\n"
        "from etloom.cli import main\n"
        "etloom.api.open = lambda *_, **__: (print('reading', flush=True), time.sleep(600))\n"
        "sys.exit(main(['info', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (error_handling.EXIT_INTERRUPTED, "")


@pytest.mark.slow
def test_a_closed_pipe_is_silent(run: Path) -> None:
    sql = "select e.name, f.ts from events e cross join events f cross join events g cross join events h"
    process = etloom_process("query", run, sql, "--format", "csv")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    # Where all fitted into the pipe before it was closed, nothing went wrong.
    assert process.wait(timeout=400) in (0, error_handling.EXIT_PIPE_CLOSED)
    code = "from etloom.cli.error_handling import handle_errors\nwith handle_errors(): print(1); raise BrokenPipeError"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (error_handling.EXIT_PIPE_CLOSED, "")


# -- tables


def test_table(run: Path, call: Callable[..., Outcome]) -> None:
    status, out, err = call(
        "query", run, "select name, ts, dur dur_ns from events where rank = 1 order by id limit 2"
    )
    assert (status, err) == (0, "")
    assert out == (
        "name                             ts   dur_ns\n"
        "ProfilerStep#3  1700000000000100000  1000000\n"
        "aten::linear    1700000000000200000   400000\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dur", "dur_ns", "dur_bytes", "start_ns", "pct"])
def test_a_name_in_sql_changes_no_value(name: str, run: Path, call: Callable[..., Outcome]) -> None:
    sql = f"select dur as {name}, dur / 2.0 as half_{name} from events where name = 'aten::linear' limit 1"
    assert call("query", run, sql)[1].split() == [name, f"half_{name}", "400000", "200000"]


def test_a_table_has_one_unit_but_for_columns_too_small_for_it() -> None:
    frame = pl.DataFrame(
        {"span_ns": [19_900_000], "copy_ns": [-250_000], "gap_ns": [9_900], "none_ns": [-0.0]}
    )
    assert output.format_lines(frame).split() == [
        *("span", "(ms)", "copy", "(ms)", "gap", "(ns)", "none", "(ms)", "19.90", "-0.2500", "9,900", "0")
    ]


def test_columns_that_no_row_fills_are_named_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_table(pl.DataFrame({"a": [1, 2], "b": [None, None], "c": [None, 3]}), None, None)
    out, err = capsys.readouterr()
    assert out.split() == ["a", "c", "1", "-", "2", "3"]
    assert err == "etloom: columns without values are not shown: b\n"


def test_times_of_the_epoch_are_shown_since_the_first() -> None:
    epoch = 1_795_240_669_000_000_000
    frame = pl.DataFrame({"start_ns": [epoch, epoch + 69_330_000, None], "dur_ns": [5, 7, 9]})
    assert output.render_text(output.build_table(frame)).split() == [
        *("start", "since", "the", "first", "(ms)", "dur", "(ns)", "0", "5", "69.33", "7", "-", "9")
    ]


def test_a_narrow_terminal_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    name = "a_very_long_kernel_name_" * 4
    numbers = {f"number {at} of this row": [123_456_789_000 + at] for at in range(4)}
    drawn = output.render_text(output.build_table(pl.DataFrame({"name": [name], **numbers})))
    for number in numbers.values():
        assert f"{number[0]:,}" in drawn
    assert "of this row" not in drawn, "headers of numbers are broken into lines"
    first_column = "".join(line[: output.MIN_TEXT_WIDTH].strip() for line in drawn.split("\n")[1:])
    assert name in first_column.replace("\x1b[1m", "").replace("\x1b[0m", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert (
        len(output.render_text(output.build_table(pl.DataFrame({"name": [name], **numbers}))).split("\n"))
        == 3
    )


@pytest.mark.slow
def test_json_csv_parquet_have_the_same_rows(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    sql = (
        "select e.rank, name, dur, grid_x from events e "
        "left join kernels k on e.id = k.event and e.rank = k.rank order by e.rank, e.id"
    )
    rows = json.loads(call("query", run, sql, "--format", "json")[1])
    assert rows[0] == {"rank": 0, "name": "ProfilerStep#3", "dur": 1_000_000, "grid_x": None}
    assert [row["grid_x"] for row in rows if row["name"] == "gemm"] == [2, 2]
    table = pl.read_csv(io.StringIO(call("query", run, sql, "--format", "csv")[1]))
    assert table.to_dicts() == rows
    for name in ("a.json", "a.csv", "a.parquet", "a.txt"):
        status, out, err = call("query", run, sql, "--out", tmp_path / name)
        assert (status, out) == (0, "")
        assert err == f"etloom: wrote 14 rows to {tmp_path / name}\n"
    assert json.loads((tmp_path / "a.json").read_text()) == rows
    assert pl.read_csv(tmp_path / "a.csv").to_dicts() == rows
    assert pl.read_parquet(tmp_path / "a.parquet").to_dicts() == rows
    assert (tmp_path / "a.txt").read_text().startswith("rank  name")


@pytest.mark.slow
def test_parquet_goes_to_a_pipe_but_not_to_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        sys.executable,
        "-m",
        "etloom",
        "query",
        str(run),
        "select dur from events",
        "--format",
        "parquet",
    ]
    done = subprocess.run(command, capture_output=True, check=True)
    assert pl.read_parquet(io.BytesIO(done.stdout)).height == 14
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(etloom.EtloomError, match="refusing to write Parquet to a terminal; add --out FILE"):
        output.write_table(pl.DataFrame(), output.Format.parquet, None)


def test_json_has_no_nan_and_csv_takes_nested_values() -> None:
    frame = pl.DataFrame({"x": [1.5, float("nan"), float("inf")], "dims": [[1, 2], [], None]})
    assert json.loads(output.to_json(frame)) == [
        {"x": 1.5, "dims": [1, 2]}, {"x": None, "dims": []}, {"x": None, "dims": None},
    ]  # fmt: skip
    assert json.loads(output.to_json(frame.clear())) == []
    assert output._flatten(frame)["dims"].to_list() == ["[1, 2]", "[]", None]


def test_a_name_from_a_trace_does_not_steer_the_terminal(
    tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    document = small_traces.kineto(world=1)
    document["traceEvents"][-1]["name"] = "\x1b[2J\x07[bold]evil[/bold]\nline"
    (tmp_path / "kineto_trace_0.json").write_text(json.dumps(document))
    status, out, _ = call("query", tmp_path, "select name from events where stream = 13")
    assert status == 0
    assert out == "name\n\\x1b[2J\\x07[bold]evil[/bold]\\nline\n"
    assert "\x1b" not in call("query", tmp_path, "select \x1b[2J from events")[2]


def test_query_refuses_in_one_line(run: Path, call: Callable[..., Outcome]) -> None:
    assert call("query", run, "select * from event") == (
        2, "", "etloom: SQL: unknown table 'event'; did you mean 'events'?; see etloom query --help\n",
    )  # fmt: skip
    columns = json.loads(call("query", "--tables", "--format", "json")[1])
    assert len(columns) == sum(len(table.columns) for table in TABLES.values())
    dur = {"table": "events", "column": "dur", "type": "Int64", "unit": "ns"}
    assert dur.items() <= columns[5].items()


@pytest.mark.parametrize(
    ("sql", "status", "words"),
    [
        ("selct name from events", 2, "the query is not a SELECT"),
        ("select name from events where", 2, "sql parser error"),
        ("select nam from events", 2, "did you mean 'name'?"),
        ("select read_csv('x') from events", 2, "which reads files"),
        ("select sum(name) from events", 2, "not supported for dtype"),
        ("select cast(name as int) from events", 1, "conversion from `str`"),
        ("select rank, name from EVENTS limit 1", 0, ""),
        ("select count(*) from events where stream = 99", 0, ""),
    ],
)
def test_a_query_that_no_run_can_answer_is_wrong_usage(
    run: Path, call: Callable[..., Outcome], sql: str, status: int, words: str
) -> None:
    got, out, err = call("query", run, sql)
    assert (got, out == "", err.count("\n")) == (status, status > 0, int(status > 0)) and words in err, err
    if status == 2:  # which is told before anything is read
        assert call("query", "nowhere", sql) == (2, "", err)


# -- verbs


def test_analyze_lists_all_analyses(call: Callable[..., Outcome]) -> None:
    names = [(name, registry.get_summary("analyses", name)) for name in registry.list_plugins("analyses")]
    listed = json.loads(call("analyze", "--list", "--format", "json")[1])
    assert [(row["analysis"], row["summary"]) for row in listed] == names
    assert call("analyze")[1] == call("analyze", "--list")[1]


def test_the_first_rows_of_a_job_are_of_all_ranks(run: Path, call: Callable[..., Outcome]) -> None:
    status, out, err = call("analyze", "slack", run, "--top", 1, "--format", "csv")
    assert (status, len(out.splitlines())) == (0, 2)
    assert err.startswith("etloom: 1 of ")
    assert "of each rank" not in err


@pytest.mark.slow
def test_options_of_an_analysis_are_flags(run: Path, call: Callable[..., Outcome]) -> None:
    arguments = ("analyze", "top-ops", run, "--top", 1, "--by", "total", "--step", 3, "--format", "json")
    status, out, err = call(*arguments)
    assert (status, err) == (0, "etloom: 2 of 4 rows, 1 of each rank; --top 2 shows all\n")
    assert [(row["rank"], row["name"], row["total_ns"]) for row in json.loads(out)] == [
        (0, "ProfilerStep#3", 1_000_000), (1, "ProfilerStep#3", 1_000_000),
    ] or [row["name"] for row in json.loads(out)] == ["aten::linear", "aten::linear"]  # fmt: skip
    assert call("analyze", "top_ops", run)[0] == 0
    assert call("analyze", "top-opz", run)[::2] == (
        2, "etloom: unknown analysis 'top-opz'; did you mean 'top-ops'?; see etloom analyze --help\n",
    )  # fmt: skip
    status, _, err = call("analyze", "steps", run, "--step", 99)
    assert (status, err.count("\n")) == (1, 1)


INFO_KEYS = [
    "schema", "path", "ranks", "world_size", "formats", "schema_versions", "devices", "hosts", "clock", "start_ns",
    "span_ns", "steps", "mean_step_ns", "rings", "tables", "categories", "by_rank", "stats",
]  # fmt: skip
RANK_KEYS = [
    "rank", "events", "nodes", "device_events", "start_ns", "end_ns", "steps", "mean_step_ns", "linked_by",
    "linked_pct", "launched_pct", "lost",
]  # fmt: skip


def test_info_json_has_stable_keys(run: Path, call: Callable[..., Outcome]) -> None:
    status, out, err = call("info", run, "--format", "json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert list(told) == INFO_KEYS
    assert [list(row) for row in told["by_rank"]] == [RANK_KEYS, RANK_KEYS]
    expected = {
        "ranks": [0, 1], "world_size": 2, "formats": ["execution_trace", "kineto"],
        "schema_versions": {"execution_trace": ["1.1.1-chakra.0.0.4"], "kineto": ["1"]},
        "devices": {"GPU of the test": 2}, "hosts": ["host0", "host1"], "clock": "epoch",
        "start_ns": small_traces.BASE_NS + 100_000, "span_ns": 1_000_000, "steps": [3], "mean_step_ns": 1_000_000.0,
        "categories": {"cpu_op": 4, "cuda_runtime": 4, "kernel": 4, "user_annotation": 2},
    }  # fmt: skip
    assert {key: told[key] for key in expected} == expected
    first = told["by_rank"][0]
    assert (first["events"], first["nodes"], first["device_events"], first["lost"]) == (7, 4, 2, 0)
    assert (first["linked_by"], first["linked_pct"], first["launched_pct"]) == ("rf_id", 100.0, 100.0)


@pytest.mark.slow
def test_info_for_people_and_as_a_table(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    status, out, err = call("info", run)
    assert (status, err) == (0, "")
    for words in (
        "2 of 2 (ranks 0, 1)",
        "2 x GPU of the test",
        "host0, host1",
        "1.000 ms",
        "kernel 4",
        "rf_id",
    ):
        assert words in out
    status, out, _ = call("info", run, "--format", "csv")
    assert pl.read_csv(io.StringIO(out))["rank"].to_list() == [0, 1]
    alone = json.loads(call("info", run / "torch_et_0.json", "--format", "json")[1])
    assert list(alone) == INFO_KEYS
    assert (alone["span_ns"], alone["steps"], alone["mean_step_ns"], alone["clock"]) == (
        None,
        [3],
        None,
        None,
    )
    assert call("info", run / "torch_et_0.json")[0] == 0


def test_info_infers_the_devices_of_an_execution_trace_from_its_tensors(
    data: Path, call: Callable[..., Outcome]
) -> None:
    told = json.loads(call("info", data / "et_schemas" / "hf_gpt2.json.gz", "--format", "json")[1])
    assert told["devices"] == {"cuda:0": 1}
    assert told["tables"]["nodes"] == 27156


@pytest.mark.slow
def test_link_saves_a_folder_or_two_files(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    status, out, err = call("link", run, "--out", tmp_path / "linked")
    assert (status, err) == (0, f"etloom: saved {tmp_path / 'linked'}\n")
    assert "host operators" in out
    saved = etloom.open(tmp_path / "linked")
    assert saved.ranks == [0, 1]
    assert saved[1].links.height == 3
    host, device = run / "torch_et_1.json", run / "kineto_trace_1.json"
    status, _, _ = call(
        "link", "--host", host, "--device", device, "--rank", 7, "--out", tmp_path / "one.json"
    )
    assert status == 0
    one = etloom.read(tmp_path / "one.json")
    assert isinstance(one, etloom.Trace)
    assert one.events.height == 7


def test_link_refuses_a_repeated_trace(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    device = run / "kineto_trace_0.json"
    status, _, err = call("link", "--host", device, "--device", device, "--out", tmp_path / "x")
    assert status == 1
    assert "2 profiler traces of one rank cannot be linked" in err


@pytest.mark.slow
def test_export_by_suffix_name_and_rank(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    for arguments in (
        ["a.json"],
        ["a.json.gz"],
        ["a.parquet"],
        ["a", "--to", "chrome"],
        ["b", "--to", "parquet"],
    ):
        out = tmp_path / arguments[0]
        assert call("export", run, "--out", out, *arguments[1:]) == (0, "", f"etloom: wrote {out}\n")
    both = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert len([event for event in both if event["ph"] == "X"]) == 14
    assert call("export", run, "--rank", 1, "--out", tmp_path / "one.json")[0] == 0
    one = json.loads((tmp_path / "one.json").read_text())
    assert len([event for event in one["traceEvents"] if event["ph"] == "X"]) == 7
    assert one["distributedInfo"]["rank"] == 1
    assert call("export", run, "--rank", 2, "--out", tmp_path / "x.json")[::2] == (
        1, "etloom: unknown rank 2; the run holds ranks 0, 1\n",
    )  # fmt: skip
    status, _, err = call("export", run, "--out", tmp_path / "a.xyz")
    assert status == 2
    assert "no export writes files with this suffix" in err


def test_convert(run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
    out = tmp_path / "k.parquet"
    assert call("convert", run / "kineto_trace_0.json", out) == (0, "", f"etloom: wrote {out}\n")
    assert etloom.open(out).ranks == [0]
    assert call("convert", run / "kineto_trace_0.json", "--out", tmp_path / "new" / "k.json")[0] == 0
    assert call("convert", run / "kineto_trace_0.json")[0] == 2


@pytest.mark.slow
def test_report_prints_the_verdict_and_writes_the_page(
    run: Path, tmp_path: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "r.html"
    status, out, err = call("report", run, "--out", page)
    assert status == 0
    assert "1.000 ms" in out
    assert page.stat().st_size > 1000
    assert err == f"etloom: wrote {page}; open it in a browser: {page.as_uri()}\n"
    saved = small_traces.write_run(tmp_path / "run")
    assert call("report", saved)[0] == 0
    assert (saved / "report.html").is_file()
    monkeypatch.chdir(tmp_path)
    assert call("report", run / "kineto_trace_0.json")[0] == 0
    assert (tmp_path / "report.html").is_file()
    assert not (run / "report.html").exists()
    assert call("report", run, "--out", tmp_path / "new" / "r.html")[0] == 0
    status, _, err = call("report", run, "--out", page / "r.html")
    assert status == 1
    assert err.endswith("r.html: cannot be written: Not a directory; choose another path with --out\n")


def test_collect_passes_on_options_command_and_status(
    tmp_path: Path, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def collect(
        command: Any, out: Any, options: Any, *, overwrite: bool, on_build: Any, **_: Any
    ) -> CollectResult:
        assert callable(on_build) and not overwrite
        calls.append((list(command), out, options))
        return CollectResult(Path(out), 3, (0, 1), (Path(out),), ("one thing",))

    monkeypatch.setattr(collector, "collect", collect, raising=False)
    status, out, err = call(
        "collect",
        "--out",
        tmp_path,
        "--steps",
        "4:6",
        "--no-shapes",
        "--stack",
        "--",
        "python",
        "t.py",
        "--out",
        "x",
    )
    assert (status, out) == (3, "")
    assert (
        err == f"etloom: one thing\netloom: recorded 2 ranks in {tmp_path}; next: etloom report {tmp_path}\n"
    )
    expected = CollectOptions(steps="4:6", shapes=False, stack=True)
    assert calls == [(["python", "t.py", "--out", "x"], tmp_path, expected)]
    call("collect", "--out", tmp_path, "python", "-c", "pass", "--help")
    assert calls[1][0] == ["python", "-c", "pass", "--help"]

    def refuse(*_: Any, **__: Any) -> None:
        raise CollectError("no range", where="steps", remedy="write 3:5")

    monkeypatch.setattr(collector, "collect", refuse)
    assert call("collect", "--out", tmp_path, "--", "x") == (1, "", "etloom: steps: no range; write 3:5\n")


def test_no_progress_is_drawn_if_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.show_progress("reading") as update:
        update(Path("a"), 10)
    assert capsys.readouterr() == ("", "")


def test_progress_shows_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar's total is the size of all files told of, also before the first byte of them is read."""
    import rich.progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen: list[tuple[float, float | None]] = []

    class Bar(rich.progress.Progress):
        def update(self, *arguments: Any, **options: Any) -> None:
            super().update(*arguments, **options)
            seen.append((self.tasks[0].completed, self.tasks[0].total))

    files = [tmp_path / "a", tmp_path / "b"]
    for size, file in zip((100, 50), files, strict=True):
        file.write_bytes(bytes(size))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(rich.progress, "Progress", Bar)
    with output.show_progress("reading") as update:
        for file in files:
            update(file, 0)
        update(files[1], 50)
        update(files[0], 30)
        update(tmp_path, 0)  # a folder, of which nothing is told
    assert seen == [(0, 100), (0, 150), (50, 150), (80, 150), (80, 150)]


def test_info_states_what_is_unknown(tmp_path: Path, call: Callable[..., Outcome]) -> None:
    document = small_traces.kineto()
    del document["distributedInfo"]
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "kernel"]
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    lines = [line.split(maxsplit=1) for line in call("info", file)[1].splitlines() if line]
    facts = {line[0]: line[1] for line in reversed(lines) if len(line) == 2}  # of two "rank" the first
    assert facts["ranks"] == "1 (rank 0, not stated in any file)"
    assert facts["devices"] == "1 x cpu (calls to a device, but none of its work was recorded)"
    assert facts["time"] == "1.000 ms"
    assert facts["rank"].split()[:2] == ["events", "steps"]  # no column that is 0 throughout
    (tmp_path / "et.json").write_text(json.dumps(small_traces.execution_trace()))
    told = call("info", tmp_path / "et.json")[1]
    assert "\ntime" not in told
    assert json.loads(call("info", tmp_path / "et.json", "--format", "json")[1])["by_rank"][0]["events"] == 0


def test_a_verb_imports_no_other_verb() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from etloom import cli; cli.main(['link', '--help']); print(sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "etloom.cli.link" in said
    assert not [verb for verb in cli._VERBS if verb != "link" and f"'etloom.cli.{verb}'" in said]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["analyze", "top-ops", "RUN", "--out", "x.xlsx"],
            "--out: x.xlsx: unknown ending .xlsx; expected .json, .csv, ",
        ),
        (["query", "RUN", "select name from events", "--out", "x.tsv"], "unknown ending .tsv"),
        (["info", "RUN", "--out", "x.html"], "unknown ending .html"),
        (["diff", "RUN", "RUN", "--out", "x.xlsx"], "unknown ending .xlsx"),
        (["simulate", "RUN"], "expected at least one change, such as "),
        (["simulate", "RUN", "--set", "kernel"], "'kernel', character "),
        (
            ["simulate", "RUN", "--set", "comm x0", "--straggler", "1"],
            "--straggler: expected the word none, got '1'; --like-peers RANK",
        ),
        (["simulate", "RUN", "--set", "comm x0", "--out", "x.zzz"], "x.zzz: no export writes files"),
        (["export", "RUN", "--out", "x", "--to", "zzz"], "unknown export 'zzz'"),
        (["convert", "RUN/kineto_trace_0.json", "x.zzz"], "x.zzz: no export writes files"),
        (["analyze", "zzzz", "RUN"], "unknown analysis 'zzzz'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_2_and_writes_nothing(
    arguments: list[str],
    words: str,
    run: Path,
    call: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*(word.replace("RUN", str(run)) for word in arguments))
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1 and "Invalid value" not in err
    assert not list(tmp_path.glob("x*"))


@pytest.mark.slow
def test_the_end_of_out_chooses_also_of_info(run: Path, call: Callable[..., Outcome], tmp_path: Path) -> None:
    assert call("info", run, "--out", tmp_path / "a.csv")[0] == 0
    assert pl.read_csv(tmp_path / "a.csv")["rank"].to_list() == [0, 1]
    assert call("info", run, "--out", tmp_path / "a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text())["ranks"] == [0, 1]
    status, out, _ = call("info", run, "--out", tmp_path / "a.txt")
    assert (status, out) == (0, "") and (tmp_path / "a.txt").read_text().startswith(str(run))
    assert call("query", run, "select 1 as x", "--out", tmp_path / "a.xlsx", "--format", "csv")[0] == 0
    assert (tmp_path / "a.xlsx").read_text() == "x\n1\n"


def test_a_process_ends_without_a_last_collection_but_a_caller_of_main_is_left_alone() -> None:
    """The collection at the end of a process takes a quarter of the time of a short verb."""
    script = (
        "import gc, sys; from etloom.cli import main; main(['--version']); print(gc.get_freeze_count());"
        "sys.argv = ['etloom', '--version']; main(); print(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    _, kept, _, frozen = done.stdout.split("\n")[:4]
    assert int(kept) == 0 < int(frozen)


@pytest.mark.slow
def test_a_query_ends_at_the_limits_that_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small_traces.write_run(tmp_path / "run")
    words = ["query", str(tmp_path / "run")]
    limits = ["--time-limit", "60", "--memory-limit", "1"]
    counted = "select count(*) n from events"
    assert cli.main([*words, counted, "--format", "csv"]) == 0
    expected = capfd.readouterr().out
    assert cli.main([*words, counted, "--format", "csv", *limits]) == 0
    assert capfd.readouterr().out == expected
    assert cli.main([*words, "select lpad(name, 2000000000, 'x') from events", *limits]) == 1
    assert capfd.readouterr().err.count("needs more than 1.0 GB") == 1
    joined = " cross join ".join(f"events e{number}" for number in range(12))
    assert cli.main([*words, f"select sum(e0.dur * e1.dur) s from {joined}", "--time-limit", "0.2"]) == 1
    assert re.fullmatch(r"etloom: the query takes longer than 0.2 s; .*\n", capfd.readouterr().err)
    assert cli.main([*words, "select nothing from events", *limits]) == 2
    assert cli.main([*words[:1], str(tmp_path / "none"), counted, *limits]) == 1
