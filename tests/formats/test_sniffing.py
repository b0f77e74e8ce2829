"""A trace reads the same whatever it is called and whatever it is packed in."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import etloom
from etloom import cli, formats
from etloom.analyses.run_info import list_devices
from etloom.core import registry
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.formats import detect_format
from support import small_traces
from support.examples import slow_after

Source = Callable[[Path, Path, Path], Path]
"""A file of that format, of the shared data, our own data or made in a folder."""


def exported(name: str) -> Source:
    def make(data: Path, own: Path, folder: Path) -> Path:
        job = etloom.open(small_traces.write_run(folder / "run", ranks=(0,)), use_cache=False)
        return etloom.export(job[0], folder / name)

    return make


SOURCES: dict[str, Source] = {
    "kineto": lambda data, own, folder: data / "linear/kineto_trace_0.json.gz",
    "execution-trace": lambda data, own, folder: data / "linear/torch_et_0.json.gz",
    "chakra": lambda data, own, folder: data / "chakra/chakra.0.et.gz",
    "nsys": lambda data, own, folder: next(iter(sorted((data / "nsys").glob("*.sqlite*")))),
    "etplus": exported("rank0.etplus.json"),
    "xplane": lambda data, own, folder: data / "xplane/jax_te_attention.xplane.pb",
    "flight-recorder": lambda data, own, folder: sorted((own / "flight_recorder").glob("nccl*"))[0],
}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(level=1).compress,
}


def assert_same(one: Trace | Job, other: Trace | Job) -> None:
    if isinstance(one, Job):
        assert isinstance(other, Job)
        assert one.ranks == other.ranks
        for rank in one:
            assert_same(one[rank], other[rank])
        return
    assert isinstance(other, Trace)
    assert {**one.meta, "files": None} == {**other.meta, "files": None}
    for name in TABLES:
        assert one.table(name).equals(other.table(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("packing", slow_after(1, PACKINGS))
@pytest.mark.parametrize("format", SOURCES)
def test_a_file_with_an_uninformative_name(
    data: Path, own: Path, tmp_path: Path, format: str, packing: str
) -> None:
    source = SOURCES[format](data, own, tmp_path)
    content = source.read_bytes()
    plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    unknown = tmp_path / "unknown"
    unknown.write_bytes(PACKINGS[packing](plain))
    assert detect_format(unknown) == detect_format(source) == format
    assert_same(etloom.read(source), etloom.read(unknown))


def test_a_folder_with_an_uninformative_name(data: Path, own: Path, tmp_path: Path) -> None:
    saved = exported("rank0.parquet")(data, own, tmp_path)
    before = etloom.read(saved)
    unknown = saved.rename(tmp_path / "unknown")
    assert detect_format(unknown) == "parquet"
    assert_same(before, etloom.read(unknown))


@pytest.mark.parametrize(
    "piece", ["[", "(", "{", '"', " ", "\\", "\n", "1,", '{"a":', '"a":[', "[1 ", "2026-", "\0", "\x80", "]"]
)
def test_recognizing_a_format_does_not_take_quadratic_time(tmp_path: Path, piece: str) -> None:
    for start in ("", "[", "{", "ts,", '{"nodes":[', "\x80"):
        head = (start + piece * (1 << 16)).encode("latin-1")[: 1 << 16]
        begin = time.process_time()
        for name in registry.list_plugins("readers"):
            registry.get("readers", name).sniff(head)
        assert time.process_time() - begin < 1, start


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("verb", ["info", "query", "convert"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    more = {"info": [], "query": ["select 1"], "convert": [str(tmp_path / "out.parquet")]}[verb]
    assert cli.main([verb, str(pipe), *more]) == 1
    assert "is not a regular file" in capsys.readouterr().err


def test_an_empty_archive_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "empty.json.gz"
    file.write_bytes(gzip.compress(b""))
    with pytest.raises(ReadError, match="nothing could be decompressed"):
        etloom.read(file)


@pytest.mark.parametrize(
    "text", [b"<!DOCTYPE html><html></html>", b"\n <HTML>", b"<?xml version='1.0'?>", b"<"]
)
def test_pages_are_no_traces(tmp_path: Path, text: bytes) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(text)
    assert detect_format(page) is None


def test_a_page_is_offered_to_readers_of_other_packages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = []
    monkeypatch.setattr(registry, "get", lambda kind, name: imported.append(name))
    monkeypatch.setattr(registry, "find_package", lambda kind, name: None)
    page = tmp_path / "report.html"
    page.write_bytes(b"<!doctype html><html>")
    assert detect_format(page) is None
    assert not imported


def test_the_json_of_xla_names_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "host.trace.json"
    device = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}
    fusion = {"ph": "X", "pid": 1, "tid": 13, "ts": 100, "dur": 50, "name": "loop_add_fusion"}
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": [device, fusion, {}]}))
    (tmp_path / "host.xplane.pb").touch()
    trace = formats.read(path)
    assert isinstance(trace, Trace)
    rows = {name: (severity, text) for name, severity, _, text in trace.stats.iter_rows()}
    assert "host.xplane.pb" in rows["read.xla_copy"][1]
    assert "host.xplane.pb" in list_devices(trace)[0]
    assert rows["read.no_phase"][0] == "info"  # the empty entry at the end
    path.write_text(json.dumps({"traceEvents": [fusion, {"name": "x", "ts": 1}]}))
    unnamed = formats.read(path)
    assert isinstance(unnamed, Trace)
    assert dict(unnamed.stats.select("name", "severity").iter_rows())["read.no_phase"] == "data_loss"
