"""Kernel times on another device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.analyses.flops.call_shapes import parse_calls
from etloom.analyses.flops.measured_tables import MeasuredRatios
from etloom.analyses.flops.peaks import lookup_peaks
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Job
from etloom.graphs.graph import EdgeKind
from etloom.simulator.devices import change_collectives, change_device
from etloom.simulator.devices.kernel_ratios import compute_kernel_ratios, list_kernel_costs, scale_by_limits
from etloom.simulator.recorded_run import describe_recording
from etloom.simulator.scenario import Basis, Communications
from support.small_traces import matrix_product

FLASH = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return matrix_product(100).kernel("gemm", 110, 200, 300).operator("aten::mm", 600, 50).open(tmp_path)


def test_devices_are_named_like_the_table_or_in_part() -> None:
    assert lookup_peaks("H100 PCIe").name == "H100 PCIe"
    assert lookup_peaks("h200").name == "H200 SXM"
    for name in ("abacus", "h1000", "NVIDIA RTX A1000", "MI2100"):
        with pytest.raises(UnknownName, match="unknown device"):
            lookup_peaks(name)


def test_only_time_explained_by_the_limit_becomes_shorter() -> None:
    time, old = pl.Series([100.0, 1000.0, 100.0, 100.0]), pl.Series([75.0, 75.0, 50.0, 0.0])
    ratios = scale_by_limits(time, old, pl.Series([37.5, 37.5, 100.0, 1.0]))
    # At full efficiency half the limit is half the time; far from it little changes; slower devices keep efficiency.
    assert ratios[:3].tolist() == pytest.approx([0.5, 0.95, 2.0])
    assert np.isnan(ratios[3])
    others = scale_by_limits(time, old, pl.Series([150.0, 150.0, 100.0, 1.0]), keeps_efficiency=False)
    assert others[:3].tolist() == pytest.approx([2.0, 1.1, 1 + 2 / 3])


def test_kernels_change_and_the_host_does_not(job: Job) -> None:
    scenario = describe_recording(job)
    changed = change_device(scenario, "a100 80GB SXM")
    kernels = scenario.graph.kind == EdgeKind.KERNEL
    assert (changed.lag[~kernels] == scenario.lag[~kernels]).all()
    assert set(changed.basis[kernels]) <= {Basis.TABLE, Basis.ROOFLINE}
    if set(changed.basis[kernels]) == {Basis.ROOFLINE}:
        assert changed.lag[kernels] / scenario.lag[kernels] == pytest.approx([989.4 / 312], rel=0.01)
    assert "H100 SXM on A100 80GB SXM" in changed.notes[-1]
    same = change_device(scenario, "H100 SXM")
    assert (same.lag == scenario.lag).all()
    assert changed.deviations[Basis.ROOFLINE] > same.deviations[Basis.ROOFLINE]


def test_predict_takes_a_device(job: Job) -> None:
    prediction = etloom.predict(job, device="a100 80GB SXM")
    row = prediction.table.filter(pl.col("scope") == "job").row(0, named=True)
    assert row["lower_bound_ns"] < row["predicted_ns"] < row["upper_bound_ns"]
    assert row["predicted_ns"] > 1.5 * row["before_ns"]


@pytest.mark.slow
def test_another_vendor_is_wide_and_another_kind_of_device_refused(data: Path) -> None:
    """TraceLens recorded the same model on both: 49.7 ms on an H100, 47.1 ms on an MI300X."""
    for name, device, measured_ms in (("h100", "MI300X", 47.14), ("mi300", "h100", 49.73)):
        prediction = etloom.predict(data / "tracelens" / f"{name}_qwen.json.gz", device=device)
        row = prediction.table.row(0, named=True)
        assert row["lower_bound_ns"] < measured_ms * 1e6 < row["upper_bound_ns"]
        assert row["upper_bound_ns"] > 1.65 * row["predicted_ns"]
        assert prediction.reasons[-1] == (
            "interval not calibrated: another device, another vendor, another host"
        )
        assert "ms (not calibrated)" in repr(prediction)
    for device in ("Gaudi 3", "TPU v5p", "Ascend 910"):
        with pytest.raises(
            EtloomError, match=r"no measurement relates kernels of the MI300X \(AMD\) to those of"
        ):
            etloom.predict(data / "tracelens" / "mi300_qwen.json.gz", device=device)


def test_a_run_without_kernels_is_refused(data: Path) -> None:
    scenario = describe_recording(etloom.open(data / "cpu" / "ddp_2"))
    with pytest.raises(EtloomError, match="the run has no kernels"):
        change_device(scenario, "h100")


def write_table(folder: Path, system: str, name: str, rows: list[dict[str, object]]) -> None:
    path = folder / system / name / "vllm" / "0.1.0" / f"{name}.parquet"
    path.parent.mkdir(parents=True)
    pl.DataFrame([{"framework": "VLLM", "version": "0.1.0", **row} for row in rows]).write_parquet(path)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables by which a B200 takes 0.4 of an H100's time for products, 0.5 for attention, 0.6 for all-reduces."""
    folder = tmp_path_factory.mktemp("tables")
    sizes = (256, 1024, 4096)
    for system, (products, attention, reduces) in {
        "h100_sxm": (1.0, 1.0, 1.0),
        "b200_sxm": (0.4, 0.5, 0.6),
    }.items():
        gemm = [{"gemm_dtype": "bfloat16", "m": m, "n": n, "k": 4096} for m in sizes for n in sizes]
        rows = [{**row, "latency": products * row["m"] * row["n"] / 1e6} for row in gemm]
        write_table(folder, system, "gemm_perf", rows)
        heads = {"num_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "step": 0}
        context = [{"attn_dtype": "bfloat16", "batch_size": 2, "isl": size, **heads} for size in sizes]
        rows = [{**row, "latency": attention * row["isl"] / 1e3} for row in context]
        write_table(folder, system, "context_attention_perf", rows)
        one_query = [{**row, "isl": 1, "step": row["isl"] - 1, "latency": attention / 2} for row in context]
        write_table(folder, system, "generation_attention_perf", one_query)
        nccl = [
            {"op_name": "all_reduce", "num_gpus": n, "message_size": 1 << s}
            for n in (2, 4, 8)
            for s in range(10, 28)
        ]
        write_table(
            folder, system, "nccl_perf", [{**row, "latency": reduces * row["message_size"]} for row in nccl]
        )
    return folder


def test_measured_tables_give_ratios_near_measured_shapes(tables: Path) -> None:
    products = MeasuredRatios.load("gemm", "H100 SXM", "B200", tables)
    assert products is not None
    shapes = np.array([[1024.0, 1024, 4096], [1000, 4000, 4096], [1, 1, 64], [np.nan] * 3])
    ratios = products.compute_ratios(shapes, ["bf16"] * 4)
    assert ratios[:2].tolist() == pytest.approx([0.4, 0.4]) and np.isnan(ratios[2:]).all()
    assert np.isnan(products.compute_ratios(shapes[:1], ["fp8"])).all()
    assert MeasuredRatios.load("gemm", "H100 SXM", "MI300X", tables) is None
    assert MeasuredRatios.load("moe", "H100 SXM", "B200", tables) is None


def parse(name: str, dims: str, family: str) -> list[float] | None:
    calls = pl.DataFrame({"name": [name], "dims": [dims], "dtype": ["c10::BFloat16"]})
    shapes, precisions = parse_calls(calls, family)
    assert precisions == ["bf16"]
    return None if np.isnan(shapes).any() else shapes[0].tolist()


@pytest.mark.parametrize(
    ("name", "dims", "family", "shape"),
    [
        ("aten::mm", "[[2, 3], [3, 5]]", "gemm", [2, 5, 3]),
        ("aten::addmm", "[[5], [2, 3], [3, 5]]", "gemm", [2, 5, 3]),
        ("aten::linear", "[[7, 2, 3], [5, 3]]", "gemm", [14, 5, 3]),
        ("aten::add", "[[2], [2]]", "gemm", None),
        ("aten::mm", "[[2], []]", "gemm", None),
        (FLASH, "[[2, 16, 512, 128], [2, 4, 512, 128]]", "context_attention", [2, 512, 512, 16, 4, 128]),
        (FLASH, "[[2, 16, 1, 128], [2, 4, 300, 128]]", "generation_attention", [2, 300, 16, 4, 128]),
        (FLASH, "[[2, 16, 1, 128], [2, 4, 300, 128]]", "context_attention", None),
        ("aten::_flash_attention_forward", "[[2, 512, 16, 128], [2, 600, 4, 128]]", "context_attention",
         [2, 512, 600, 16, 4, 128]),
        ("aten::_flash_attention_forward", "[[900, 16, 128], [900, 4, 128]]", "context_attention", None),
    ],
)  # fmt: skip
def test_sizes_are_read_from_calls(name: str, dims: str, family: str, shape: list[float] | None) -> None:
    assert parse(name, dims, family) == shape


def test_attention_takes_measured_ratios(tables: Path) -> None:
    measured = MeasuredRatios.load("context_attention", "H100 SXM", "B200", tables)
    assert measured is not None
    ratios = measured.compute_ratios(np.array([[2.0, 2048, 2048, 16, 4, 128]]), ["bf16"])
    assert ratios.tolist() == pytest.approx([0.5])


def test_collectives_of_a_node_take_measured_ratios(job: Job, tables: Path) -> None:
    scenario = describe_recording(job)
    instances = pl.DataFrame(
        [
            {
                "instance": i,
                "collective": name,
                "bytes": 1 << 20,
                "group_size": 2,
                "ranks": ranks,
                "where": "device",
            }
            for i, (name, ranks) in enumerate(
                (("all_reduce", [0, 1]), ("all_reduce", [7, 8]), ("broadcast", [0, 1]))
            )
        ]
    )
    edges = np.flatnonzero(scenario.graph.kind == EdgeKind.KERNEL)[:1].tolist()
    parts = pl.DataFrame([{"instance": i, "own_edge": edges[0], "transfer_edge": -1} for i in (0, 1, 2)])
    within = scenario.replace(communications=Communications(instances[:1], parts))
    changed = change_collectives(within, "b200", tables=tables)
    assert changed.lag[edges] == pytest.approx(0.6 * scenario.lag[edges], abs=1)
    assert changed.basis[edges[0]] == Basis.TABLE
    across = scenario.replace(communications=Communications(instances[1:], parts))
    assert change_collectives(across, "b200", tables=tables) is across


def test_unknown_costs_are_guessed_by_family(job: Job) -> None:
    trace = job[0]
    bare = trace.replace(None, arguments=trace.arguments.head(0))
    ratios = compute_kernel_ratios(list_kernel_costs(bare), lookup_peaks("H100 SXM"), lookup_peaks("B200"))
    assert set(ratios["basis"]) == {Basis.GUESSED} and (ratios["ratio"] < 1).all()
