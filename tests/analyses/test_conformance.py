"""Every plugin of the registry keeps the contract of its kind."""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import formats, linker
from etloom.core import registry
from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.schema import TABLES, find_unit
from etloom.core.trace import Job, Trace
from etloom.formats import memory_snapshot
from support import small_traces
from support.allocator_snapshots import write_snapshot
from support.examples import slow_after

ALL = [(kind, name) for kind in registry.CONTRACT for name in registry.list_plugins(kind)]
ENTRY = {"readers": "read", "analyses": "analyze", "exports": "write", "patterns": "find"}
ANALYSES = registry.list_plugins("analyses")
ASK_MORE = {
    "allocator": "the history of a caching allocator",
    "memory-findings": "the history of a caching allocator",
    "memory-holders": "the history of a caching allocator",
    "clocks": "two ranks that communicate",
    "cupti-counters": "counters of kernels",
    "device-graphs": "replays of device graphs",
    "xla-ops": "XLA operations",
    "compiled-kernels": "kernels of torch.compile",
    "nccl-bandwidth": "NCCL's own profilers",
    "flops": "operators with shapes",
    "hangs": "Flight Recorder dumps",
    "imbalance": "two ranks",
    "memory-bandwidth": "copies",
    "memory-bandwidth-summary": "copies",
    "memory-timeline": "allocations",
    "mfu": "operators with shapes",
    "module-view": "Python frames",
    "recompute": "a backward pass",
    "roofline": "operators with shapes",
    "slowdown": "two ranks",
    "stragglers": "two ranks that communicate",
    "tasks": "operators with shapes",
}
"""What an analysis asks of a run beyond device work."""
FINDS = {"findings", "idle-time", "kernel-sequences", "recompute", "short-kernels"}
"""Analyses that may find nothing."""
KEY_TYPES = {pl.Int64, pl.Int32, pl.UInt32, pl.String, pl.Boolean, pl.Float64, pl.UInt64, pl.Int8, pl.Int16}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(
        small_traces.write_run(tmp_path_factory.mktemp("conformance") / "run"), use_cache=False
    )


@pytest.fixture(scope="module")
def traces(job: Job) -> dict[str, Trace]:
    """A trace with device work, one of the host alone, one of an execution trace alone, one of nothing."""
    full = job[0]
    host = full.events.filter(pl.col("cat").cast(pl.String).is_in(["cpu_op", "user_annotation"]))
    return {
        "device": full,
        "host": linker.link(Trace({"events": host}, {"rank": 0, "clock": "epoch"})),
        "nodes": linker.link(Trace({"nodes": full.nodes}, {"rank": 0})),
        "empty": linker.link(Trace({}, {"rank": 0})),
    }


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_plugin_contains_what_its_kind_requires(kind: str, name: str) -> None:
    module = registry.get(kind, name)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    summary = registry.get_summary(kind, name)
    assert summary.endswith((".", ":")), f"{name}: the first line of the docstring is a sentence: {summary!r}"
    assert len(summary) <= 120
    for part in registry.CONTRACT[kind]:
        assert hasattr(module, part)
    assert callable(getattr(module, ENTRY[kind]))


@pytest.mark.parametrize("name", registry.list_plugins("patterns"))
def test_a_pattern_states_its_cost_and_confidence(name: str) -> None:
    last = inspect.cleandoc(registry.get("patterns", name).__doc__ or "").split("\n\n")[-1]
    assert re.match(r"(?s)Cost: .+\nConfidence: .+\.$", last)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_option_is_typed_has_a_default_and_is_documented(kind: str, name: str) -> None:
    function = getattr(registry.get(kind, name), ENTRY[kind])
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter.name} has no type"
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, f"{name}: options are named"
    for option in registry.list_options(kind, name):
        assert option.default is not inspect.Parameter.empty, f"{name}: {option.name} has no default"
        assert option.help, f"{name}: {option.name} has no help"


