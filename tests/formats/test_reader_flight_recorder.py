"""Flight Recorder dumps, and above all: a pickle runs nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import pickletools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError, LimitError, ReadError
from etloom.formats import flight_recorder
from etloom.formats.io import safe_values
from support.examples import examples

START = 1_795_235_217_000_000_000
JSON, PICKLE = "nccl_trace_rank_1.json", "nccl_trace_rank_1"


def texts(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


def test_the_dumps_equal_those_of_the_script(own: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_dump", own / "flight_recorder" / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert pickle.loads((own / "flight_recorder" / PICKLE).read_bytes()) == module.dump()


@pytest.mark.parametrize("name", [JSON, PICKLE])
def test_entries_are_comms(own: Path, name: str) -> None:
    path = own / "flight_recorder" / name
    assert flight_recorder.sniff(path.read_bytes())
    trace = flight_recorder.read(path)
    columns = ("event", "collective", "pg_name", "pg_desc", "ranks", "group_size", "seq", "peer", "is_p2p")
    world = ("0", "default_pg", "[0, 1, 2, 3]", 4)
    assert texts(trace.comms).select(columns).rows() == [
        (0, "all_reduce", *world, 1, None, False),
        (1, "all_gather", "1", "tp", "[0, 1]", 2, 1, None, False),
        (2, "send", *world, 5, 3, True),
        (3, "recv", *world, 6, 0, True),
        (4, "all_to_all", *world, 2, None, False),
    ]
    assert texts(trace.comms).select("dtype", "in_nelems", "out_nelems", "bytes").rows() == [
        ("BFloat16", 12, 12, 24),
        ("BFloat16", 12, 24, 24),
        ("BFloat16", 12, 12, 24),
        ("BFloat16", 12, 12, 24),
        ("Float", 7, 12, 28),
    ]
    assert trace.stats.is_empty()
    assert trace.meta["schema_version"] == "2.10"
    assert trace.meta["pg_status"]["1"] == {
        "last_enqueued_collective": 1,
        "last_started_collective": None,
        "last_completed_collective": None,
    }


@pytest.mark.parametrize("name", [JSON, PICKLE])
def test_events_last_from_start_to_end_if_both_are_known(own: Path, name: str) -> None:
    trace = flight_recorder.read(own / "flight_recorder" / name)
    assert texts(trace.events).select("ph", "cat", "name", "ts", "dur", "tid").rows()[3:] == [
        ("X", "collective_comm", "nccl:recv 1<-0", START + 3_000_500, 2000, 140000000000001),
        ("i", "collective_comm", "nccl:all_to_all", START + 4_000_000, None, 140000000000001),
    ]
    args = json.loads(texts(trace.events)["args"][4])
    assert (args["state"], args["frames"]) == ("scheduled", ["all_reduce (train.py:7)"])


class Runs:
    """What a hostile pickle holds: a call that unpickling would make."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_does_not_run(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for call in (
        Runs(os.system, f"touch {marker}"),
        Runs(eval, f"open({str(marker)!r}, 'w')"),
        Runs(marker.touch),
    ):
        content = pickle.dumps({"pg_config": {}, "entries": [call]}, protocol)
        path = tmp_path / "x"
        path.write_bytes(content)
        with pytest.raises(
            ReadError, match=r"is a pickle with more than plain values: (STACK_)?GLOBAL at byte"
        ):
            flight_recorder.read(path)
        assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # the pickle was a real one


def test_the_unpickler_refuses_classes_even_without_the_scan(tmp_path: Path) -> None:
    import io

    marker = tmp_path / "ran"
    content = pickle.dumps(Runs(os.system, f"touch {marker}"))
    with pytest.raises(pickle.UnpicklingError, match="system is refused"):
        safe_values._Unpickler(io.BytesIO(content)).load()
    with pytest.raises(pickle.UnpicklingError, match="persistent id"):
        safe_values._Unpickler(io.BytesIO(b"Pid\n.")).load()
    assert not marker.exists()


def test_no_allowed_opcode_can_call() -> None:
    calling = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"}
    calling |= {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
    names = {opcode.name for opcode in pickletools.opcodes}
    assert calling <= names
    assert names >= safe_values._ALLOWED
    assert not calling & safe_values._ALLOWED


def test_a_memo_of_two_thousand_million_entries_is_not_allocated(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(ReadError, match="damaged pickle: memo 2147483647 at byte 3"):
        flight_recorder.read(tmp_path / "x")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]q\x00h\x05.",  # a memo that was never set
        b"\x80\x02(lp0\n.",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x09N.",
        b"\x80\x02X\xff\xff\xff\x7fab.",
        b"\x80\x02}(]K\x01u.",  # a list as a key
        pickle.dumps({"entries": ["\ud800"]}),  # half of a surrogate pair
    ],
    ids=range(8),
)
def test_damaged_pickles_are_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ReadError) as error:
        flight_recorder.read(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_a_pickle_that_grows_without_end_is_bounded(tmp_path: Path) -> None:
    value: Any = [0]
    for _ in range(60):
        value = [value, value]  # 2**60 parts written out, 60 in the file
    (tmp_path / "x").write_bytes(pickle.dumps({"pg_config": {}, "entries": value}))
    assert (tmp_path / "x").stat().st_size < 1000
    with pytest.raises(LimitError, match="more than 100,000 values"):
        safe_values.load_plain_values((tmp_path / "x").read_bytes(), "x", max_values=100_000)
    (tmp_path / "x").write_bytes(pickle.dumps({"entries": [1 << 100_000]}))
    with pytest.raises(LimitError, match="digits"):
        flight_recorder.read(tmp_path / "x")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read(value: Any, protocol: int) -> None:
    assert safe_values.load_plain_values(pickle.dumps(value, protocol), "x") == value


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.data())
def test_any_mutation_is_read_or_refused(
    own: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([JSON, PICKLE]))
    content = bytearray((own / "flight_recorder" / name).read_bytes())
    rng = random.Random(data.draw(st.integers()))
    for _ in range(rng.choice([1, 3, 30])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(content)
    try:
        flight_recorder.read(path)
    except EtloomError as error:
        assert "\n" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "text", -1, 2**70, [], {}, [[]], True, 0.5])
