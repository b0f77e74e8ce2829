"""Stores and recordings in an object store."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.api import uploading
from etloom.collector import CollectResult, run_folder
from etloom.collector.options import RecordingOptions
from etloom.core.errors import CollectError, ReadError
from etloom.formats.io import mirror, transfers
from support import small_traces
from support.s3_server import S3Server

Call = Callable[..., tuple[int, str, str]]
STORE = "s3://bucket/store"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_traces.write_run(tmp_path / "local" / "run")


@pytest.mark.slow
def test_a_store_in_s3_answers_as_a_local_one(s3: S3Server, run: Path, tmp_path: Path) -> None:
    (added,) = etloom.store_add(run, to=STORE, jobs=1)
    assert (str(added.path), added.is_new) == ("s3://bucket/store/run=run", True)
    assert s3.order[0] == "bucket/store/store.json" and s3.order[-1] == "bucket/store/run=run/meta.json"
    assert not s3.keys("bucket/store/.")
    (local,) = etloom.store_add(run, to=tmp_path / "store", jobs=1)
    for name in ("temporal-breakdown", "top-ops"):
        assert_frame_equal(etloom.analyze(added.path, name), etloom.analyze(local.path, name))
    assert etloom.store_list(STORE)["run"].to_list() == ["run"]
    s3.order.clear()
    (again,) = etloom.store_add(run, to=STORE, jobs=1)
    assert not again.is_new and s3.order == []


@pytest.mark.slow
def test_tables_of_a_stored_run_are_copied_on_access(
    s3: S3Server, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etloom.store_add(run, to=STORE, jobs=1)
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "another cache"))
    s3.requests.clear()
    job = etloom.open(f"{STORE}/run=run", lazy=True)
    assert not [key for method, key in s3.requests if method == "GET" and "rank=" in key]
    assert_frame_equal(job[1].events, etloom.open(run)[1].events)
    tables = {key for method, key in s3.requests if method == "GET" and "rank=" in key}
    # The checksum of the table is in the meta.json of its rank.
    assert tables == {f"store/run=run/rank=1/{name}" for name in ("events.parquet", "meta.json")}


@pytest.mark.slow
def test_an_addition_continues_after_a_failed_upload(
    s3: S3Server, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.refused_uploads = 10**6
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ReadError, match="the connection failed 1 times"),
    ):
        patch.setattr(transfers, "TRIES", 1)
        etloom.store_add(run, to=STORE, jobs=1)
    s3.refused_uploads = 0
    assert not s3.keys("bucket/store/run=run/meta.json")
    (added,) = etloom.store_add(run, to=STORE, jobs=1)
    assert not added.is_new  # it was read the first time
    assert s3.order[-1] == "bucket/store/run=run/meta.json"
    assert etloom.open(added.path).ranks == [0, 1]


@pytest.mark.slow
def test_a_changed_run_replaces_the_stored_one(s3: S3Server, run: Path) -> None:
    etloom.store_add(run, to=STORE, jobs=1)
    for path in run.iterdir():
        if "1" in path.name:
            path.unlink()
    etloom.store_add(run, to=STORE, jobs=1)
    assert etloom.open(STORE).ranks == [0]
    assert not [key for key in s3.keys("bucket/store/run=run/rank=1/") if not key.endswith("/")]


def publish(window: Path, scratch: Path, rank: int) -> None:
    """Publish a rank as the recorder does."""
    scratch.mkdir(parents=True)
    (scratch / "kineto.json.gz").write_bytes(b"kineto of %d" % rank)
    facts: dict[str, Any] = {
        "rank": rank, "world_size": 2, "pid": 10 + rank, "restart": 0, "host": "node", "versions": {},
        "start_ns": 5, "end_ns": 9, "steps": [3], "operators": 1,
    }  # fmt: skip
    options = RecordingOptions(str(window), str(scratch), 3, 4, command=("python", "train.py"))
    assert run_folder.publish_rank(scratch, window, facts, options) == []


def test_finished_windows_are_uploaded_while_the_job_runs(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "POLL_S", 0.01)

    def record(folder: Path) -> CollectResult:
        folder.mkdir()
        publish(folder / "step_10", tmp_path / "s0", 0)
        assert s3.wait_for("bucket/run/step_10/rank_0.json")
        assert s3.order.index("bucket/run/step_10/kineto_trace_0.json.gz") == 0
        assert not s3.keys("bucket/run/step_10/run.json")  # the window is not complete
        publish(folder / "step_10", tmp_path / "s1", 1)
        (folder / ".watch").mkdir()
        (folder / ".watch" / "state").touch()
        return CollectResult(folder, 7, (0, 1), (folder / "step_10",))

    result = uploading.collect_to_url("s3://bucket/run", False, record)
    assert (str(result.out), result.exit_status, result.warnings) == ("s3://bucket/run", 7, ())
    assert [str(path) for path in result.windows] == ["s3://bucket/run/step_10"]
    assert s3.order[-1] == "bucket/run/step_10/run.json"
    assert not [key for key in s3.objects if ".watch" in key]
    assert len(json.loads(s3.objects["bucket/run/step_10/run.json"][0])["ranks"]) == 2


@pytest.mark.slow
def test_a_store_that_fails_costs_the_job_nothing(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "POLL_S", 0.01)
    monkeypatch.setattr(transfers, "TRIES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    s3.refused_uploads = 10**6

    def record(folder: Path) -> CollectResult:
        folder.mkdir()
        publish(folder, tmp_path / "s0", 0)
        return CollectResult(folder, 0, (0,), (folder,))

    result = uploading.collect_to_url("s3://bucket/run", False, record)
    assert (result.exit_status, result.ranks) == (0, (0,))
    (warning,) = result.warnings
    assert "files could not be uploaded to s3://bucket/run" in warning and str(result.out) in warning
    assert (result.out / "kineto_trace_0.json.gz").read_bytes() == b"kineto of 0"


def test_an_earlier_run_is_refused_before_the_job_runs(s3: S3Server, call: Call) -> None:
    s3.put("bucket/run/run.json", b"{}")
    with pytest.raises(CollectError, match="contains files, perhaps of an earlier run"):
        etloom.collect(["python", "-c", "1/0"], "s3://bucket/run")
    status, _, err = call("collect", "--out", "s3://nobucket/run", "--", "true")
    assert (status, err) == (1, "etloom: s3://nobucket/run: no such bucket; check the name\n")
    status, _, err = call("collect", "--out", "s3://bucket/other", "--steps", "x", "--", "true")
    assert status == 2 and not s3.keys("bucket/other")


def test_a_page_of_many_objects_is_listed_completely(s3: S3Server) -> None:
    s3.page_size = 10
    for number in range(25):
        s3.put(f"bucket/many/{number}.txt", b"x")
    assert len(list(mirror.fetch("s3://bucket/many").iterdir())) == 25


def test_recording_in_the_script_needs_a_local_folder() -> None:
    with pytest.raises(CollectError, match="expected a local folder, got s3://"):
        etloom.record("s3://user:secret@bucket/run")
    assert not Path("s3:").exists()


def test_another_server_of_s3(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server is not in the dev group: it takes half a minute to install."""
    server_module = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
    import boto3

    server = server_module.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "any-access-key",
            "AWS_SECRET_ACCESS_KEY": "any-secret-key",
            "AWS_REGION": "us-east-1",
            "ETLOOM_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="moto")
        for path in run.iterdir():
            client.upload_file(str(path), "moto", f"runs/run/{path.name}")
        remote = etloom.open("s3://moto/runs/run")
        assert_frame_equal(remote[0].events, etloom.open(run)[0].events)
        etloom.export(remote, "s3://moto/saved.parquet")
        (added,) = etloom.store_add("s3://moto/saved.parquet", to="s3://moto/store", name="a", jobs=1)
        assert etloom.open(added.path).ranks == [0, 1]
        (again,) = etloom.store_add("s3://moto/saved.parquet", to="s3://moto/store", name="a", jobs=1)
        assert not again.is_new
        with pytest.raises(ReadError, match="no such bucket"):
            etloom.open("s3://none/run")
    finally:
        server.stop()
