"""Opening packed files: the same bytes, everything before a damage, and no bombs."""

from __future__ import annotations

import gzip
import io
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from etloom import formats
from etloom.core import registry
from etloom.core.errors import LimitError, ReadError
from etloom.formats.io import compression, limits, native_parser

PLAIN = b"".join(b'{"id": %d, "name": "aten::mul"},\n' % i for i in range(100_000))
PACKINGS = {
    "plain": PLAIN,
    "gzip": gzip.compress(PLAIN),
    "gzip of two members": gzip.compress(PLAIN[:1000]) + gzip.compress(PLAIN[1000:]),
    "gzip padded with zeros": gzip.compress(PLAIN) + bytes(512),
    "zstd": zstandard.ZstdCompressor().compress(PLAIN),
    "zstd of two frames": zstandard.ZstdCompressor().compress(PLAIN[:1000])
    + zstandard.ZstdCompressor().compress(PLAIN[1000:]),
}


@pytest.mark.parametrize("kind", PACKINGS)
def test_every_compression_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "unknown"
    path.write_bytes(PACKINGS[kind])
    assert b"".join(compression.read_chunks(path)) == PLAIN
    assert compression.read_content(path, 1 << 30) == (PLAIN, None)
    with compression.decompressed_file(path, ".x") as plain:
        assert plain.read_bytes() == PLAIN
        assert (plain == path) == (kind == "plain")
    assert plain.exists() == (kind == "plain")


@pytest.mark.parametrize("size", [1, 100, 1 << 16, 1 << 24])
def test_a_stream_returns_at_most_the_requested_bytes(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    short = PLAIN[:3000]
    path.write_bytes(gzip.compress(short))
    out = io.BytesIO()
    with compression.open_decompressed(path) as stream:
        while piece := stream.read(size):
            assert len(piece) <= size
            out.write(piece)
    assert out.getvalue() == short


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd"])
def test_no_more_is_decompressed_at_a_time_than_the_caller_needs(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(PACKINGS[kind])
    with compression.open_decompressed(path, 1000) as stream:
        assert stream.read() == PLAIN[:1000]


def test_gzip_cut_off_anywhere_gives_all_that_came_before(tmp_path: Path) -> None:
    path, packed, rng = tmp_path / "x", PACKINGS["gzip"], random.Random(1)
    for cut in (3, 20, len(packed) - 4, *(rng.randrange(20, len(packed)) for _ in range(20))):
        path.write_bytes(packed[:cut])
        data, complaint = compression.read_content(path, 1 << 30)
        assert complaint == "the compressed data ends early"
        assert PLAIN.startswith(data)
        # Deflate writes blocks; all but the last part of one is there.
        assert len(data) >= len(PLAIN) * cut / len(packed) * 0.8 - 300_000
        with compression.open_decompressed(path) as stream:
            assert stream.read(100) == data[:100] if data else True
        with (
            pytest.raises(ReadError, match="compressed data is damaged"),
            compression.decompressed_file(path, ".x"),
        ):
            pass
    path.write_bytes(packed[:-4])
    assert compression.read_content(path, 1 << 30)[0] == PLAIN


def test_flipped_bits_are_reported(tmp_path: Path) -> None:
    path, packed = tmp_path / "x", bytearray(PACKINGS["gzip"])
    packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(packed)
    assert compression.read_content(path, 1 << 30)[1] is not None


@pytest.mark.slow
def test_a_small_file_that_grows_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MIN_CHECKED_BYTES", 1 << 20)
    for name, packed in (
        ("gzip", gzip.compress(bytes(1 << 26))),
        ("zstd", zstandard.ZstdCompressor().compress(bytes(1 << 26))),
    ):
        path = tmp_path / name
        path.write_bytes(packed)
        with pytest.raises(LimitError, match="decompress to more than 200 times"):
            list(compression.read_chunks(path))
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(1 << 21))
    assert sum(map(len, compression.read_chunks(plain))) == 1 << 21


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.slow
def test_a_bomb_is_refused_by_its_beginning(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """However long the file is, so that time and memory stay small; and events that are all alike are no exception."""
    path = tmp_path / "kineto_trace_0.json"
    path.write_bytes(compress(b'{"traceEvents":[' + b'{"ph":"X","ts":1},' * (1 << 22)) * 3)
    with pytest.raises(LimitError, match="ETLOOM_MAX_RATIO") as refused:
        formats.read(path)
    first = re.search("its first ([0-9,]+) bytes", str(refused.value))
    assert first is not None and int(first[1].replace(",", "")) <= max(1 << 18, path.stat().st_size / 2)


@pytest.mark.parametrize("max_small_bytes", [0, 1 << 20])
def test_a_cut_off_file_is_read_alike_with_and_without_a_second_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_small_bytes: int
) -> None:
    monkeypatch.setattr(native_parser, "_MAX_SMALL_BYTES", max_small_bytes)
    text = b'{"traceEvents":[' + b",".join(b'{"ph":"X","ts":%d}' % ts for ts in range(9_000)) + b"]}"
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(text)[:-600])
    threads = threading.active_count()
    trace = formats.read(path)
    assert 1_000 < trace.events.height < 9_000
    assert "read.corrupt_compression" in trace.stats["name"]
    assert threading.active_count() == threads


