"""pprof profiles, decoded by protobuf's own library: the samples are those of the folded stacks."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import etloom
from etloom.cli import app
from etloom.core.errors import EtloomError
from fuzzing.seeds import SEEDS
from support.protobuf_messages import declare

Profile = declare(
    "pprof_test",
    {
        "Profile": "sample_type=1*ValueType sample=2*Sample location=4*Location function=5*Function "
        "string_table=6*string time_nanos=9:int64 duration_nanos=10:int64",
        "ValueType": "type=1:int64 unit=2:int64",
        "Sample": "location_id=1*uint64 value=2*int64 label=3*Label",
        "Label": "key=1:int64 str=2:int64 num=3:int64",
        "Location": "id=1:uint64 line=4*Line",
        "Line": "function_id=1:uint64 line=2:int64",
        "Function": "id=1:uint64 name=2:int64",
    },
    "Profile",
)
"""The fields of profile.proto of google/pprof."""


def decode(path: Path) -> tuple[list[tuple[str, str]], Counter[tuple[int, str, int]]]:
    """Return the types of the values, and the sum of each value by rank, stack (outermost first) and its place."""
    profile = Profile.FromString(gzip.decompress(path.read_bytes()))
    texts = profile.string_table
    assert texts[0] == "" and len(set(texts)) == len(texts)
    functions = {function.id: texts[function.name] for function in profile.function}
    places = {location.id: functions[location.line[0].function_id] for location in profile.location}
    sums: Counter[tuple[int, str, int]] = Counter()
    for sample in profile.sample:
        assert all(texts[label.key] == "rank" for label in sample.label)
        rank = int(texts[sample.label[0].str]) if sample.label else 0
        for place, value in enumerate(sample.value):
            sums[rank, ";".join(places[number] for number in reversed(sample.location_id)), place] += value
    return [(texts[kind.type], texts[kind.unit]) for kind in profile.sample_type], +sums


def test_samples_are_the_folded_stacks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    SEEDS["kineto"].write(tmp_path / "run")
    job = etloom.open(tmp_path / "run", use_cache=False)
    etloom.export(job, tmp_path / "run.pb.gz")
    types, sums = decode(tmp_path / "run.pb.gz")
    assert types == [("host", "nanoseconds"), ("device", "nanoseconds")]
    expected: Counter[tuple[int, str, int]] = Counter()
    for place, time in enumerate(("host", "device")):
        for rank in job.ranks:
            etloom.export(job[rank], tmp_path / "run.folded", time=time)
            for line in (tmp_path / "run.folded").read_text().splitlines():
                stack, _, value = line.rpartition(" ")
                expected[rank, stack, place] += int(value)
    assert sums == expected and {rank for rank, _, _ in sums} == {0, 1}
    assert {place for _, _, place in sums} == {0, 1}


def test_on_the_command_line(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.pprof"
    result = CliRunner().invoke(app, ["export", str(data / "simple_add"), "--to", "pprof", "--out", str(out)])
    assert result.exit_code == 0, result.output
    profile = Profile.FromString(gzip.decompress(out.read_bytes()))
    events = etloom.open(data / "simple_add", use_cache=False)[0].events
    assert profile.duration_nanos == (events["ts"] + events["dur"].fill_null(0)).max() - events["ts"].min()
    assert len(profile.sample) > 10


def test_a_run_without_stacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EtloomError, match="no events of threads"):
        etloom.export(etloom.link(etloom.Trace({}, {})), tmp_path / "x.pprof")
