"""XLA's profiles: sums equal those of protobuf's own library, devices are ranks, and damage is counted."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Job, Trace
from support.xspaces import PlaneBuilder, XSpace, sum_kernels, write_gpus, write_space

EPOCH = 1_800_000_000_000_000_000
SAMPLES = {
    # By tests/support/xspaces.py: kernels, their names on all devices, ns
    "jax_conv_mi300": (235, 41, 28_137_077),
    "jax_te_attention": (150, 19, 12_133_585),
}


def open_ranks(path: Path) -> Job:
    return etloom.open(path, use_cache=False)


def counts(trace: Trace) -> dict[str, int]:
    return dict(trace.stats.select("name", "count").iter_rows())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_kernels_equal_the_sums_of_protobuf(data: Path, name: str) -> None:
    path = data / "xplane" / f"{name}.xplane.pb"
    expected = {key: (count, ps // 1000) for key, (count, ps) in sum_kernels(path).items()}
    content = etloom.read(path)
    job = content if isinstance(content, Job) else Job({0: content})
    kernels = job.events.filter(pl.col("cat").cast(pl.String) == "kernel")
    by_name = kernels.group_by("device", pl.col("name").cast(pl.String)).agg(pl.len(), pl.col("dur").sum())
    sums = {(f"/device:GPU:{device}", kernel): (n, ns) for device, kernel, n, ns in by_name.iter_rows()}
    assert sums == expected
    assert (kernels.height, len(sums), kernels["dur"].sum()) == SAMPLES[name]
    assert not job.events["ts"].null_count()
    assert job.events["ts"].min() > 1_700_000_000_000_000_000
    calls = job.events.filter(pl.col("cat").cast(pl.String) == "cuda_runtime")
    launched = kernels.join(calls, on=["rank", "correlation"], how="semi")
    assert launched.height == kernels.height


@pytest.mark.slow
def test_operations_have_the_time_of_their_kernels(data: Path) -> None:
    job = open_ranks(data / "xplane" / "jax_te_attention.xplane.pb")
    table = etloom.analyze(job[0], "xla-ops", top=1000)
    assert table["total_ns"].sum() == SAMPLES["jax_te_attention"][2]
    gemm = table.row(by_predicate=pl.col("operation") == "gemm_fusion_dot", named=True)
    # Five products of (4096, 2048) and (2048, 6144) in bfloat16, from the program in the file.
    assert (gemm["program"], gemm["count"], gemm["flops"]) == ("jit_loss_fn", 5, 5 * 2 * 4096 * 2048 * 6144)
    assert gemm["framework_op"] == "jit(loss_fn)/jvp(bsd,de->bse)/dot_general"


def make_tpu(folder: Path, steps_on_host: bool = False) -> Path:
    space = XSpace(hostnames=["worker"])
    core = PlaneBuilder(space, "/device:TPU:0")
    core.describe(
        "%fusion.1 = f32[8,8] fusion(...)",
        "fusion.1",
        hlo_category="convolution fusion",
        flops=1000,
        bytes_accessed=64,
    )
    for step in (0, 1):
        at = step * 1000
        core.add("Steps", str(step + 7), at, 900)
        core.add("XLA Modules", "jit_train(1)", at, 900)
        core.add("XLA Ops", "while.2", at, 600)
        core.add("XLA Ops", "%fusion.1 = f32[8,8] fusion(...)", at, 250)
        core.add("XLA Ops", "%fusion.1 = f32[8,8] fusion(...)", at + 300, 250)
        core.add("XLA Ops", "all-reduce.3", at + 700, 100)
        core.add("Async XLA Ops", "all-gather-start.1", at + 100, 500)
        core.add("Async XLA Ops", "copy-start.1", at + 100, 50)
    host = PlaneBuilder(space, "/host:CPU")
    host.add("python", "$train.py:3 main", 0, 3000)
    if steps_on_host:
        host.add("python", "train", 10, 900, step_num=3)
    PlaneBuilder(space, "Task Environment").set(profile_start_time=EPOCH)
    return write_space(space, folder)


def test_operations_of_a_tpu_core(tmp_path: Path) -> None:
    trace = open_ranks(make_tpu(tmp_path))[0]
    names = trace.events.group_by(pl.col("cat").cast(pl.String)).agg(
        pl.col("name").cast(pl.String).unique().sort()
    )
    by_category = dict(names.iter_rows())
    assert by_category["kernel"] == ["all-gather-start.1", "all-reduce.3", "copy-start.1", "fusion.1"]
    assert (by_category["xla_region"], by_category["xla_module"]) == (["while.2"], ["jit_train(1)"])
    assert counts(trace)["read.xplane_enclosing_ops"] == 2
    assert trace.events["ts"].min() == EPOCH
    fusion = etloom.analyze(trace, "xla-ops").row(by_predicate=pl.col("operation") == "fusion.1", named=True)
    assert (fusion["category"], fusion["count"], fusion["total_ns"]) == ("convolution fusion", 4, 1000)
    assert (fusion["flops"], fusion["bytes"]) == (4000.0, 256.0)
    assert fusion["tflops_per_s"] == pytest.approx(0.004)
    breakdown = etloom.analyze(trace, "kernel-breakdown")
    kinds = dict(breakdown.select("name", pl.col("kind").cast(pl.String)).iter_rows())
    assert kinds == {
        "fusion.1": "computation",
        "all-reduce.3": "communication",
        "all-gather-start.1": "communication",
        "copy-start.1": "memory",
    }


def test_steps_of_a_tpu_core(tmp_path: Path) -> None:
    trace = open_ranks(make_tpu(tmp_path))[0]
    work = trace.events.filter(pl.col("cat").cast(pl.String) == "kernel")
    assert dict(work["step"].value_counts().iter_rows()) == {7: 5, 8: 5}
    assert etloom.analyze(trace, "steps")["step"].to_list() == [7, 8]


def test_steps_of_the_host_come_first(tmp_path: Path) -> None:
    trace = open_ranks(make_tpu(tmp_path, steps_on_host=True))[0]
    assert etloom.analyze(trace, "steps")["step"].to_list() == [3]


def test_each_device_is_a_rank(tmp_path: Path) -> None:
    job = open_ranks(write_gpus(tmp_path))
    assert job.ranks == [0, 1]
    for rank, trace in job.items():
        work = trace.events.filter(
            pl.col("device").is_not_null() & (pl.col("cat").cast(pl.String) != "xla_op")
        )
        assert set(work["device"]) == {rank}
        assert work.height == 61
        kernels = work.filter(pl.col("cat").cast(pl.String) == "kernel")
        assert (kernels["step"].unique().to_list(), kernels["dur"].sum()) == ([5], 60 * 5)  # from 4.5 to 9
        facts = trace.kernels.drop_nulls("registers").row(0, named=True)
        shape = [facts[f"{kind}_{axis}"] for kind in ("grid", "block") for axis in "xyz"]
        assert (shape, facts["shared_mem"], facts["occupancy"]) == ([2, 3, 1, 64, 1, 1], 24, 50)
        assert trace.kernels["bytes"].drop_nulls().to_list() == [4096]


@pytest.mark.slow
def test_a_folder_of_several_hosts(tmp_path: Path) -> None:
    write_gpus(tmp_path, "a.xplane.pb")
    write_gpus(tmp_path, "b.xplane.pb")
    (tmp_path / "a.trace.json").write_text(
        json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}]})
    )
    job = open_ranks(tmp_path)
    assert job.ranks == [0, 1, 2, 3]
    assert [trace.rank for trace in job.values()] == [0, 1, 2, 3]
    (tmp_path / "b.xplane.pb").unlink()
    assert open_ranks(tmp_path).ranks == [0, 1]


def test_values_of_every_type(tmp_path: Path) -> None:
    space = XSpace(warnings=["events were dropped"])
    plane = PlaneBuilder(space, "/host:CPU")
    event = plane.add("python", "op", 0, 1, text='a "b"\n', real=0.5, integer=-3)
    event.stats.add(metadata_id=plane._number_stat("unsigned"), uint64_value=(1 << 64) - 1)
    event.stats.add(metadata_id=plane._number_stat("reference"), ref_value=plane._number_stat("a name"))
    event.stats.add(metadata_id=plane._number_stat("program"), bytes_value=b"\xff")
    plane.add("python", "backwards", 5, -2)
    plane.plane.lines[0].events.add(metadata_id=1, num_occurrences=9)
    plane.plane.lines[0].events.add(metadata_id=99, offset_ps=1)
    PlaneBuilder(space, "/device:CUSTOM:Other").add("line", "x", 0, 1)
    trace = open_ranks(write_space(space, tmp_path))[0]
    args = json.loads(trace.events.filter(pl.col("name").cast(pl.String) == "op")["args"][0])
    assert args == {
        "text": 'a "b"\n', "real": 0.5, "integer": -3, "unsigned": (1 << 64) - 1, "reference": "a name"
    }  # fmt: skip
    expected = {
        **dict.fromkeys(("read.negative_dur", "read.xplane_no_time", "read.xplane_no_name"), 1),
        **dict.fromkeys(("read.xplane_plane_not_read", "read.xplane_problem"), 1),
    }
    assert {name: counts(trace).get(name) for name in expected} == expected


def test_a_value_of_an_event_replaces_that_of_its_name_for_this_event_only(tmp_path: Path) -> None:
    space = XSpace()
    core = PlaneBuilder(space, "/device:TPU:0")
    core.describe("fusion.1", flops=1000, bytes_accessed=64)
    core.add("XLA Ops", "fusion.1", 0, 10, flops=7)
    core.add("XLA Ops", "fusion.1", 20, 10)
    trace = open_ranks(write_space(space, tmp_path))[0]
    args = [json.loads(text) for text in trace.events.sort("ts")["args"]]
    assert [(entry["flops"], entry["bytes_accessed"]) for entry in args] == [(7, 64), (1000, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.999])
def test_a_truncated_file_is_read_to_its_end(data: Path, tmp_path: Path, share: float) -> None:
    whole = data / "xplane" / "jax_te_attention.xplane.pb"
    content = whole.read_bytes()
    path = tmp_path / "cut.xplane.pb"
    path.write_bytes(content[: int(len(content) * share)])
    trace, complete = etloom.read(path), etloom.read(whole)
    assert isinstance(trace, Trace) and isinstance(complete, Trace)
    assert counts(trace)["read.truncated"] == 1
    kernels = [
        part.events.filter(pl.col("cat").cast(pl.String) == "kernel")
        .select("name", "dur", "correlation")
        .rows()
        for part in (trace, complete)
    ]
    # Names of a plane follow its events.
    assert kernels[0] == kernels[1]
    assert 150 < trace.events.height <= complete.events.height


@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytes_end_in_an_answer_or_one_line(tmp_path: Path, seed: int) -> None:
    import random

    generator = random.Random(seed)
    content = bytearray(write_gpus(tmp_path).read_bytes())
    for _ in range(20):
        content[generator.randrange(len(content))] = generator.randrange(256)
    path = tmp_path / "damaged.xplane.pb"
    path.write_bytes(content)
    try:
        etloom.read(path, "xplane")
    except EtloomError as error:
        assert "\n" not in str(error)


def test_a_file_without_events_names_a_remedy(tmp_path: Path) -> None:
    space = XSpace()
    PlaneBuilder(space, "/host:metadata")
    with pytest.raises(ReadError, match="block_until_ready"):
        etloom.read(write_space(space, tmp_path))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=9))
def test_an_operation_that_contains_another_one_is_a_region(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]
) -> None:
    space = XSpace(hostnames=["worker"])
    core = PlaneBuilder(space, "/device:TPU:0")
    for at, duration in rows:
        core.add("XLA Ops", "op", at, duration)
    PlaneBuilder(space, "Task Environment").set(profile_start_time=EPOCH)
    trace = open_ranks(write_space(space, tmp_path_factory.mktemp("generated")))[0]
    events = sorted(
        rows, key=lambda row: (row[0], -row[1])
    )  # of two equal ones the first contains the second
    regions = [
        (start, duration)
        for place, (start, duration) in enumerate(events)
        if any(other < start + duration >= other + length for other, length in events[place + 1 :])
    ]
    marked = trace.events.filter(pl.col("cat").cast(pl.String) == "xla_region")
    assert sorted((ts - EPOCH, dur) for ts, dur in marked.select("ts", "dur").iter_rows()) == sorted(regions)


def test_registers_out_of_uninitialised_memory_are_unknown_and_no_loss(tmp_path: Path) -> None:
    """XLA on ROCm states such numbers."""
    space = XSpace()
    gpu = PlaneBuilder(space, "/device:GPU:0")
    for start, registers in ((0, 2191500840), (10, 32)):
        gpu.add(
            "Stream #1(Compute)",
            "fusion",
            start,
            5,
            kernel_details=f"regs:{registers} grid:2,1,1 block:64,1,1",
        )
    trace = open_ranks(write_space(space, tmp_path))[0]
    assert trace.kernels["registers"].to_list() == [None, 32]
    assert "read.out_of_range" not in counts(trace)
