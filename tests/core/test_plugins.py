"""Analyses of other packages: found, named where they fail, held to what they declare, and no danger to the others."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core import registry
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.trace import Job
from support import small_traces
from support.paths import ROOT

PAGE = ROOT / "docs" / "plugins.md"
Outcome = tuple[int, str, str]
Install = Callable[..., None]
GOOD = '''"""Count events by name."""
import polars as pl
SCOPE = "rank"
COLUMNS = {"name": pl.String, "count": pl.UInt32}
def analyze(trace, *, top: int = 2):
    """top: how many names."""
    names = trace.events["name"].cast(pl.String)
    return names.alias("name").value_counts(sort=True).sort("count", "name", descending=[True, False]).head(top)
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put the source of a plugin where pip would: a distribution with an entry point."""

    def write(source: str, kind: str = "analyses") -> None:
        site = tmp_path / "site"
        information = site / "shop_tools-1.0.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-tools\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[etloom.{kind}]\nshop-count = shop_count\n")
        (site / "shop_count.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "shop_count", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        importlib.invalidate_caches()
        registry._find_plugins.cache_clear()

    yield write  # type: ignore[misc]
    sys.modules.pop("shop_count", None)
    registry._find_plugins.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_traces.write_run(tmp_path_factory.mktemp("plugins") / "run")


def test_an_analysis_of_another_package_is_one_of_ours(
    run: Path, install: Install, call: Callable[..., Outcome]
) -> None:
    install(GOOD)
    assert registry.find_package("analyses", "shop-count") == "shop-tools"
    assert registry.find_package("analyses", "top-ops") is None
    status, out, err = call("analyze", "shop-count", run, "--top", 1, "--rank", 1, "--format", "json")
    assert (status, json.loads(out), err) == (0, [{"rank": 1, "name": "cudaLaunchKernel", "count": 2}], "")
    assert "shop-count" in call("analyze", "--list")[1]
    # The docstring explains the option; only Annotated gives it a help text.
    assert re.search(r"--top INTEGER +\[default: 2\]", call("analyze", "shop-count", "--help")[1])


@pytest.mark.slow
def test_the_example_of_the_page_runs(run: Path, install: Install, call: Callable[..., Outcome]) -> None:
    source = read_page_example(0)
    assert len(source.strip().splitlines()) <= 20
    install(source)
    status, out, err = call("analyze", "shop-count", run, "--format", "json")
    assert (status, err) == (0, "")
    # gemm and the all-reduce are 600 and 250 us long on each rank.
    assert json.loads(out)[:2] == [
        {"rank": 0, "name": "gemm", "count": 1, "longest_ns": 600_000},
        {"rank": 0, "name": "ncclDevKernel_AllReduce_Sum", "count": 1, "longest_ns": 250_000},
    ]
    assert len(json.loads(call("analyze", "shop-count", run, "--top", 1, "--format", "json")[1])) == 2
    assert "Number of names" in call("analyze", "shop-count", "--help")[1]


def test_the_page_lists_all_that_a_module_must_contain() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for parts in (registry.CONTRACT[kind] for kind in ("readers", "analyses", "exports")):
        for part in parts:
            assert f"`{part}`" in page


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "cannot be loaded: No module named 'no_such_module'"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("def", "cannot be loaded: SyntaxError: "),
        ("'''Count.'''", "lacks SCOPE, COLUMNS, analyze"),
        (
            GOOD.replace('"rank"', '"ranks"'),
            "defines SCOPE = 'ranks'; expected: \"rank\": analyze receives a",
        ),
        (
            GOOD.replace('COLUMNS = {"name": pl.String, "count": pl.UInt32}', 'COLUMNS = ["name"]'),
            "defines COLUMNS = \"['name']\"; expected: dict of str to polars type",
        ),
        (
            GOOD.replace("pl.UInt32}", '"count"}'),
            "expected: dict of str to polars type",
        ),
        (
            GOOD.replace("*, top", "top"),
            "declares the option 'top' of analyze without * before it",
        ),
        (
            GOOD.replace("def analyze", "analyze = 3\ndef other"),
            "defines analyze = '3'; expected: function ",
        ),
    ],
)
def test_a_broken_one_is_a_row_of_the_list_and_harms_no_other(
    source: str, reason: str, run: Path, install: Install, call: Callable[..., Outcome]
) -> None:
    install(source)
    status, out, err = call("analyze", "--list", "--format", "json")
    rows = {row["analysis"]: row["summary"] for row in json.loads(out)}
    assert (status, err) == (0, "")
    assert "unusable: shop_count: the analysis 'shop-count' of package shop-tools" in rows["shop-count"]
    assert reason in rows["shop-count"]
    assert rows["top-ops"] == registry.get_summary("analyses", "top-ops")
    status, out, _ = call("analyze", "--help")
    assert status == 0 and "top-ops" in out and "shop-count" not in out
    assert call("analyze", "steps", run)[0] == 0
    status, out, err = call("analyze", "shop-count", run)
    assert status == 1 and reason in err and err.count("\n") == 1 and out == ""


