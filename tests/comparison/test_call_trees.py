"""Call trees of two runs: what ran instead of what, and that every activity is counted once."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.analyses.flops.counting import count_calls
from etloom.comparison.call_trees import Node, _align, compare_trees
from etloom.core.trace import Job, Trace
from support.small_traces import OperatorTraceBuilder


@pytest.mark.slow
def test_what_replaces_what_is_stated_at_the_lowest_common_operator(data: Path) -> None:
    cases = data / "cases" / "turn3"
    if not (cases / "attention_fused.json").exists():
        pytest.skip("needs the cases of turn 3")
    runs = [etloom.open(cases / f"attention_{name}.json", use_cache=False) for name in ("fused", "unfused")]
    (row,) = etloom.diff(*runs).table("tree").iter_rows(named=True)
    assert (row["caller"], row["in"]) == ("my_attention", "both")
    assert (row["before"], row["after"]) == (
        "my::flash_fwd 350.0 µs",
        "aten::bmm 520.0 µs, aten::_softmax 260.0 µs",
    )
    assert (row["before_ns"], row["after_ns"], row["change_ns"]) == (350_000, 780_000, 430_000)


@pytest.mark.slow
def test_a_pair_of_devices_adds_up(data: Path) -> None:
    pair = data / "tracelens"
    if not pair.exists():
        pytest.skip("needs the pair of devices")
    runs = [etloom.open(pair / f"{name}_qwen.json.gz", use_cache=False) for name in ("h100", "mi300")]
    difference = etloom.diff(*runs)
    tree, kernels = difference.table("tree"), difference.table("kernel")
    for name in ("before_ns", "after_ns", "change_ns"):
        assert tree[name].sum() == pytest.approx(kernels[name].sum(), abs=tree.height + kernels.height)
    attention = tree.filter(pl.col("caller").str.ends_with("aten::_flash_attention_forward")).row(
        0, named=True
    )
    assert "flash_fwd_kernel" in attention["before"] and "attn_fwd" in attention["after"]
    assert "Qwen2DecoderLayer" in attention["caller"], "layers are one module"
    for side, run in zip(("before", "after"), runs, strict=True):
        flops = count_calls(run[0]).filter("known", pl.col("row") >= 0)["flops"].sum()
        assert compare_trees(*runs, stepped=False)[f"{side}_gflop"].sum() == pytest.approx(flops / 1e9)
    products = tree.filter(
        pl.col("caller").str.ends_with("Qwen2MLP > Linear > aten::linear > aten::matmul > aten::mm")
    )
    assert products["before_gflop"].item() == pytest.approx(products["after_gflop"].item(), rel=1e-9)
    assert products.select("before_roofline_pct", "after_roofline_pct").row(0) > (20, 20)


@pytest.mark.slow
def test_ranks_without_shapes_do_not_lower_the_flops(data: Path) -> None:
    pair = data / "tracelens"
    if not pair.exists():
        pytest.skip("needs a trace with shapes")
    trace = etloom.open(pair / "h100_qwen.json.gz", use_cache=False)[0]
    without = Trace(
        {name: trace.table(name) for name in trace.table_names if name != "arguments"}, trace.meta
    )
    one, both = Job({0: trace}), Job({0: trace, 1: without})
    alone, mean = (compare_trees(job, job, stepped=False) for job in (one, both))
    assert mean["before_gflop"].sum() == pytest.approx(alone["before_gflop"].sum())
    assert mean["before_ns"].sum() == pytest.approx(alone["before_ns"].sum(), abs=mean.height)


def products(folder: Path, library: str, each: float) -> Job:
    made = OperatorTraceBuilder()
    made.operator("aten::linear", 0, 90).operator(f"{library}::mm", 10, 50).kernel(
        f"{library}_gemm", 20, 1000, each
    )
    made.kernel("fill", 70, 1000 + each, 5).kernel("lost", None, 2000, 7)
    folder.mkdir()
    return made.open(folder)


def test_own_kernels_and_callees_of_one_side_are_one_row(tmp_path: Path) -> None:
    table = etloom.diff(products(tmp_path / "a", "one", 40), products(tmp_path / "b", "two", 90)).table(
        "tree"
    )
    rows = {row["caller"]: row for row in table.iter_rows(named=True)}
    assert set(rows) == {"aten::linear", "(top)"}
    assert rows["aten::linear"]["before"] == "one::mm 40.00 µs, fill 5.000 µs"
    assert rows["aten::linear"]["after"] == "two::mm 90.00 µs, fill 5.000 µs"
    assert rows["(top)"]["before"] == rows["(top)"]["after"] == "lost 7.000 µs"


def test_runs_on_the_host_are_compared_by_exclusive_time(tmp_path: Path) -> None:
    runs = []
    for name, product in (("a", "aten::mm"), ("b", "aten::bmm")):
        (tmp_path / name).mkdir()
        made = OperatorTraceBuilder().operator("aten::linear", 0, 90).operator(product, 10, 50)
        runs.append(made.open(tmp_path / name))
    (row,) = etloom.diff(*runs).table("tree").iter_rows(named=True)
    assert (row["caller"], row["before"]) == ("aten::linear", "aten::mm 50.00 µs, aten::linear 40.00 µs")


def test_deep_calls_are_compared(tmp_path: Path) -> None:
    made = OperatorTraceBuilder()
    for depth in range(1500):
        made.operator(f"op{depth}", depth, 10_000 - 2 * depth)
    made.kernel("deepest", 5000, 20_000, 9)
    run = made.open(tmp_path)
    (row,) = etloom.diff(run, run).table("tree").iter_rows(named=True)
    assert row["caller"].count(" > ") == 1499


OWN = st.dictionaries(st.sampled_from("xyz"), st.integers(1, 9).map(float), min_size=1, max_size=2)
"""Without time a node would have no row for its costs."""
trees = st.recursive(
    st.builds(Node, OWN),
    lambda inner: st.builds(
        Node,
        OWN,
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(st.integers(0, 9).map(float), min_size=3, max_size=3),
    ),
    max_leaves=12,
)


@given(trees, trees)
def test_every_activity_is_in_one_row(first: Node, second: Node) -> None:
    rows = list(_align(first, second))
    for node, place in ((first, 3), (second, 7)):
        ns, (flops, *_) = node.sum_all()
        assert sum(row[place] for row in rows) == pytest.approx(ns)
        assert sum(row[place + 1] for row in rows) == pytest.approx(flops)
    assert len({row[0] for row in rows}) == len(rows), "one row per caller"


@given(trees)
def test_equal_trees_differ_nowhere(tree: Node) -> None:
    assert all(row[1] == row[2] and row[3:7] == row[7:] for row in _align(tree, tree))
