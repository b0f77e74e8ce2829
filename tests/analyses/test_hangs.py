"""The cause of a hang: its kind, its ranks, and who waits for them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

import etloom
from etloom.analyses.hangs import COLUMNS, describe_processes, find_cause, remarks
from etloom.cli import main
from etloom.core.errors import AnalysisError, ReadError
from support.paths import ROOT


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The generator of dumps with known faults."""
    spec = importlib.util.spec_from_file_location("hang_dumps", ROOT / "benchmarks" / "hangs" / "dumps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hang_dumps"] = module
    spec.loader.exec_module(module)
    return module


KINDS = ("not arrived", "crashed", "other collective", "other size", "other dtype", "device", "healthy")


@pytest.mark.parametrize("kind", KINDS)
def test_generated_faults_are_named(kind: str, generator: ModuleType, tmp_path: Path) -> None:
    fault = generator.Fault(kind, 5)
    generator.make_job(tmp_path / "job", 12, 20, fault, seed=3, group_size=4)
    report = etloom.hangs(tmp_path / "job")
    cause = report.cause
    assert generator.is_right(fault, cause and cause.kind, cause.ranks if cause else ()), report.sentence


@pytest.mark.slow
@pytest.mark.parametrize("ring", [0, 3])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_both_of_two_culprits_are_named(kind: str, ring: int, generator: ModuleType, tmp_path: Path) -> None:
    """Two ranks of a group fail together; rings of few calls may hold no call of the group any more."""
    for seed in range(4):
        job, other = tmp_path / f"{seed}", tmp_path / f"{seed}-other"
        culprits = tuple(sorted(random.Random(seed).sample(range(8, 16), 2)))
        for folder, rank in zip((job, other), culprits, strict=True):
            generator.make_job(folder, 24, 20 + seed % 2, generator.Fault(kind, rank), seed)
        name = f"_dump_{culprits[1]}"
        (job / name).unlink()
        if kind != "crashed":
            shutil.copy(other / name, job / name)
        for path in job.iterdir() if ring else ():
            dump = json.loads(path.read_text())
            dump["entries"] = dump["entries"][-1 - (int(path.name[6:]) + seed) % ring :]
            path.write_text(json.dumps(dump))
        report = etloom.hangs(job)
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == (kind, culprits), report.sentence


FAULTS = [kind for kind in KINDS if kind not in ("device", "healthy")]


@pytest.mark.parametrize("ring", [0, 3])
@pytest.mark.parametrize("kinds", itertools.combinations(FAULTS, 2), ids="-".join)
def test_culprits_of_two_kinds_are_both_named(
    kinds: tuple[str, str], ring: int, generator: ModuleType, tmp_path: Path
) -> None:
    """Two ranks of a group fail in the same call, each in its own way, and no other rank is named."""
    for seed in range(2):
        shuffled = random.Random(f"{seed} {kinds} {ring}")
        culprits = shuffled.sample(range(6), 2)
        for rank, kind in zip(culprits, kinds, strict=True):
            generator.make_job(tmp_path / f"{seed} {rank}", 12, 8, generator.Fault(kind, rank), seed, 6)
        job, other = (tmp_path / f"{seed} {rank}" for rank in culprits)
        name = f"_dump_{culprits[1]}"
        (job / name).unlink()
        if (other / name).exists():
            shutil.copy(other / name, job / name)
        for path in job.iterdir() if ring else ():
            dump = json.loads(path.read_text())
            dump["entries"] = dump["entries"][-1 - shuffled.randrange(ring) :]
            path.write_text(json.dumps(dump))
        report = etloom.hangs(job)
        assert report.cause is not None
        assert report.cause.ranks == tuple(sorted(culprits)), report.sentence
        named = set(map(int, re.findall(r"\brank (\d+) (?:diverged|did not|left|crashed)", report.sentence)))
        assert named == set(culprits), report.sentence