def read_page_example(number: int) -> str:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[number]


def write_lines(folder: Path) -> Path:
    path = folder / "rank_3.txt"
    path.write_text("# shop lines 1\nresize 10.5 3.25\nload 2 1\n")
    return path


def test_the_reader_of_the_page_reads(tmp_path: Path, install: Install) -> None:
    install(read_page_example(1), "readers")
    (trace,) = etloom.open(write_lines(tmp_path), use_cache=False).values()
    assert trace.query("select name, ts, dur from events").rows() == [
        ("load", 2000, 1000), ("resize", 10_500, 3250),
    ]  # fmt: skip
    assert trace.stats.is_empty()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return head.", "return head.no.", "AttributeError: 'bytes' object has no attribute 'no'"),
        ("return Trace(", "return dict(", "dict expected at most 1 argument, got 2"),
        ("return Trace(", "return events\n    Trace(", "read returns DataFrame; expected a Trace or a Job"),
    ],
)
def test_a_reader_that_fails_is_named(
    old: str, new: str, reason: str, tmp_path: Path, install: Install, call: Callable[..., Outcome]
) -> None:
    install(read_page_example(1).replace(old, new), "readers")
    status, out, err = call("info", write_lines(tmp_path))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "the reader 'shop-count' of package shop-tools failed: " in err and reason in err


def test_one_that_raises_is_named(run: Path, install: Install, call: Callable[..., Outcome]) -> None:
    install(GOOD.replace("    names =", "    raise KeyError('columns')\n    names ="))
    status, out, err = call("analyze", "shop-count", run)
    assert (status, out) == (1, "")
    assert err == (
        "etloom: the analysis 'shop-count' of package shop-tools failed: KeyError: 'columns'; "
        "report it to the authors of the package; ETLOOM_DEBUG=1 shows where\n"
    )


def test_errors_raised_by_the_plugin_are_unchanged(run: Path, install: Install) -> None:
    install(
        GOOD.replace("    names =", "    raise AnalysisError('no shop', remedy='open one')\n    names =")
        + "from etloom.core.errors import AnalysisError\n"
    )
    with pytest.raises(AnalysisError, match=r"^no shop; open one$"):
        etloom.analyze(etloom.open(run), "shop-count")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pl.UInt32}", "pl.Float64}", "returns count as UInt32, but declares Float64"),
        (
            '"count": pl.UInt32',
            '"calls": pl.UInt32',
            "returns the columns name, count, but declares name, calls",
        ),
        (
            ".head(top)",
            ".head(top).select('count', 'name')",
            "returns the columns count, name, but declares name, ",
        ),
        (".head(top)", ".head(top).to_dicts()", "returns list; expected a polars DataFrame"),
    ],
)
@pytest.mark.parametrize("scope", ["rank", "job"])
def test_an_answer_must_match_its_declared_schema(
    old: str, new: str, message: str, scope: str, run: Path, install: Install
) -> None:
    source = GOOD.replace(old, new)
    if scope == "job":
        source = source.replace('"rank"', '"job"').replace("trace.events", "trace[0].events")
    install(source)
    with pytest.raises(EtloomError) as raised:
        etloom.analyze(etloom.open(run), "shop-count")
    assert f"the analysis 'shop-count' of package shop-tools {message}" in str(raised.value)