def test_a_limit_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(
        gzip.compress(b'{"traceEvents":[' + b'{"ph":"X","ts":1},' * 50_000 + b'{"ph":"X","ts":1}]}')
    )
    monkeypatch.setattr(limits, "MIN_CHECKED_BYTES", 1 << 10)
    with pytest.raises(LimitError):
        formats.read(path)
    monkeypatch.setenv("ETLOOM_MAX_RATIO", "2000")
    assert len(formats.read(path).events) == 50_001
    monkeypatch.setenv("ETLOOM_MAX_ROWS", "1000")
    with pytest.raises(LimitError, match="contains more than 1,000 rows"):
        formats.read(path)


def test_the_callers_limit_holds_for_plain_files_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(PLAIN)
    with pytest.raises(LimitError, match="contains more than 1,000 bytes"):
        compression.read_content(tmp_path / "x", 1000)


def test_a_missing_file_and_a_folder_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ReadError, match="cannot be opened"):
            compression.read_content(path, 10)


def test_each_file_is_claimed_by_one_reader(data: Path, own: Path) -> None:
    readers = {name: registry.get("readers", name) for name in registry.list_plugins("readers")}
    expected = {"chakra": "chakra", "nsys": "nsys", "flight_recorder": "flight-recorder", "xplane": "xplane"}
    results = {
        "vtrain",
        "straggler_what_if",
        "serving",
        "serving_requests",
        "astra_sim",
        "flight_recorder",
    }  # not only traces
    for path in (*data.rglob("*.*"), *(own / "flight_recorder").glob("nccl*")):
        if path.suffix in (".md", ".py") or path.is_dir():
            continue
        with compression.open_decompressed(path) as stream:
            head = stream.read(1 << 16)
        claims = [name for name, reader in readers.items() if reader.sniff(head)]
        folder = path.relative_to(data).parts[0] if path.is_relative_to(data) else path.parent.name
        assert len(claims) == 1 or (not claims and folder in results), path
        assert not claims or expected.get(folder, claims[0]) == claims[0], path


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_two_writers_of_one_file_do_not_mix(tmp_path: Path, name: str) -> None:
    """As the launchers of several hosts do that share a folder: each file is whole, and the last one stays."""
    from etloom.formats.io.atomic_file import open_atomic

    with open_atomic(tmp_path / name) as first:
        first.write(b"first")
        with open_atomic(tmp_path / name) as second:
            second.write(b"second")
        first.write(b" writer")
    written = (tmp_path / name).read_bytes()
    assert (gzip.decompress(written) if name.endswith(".gz") else written) == b"first writer"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def write_plain_trace(folder: Path) -> Path:
    (folder / "x.json").write_bytes(
        b'{"traceEvents":[' + b",".join(b'{"ph":"X","ts":%d}' % ts for ts in range(9_000)) + b"]}"
    )
    return folder / "x.json"


@pytest.mark.parametrize("piece_bytes", [100, 4_097, 1 << 22])
def test_a_plain_file_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(native_parser, "_PIECE_BYTES", piece_bytes)
    path = write_plain_trace(tmp_path)
    sizes: list[int] = []
    trace = formats.read(path, progress=sizes.append)
    assert trace.events["ts"].to_list() == [1000 * ts for ts in range(9_000)]
    assert sum(sizes) == path.stat().st_size
    assert max(sizes) <= piece_bytes


def test_a_plain_file_that_cannot_be_read_to_its_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            if self.tell():
                raise OSError(5, "Input/output error")
            return super().readinto(buffer[:1000]) or 0

    path, plain_open = write_plain_trace(tmp_path), Path.open

    def fail(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        return Failing(path) if buffering == 0 else plain_open(path, mode, buffering, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(ReadError, match="cannot be read: Input/output error"):
        formats.read(path)