@pytest.mark.parametrize("is_partial", [False, True])
def test_calls_without_numbers_are_not_taken_as_equal(is_partial: bool, tmp_path: Path) -> None:
    for rank in range(2):
        entries = [
            {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "is_p2p": False}
            | {"time_created_ns": 10**18 + number, "retired": number < 2, "state": "scheduled"}
            | ({"collective_seq_id": number} if is_partial and number < 2 else {})
            for number in range(3 - rank)
        ]
        dump = {"entries": entries, "pg_config": {}, "pg_status": {}, "version": "1.4"}
        (tmp_path / f"_dump_{rank}").write_text(json.dumps(dump))
    if is_partial:
        assert [problem.partition(":")[0] for problem in etloom.hangs(tmp_path).problems] == [
            "read.unnumbered_call"
        ]
        return
    with pytest.raises(AnalysisError, match="none of the 5 recorded calls has a sequence number"):
        etloom.hangs(tmp_path)
    with pytest.raises(AnalysisError, match="sequence number"):
        etloom.analyze(etloom.open(tmp_path, use_cache=False), "hangs")


def test_ranks_that_wait_through_another_group_are_counted(generator: ModuleType, tmp_path: Path) -> None:
    generator.make_job(tmp_path / "job", 12, 20, generator.Fault("not arrived", 5), seed=3, group_size=4)
    sentence = etloom.hangs(tmp_path / "job").sentence
    assert sentence.startswith("rank 5 ")
    assert "11 ranks wait for it" in sentence


def test_dumps_of_a_healthy_job_at_different_times_blame_no_rank(
    generator: ModuleType, tmp_path: Path
) -> None:
    generator.make_job(tmp_path / "job", 4, 20, generator.Fault("healthy", 0), seed=3)
    older = tmp_path / "job" / "_dump_2"
    dump = json.loads(older.read_text())
    del dump["entries"][-6:]
    older.write_text(json.dumps(dump))
    assert etloom.hangs(tmp_path / "job").cause is None