@pytest.mark.parametrize("name", registry.list_plugins("readers"))
@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"[",
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b'{"a": 1}',
        b"hello\nworld\n",
        bytes(range(256)) * 8,
    ],
)
def test_a_reader_sniffs_any_bytes_and_rejects_files_of_other_formats(name: str, head: bytes) -> None:
    assert registry.get("readers", name).sniff(head) in (False, True)
    if len(head) > 1:
        assert not registry.get("readers", name).sniff(head)


def test_readers_with_a_folder_sniffer_are_listed() -> None:
    readers = registry.list_plugins("readers")
    sniffers = {name for name in readers if hasattr(registry.get("readers", name), "sniff_folder")}
    assert sniffers == set(formats.FOLDER_FORMATS)


@pytest.mark.parametrize("name", registry.list_plugins("readers"))
def test_a_reader_refuses_other_files_in_one_line(name: str, tmp_path: Path) -> None:
    reader = registry.get("readers", name)
    for number, content in enumerate((b"", b"\x89PNG\r\n\x1a\n" + bytes(100), b"{", b'{"a": 1}')):
        file = tmp_path / f"file{number}"
        file.write_bytes(content)
        with pytest.raises(EtloomError) as raised:
            reader.read(file)
        assert str(file) in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", registry.list_plugins("exports"))