def test_an_internal_error_is_not_hidden(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Outcome]
) -> None:
    def wrong(trace: object) -> pl.DataFrame:
        raise KeyError("x")

    monkeypatch.setattr(registry.get("analyses", "steps"), "analyze", wrong)
    status, _, err = call("analyze", "steps", run)
    assert status == 70 and "internal error" in err


# -- what the verbs are given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"top": "x"},
            "the option 'top' of the analysis 'top-ops': expected an integer, got 'x'; its default is 20",
        ),
        ({"top": True}, "expected an integer, got True"),
        ({"top": None}, "expected an integer, got None"),
        ({"by": 3}, "the option 'by' of the analysis 'top-ops': expected a string, got 3"),
        ({"step": "3"}, "the option 'step' of the analysis 'top-ops': expected an integer or None, got '3'"),
        ({"topp": 3}, "the analysis 'top-ops' has no option 'topp'; did you mean 'top'?"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(
    options: dict[str, object], message: str, run: Path
) -> None:
    with pytest.raises(EtloomError) as raised:
        etloom.analyze(etloom.open(run), "top-ops", **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_numbers_of_other_kinds_are_numbers(run: Path) -> None:
    job = etloom.open(run)
    import numpy as np

    assert etloom.analyze(job, "top-ops", top=np.int64(1)).height == 2
    assert etloom.analyze(job, "call-stacks", min_pct=5).height > 0


@pytest.mark.parametrize("given", [3, None, ["run/"]])
def test_an_object_that_is_not_a_run_is_refused_with_a_remedy(given: object, tmp_path: Path) -> None:
    for verb in (
        lambda: etloom.analyze(given, "steps"),  # type: ignore[arg-type]
        lambda: etloom.select(given, rank=0),  # type: ignore[type-var]
        lambda: etloom.simulate(given, "comm x0"),  # type: ignore[arg-type]
        lambda: etloom.diff(given, given),  # type: ignore[arg-type]
        lambda: etloom.query(given, "select 1"),  # type: ignore[arg-type]
        lambda: etloom.graph(given),  # type: ignore[arg-type]
        lambda: etloom.report(given, tmp_path / "r.html"),  # type: ignore[arg-type]
        lambda: etloom.export(given, tmp_path / "x.json"),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            EtloomError,
            match=r"expected a Trace, a Job or a path, got .*; etloom.open\(path\) returns the Job",
        ):
            verb()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_not_there(run: Path) -> None:
    job = etloom.open(run)
    with pytest.raises(KeyError, match="unknown rank 9; the job holds ranks 0, 1"):
        job[9]
    assert 9 not in job and job.get(9) is None
    with pytest.raises(KeyError, match="unknown rank 0; the job holds no ranks"):
        Job({})[0]


@pytest.mark.slow
def test_the_result_of_a_simulation_has_a_short_repr_and_a_table(run: Path) -> None:
    done = etloom.simulate(etloom.open(run), "kernel:gemm x0.5")
    assert re.fullmatch(
        r"<Simulated: [\d.]+ ms recorded, [\d.]+ to [\d.]+ ms predicted; see .table, .reasons, .job>",
        repr(done),
    )
    job = done.table.row(0, named=True)
    assert (job["scope"], f"{job['before_ns'] / 1e6:.3f} ms recorded") == (
        "job",
        repr(done).split(": ")[1].split(",")[0],
    )
    assert any(line.startswith("the critical path was ") for line in done.reasons)