def test_the_answer_is_the_first_line(
    generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator.make_job(tmp_path / "job", 4, 20, generator.Fault("other size", 2), seed=3)
    assert main(["hangs", str(tmp_path / "job")]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 2 diverged with another size in ")
    assert any("size mismatch" in line for line in rest)
    assert main(["hangs", str(tmp_path / "job"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [2]


def test_a_folder_without_dumps_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hangs", str(tmp_path)]) == 1
    assert "no Flight Recorder dump" in capsys.readouterr().err


NOW = time.time_ns()
ALIVE = {"written_ns": NOW, "interval_s": 0.5}


@pytest.mark.parametrize(
    ("facts", "system_state", "kind"),
    [
        (ALIVE, "T", "stopped"),
        (ALIVE, "", "crashed"),
        (ALIVE | {"written_ns": NOW - 10**10}, "R", "unresponsive"),
        (ALIVE | {"error": "ValueError: bad batch"}, "", "crashed"),
        (ALIVE | {"frames": ["get (/x/torch/utils/data/dataloader.py:3)"]}, "S", "data loading"),
        (ALIVE | {"frames": ["save (/x/torch/serialization.py:3)"]}, "S", "a checkpoint"),
        (ALIVE | {"frames": ["step (/x/train.py:3)"]}, "S", "not arrived"),
    ],
)
def test_the_kind_of_hang_follows_from_the_process_state(facts: dict, system_state: str, kind: str) -> None:
    lost = ALIVE | {"error": "RuntimeError: Connection closed by peer"}
    processes = describe_processes(
        {0: lost if kind == "crashed" else ALIVE, 1: facts},
        NOW,
        lambda item: system_state if item is facts else "S",
    )
    cause = find_cause(wait_table(([1], [0])), processes, has_stalled=True)
    assert cause is not None
    assert (cause.kind, cause.ranks) == (kind, (1,))


def test_a_cut_link_is_named_by_connections_without_acknowledgement() -> None:
    facts = {
        rank: ALIVE | {"addresses": [f"10.0.0.{rank}"], "unacknowledged": ["10.0.0.2"] if rank != 2 else []}
        for rank in range(4)
    }
    row = {
        "group": "0",
        "seq": 7,
        "finding": "not finished",
        "collective": "all_reduce",
        "ranks": [0, 1, 2, 3],
    }
    table = pl.DataFrame([dict.fromkeys(COLUMNS) | row | {"others": []}], schema=COLUMNS)
    cause = find_cause(table, describe_processes(facts, NOW), has_stalled=True)
    assert cause is not None
    assert (cause.kind, cause.ranks) == ("link", (2,))
    assert find_cause(table, describe_processes(facts, NOW)) is None  # calls in flight


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lock_gil_1st", "gpu_error_2nd"])
def test_the_injected_ranks_are_named(name: str, data: Path) -> None:
    table = etloom.analyze(data / "flight_recorder" / name, "hangs")
    (sentence,) = remarks(table)
    assert sentence.startswith("ranks 9, 14 ")
    report = etloom.hangs(data / "flight_recorder" / name)
    assert report.sentence == sentence
    assert report.cause is not None
    assert report.cause.kind == {"lock_gil_1st": "not arrived", "gpu_error_2nd": "device"}[name]


def wait_table(*waits: tuple[list[int], list[int]]) -> pl.DataFrame:
    """A table of hangs: the ranks that did not call, and those that did and wait."""
    rows = [
        {
            "group": "0",
            "seq": seq,
            "finding": "missing",
            "collective": "all_reduce",
            "ranks": ranks,
            "others": others,
        }
        for seq, (ranks, others) in enumerate(waits)
    ]
    return pl.DataFrame([dict.fromkeys(COLUMNS) | row for row in rows], schema=COLUMNS)


def test_ranks_without_a_dump_for_whose_messages_others_wait_are_named(data: Path, tmp_path: Path) -> None:
    for rank in range(8):
        shutil.copy(data / "flight_recorder" / "lock_gil_1st" / f"_dump_{rank}", tmp_path)
    report = etloom.hangs(tmp_path)
    assert report.cause is not None
    assert (report.cause.kind, report.cause.ranks) == ("crashed", tuple(range(8, 16)))
    assert report.sentence.startswith("ranks 8-15 crashed or left no readable dump; 8 ranks wait")


def test_ranks_without_a_dump_are_named_if_no_rank_waits(generator: ModuleType, tmp_path: Path) -> None:
    generator.make_job(tmp_path, 4, 20, generator.Fault("healthy", 0), seed=3, group_size=4)
    for rank in (2, 3):
        (tmp_path / f"_dump_{rank}").unlink()
    report = etloom.hangs(tmp_path)
    assert report.absent == (2, 3)
    assert report.cause is None
    assert report.sentence.endswith("; ranks 2, 3 have no dump, so that a wait for them is not visible")


def test_a_single_dump_states_that_the_others_are_not_read(generator: ModuleType, tmp_path: Path) -> None:
    generator.make_job(tmp_path, 4, 20, generator.Fault("healthy", 0), seed=3, group_size=4)
    assert not etloom.hangs(tmp_path).problems
    (problem,) = etloom.hangs(tmp_path / "_dump_1").problems
    generator.make_job(tmp_path / "job", 12, 20, generator.Fault("not arrived", 5), seed=3, group_size=4)
    report = etloom.hangs(tmp_path / "job" / "_dump_4")
    assert "crashed" not in report.sentence
    assert "the only dump that is read; ranks 0, 2, 3 count as ranks without a dump" in problem


def test_a_rank_that_waits_for_another_is_not_named() -> None:
    (sentence,) = remarks(wait_table(([1], [0]), ([2], [1, 3])))
    assert sentence.startswith("rank 2 stopped or diverged")
    assert "2 ranks wait for it directly, 1 through other ranks" in sentence
    assert "only ranks 1, 3 called all_reduce 1 of group 0" in sentence


def test_ranks_in_a_cycle_wait_for_each_other() -> None:
    (sentence,) = remarks(wait_table(([1], [0]), ([0], [1])))
    assert sentence.startswith("ranks 0, 1 wait for each other: compare the order of their calls")


def test_a_run_without_missing_calls_has_no_note() -> None:
    assert not list(remarks(wait_table()))


@pytest.mark.slow
def test_a_finding_states_the_axis_of_its_group(data: Path) -> None:
    job = etloom.open(data / "flight_recorder" / "gpu_error_2nd", use_cache=False)
    table = etloom.analyze(job, "hangs").filter(pl.col("group").str.contains(" TENSOR_MODEL_PARALLEL_GROUP"))
    assert table.height
    assert set(table["axis"]) == {"tp"}


def test_a_damaged_dump_is_named(tmp_path: Path) -> None:
    (tmp_path / "_dump_0").write_bytes(b"\x80")
    with pytest.raises(ReadError, match="_dump_0: is not a readable Flight Recorder dump"):
        etloom.hangs(tmp_path)