def test_any_field_of_an_entry_may_be_anything(own: Path, value: Any, tmp_path: Path) -> None:
    dump = json.loads((own / "flight_recorder" / JSON).read_text())
    for key in dump["entries"][0]:
        broken = json.loads(json.dumps(dump))
        broken["entries"][0][key] = value
        (tmp_path / "x.json").write_text(json.dumps(broken))
        trace = flight_recorder.read(tmp_path / "x.json")
        lost = trace.stats.filter(pl.col("name") == "read.damaged_entry")["count"].sum()
        assert trace.comms.height + lost == 5
    for key in ("version", "pg_config", "pg_status"):
        (tmp_path / "x.json").write_text(json.dumps({**dump, key: value}))
        assert flight_recorder.read(tmp_path / "x.json").comms.height == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"input_sizes": [[-(2**31), 2**31]]},
        {"input_sizes": [[2**40, 2**21]], "input_dtypes": ["Double"]},
        {"time_discovered_started_ns": -(2**62), "time_discovered_completed_ns": 2**63 - 1},
        {"profiling_name": "nccl:send 0->" + "9" * 5000, "is_p2p": True},
        {"thread_id": "9" * 5000},
    ],
)
def test_numbers_beyond_64_bits_are_unknown(own: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    dump = json.loads((own / "flight_recorder" / JSON).read_text())
    dump["entries"][0] |= fields
    (tmp_path / "x.json").write_text(json.dumps(dump))
    comms = flight_recorder.read(tmp_path / "x.json").comms
    assert comms.height == 5
    assert comms["bytes"].drop_nulls().is_between(0, 2**62).all()


@pytest.mark.slow
def test_all_complete_entries_of_truncated_json_are_read(own: Path, tmp_path: Path) -> None:
    text = (own / "flight_recorder" / JSON).read_text()
    entries = json.loads(text)["entries"]
    decoder, at, ends = json.JSONDecoder(), text.index("[", text.index('"entries"')) + 1, []
    for _ in entries:
        _, at = decoder.raw_decode(text, text.index("{", at))
        ends.append(at)
    path = tmp_path / "x.json"
    positions = range(text.index('"entries"') + 12, len(text.rstrip()))
    for cut in random.Random(1).choices(positions, k=examples(2000)):
        path.write_text(text[:cut])
        trace = flight_recorder.read(path)
        assert trace.comms.height == sum(end <= cut for end in ends), cut
        assert trace.stats.filter(pl.col("severity") == "data_loss")["name"].to_list() == ["read.truncated"]


def test_a_damaged_entry_costs_itself(own: Path, tmp_path: Path) -> None:
    text = (own / "flight_recorder" / JSON).read_text()
    path = tmp_path / "x.json"
    path.write_text(text.replace('"nccl:_all_gather_base"', '"nccl:"all_gather"'))
    trace = flight_recorder.read(path)
    whole = flight_recorder.read(own / "flight_recorder" / JSON)
    assert trace.comms.height == whole.comms.height - 1
    assert trace.table("groups").equals(whole.table("groups"))
    assert "read.truncated" in trace.stats["name"].to_list()


def test_a_damaged_dump_has_no_lone_surrogates(own: Path, tmp_path: Path) -> None:
    text = (own / "flight_recorder" / JSON).read_text()
    path = tmp_path / "x.json"
    path.write_text(text.replace("nccl:_all_gather_base", "nccl:\\ud800all_gather").rstrip()[:-1])
    trace = flight_recorder.read(path)
    assert "read.truncated" in trace.stats["name"].to_list()
    assert trace.events["name"].cast(pl.String).str.contains("nccl:\ufffdall_gather").any()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"entries": 3}', "[" * 100_000], ids=range(6))
def test_a_file_that_is_not_a_dump_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ReadError) as error:
        flight_recorder.read(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_a_dump_without_collectives(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(
        '{"version": "2.10", "pg_config": {"0": {"name": "0", "ranks": "[]"}}, "entries": []}'
    )
    trace = flight_recorder.read(tmp_path / "x")
    assert texts(trace.groups).select("pg_name", "ranks", "size").rows() == [("0", None, None)]


REAL = """
import sys, torch, torch.distributed as dist, torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.ones(4, 3))
dist.broadcast(torch.ones(5, dtype=torch.int64), 0)
open(sys.argv[1], "wb").write(c10d._dump_fr_trace())
open(sys.argv[2], "wb").write(c10d._dump_fr_trace_json())
"""


@pytest.mark.torch
@pytest.mark.slow
def test_dumps_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    paths = [tmp_path / "dump", tmp_path / "dump.json"]
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", REAL, *map(str, paths)], check=True, env=env, timeout=400)
    for path in paths:
        assert flight_recorder.sniff(path.read_bytes())
        trace = flight_recorder.read(path)
        assert texts(trace.comms).select("collective", "dtype", "in_nelems", "bytes", "seq").rows() == [
            ("all_reduce", "Float", 12, 48, 1),
            ("broadcast", "Long", 5, 40, 2),
        ]
        assert trace.events["ts"].is_sorted()
        assert trace.events["ts"][0] > 1_600_000_000_000_000_000


def test_dumps_do_not_list_devices(own: Path) -> None:
    assert etloom.info(own / "flight_recorder" / JSON)["devices"] == {}
