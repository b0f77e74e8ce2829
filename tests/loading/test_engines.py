"""Engines: tasks on ranks, here run one after another in this process; tests/exports/test_ray.py has a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.core.errors import EtloomError, InvalidValue, UnknownName
from etloom.exports.store import adding, batches
from etloom.loading import engines, remote_reading
from support.fleets import write_fleet

Tasks = list[str]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tasks:
    """The texts of the tasks, which run in this process instead of a cluster."""
    texts: Tasks = []

    def run(
        function: Callable[[str], None], each: Sequence[str], on_done: Callable[[int], None] | None = None
    ) -> None:
        texts.extend(each)
        for index, text in enumerate(each):
            function(text)
            if on_done is not None:
                on_done(index)

    for module in (engines, adding):
        monkeypatch.setattr(module, "run_on_ray", run)
    monkeypatch.setattr(engines, "connect", lambda: pytest.fail("a cluster was started"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(adding, "count_cpus", lambda _: 2)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    return texts


def test_ranks_are_read_into_the_cache_by_tasks(tasks: Tasks, tmp_path: Path) -> None:
    run = write_fleet(tmp_path / "run", 3)
    job = etloom.open(run, engine="ray", iterations="all")
    assert len(tasks) == 3
    expected = etloom.open(run, use_cache=False, iterations="all")
    for rank, trace in expected.items():
        assert_frame_equal(job[rank].events, trace.events, categorical_as_str=True)
        assert_frame_equal(job[rank].stats, trace.stats)
    assert job.meta == expected.meta
    etloom.open(run, engine="ray", iterations="all")
    assert len(tasks) == 3  # the cache has them
    etloom.open(run, engine="ray")
    assert len(tasks) == 6


def test_a_rank_that_a_task_cannot_read_is_reported_as_without_an_engine(
    tasks: Tasks, tmp_path: Path
) -> None:
    run = write_fleet(tmp_path / "run", 3)
    file = next(run.glob("*_1.json*"))
    file.write_bytes(b"{]")
    stats = [etloom.open(run, engine=engine).stats for engine in ("ray", "local")]
    assert_frame_equal(*stats)
    assert "job.unreadable_file" in stats[0]["name"]


@pytest.mark.slow
def test_a_store_is_filled_by_tasks(tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MIN_RANKS", 1)
    run = write_fleet(tmp_path / "run", 4)
    seen: list[int] = []
    (added,) = etloom.store_add(
        run, to=tmp_path / "store", engine="ray", progress=lambda _, count: seen.append(count)
    )
    assert len(tasks) == 2 and added.ranks == (0, 1, 2, 3) and sum(seen) > 0
    (local,) = etloom.store_add(run, to=tmp_path / "local", jobs=1)
    assert_frame_equal(
        etloom.analyze(added.path, "stragglers"), etloom.analyze(local.path, "stragglers"), check_exact=True
    )


def test_a_missing_engine_package_is_one_line(tasks: Tasks, tmp_path: Path) -> None:
    run = write_fleet(tmp_path / "run", 2)
    with pytest.raises(UnknownName, match="unknown engine 'spark'; expected one of local, ray"):
        etloom.open(run, engine="spark")
    with pytest.raises(InvalidValue, match="returns tables through the cache"):
        etloom.open(run, engine="ray", use_cache=False)
    with pytest.raises(InvalidValue, match="s3://bucket/store is copied to this host"):
        etloom.store_add(run, to="s3://bucket/store", engine="ray")
    assert not tasks


def test_without_ray_the_remedy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EtloomError, match=r"needs Ray; pip install 'etloom\[ray\]'"):
        engines.run_on_ray(remote_reading.read_into_cache, ["{}"])


def test_without_ray_a_cached_run_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a single trace, which the engine does not concern."""
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    run, store = write_fleet(tmp_path / "run", 2), tmp_path / "store"
    etloom.open(run)
    etloom.store_add(run, to=store, jobs=1)
    monkeypatch.setitem(sys.modules, "ray", None)
    for path in (run, run / "kineto_trace_0.json", store / "run=run"):
        with pytest.raises(EtloomError, match="needs Ray"):
            etloom.open(path, engine="ray")
    with pytest.raises(EtloomError, match="needs Ray"):
        etloom.store_add(run, to=store, engine="ray")


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **_: object) -> None:
        raise ConnectionError(f"ray client at {address} timed out\nlong hint")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=refuse))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        EtloomError,
        match=r"^127.0.0.1:1: the Ray cluster cannot be used: [^\n]* timed out; check RAY_ADDRESS",
    ):
        engines.connect()
