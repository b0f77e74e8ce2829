"""Odd values and damage of every format through every verb: a deterministic part of what `make fuzz` runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core import registry
from etloom.core.errors import EtloomError, EtloomWarning
from etloom.core.schema import TABLES, Stat
from etloom.core.stats import DECLARED_STATS
from etloom.formats.kineto.event_json import ARGUMENT_NAMES, MEMORY_ARGUMENT_NAMES
from etloom.formats.tables.value_checks import check_table
from fuzzing.access import watch
from fuzzing.cases import build_seeds
from fuzzing.commands import COMMANDS
from fuzzing.seeds import SEEDS, gpu_document
from fuzzing.values import ODD_VALUES
from fuzzing.worker import run_case
from support.examples import is_quick, slow_after
from support.paths import ROOT
from support.saved_folders import update_checksum

ARGUMENTS = {
    *MEMORY_ARGUMENT_NAMES.values(),
    *(name for table in ARGUMENT_NAMES.values() for name in table.values()),
}
EVENT_MEMBERS = ("pid", "tid", "name", "cat")
VALUES = [
    None,
    "text",
    -1,
    2**70,
    1.5,
    float("nan"),
    [[1, "x"], 2],
    {"a": 1},
    [],
    "\ud800",
    True,
    [10**12] * 3,
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzing") / "seeds"
    build_seeds(folder)
    return folder


def test_every_reader_has_a_seed() -> None:
    assert set(registry.list_plugins("readers")) <= {name.replace("_", "-") for name in SEEDS}


@pytest.mark.parametrize("number", slow_after(6, range(len(SEEDS))))
@pytest.mark.slow
def test_a_mutated_input_ends_in_an_answer_or_one_line(number: int, seeds: Path) -> None:
    assert run_case(0, number, seeds, seeds.parent / f"case{number}") == []


def test_accesses_outside_of_a_run_are_noted(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    with watch(tmp_path / "run") as accesses:
        (tmp_path / "other").read_text()
        Path("/etc/hostname").exists()
        (tmp_path / "new").write_text("")
        subprocess.run(["true"], check=True)
    assert [access.partition(":")[0] for access in accesses if "pipe" not in access][:3] == [
        "open to read", "open to write", "subprocess.Popen",
    ]  # fmt: skip


@pytest.mark.parametrize("value", slow_after(4, VALUES), ids=repr)
@pytest.mark.filterwarnings("error", "ignore::etloom.core.errors.EtloomWarning")
@pytest.mark.slow
def test_no_analysis_fails_on_an_unexpected_value_of_any_argument(value: Any, tmp_path: Path) -> None:
    for rank in range(2):
        document = gpu_document(rank)
        for event in document["traceEvents"]:
            event["args"] = {
                name: value if name in ARGUMENTS else old for name, old in event.get("args", {}).items()
            }
        (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps(document))
    job = etloom.open(tmp_path, use_cache=False)
    assert set(job.stats["name"]) <= {declared.name for declared in DECLARED_STATS}
    for name in registry.list_plugins("analyses"):
        try:
            etloom.analyze(job, name)
        except EtloomError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("member", EVENT_MEMBERS)
@pytest.mark.parametrize("value", [None, "text", [], 2**70, "\ud800"], ids=repr)
@pytest.mark.filterwarnings("error", "ignore::etloom.core.errors.EtloomWarning")
@pytest.mark.slow
def test_no_export_fails_on_an_unexpected_member_of_events(member: str, value: Any, tmp_path: Path) -> None:
    document = gpu_document(0)
    for event in document["traceEvents"][6:]:
        event[member] = value
    (tmp_path / "kineto_trace_0.json").write_text(json.dumps(document))
    job = etloom.open(tmp_path, use_cache=False)
    for name in registry.list_plugins("exports"):
        try:
            etloom.export(job, tmp_path / f"out-{name}", name)
        except EtloomError as error:
            assert "\n" not in str(error)


def test_a_number_beyond_the_range_of_a_narrow_column_is_null() -> None:
    values = {
        "event": [0, 1],
        "grid_x": [-5, 3],
        "block_x": [70_000, 70_001],
        "occupancy": [float("nan"), 1.0],
    }
    stats: list[Stat] = []
    checked = check_table("kernels", TABLES["kernels"].conform(pl.DataFrame(values)), stats)
    assert checked.select(values.keys()).rows() == [(0, None, None, None), (1, 3, None, 1.0)]
    assert [(row.name, row.count) for row in stats] == [("read.out_of_range", count) for count in (1, 2, 1)]


def test_a_cycle_of_parents_in_a_saved_trace_is_broken(seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(seeds / "parquet" / "saved", tmp_path / "saved")
    file = tmp_path / "saved" / "rank=0" / "events.parquet"
    events = pl.read_parquet(file)
    events.with_columns(parent=(pl.col("id") + 1) % events.height).with_columns(
        pl.col("parent").cast(pl.UInt32)
    ).write_parquet(file)
    update_checksum(file)
    trace = etloom.read(tmp_path / "saved")[0]
    assert trace.events["parent"].null_count() == events.height
    assert trace.stats.filter(pl.col("name") == "read.parent_cycle")["count"].to_list() == [events.height]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["kineto", "nsys"])
def test_no_verb_warns(format: str, seeds: Path, tmp_path: Path) -> None:
    run = seeds / format
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", EtloomWarning)
        # In quick runs each format tries every fourth command.
        for index, command in enumerate(COMMANDS[format == "nsys" :: 4] if is_quick() else COMMANDS):
            out = tmp_path / str(index)
            out.mkdir()
            fault = command.check(run, run / SEEDS[format].files[0], out)
            faults += [f"{' '.join(command.words)}: {fault}"] if fault else []
    assert faults == []


@pytest.mark.slow
def test_a_short_run_of_the_fuzzer_finds_no_fault() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "fuzzing", "--seconds", "12", "--seed", "2"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]


def test_unexpected_values_include_every_kind() -> None:
    assert {type(value) for value in ODD_VALUES} == {type(None), bool, int, float, str, list, dict}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(1, ("events", "nodes", "launches", "links", "comms", "kernels")))
def test_no_analysis_needs_a_table_that_others_refer_to(name: str, seeds: Path) -> None:
    job = etloom.open(seeds / "parquet" / "saved", use_cache=False)
    job = job.map(lambda trace: trace.replace(**{name: TABLES[name].empty()}))
    for analysis in registry.list_plugins("analyses"):
        try:
            etloom.analyze(job, analysis)
        except EtloomError as error:
            assert "\n" not in str(error)
