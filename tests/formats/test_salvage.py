"""A damaged trace made whole: valid JSON, every whole row kept, names escaped, losses counted."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import cli
from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Trace
from etloom.formats.io.salvage import default_output_path, salvage
from support.examples import examples, slow_after

NODE = (
    '{{\n"id": {id}, "name": "{name}", "ctrl_deps": 1,\n"inputs": {{"values": [], "shapes": [], "types": []}}, '
    '"outputs": {{"values": [], "shapes": [], "types": []}},\n'
    '"attrs": [{{"name": "rf_id", "type": "uint64", "value": 1}}, {{"name": "tid", "type": "uint64", "value": 1}}]}}'
)


def raw(names: list[str], end: str = '\n], "finish_ts": 9}\n') -> str:
    """An execution trace as PyTorch writes it: no name is escaped."""
    nodes = ",\n".join(NODE.format(id=2 + number, name=name) for number, name in enumerate(names))
    return '{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "x", "start_ts": 1, "nodes": [\n' + nodes + end


def strict(path: Path) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    return json.loads(path.read_bytes(), parse_constant=refuse)


def lost(trace: Trace | etloom.Job) -> list[str]:
    assert isinstance(trace, Trace)
    return trace.stats.filter(pl.col("severity") != "info")["name"].to_list()


ODD = [
    'a "q" b',
    "new\nline",
    "tab\tx",
    r"back\slash",
    'C:\\x "y"',
    "\x01",
    "é",
    'x", "ctrl_deps": 5, "y',
    "{",
    '"]}',
    "\\",
]


def test_names_that_were_not_escaped(tmp_path: Path) -> None:
    file, out = tmp_path / "et.json", tmp_path / "out.json"
    file.write_text(raw(ODD))
    found = salvage(file, out)
    told = strict(out)
    assert [node["name"] for node in told["nodes"]] == ODD
    assert told["finish_ts"] == 9
    assert (found.kept, found.repaired, found.lost) == (len(ODD), len(ODD) - 2, 0)
    assert lost(etloom.read(out)) == []
    assert etloom.read(out).nodes["name"].to_list() == ODD  # type: ignore[union-attr]


RAW_NAMES = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda name: not re.search(r'"\s*}', name)
)
"""A raw quote and brace may end the node as well as belong to its name: which of the two cannot be known."""


@settings(max_examples=examples(60))
@given(st.lists(RAW_NAMES, min_size=1, max_size=5))
def test_any_name_in_raw_form_costs_no_node(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    file = tmp_path_factory.mktemp("x") / "et.json"
    file.write_bytes(raw(names).encode())
    out = file.with_name("out.json")
    if not salvage(file, out).is_intact:
        file = out
    told = [node["name"] for node in strict(file)["nodes"]]
    # A raw backslash may happen to begin an escape that JSON knows: then the name is what JSON says it is.
    assert [said for name, said in zip(names, told, strict=True) if "\\" not in name] == [
        name for name in names if "\\" not in name
    ]


CUT = "the end of the document is missing"
CUT_FILES = (
    "et_schemas/1.0.2-chakra.0.0.4.json.gz",
    "linear/torch_et_0.json.gz",
    "linear/kineto_trace_0.json.gz",
    "critical_path/simple_add.json.gz",
)


@pytest.mark.parametrize("name", slow_after(2, CUT_FILES))
@pytest.mark.slow
def test_real_files_cut_anywhere(data: Path, tmp_path: Path, name: str) -> None:
    text = gzip.decompress((data / name).read_bytes())
    key = "nodes" if b'"nodes"' in text[:4000] else "traceEvents"
    whole = json.loads(text)[key]
    file, out, rng = tmp_path / "t.json", tmp_path / "o.json", random.Random(name)
    start = text.index(f'"{key}"'.encode()) + 40
    cuts = 12 if len(text) < 4_000_000 else 3
    for cut in sorted(rng.randrange(start, len(text)) for _ in range(cuts)):
        file.write_bytes(text[:cut])
        found = salvage(file, out)
        kept = strict(out)[key]
        assert kept == whole[: len(kept)]
        assert len(kept) == found.kept
        # Every row that is whole is kept: the reader finds no more in the cut file than in the new one.
        before, after = etloom.read(file), etloom.read(out)
        assert isinstance(before, Trace)
        assert isinstance(after, Trace)
        table = "nodes" if key == "nodes" else "events"
        assert before.table(table).equals(after.table(table))
        assert set(lost(after)) <= {*lost(before), "read.truncated"}
        assert ("read.truncated" in lost(after)) == (key == "traceEvents" and CUT in found.problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear/torch_et_0.json.gz", "linear/kineto_trace_0.json.gz",
                                  "hta_misc/triton_example.json.gz", "et_schemas/hf_gpt2.json.gz"])  # fmt: skip
def test_a_valid_file_is_unchanged(data: Path, tmp_path: Path, name: str) -> None:
    found = salvage(data / name, tmp_path / "out.json")
    assert found.is_intact
    assert found.kept > 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    unpack = {"": bytes, ".gz": gzip.decompress,
              ".zst": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)}[suffix]  # fmt: skip
    file = tmp_path / f"et.json{suffix}"
    file.write_bytes(pack(raw(ODD, end="").encode()))
    out = default_output_path(file)
    assert out.name == f"et.salvaged.json{suffix}"
    salvage(file, out)
    assert len(json.loads(unpack(out.read_bytes()))["nodes"]) == len(ODD)


def test_a_cut_gzip(data: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "et.json.gz", tmp_path / "out.json"
    packed = (data / "linear/torch_et_0.json.gz").read_bytes()
    file.write_bytes(packed[: len(packed) * 2 // 3])
    found = salvage(file, out)
    assert "the compressed data is damaged or cut off" in found.problems
    assert len(strict(out)["nodes"]) == found.kept > 10


def test_damage_in_the_middle_costs_one_row(tmp_path: Path) -> None:
    file, out = tmp_path / "et.json", tmp_path / "out.json"
    file.write_text(raw(["a", "b", "c", "d"]).replace('"name": "b", "ctrl', '"name": "b, ctrl'))
    found = salvage(file, out)
    assert [node["name"] for node in strict(out)["nodes"]] == ["a", "c", "d"]
    assert found.problems == {"node damaged, skipped": (1, found.problems["node damaged, skipped"][1])}


def test_two_processes_wrote_one_file(tmp_path: Path) -> None:
    file, out = tmp_path / "et.json", tmp_path / "out.json"
    file.write_text(raw(["a", "b"]) + "," + NODE.format(id=7, name="c") + '\n], "finish_ts": 11}')
    assert salvage(file, out).kept == 3
    told = strict(out)
    assert [node["name"] for node in told["nodes"]] == ["a", "b", "c"]
    assert told["finish_ts"] == 11


def test_kineto_members_rows_in_args_and_unusual_numbers(tmp_path: Path) -> None:
    file, out = tmp_path / "k.json", tmp_path / "out.json"
    nested = '{"ph": "X", "name": "n", "ts": 1, "dur": 1, "args": {"l": [{"name": 1}, {"name": 2}]}}'
    odd = '{"ph": "X", "name": "o", "ts": 2, "dur": 1, "args": {"v": nan, "w": -inf}}'
    tail = '], "traceName": "x", "deviceProperties": [{"id": 0, "name": "g"}, {"id": 1, "name": "h"}], "z": {"cut'
    file.write_text('{"schemaVersion": 1, "traceEvents": [' + nested + "," + odd + tail)
    salvage(file, out)
    told = strict(out)
    assert told["traceEvents"][0]["args"] == {"l": [{"name": 1}, {"name": 2}]}
    assert told["traceEvents"][1]["args"] == {"v": "nan", "w": "-inf"}
    assert [one["name"] for one in told["deviceProperties"]] == ["g", "h"]
    assert "z" not in told


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "et.json"
    file.write_text(raw(["a", 'b"c'], end=""))
    assert cli.main(["salvage", str(file)]) == 0
    told = capsys.readouterr()
    assert "the end of the document is missing" in told.out
    assert f"wrote {tmp_path / 'et.salvaged.json'}" in told.err
    assert cli.main(["salvage", str(tmp_path / "et.salvaged.json")]) == 0
    assert "nothing to repair in 2 rows" in capsys.readouterr().err
    file.write_text("no trace")
    assert cli.main(["salvage", str(file)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("piece", ['","id":', '"name":"', "nan ", '{"a":', "[", '\\"', "},", '"x":1,'])
def test_a_hostile_row_does_not_take_quadratic_time(tmp_path: Path, piece: str) -> None:
    file = tmp_path / "et.json"
    for end in ("", "}]}"):
        file.write_text('{"schema":"1.1.1","nodes":[{"id":1,"name":"' + piece * (100_000 // len(piece)) + end)
        begin = time.process_time()
        salvage(file, tmp_path / "out.json")
        assert time.process_time() - begin < 5, end


def test_refusals(tmp_path: Path) -> None:
    file = tmp_path / "et.json"
    file.write_text(raw(["a"], end=""))
    with pytest.raises(EtloomError, match="the output file is the file to read"):
        salvage(file, file)
    with pytest.raises(ReadError, match="cannot be opened"):
        salvage(tmp_path / "none.json", tmp_path / "out.json")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_files_of_torchs_observer(tmp_path: Path, killed: bool) -> None:
    script = f"""
import os, torch
from torch.profiler import ExecutionTraceObserver, record_function
observer = ExecutionTraceObserver().register_callback("et.json")
observer.start()
for name in {ODD!r}:
    with record_function(name): torch.ones(3) @ torch.ones(3)
with record_function("last"): pass
if {killed}: os._exit(0)
observer.stop(); observer.unregister_callback()
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    found = salvage(tmp_path / "et.json", tmp_path / "out.json")
    assert found.lost == 0
    told = strict(tmp_path / "out.json")
    assert told["schema"].startswith("1.")
    # A killed job may leave its last nodes unwritten; every one that the file holds is kept.
    assert found.kept == (tmp_path / "et.json").read_text().count('"name": "tensor_range"')
    assert {*ODD[:-1]} <= {node["name"] for node in told["nodes"]}
    assert lost(etloom.read(tmp_path / "out.json")) == []