def test_an_export_writes_only_its_file(
    name: str, job: Job, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for suffix in registry.get_suffixes("exports", name):
        assert suffix.startswith(".")
        assert registry.find_by_suffix("exports", f"x{suffix}") == name
    suffix = registry.get_suffixes("exports", name)[0]
    if name == "memory-snapshot":  # it asks for the history of a caching allocator
        trace = memory_snapshot.read(write_snapshot(tmp_path_factory.mktemp("snapshot") / "a.pickle"))
        etloom.export(trace, tmp_path / f"out{suffix}")
    else:
        etloom.export(job[0], tmp_path / f"out{suffix}")
    stem = "out.0" if name == "chakra" else "out"  # simulators expect the rank in the name
    assert [path.name for path in tmp_path.iterdir()] == [f"{stem}{suffix}"], "nothing else is left behind"


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_declares_its_columns(name: str) -> None:
    module = registry.get("analyses", name)
    assert module.SCOPE in ("rank", "job")
    assert module.COLUMNS
    for column, dtype in module.COLUMNS.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", column)
        assert pl.Series([], dtype=dtype).dtype == dtype
    first = next(iter(inspect.signature(module.analyze).parameters.values()))
    assert first.name == ("trace" if module.SCOPE == "rank" else "job")
    positional = [
        p for p in inspect.signature(module.analyze).parameters.values() if p.kind is not p.KEYWORD_ONLY
    ]
    assert len(positional) == 1, "options are keyword-only"


COUNTS = """
blocks communications sized
activities allocations calls channels communications count counted critical device_starts edges gaps ignored_threads
inferred_syncs instances inter_thread_dependencies kernel_count kernels last late_activities late_confirmed
launches linked local_communications matched matched_communications modules operators points queue_length ranks recorded
replayed replays requests tokens
short_activities slow_calls small total unlinked unmatched_syncs
"""
"""Columns that say how many; the name says of what."""
NAMES = """
communication depth destination device device_type event first_rank group_size last_rank max_rank min_rank node parent
kind operation pid rank reference seq source step stream tid worst_step
"""
"""Columns of numbers that name something."""
OWN_UNITS = {
    "slowdown": ("slowdown",),  # a ratio
    "ccl-bench": {"value"},  # in the unit that the row says
    "collective-summary": {"slowest_over_median"},  # a ratio
    "cupti-counters": {"total", "mean", "min", "max"},  # in whatever the counter counts
    "queue-summary": {"mean", "median", "p95", "max"},  # launches
}


@pytest.mark.parametrize("name", ANALYSES)
def test_a_column_name_contains_its_unit(name: str) -> None:
    known = {*COUNTS.split(), *NAMES.split(), *OWN_UNITS.get(name, ())}
    for column, dtype in registry.get("analyses", name).COLUMNS.items():
        if pl.Series([], dtype=dtype).dtype.is_numeric() and not find_unit(column):
            assert column in known, f"{column}: in which unit?"


def answer(trace: Trace, name: str, **options: Any) -> pl.DataFrame:
    module = registry.get("analyses", name)
    frame = module.analyze(trace if module.SCOPE == "rank" else Job({0: trace}), **options)
    assert isinstance(frame, pl.DataFrame)
    return frame


@pytest.mark.slow
@pytest.mark.parametrize("what", ["device", "host", "nodes", "empty"])
@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_returns_its_columns_or_raises_with_a_reason(
    name: str, what: str, traces: dict[str, Trace]
) -> None:
    module = registry.get("analyses", name)
    before = {table: frame.clone() for table, frame in traces[what].tables.items()}
    try:
        frame = answer(traces[what], name)
    except AnalysisError as error:
        assert what != "device" or name in ASK_MORE, f"a trace with device work has an answer, not: {error}"
        assert "\n" not in str(error)
    else:
        assert list(frame.schema.items()) == list(module.COLUMNS.items())
        assert frame.height > 0 or what != "device" or name in FINDS
    assert all(frame.equals(before[table]) for table, frame in traces[what].tables.items()), (
        "the trace was changed"
    )


@pytest.mark.parametrize("name", ANALYSES)
def test_a_job_s_answer_has_the_rank_first(name: str, job: Job) -> None:
    module = registry.get("analyses", name)
    if name in ASK_MORE and name not in ("clocks", "imbalance", "stragglers"):
        pytest.skip(f"it asks for {ASK_MORE[name]}")
    frame = etloom.analyze(job, name)
    if module.SCOPE == "rank":
        assert frame.columns == ["rank", *module.COLUMNS]
        assert frame["rank"].unique().sort().to_list() == [0, 1] or (frame.is_empty() and name in FINDS)
    else:
        assert frame.columns == list(module.COLUMNS)


@lru_cache(maxsize=4)
def opened(path: Path, time: int) -> Job:
    """A run that was opened ``time`` times."""
    return etloom.open(path)


@pytest.mark.slow
@pytest.mark.parametrize("folder", slow_after(1, ["cpu/ddp_2", "hta_multirank"]))
@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_answers_on_a_real_trace(name: str, folder: str, data: Path) -> None:
    module = registry.get("analyses", name)
    try:
        frame = etloom.analyze(opened(data / folder, 1), name)
    except AnalysisError as error:
        assert error.remedy, "it says what to do"
        return
    expected = dict(module.COLUMNS) if module.SCOPE == "job" else {"rank": pl.Int64, **module.COLUMNS}
    assert dict(frame.schema) == expected
    again = etloom.analyze(opened(data / folder, 2), name)
    assert frame.equals(again), "the same question on the same files has the same answer"


def test_every_table_that_readers_and_linker_fill_is_declared(traces: dict[str, Trace]) -> None:
    for trace in traces.values():
        assert set(trace.tables) <= set(TABLES)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ANALYSES
        if any(option.name == "top" for option in registry.list_options("analyses", name))
    ],
)
def test_top_gives_the_first_rows_of_a_rank_or_of_a_job(name: str, data: Path) -> None:
    """So the command line may ask for all of them and say how many it leaves out."""
    sources = {
        "xla-ops": "xplane/jax_te_attention.xplane.pb",
        "memory-holders": "memory/small_finetune.pickle.gz",
    }
    trace = etloom.open(data / sources.get(name, "tracelens/h100_qwen.json.gz"))[0]
    options = {"min_length": 1} if name == "kernel-sequences" else {}
    whole = etloom.analyze(trace, name, top=10**9, **options)
    assert whole.height > 2
    assert etloom.analyze(trace, name, top=2, **options).equals(whole.head(2))
