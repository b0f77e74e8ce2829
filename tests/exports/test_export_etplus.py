"""ET+ holds the execution trace as it was, the times that linking found, and the device work with its own facts."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import linker
from etloom.compat import chakra
from etloom.core.errors import EtloomError, LinkError
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.exports import etplus
from support import small_traces
from support.examples import examples
from support.real_runs import open_run


def original(path: Path) -> dict[int, dict[str, Any]]:
    nodes = json.loads(gzip.decompress(path.read_bytes()))["nodes"]
    return {node["id"]: node for node in nodes}


def exported(trace: Trace, path: Path) -> dict[str, Any]:
    etplus.write(trace, path)
    return json.loads(path.read_text())


@lru_cache(maxsize=1)
def exported_run(path: Path) -> str:
    """The text of rank 0 of a real run as ET+."""
    with tempfile.TemporaryDirectory() as folder:
        etplus.write(open_run(path)[0], Path(folder) / "x.etplus.json")
        return (Path(folder) / "x.etplus.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("run", ["cpu/coll_4", "cpu/ddp_2", "cpu/compile", "nccl_ddp"])
def test_the_execution_trace_is_as_it_was(data: Path, run: str) -> None:
    document = json.loads(exported_run(data / run))
    before = original(data / run / "torch_et_0.json.gz")
    host = {node["id"]: node for node in document["nodes"] if "cat" not in node}
    assert host.keys() == before.keys()
    for key, node in host.items():
        assert node["name"] == before[key]["name"]
        for side in ("inputs", "outputs"):
            for part, values in before[key][side].items():
                assert node[side][part] == values, (key, side, part)
        known = {attr["name"]: attr["value"] for attr in node["attrs"]}
        for attr in before[key]["attrs"]:
            if attr["value"] not in ("", None):
                assert known.get(attr["name"]) == attr["value"] or attr["name"] in (
                    "collective_name",  # normalised
                    "global_rank_start",  # kept as a list of ranks
                    "global_rank_stride",
                )


@pytest.mark.slow
def test_times_are_those_of_the_profiler_exactly(data: Path) -> None:
    text = exported_run(data / "nccl_ddp")
    kineto = json.loads(
        gzip.decompress((data / "nccl_ddp/kineto_trace_0.json.gz").read_bytes()), parse_float=str
    )
    times = {
        event["args"]["Record function id"]: (str(event["ts"]), str(event["dur"]))
        for event in kineto["traceEvents"]
        if event.get("args", {}).get("Record function id")
    }
    found = {}
    for node in json.loads(text, parse_float=str)["nodes"]:
        rf_id = next((attr["value"] for attr in node["attrs"] if attr["name"] == "rf_id"), 0)
        if "ts" in node and rf_id:
            found[rf_id] = (node["ts"], node["inclusive_dur"])
    assert len(found) == 14_388
    assert found == {key: times[key] for key in found}


@pytest.mark.slow
def test_gpu_activity_is_attached_to_its_operator_with_its_attributes(data: Path) -> None:
    document = json.loads(exported_run(data / "nccl_ddp"))
    device = [node for node in document["nodes"] if "cat" in node]
    assert len(device) == 3_774
    rf_ids = {
        node["id"]: next(attr["value"] for attr in node["attrs"] if attr["name"] == "rf_id")
        for node in document["nodes"]
        if "cat" not in node
    }
    golden = pl.read_csv(data.parent / "golden" / "chakra_link_gpu.csv.gz")
    pairs = {
        (round(node["ts"] * 1000), node["stream"], node["name"], rf_ids[node["ctrl_deps"]])
        for node in device
        if node["cat"] != "gpu_memset"  # the peer drops these
    }
    expected = golden.select(
        (pl.col("ts_us") * 1000).round().cast(pl.Int64), "stream", "name", "parent_rf_id"
    ).rows()
    assert pairs == set(expected)
    assert len(pairs) == golden.height == 3_660
    collectives = [node for node in device if "pg_name" in node]
    assert len(collectives) == 21
    assert all(node["inputs"]["values"] for node in collectives)
    assert all({"device", "correlation"} <= {attr["name"] for attr in node["attrs"]} for node in device)


@pytest.mark.slow
def test_gpu_activity_of_other_iterations_is_omitted(data: Path, tmp_path: Path) -> None:
    trace = open_run(data / "linear")[0]
    document = exported(trace, tmp_path / "x.etplus.json")
    device = [node for node in document["nodes"] if "cat" in node]
    times = [node["ts"] for node in document["nodes"] if "inclusive_dur" in node and "cat" not in node]
    root = min(node["id"] for node in document["nodes"])
    # 40 iterations launched 10,356; this one its share, each under the operator that launched it.
    assert len(device) == 261
    assert not any(node["ctrl_deps"] == root for node in device)
    assert min(node["ts"] for node in device) > min(times)
    # Launched before the recording began, but run in it: no operator is known.
    early = exported(open_run(data / "dlrm")[1], tmp_path / "y.etplus.json")["nodes"]
    assert sum("cat" in node and node["ctrl_deps"] == 1 for node in early) == 64


@pytest.mark.slow
def test_it_reads_back(data: Path, tmp_path: Path) -> None:
    trace = open_run(data / "nccl_ddp")[0]
    etplus.write(trace, tmp_path / "x.etplus.json.gz")
    again = etloom.read(tmp_path / "x.etplus.json.gz")
    assert isinstance(again, Trace)
    assert again.nodes.height == trace.nodes.height + 3_774
    assert again.launches.height == trace.launches.height
    assert not again.stats.filter(pl.col("severity") != "info").height


def test_an_inexpressible_trace_is_refused_with_a_reason(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EtloomError, match="a file contains one rank, not 2"):
        etplus.write(open_run(data / "cpu/ddp_2"), tmp_path / "x.etplus.json")
    with pytest.raises(EtloomError, match="no execution trace"):
        etplus.write(open_run(data / "hta_multirank")[0], tmp_path / "x.etplus.json")


@pytest.mark.slow
def test_the_peers_class_and_command(data: Path, tmp_path: Path) -> None:
    host, device = data / "cpu/ddp_2/torch_et_1.json.gz", data / "cpu/ddp_2/kineto_trace_1.json.gz"
    chakra.TraceLinker().link(host, device, tmp_path / "by_class.json")
    command = [sys.executable, "-c", "import sys; from etloom.compat.chakra import main; sys.exit(main())"]
    flags = ["--chakra-host-trace", str(host), "--chakra-device-trace", str(device), "--rank", "1"]
    done = subprocess.run(
        [*command, *flags, "--output-file", "by_command.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    relative = [f"{part}.json.gz" for part in ("ddp_2/torch_et_1", "ddp_2/kineto_trace_1")]
    assert os.path.relpath(host, data / "cpu") == relative[0]
    flags_there = ["--chakra-host-trace", relative[0], "--chakra-device-trace", relative[1], "--rank", "1"]
    there = [*command, *flags_there, "--log-level", "WARNING", "--output-file", str(tmp_path / "there.json")]
    assert subprocess.run(there, cwd=data / "cpu", capture_output=True, text=True).stderr == ""
    assert (tmp_path / "there.json").read_text() == (tmp_path / "by_class.json").read_text()
    assert (tmp_path / "by_command.json").read_text() == (tmp_path / "by_class.json").read_text()
    assert "linked" in done.stderr
    missing = subprocess.run(
        [*command, *flags[:2], "--chakra-device-trace", "none.json", "--output-file", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert "none.json" in missing.stderr


@pytest.mark.slow
def test_traces_of_different_programs_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(LinkError):
        chakra.TraceLinker().link(
            data / "resnet_mismatch/torch_et_0.json.gz",
            data / "resnet_mismatch/kineto_trace_0.json.gz",
            tmp_path / "x.json",
        )
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("value", "kind"), [(1.5, "double"), (True, "bool"), (2**64 - 1, "uint64"), ([1, 2], "array")]
)
def test_attributes_keep_their_types_and_the_end_is_json(tmp_path: Path, value: Any, kind: str) -> None:
    et = small_traces.execution_trace()
    et["finish_ts"] = None
    et["nodes"][-1]["attrs"].append({"name": "odd", "type": kind, "value": value})
    source = tmp_path / "torch_et_0.json"
    source.write_text(json.dumps(et))
    etloom.export(linker.link(etloom.read(source)), tmp_path / "out.etplus.json")
    nodes = json.loads((tmp_path / "out.etplus.json").read_text())["nodes"]
    assert {"name": "odd", "type": kind, "value": value} in [one for node in nodes for one in node["attrs"]]


@pytest.mark.slow
def test_an_et_plus_contains_one_iteration(data: Path, tmp_path: Path) -> None:
    host, device = (
        etloom.read(data / "linear" / f"{name}_0.json.gz") for name in ("torch_et", "kineto_trace")
    )
    with pytest.raises(EtloomError, match="linked with several iterations"):
        etplus.write(etloom.link(host, device, iterations="all"), tmp_path / "x.etplus.json")
    one = etloom.link(host, device, iterations="7")
    etplus.write(one, tmp_path / "x.etplus.json")
    # What it leaves out is counted.
    stats = dict(one.stats.select("name", "count").rows())
    written = sum("cat" in node for node in json.loads((tmp_path / "x.etplus.json").read_text())["nodes"])
    assert stats["link.activity_outside_nodes"] == 10_356 - written == 10_095


@pytest.mark.slow
def test_a_rank_is_compared_with_that_of_the_trace(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = (data / "cpu/ddp_2/torch_et_1.json.gz", data / "cpu/ddp_2/kineto_trace_1.json.gz")
    said = "states rank 1; read as rank 0"
    chakra.TraceLinker().link(*files, tmp_path / "one.json", rank=1)
    assert said not in caplog.text
    chakra.TraceLinker().link(*files, tmp_path / "other.json", rank=0)
    assert said in caplog.text
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_the_command_reports_an_inexpressible_trace(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flags = [f"--chakra-{side}-trace={data / f'dlrm/{name}_0.json.gz'}" for side, name in SIDES]
    assert chakra.main([*flags, f"--output-file={tmp_path / 'file' / 'x.json'}", "--log-level=ERROR"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


SIDES = (("host", "torch_et"), ("device", "kineto_trace"))
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e30, 1e30)
    | st.text(max_size=5)
)
OBJECT = st.recursive(
    SCALAR | st.sampled_from(["null", '"]', "{,", "a, b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


class Argument:
    """A value as it is in the file and as the tables hold it, null in place of tensors, and these."""

    def __init__(self, draw: st.DrawFn, index: int) -> None:
        self.index, self.numbers = index, itertools.count()
        self.rows: list[dict[str, Any]] = []
        self.value, self.shape, self.held = self.make(
            draw, draw(st.sampled_from(["plain", "tensor", "list"])), 0
        )

    def make(self, draw: st.DrawFn, kind: str, depth: int) -> tuple[Any, Any, Any]:
        if kind == "tensor":
            numbers = draw(st.lists(st.integers(0, 2**40), min_size=4, max_size=4))
            size, device = draw(st.sampled_from([(4, "cpu"), (2, "cuda:0"), (8, 'a"b')]))
            shape = draw(st.lists(st.integers(0, 9), max_size=3))
            self.rows.append(
                dict(zip(("tensor_id", "storage_id", "offset", "numel"), numbers, strict=True))
                | {"index": self.index, "item": next(self.numbers) if depth else None, "itemsize": size}
                | {"device": device, "shape": json.dumps(shape)}
            )
            return [*numbers, size, device], shape, None
        if kind == "list" and depth < 3:
            kinds = draw(st.lists(st.sampled_from(["tensor", "list", "plain"]), max_size=3))
            parts = [self.make(draw, one, depth + 1) for one in kinds]
            values, shapes, held = ([part[at] for part in parts] for at in range(3))
            return values, shapes, held
        # What the tables hold as null beside tensors of the same list could be either.
        plain = draw(OBJECT if depth == 0 else SCALAR.filter(lambda value: value is not None))
        return plain, nested(plain), plain


def nested(value: Any) -> Any:
    """The shapes that go with values without tensors."""
    return [nested(item) for item in value] if isinstance(value, list) else []


@st.composite
def node_tables(draw: st.DrawFn) -> tuple[Trace, list[dict[str, Any]]]:
    """A trace of random nodes, and of each what its node in the file must hold."""
    nodes, tensors, wanted = [], [], []
    et_ids = draw(st.lists(st.none() | st.integers(0, 50), max_size=5))
    et_ids.sort(key=lambda et_id: (et_id is None, et_id))
    for row, et_id in enumerate(et_ids):
        node: dict[str, Any] = {
            "id": row,
            "et_id": et_id,
            "name": draw(st.none() | st.text(min_size=1, max_size=5)),
        }
        expected: dict[str, Any] = {"id": et_id, "name": node["name"]}
        for io, side in enumerate(("inputs", "outputs")):
            arguments = [Argument(draw, at) for at in range(draw(st.integers(0, 3)))]
            node[side] = json.dumps([one.held for one in arguments])
            node[f"{side[:-1]}_types"] = json.dumps(["?"] * len(arguments))
            tensors += [{"node": row, "io": io, **one} for argument in arguments for one in argument.rows]
            expected[side] = {
                "values": [one.value for one in arguments],
                "shapes": [one.shape for one in arguments],
                "types": ["?"] * len(arguments),
            }
        attrs = draw(
            st.none() | st.dictionaries(st.sampled_from(["x", 'y"', "}"]), OBJECT, min_size=1, max_size=2)
        )
        expected["attrs"] = attrs or {}
        nodes.append(node | {"attrs": None if attrs is None else json.dumps(attrs)})
        wanted.append(expected)
    tables = {
        name: TABLES[name].conform(pl.DataFrame(rows, infer_schema_length=None))
        if rows
        else TABLES[name].empty()
        for name, rows in (("nodes", nodes), ("tensors", tensors))
    }
    return Trace(tables), wanted


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(made=node_tables())
def test_any_nodes_are_json_and_read_back_equal(made: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace, wanted = made
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        document = exported(trace, Path(folder) / "x.etplus.json")
    assert len(document["nodes"]) == len(wanted)
    last = max((node["id"] for node in wanted if node["id"] is not None), default=0)
    unnumbered = itertools.count(last + 1)
    for node, expected in zip(document["nodes"], wanted, strict=True):
        assert node["id"] == (next(unnumbered) if expected["id"] is None else expected["id"])
        assert node["name"] == expected["name"]
        for side in ("inputs", "outputs"):
            assert {part: node[side][part] for part in ("values", "shapes", "types")} == expected[side]
        attrs = {one["name"]: one["value"] for one in node["attrs"][9:]}
        assert attrs == expected["attrs"]


def test_ids_without_room_after_them_are_an_error(tmp_path: Path) -> None:
    nodes = pl.DataFrame({"id": [0, 1], "et_id": [2**63 - 1, None], "name": ["a", "b"]})
    with pytest.raises(EtloomError, match="the largest node id is"):
        etplus.write(Trace({"nodes": TABLES["nodes"].conform(nodes)}), tmp_path / "x.etplus.json")
