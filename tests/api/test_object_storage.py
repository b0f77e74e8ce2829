"""Verbs on runs in an object store: an S3 server over HTTP on loopback, and fsspec's memory://."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

import etloom
from etloom.core.errors import EtloomError, ReadError
from etloom.core.urls import clean_url, redact
from etloom.formats.io import mirror, transfers
from etloom.formats.io.object_store import StalledRequest, TransientError
from support import small_traces
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_traces.write_run(tmp_path / "local" / "run")


def put_folder(server: S3Server, folder: Path, key: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            server.put(f"{key}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def downloads(server: S3Server) -> list[str]:
    return [key for method, key in server.requests if method == "GET" and key]


@pytest.mark.slow
def test_a_run_in_s3_reads_as_a_local_one(s3: S3Server, run: Path) -> None:
    put_folder(s3, run, "bucket/runs/run")
    remote, local = etloom.open("s3://bucket/runs/run"), etloom.open(run)
    assert remote.ranks == local.ranks
    assert remote.meta["path"] == "s3://bucket/runs/run"
    for rank in local.ranks:
        assert_frame_equal(remote[rank].events, local[rank].events)
    assert_frame_equal(remote.stats, local.stats)


@pytest.mark.slow
def test_only_changed_objects_are_copied_again(s3: S3Server, run: Path) -> None:
    put_folder(s3, run, "bucket/run")
    etloom.open("s3://bucket/run")
    assert len(downloads(s3)) == len(list(run.iterdir()))
    s3.requests.clear()
    etloom.open(Path("s3://bucket/run"))  # a Path loses one slash
    assert downloads(s3) == []
    first, second, *_ = sorted(run.iterdir())
    s3.put(f"bucket/run/{first.name}", first.read_bytes())  # of the same size
    del s3.objects[f"bucket/run/{second.name}"]
    copy = mirror.fetch("s3://bucket/run")
    assert downloads(s3) == [f"run/{first.name}"]
    assert not (copy / second.name).exists()


def test_only_the_requested_file_of_a_folder_is_copied(s3: S3Server, run: Path) -> None:
    put_folder(s3, run, "bucket/run")
    name = sorted(path.name for path in run.iterdir())[0]
    etloom.read(f"s3://bucket/run/{name}")
    assert downloads(s3) == [f"run/{name}"]


def test_checkpoints_next_to_traces_are_not_copied(s3: S3Server, run: Path) -> None:
    put_folder(s3, run, "bucket/run")
    s3.put("bucket/run/model.safetensors", b"x" * 100)
    with pytest.warns(etloom.EtloomWarning, match=r"1 file not copied.*model\.safetensors"):
        etloom.open("s3://bucket/run")
    assert "run/model.safetensors" not in downloads(s3)


@pytest.mark.slow
def test_a_key_cannot_leave_the_folder_of_the_copies(s3: S3Server, run: Path, tmp_path: Path) -> None:
    etloom.export(run, "s3://bucket/saved.parquet")  # of which all keys are listed
    for key in ("../outside.json", "rank=0/../../../outside.json", "a\x7foutside.json", "a\\outside.json"):
        s3.put(f"bucket/saved.parquet/{key}", b"{}")
    assert etloom.open("s3://bucket/saved.parquet").ranks == [0, 1]
    put_folder(s3, run, "bucket/run")
    for key in ("sub/meta.json", "sub/../../outside.json", "sub/x/../../../outside.json"):
        s3.put(f"bucket/run/{key}", b"{}")
    assert etloom.open("s3://bucket/run").ranks == [0, 1]
    assert not list(tmp_path.rglob("*outside.json"))


def test_a_large_object_is_read_in_ranges(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "RANGE_BYTES", 1000)
    content = bytes(range(256)) * 17
    s3.put("bucket/x.bin", content)
    assert mirror.fetch("s3://bucket/x.bin").read_bytes() == content
    assert s3.requests["GET", "x.bin"] >= 5


@pytest.mark.slow
def test_a_cut_connection_is_retried(s3: S3Server) -> None:
    s3.put("bucket/x.json", b"content")
    s3.cuts = 4  # the client itself tries three times
    assert mirror.fetch("s3://bucket/x.json").read_bytes() == b"content"
    assert s3.cuts == 0


@pytest.mark.slow
def test_a_connection_that_is_always_cut_is_one_line(
    s3: S3Server, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "TRIES", 2)
    put_folder(s3, run, "bucket/run")
    s3.cuts = 10**6
    status, out, err = call("info", "s3://bucket/run")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "s3://bucket/run/" in err and "the connection failed 2 times" in err
    assert not list(mirror.cache_folder().rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["short", "flipped"])
def test_changed_bytes_are_noticed_by_the_md5(s3: S3Server, run: Path, call: Call, fault: str) -> None:
    put_folder(s3, run, "bucket/run")
    s3.fault = fault
    status, out, err = call("info", "s3://bucket/run")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert re.search(r"bucket/run/\S+: the bytes of \d objects differ from the MD5", err)
    assert not list(mirror.cache_folder().glob("remote/*/run/*"))
    s3.fault = ""
    assert call("info", "s3://bucket/run")[0] == 0


def test_etags_that_are_no_md5_are_ignored_on_request(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("bucket/x.json", b"content")
    s3.hash_etag = lambda content: hashlib.md5(b"a key" + content)
    with pytest.raises(ReadError, match=r"KMS\), set ETLOOM_REMOTE_MD5=0"):
        mirror.fetch("s3://bucket/x.json")
    monkeypatch.setenv("ETLOOM_REMOTE_MD5", "0")
    assert mirror.fetch("s3://bucket/x.json").read_bytes() == b"content"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow", "garbage"])
def test_a_server_that_sends_slowly_or_garbage_is_one_line(s3: S3Server, run: Path, fault: str) -> None:
    put_folder(s3, run, "bucket/run")
    s3.fault = fault
    limit, tries = (2, 3) if fault == "slow" else (30, 1)
    code = (
        "import sys; from etloom.formats.io import object_store, transfers; from etloom import cli;"
        f"object_store.REQUEST_S = {limit}; transfers.TRIES = {tries}; sys.argv = ['etloom', 'info', 's3://bucket/run'];"
        "sys.exit(cli.main())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.stderr
    expected = (
        "failed 2 times: the answer is not complete after 2 s"
        if fault == "slow"
        else "the connection failed 1 times"
    )
    assert "s3://bucket/run/" in result.stderr and expected in result.stderr


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://bucket/none", "s3://bucket/none: no such file or folder"),
        ("s3://nobucket/run", "s3://nobucket/run: no such bucket"),
        ("nokind://host/run", "nokind:// cannot be opened: Protocol not known: nokind"),
        ("s3://bucket/run?colour=red", "unknown option 'colour' in the URL"),
    ],
)
def test_wrong_urls_are_one_line(s3: S3Server, call: Call, url: str, what: str) -> None:
    s3.put("bucket/x", b"x")
    status, out, err = call("info", url)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert what in err


def test_a_scheme_that_needs_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(EtloomError, match=r"needs fsspec.*pip install 'etloom\[remote\]'"):
        etloom.open("memory://missing-package/run")


@pytest.mark.slow
def test_credentials_never_appear(
    s3: S3Server, run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_folder(s3, run, "bucket/run")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    host = s3.url.removeprefix("http://")
    url = f"s3://{ACCESS_KEY}:{SECRET_KEY}@bucket/run?endpoint_override={host}&scheme=http"
    texts = [
        repr(call("info", url, "--format", "json")),
        repr(call("report", url, "-o", tmp_path / "r.html")),
    ]
    wrong = "a-wrong-secret-that-is-refused"
    texts.append(repr(call("info", f"s3://{wrong}:{wrong}@bucket/run")))
    assert "access denied" in texts[-1]
    job = etloom.open(url)
    texts += [str(dict(job.meta)), str(job.stats.rows()), (tmp_path / "r.html").read_text(encoding="utf-8")]
    texts += [str(path) for path in tmp_path.rglob("*")]
    for text in texts:
        assert not [secret for secret in (ACCESS_KEY, SECRET_KEY, wrong) if secret in text], text
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET_KEY.encode() not in path.read_bytes(), path


def test_errors_of_libraries_lose_their_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    url = clean_url("az://account:p%40ssword-1@host/x?account_key=abcdefgh%2F")
    assert url == "az://host/x"
    message = str(EtloomError(f"refused {SECRET_KEY} p@ssword-1 abcdefgh/ abcdefgh%2F", where=url))
    assert message == "az://host/x: refused *** *** *** ***"
    assert redact("plain") == "plain"


@pytest.mark.slow
def test_exports_and_reports_are_uploaded(s3: S3Server, run: Path, call: Call) -> None:
    assert str(etloom.export(run, "s3://bucket/out/run.json.gz")) == "s3://bucket/out/run.json.gz"
    assert call("report", run, "--out", "s3://bucket/out/report.html")[0] == 0
    assert call("query", run, "select count(*) as n from events", "--out", "s3://bucket/out/n.csv")[0] == 0
    assert s3.keys("bucket/out/") == [
        f"bucket/out/{name}" for name in ("n.csv", "report.html", "run.json.gz")
    ]
    assert b"<html" in s3.objects["bucket/out/report.html"][0]
    assert s3.objects["bucket/out/n.csv"][0].startswith(b"n\n")
    assert not Path("s3:").exists()


@pytest.mark.slow
def test_a_folder_is_complete_when_its_manifest_appears(s3: S3Server, run: Path) -> None:
    etloom.export(run, "s3://bucket/saved.parquet")
    manifest = "bucket/saved.parquet/meta.json"
    assert s3.order[-1] == manifest and s3.order.count(manifest) == 1
    assert_frame_equal(etloom.open("s3://bucket/saved.parquet")[0].events, etloom.open(run)[0].events)
    s3.put("bucket/saved.parquet/rank=7/events.parquet", b"of a version with more ranks")
    s3.refused_uploads = 10**6
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ReadError, match="the connection failed 1 times"),
    ):
        patch.setattr(transfers, "TRIES", 1)
        etloom.export(run, "s3://bucket/saved.parquet")
    assert "bucket/saved.parquet/meta.json" not in s3.objects  # neither the old run nor a half new one
    s3.refused_uploads = 0
    s3.order.clear()
    etloom.export(run, "s3://bucket/saved2.parquet")
    assert s3.order[-1] == "bucket/saved2.parquet/meta.json"


def test_a_folder_with_other_files_is_not_replaced(s3: S3Server, run: Path) -> None:
    s3.put("bucket/data/precious.txt", b"x")
    with pytest.raises(EtloomError, match="is a folder that contains other files"):
        etloom.export(run, "s3://bucket/data", "parquet")
    assert s3.keys("bucket/data") == ["bucket/data/precious.txt"]


@pytest.mark.slow
def test_an_upload_is_retried(s3: S3Server, run: Path) -> None:
    s3.refused_uploads = 4
    etloom.export(run, "s3://bucket/out/run.json.gz")
    assert s3.refused_uploads == 0 and s3.keys("bucket/out/") == ["bucket/out/run.json.gz"]


@pytest.mark.slow
def test_other_urls_go_through_fsspec(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    folder = f"test-{os.getpid()}"
    memory.put(str(run), f"/{folder}/run", recursive=True)
    try:
        remote = etloom.open(f"memory://{folder}/run")
        assert_frame_equal(remote[0].events, etloom.open(run)[0].events)
        etloom.export(remote, f"memory://{folder}/out/saved.parquet")
        assert memory.exists(f"/{folder}/out/saved.parquet/meta.json")
        assert etloom.open(f"memory://{folder}/out/saved.parquet").ranks == [0, 1]
        file = sorted(run.iterdir())[0]
        memory.pipe(f"/{folder}/run/{file.name}", file.read_bytes().replace(b"aten", b"ATEN"))
        assert b"ATEN" in (mirror.fetch(f"memory://{folder}/run") / file.name).read_bytes()
    finally:
        memory.rm(f"/{folder}", recursive=True)


def test_copies_that_are_not_used_are_removed(
    s3: S3Server, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_folder(s3, run, "bucket/run")
    unused = mirror.cache_folder() / "remote" / ("0" * 32)
    unused.mkdir(parents=True)
    (unused / "x").write_bytes(b"x")
    monkeypatch.setenv("ETLOOM_REMOTE_CACHE_BYTES", "1")
    copy = mirror.fetch("s3://bucket/run")
    assert copy.is_dir() and not unused.exists()  # this process uses the copy


def test_verbs_that_need_local_folders_refuse_urls(s3: S3Server, call: Call) -> None:
    for arguments in (("watch", "s3://bucket/run"), ("collect", "--trigger", "s3://bucket/run")):
        status, _, err = call(*arguments)
        assert status == 2 and "expected a local path, got s3://bucket/run" in err
    status, _, err = call("salvage", "s3://bucket/x.json")
    assert status == 2 and "--out" in err
    assert not Path("s3:").exists()


def test_a_file_url_is_a_local_path(run: Path) -> None:
    assert json.dumps(etloom.info(run.as_uri())["ranks"]) == "[0, 1]"


@pytest.mark.slow
def test_only_arguments_are_opened_as_urls(s3: S3Server, run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"schema": "etloom-run-1", "command": ["s3://bucket/x"]}))
    (run / "s3:").mkdir()
    (run / "s3:" / "bucket").symlink_to("s3://bucket/run")
    etloom.report(run, run / "report.html")
    assert not s3.requests


@pytest.mark.parametrize(
    ("errors", "tries"),
    [("", 1), ("t", 2), ("s", 2), ("tts", 4), ("ss", 0), ("tstts", 0), ("ttttt", 0), ("ttss", 0)],
)
def test_requests_that_fail_or_stall_are_repeated(
    monkeypatch: pytest.MonkeyPatch, errors: str, tries: int
) -> None:
    """t: the connection fails; s: no complete answer. At most five tries, of which two stall; 0: given up."""
    monkeypatch.setattr(transfers, "BACKOFF_S", 0)
    kinds = {"t": TransientError, "s": StalledRequest}
    left, calls = list(errors), []

    def action() -> str:
        calls.append(1)
        if left:
            raise kinds[left.pop(0)]("no answer", where="s3://bucket/x")
        return "answer"

    if not tries:
        with pytest.raises(ReadError, match=r"failed \d times: no answer"):
            transfers.retry(action)
        assert len(calls) <= transfers.TRIES
    else:
        assert (transfers.retry(action), len(calls)) == ("answer", tries)
