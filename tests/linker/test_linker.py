"""Linking of real recordings, against the figures of the peer where it is right."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom import formats
from etloom.core.errors import LinkError
from etloom.core.nesting import compute_exclusive_time
from etloom.core.trace import Trace
from etloom.formats.execution_trace.node_json import NodeTexts
from etloom.linker import link
from etloom.linker.quality import COLUMNS, is_in_scope, summarize_links

CPU = ("coll_4/0", "coll_4/3", "ddp_2/0", "ddp_2/1", "pp_4/1", "pp_4/3", "compile/0", "mt_bwd_allthreads/0")


def read(*files: Path) -> list[Trace]:
    traces = [formats.read(file) for file in files]
    return [trace for trace in traces if isinstance(trace, Trace)]


def of_rank(folder: Path, rank: int = 0) -> Trace:
    return link(*read(folder / f"torch_et_{rank}.json.gz", folder / f"kineto_trace_{rank}.json.gz"))


def stat(trace: Trace, name: str) -> int:
    return int(trace.stats.filter(pl.col("name") == f"link.{name}")["count"].sum())


def same_names(trace: Trace) -> bool:
    pairs = trace.links.join(trace.nodes.select(pl.col("id").alias("node"), "name"), on="node").join(
        trace.events.select(pl.col("id").alias("event"), pl.col("name").alias("other")), on="event"
    )
    return pairs.height == trace.links.height and bool((pairs["name"] == pairs["other"]).all())


@pytest.fixture(scope="module")
def nccl(data: Path) -> Trace:
    return of_rank(data / "nccl_ddp")


def test_nccl_ddp_pairs_gpu_activity_as_chakra_does_and_the_memsets_it_drops(
    nccl: Trace, golden: Path
) -> None:
    events = nccl.events
    work = (
        nccl.launches.join(
            events.select(pl.col("id").alias("device_event"), "cat", "name", "ts", "stream"),
            on="device_event",
        )
        .join(events.select(pl.col("id").alias("operator"), "rf_id"), on="operator")
        .with_columns(pl.col("name").cast(pl.String))
    )
    exact = pl.Decimal(25, 3)
    peer = pl.read_csv(golden / "chakra_link_gpu.csv.gz", schema_overrides={"ts_us": exact}).with_columns(
        (pl.col("ts_us") * 1000).cast(pl.Int64) + nccl.meta["base_ns"]
    )
    both = peer.join(work, left_on=["ts_us", "stream", "name"], right_on=["ts", "stream", "name"])
    assert peer.height == both.height == 3660
    assert (both["rf_id"] == both["parent_rf_id"]).all()
    assert work.filter(pl.col("cat") == "gpu_memset").height == 114
    assert work.height == 3660 + 114


def test_nccl_ddp_operators_have_the_times_of_the_peer(nccl: Trace, golden: Path) -> None:
    """Equal but for rounding: the peer's fault with a parent that starts with its child has no occasion here."""
    own = compute_exclusive_time(nccl.events, operators_only=True)
    ours = nccl.events.with_columns(own.alias("own")).filter(pl.col("rf_id") > 0)
    children = ours.group_by("parent").agg(pl.len().alias("children"))
    ours = ours.join(children, left_on="id", right_on="parent", how="left")
    both = pl.read_csv(golden / "chakra_link_host.csv.gz").join(ours, on="rf_id")
    assert both.height == 14_385
    others = ours.join(both.select("rf_id"), on="rf_id", how="anti")["name"].cast(pl.String)
    assert others.len() == 3 and others.str.starts_with("ProfilerStep#").all()  # no operators to the peer
    starts = ours.select(pl.col("id").alias("parent"), pl.col("ts").alias("above"))
    assert not (ours.join(starts, on="parent").select(pl.col("ts") == pl.col("above")).to_series()).any()
    inclusive = (both["dur"] - 1000 * both["inclusive_dur_us"]).abs()
    assert inclusive.max() < 0.001  # type: ignore[operator]
    # The peer adds in floating microseconds since 1970, whose last place is about 1 ns: one error a child.
    error = (both["own"] - 1000 * both["exclusive_dur_us"]).abs()
    assert (error <= 1 + both["children"].fill_null(0)).all()


def test_a_parent_that_starts_with_its_child_has_not_the_childs_time() -> None:
    rows = [(0, "aten::linear", 10), (0, "aten::addmm", 8), (1, "aten::t", 2)]
    events = pl.DataFrame(
        [{"id": at, "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}
         for at, (ts, name, dur) in enumerate(rows)]
    )  # fmt: skip
    trace = link(Trace({"events": events}))
    assert compute_exclusive_time(trace.events).to_list() == [2, 6, 2]  # the peer: 10, 6, 2


def test_nccl_ddp_hands_over_between_threads_as_the_peer(nccl: Trace, golden: Path) -> None:
    events = nccl.events
    rf_ids = dict(events.select("id", "rf_id").rows())
    above = dict(events.select("id", "parent").rows())
    ids = {rf: at for at, rf in rf_ids.items() if rf}
    lanes = dict(events.select("rf_id", "tid").rows())
    peer = pl.read_csv(golden / "chakra_link_host.csv.gz", infer_schema_length=None).drop_nulls(
        "inter_thread_dep_rf_id"
    )
    first: dict[tuple[int, int], int] = {}
    for rf_id, on in peer.select(
        "rf_id", pl.col("inter_thread_dep_rf_id").cast(pl.Int64, strict=False)
    ).rows():
        if on is not None and on >= 0:
            first.setdefault((lanes[rf_id], on), rf_id)
    ours = {
        rf_ids[event]: after
        for event, after in nccl.thread_dependencies.filter(pl.col("kind") == "thread")
        .select("event", "after")
        .rows()
    }
    assert len(first) == 6
    for (_, on), rf_id in first.items():
        # The peer names an operator inside the one that ended last.
        chain, at = [], ids[on]
        while at is not None:
            chain.append(at)
            at = above[at]
        assert ours[rf_id] in chain


@pytest.mark.parametrize("name", ["nccl_ddp", "cpu/ddp_2", "cpu/pp_4", "cpu/mt_bwd_allthreads"])
def test_backward_operators_follow_the_forward_ones_that_pytorch_drew(data: Path, name: str) -> None:
    trace = link(*read(data / name / "kineto_trace_0.json.gz"))
    ends = trace.events.select("id", "ts", "tid")
    ours = (
        trace.thread_dependencies.filter(pl.col("kind") == "fwd_bwd")
        .join(ends.rename({"id": "event"}), on="event")
        .join(ends.rename({"id": "after"}), on="after", suffix="_fwd")
    )
    flows = trace.flows.filter(pl.col("cat") == "fwdbwd")
    drawn = flows.filter(pl.col("ph") == "s").join(
        flows.filter(pl.col("ph") == "f"), on="flow", suffix="_bwd"
    )
    both = drawn.join(ours, left_on=["ts_bwd", "tid_bwd"], right_on=["ts", "tid"], suffix="_ours")
    assert drawn.height == both.height > 5
    assert (both["ts"] == both["ts_fwd"]).all() and (both["tid"] == both["tid_fwd"]).all()
    assert stat(trace, "backward_without_forward") == 0


def test_nccl_kernels_get_their_call_and_its_facts(nccl: Trace) -> None:
    kernels = nccl.events.filter(
        (pl.col("cat") == "kernel") & pl.col("name").cast(pl.String).str.starts_with("nccl")
    )
    rows = kernels.select(pl.col("id").alias("event"), "name").join(nccl.comms, on="event", how="left")
    assert rows.height == 21 and rows["node"].null_count() == 0
    assert set(rows["group_size"].to_list()) == {2}
    assert rows["ranks"].unique().cast(pl.String).to_list() == ["[0, 1]"]
    kind = rows.select(pl.col("name").cast(pl.String).str.extract(r"Kernel_(\w+?)_"), "collective").unique()
    assert {tuple(row) for row in kind.rows()} == {("AllReduce", "all_reduce"), ("Broadcast", "broadcast")}
    assert nccl.comms["event"].drop_nulls().is_unique().all()


def test_steps_of_gpu_activity_are_those_of_its_launch(nccl: Trace) -> None:
    step = nccl.events.select("id", "step")
    both = nccl.launches.join(step, left_on="launch", right_on="id").join(
        step, left_on="device_event", right_on="id", suffix="_device"
    )
    assert both["step"].eq_missing(both["step_device"]).all()
    assert nccl.events["step"].drop_nulls().n_unique() == 3
    starts = nccl.events.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#"))
    assert starts.filter(pl.col("cat") == "user_annotation")["step"].to_list() == [
        int(name.split("#")[1]) for name in starts.filter(pl.col("cat") == "user_annotation")["name"]
    ]


def test_nccl_ddp_is_linked_completely(nccl: Trace) -> None:
    table = summarize_links(nccl)
    assert dict(table.schema) == COLUMNS
    shares = dict(table.select("subject", "share_pct").rows())
    assert [shares[what] for what in ("host operators", "device work", "launches", "collectives")] == [
        100
    ] * 4
    assert nccl.meta["link"]["how"] == "rf_id" and nccl.meta["link"]["coverage"] == 1
    assert nccl.links.height == 14_388 and same_names(nccl)


def test_old_traces_join_on_external_id(data: Path) -> None:
    folder = data / "simple_add"
    trace = link(
        *read(folder / "benchmark_simple_add_et.json.gz", folder / "benchmark_simple_add_trace.json.gz")
    )
    assert trace.links.height == 36 and trace.links["how"].unique().to_list() == ["external_id"]
    assert same_names(trace)


def test_old_traces_get_the_columns_that_hta_gives_them(data: Path, golden: Path) -> None:
    folder = data / "simple_add"
    trace = link(
        *read(folder / "benchmark_simple_add_et.json.gz", folder / "benchmark_simple_add_trace.json.gz")
    )
    sides = [[json.loads(text) for text in side] for side in NodeTexts(trace).format_arguments(trace.nodes)]
    events = trace.links.join(trace.events.select(pl.col("id").alias("event"), "external_id"), on="event")
    of_node = dict(events.select("node", "external_id").rows())
    ours = {}
    for at, (key, et_id, name, schema) in enumerate(
        trace.nodes.select("id", "et_id", "name", "op_schema").rows()
    ):
        if key in of_node:
            shapes = [side[at][part] for side in sides for part in ("shapes", "types")]
            ours[of_node[key]] = (et_id, name, schema or "", *shapes)
    peer = pl.read_csv(golden / "hta" / "simple_add_et" / "et_simple_add.csv").drop_nulls("et_node")
    columns = ("external_id", "et_node", "et_node_name", "op_schema", "input_shapes", "input_types")
    theirs = {}
    for key, node, name, schema, *lists in peer.select(*columns, "output_shapes", "output_types").rows():
        theirs[key] = (int(node), name, schema or "", *map(json.loads, lists))
    assert len(theirs) == 36 and ours == theirs


@pytest.mark.parametrize("rank", range(4))
def test_dlrm_is_aligned_if_ids_belong_to_another_run(data: Path, rank: int) -> None:
    trace = of_rank(data / "dlrm", rank)
    assert trace.links.height >= 1660 and trace.links["node"].is_unique().all() and same_names(trace)
    assert trace.links["how"].unique().to_list() == ["align"]
    assert stat(trace, "rejected_external_id") == 1637
    assert (
        "only 79 of 1,637 operators with the same external_id have the same name"
        in trace.stats.filter(pl.col("name") == "link.rejected_external_id")["example"][0]
    )


@pytest.mark.slow
def test_linear_is_one_of_39_equal_iterations(data: Path) -> None:
    trace = of_rank(data / "linear")
    assert trace.links.height == 928 and same_names(trace)
    assert trace.meta["link"]["ties"] == 39 and stat(trace, "identical_iterations") == 39
    span = trace.events.join(trace.links.select(pl.col("event").alias("id")), on="id")
    others = trace.events.filter(pl.col("cat") == "cpu_op")
    before = others.filter(pl.col("ts") < span["ts"].min()).height / others.height
    assert 0.4 < before < 0.6
    every = link(
        *read(*(data / "linear" / f"{name}_0.json.gz" for name in ("torch_et", "kineto_trace"))),
        iterations="all",
    )
    assert every.links.height == 39 * 928 and every.links["event"].is_unique().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "device"),
    [
        ("resnet_mismatch/torch_et_0", "resnet_mismatch/kineto_trace_0"),
        ("linear/torch_et_0", "resnet_mismatch/kineto_trace_0"),
        ("cpu/pp_4/torch_et_0", "cpu/ddp_2/kineto_trace_0"),
        ("dlrm/torch_et_0", "nccl_ddp/kineto_trace_0"),
    ],
)
def test_traces_of_two_programs_are_refused_with_figures(data: Path, host: str, device: str) -> None:
    with pytest.raises(LinkError, match=r"not of one program: at best \d+ of \d+ .*; pass traces of one run"):
        link(*read(data / f"{host}.json.gz", data / f"{device}.json.gz"))


@pytest.mark.slow
def test_ids_of_another_run_are_rejected_and_the_order_links(data: Path) -> None:
    trace = link(
        *read(
            data / "et_schemas" / "1.1.0-chakra.0.0.4_resnet_2gpu.json.gz",
            data / "nccl_ddp" / "kineto_trace_0.json.gz",
        )
    )
    assert stat(trace, "rejected_rf_id") > 14_000
    assert trace.links.height >= 14_388 and same_names(trace)
    assert trace.links["how"].unique().to_list() == ["align"]


@pytest.mark.parametrize("name", CPU)
def test_cpu_recordings_are_linked_completely_except_process_groups(data: Path, name: str) -> None:
    folder, rank = name.split("/")
    trace = of_rank(data / "cpu" / folder, int(rank))
    assert trace.meta["link"]["coverage"] == 1 and same_names(trace)
    alone = trace.nodes.filter(~pl.col("id").is_in(trace.links["node"].implode()))["name"].cast(pl.String)
    assert all("process_group:init" in one or one.startswith("[pytorch|") for one in alone)


@pytest.mark.parametrize("name", ["coll_4/0", "coll_4/1", "coll_4/2", "coll_4/3", "pp_4/1", "ddp_2/0"])
def test_cpu_recordings_are_linked_equally_without_ids(data: Path, name: str) -> None:
    # A range of gloo lies on the caller's thread in one file and on a worker's in the other.
    folder, rank = name.split("/")
    host, device = read(
        *(data / "cpu" / folder / f"{kind}_{rank}.json.gz" for kind in ("torch_et", "kineto_trace"))
    )
    none = pl.lit(None, pl.Int64)
    nameless = device.replace(events=device.events.with_columns(rf_id=none, external_id=none))
    by_id, by_order = link(host, device), link(host, nameless)
    assert by_order.meta["link"]["how"] == "align" and by_order.meta["link"]["score"] == 1
    assert by_order.meta["link"]["coverage"] == 1 and same_names(by_order)
    right = by_order.links.join(by_id.links, on=["node", "event"])
    # Two ranges of one name that begin between the same two operators cannot be told apart.
    assert right.height >= by_id.links.height - 2


def test_a_thread_that_the_profiler_missed_is_named(data: Path) -> None:
    trace = of_rank(data / "cpu" / "mt_bwd")
    assert trace.links.height == 32 and trace.meta["link"]["host_operators"] == 111
    missing = trace.stats.filter(pl.col("name") == "link.missing_threads").row(0, named=True)
    assert missing["count"] == 79 and "thread 3 (79)" in missing["example"]


@pytest.mark.parametrize("name", ["coll_4", "pp_4"])
def test_gloo_ranges_are_not_nested(data: Path, name: str) -> None:
    trace = of_rank(data / "cpu" / name)
    ranges = trace.events.filter(pl.col("name").cast(pl.String).str.starts_with("gloo:"))
    assert ranges.height == stat(trace, "asynchronous_events") > 10
    assert ranges["depth"].null_count() == ranges["parent"].null_count() == ranges.height
    assert not trace.events["parent"].is_in(ranges["id"].implode()).any()
    assert stat(trace, "overlapping_events") == 0
    # Every operator nests as the execution trace, whose parents need no times, says.
    pairs = trace.links.join(trace.events.select(pl.col("id").alias("event"), "parent"), on="event").join(
        trace.nodes.select(pl.col("id").alias("node"), pl.col("parent").alias("above"), "name"), on="node"
    )
    node_of = trace.links.select(pl.col("event").alias("parent"), pl.col("node").alias("by_time"))
    pairs = pairs.filter(~pl.col("name").cast(pl.String).str.starts_with("gloo:")).join(
        node_of, on="parent", how="inner"
    )
    assert pairs.height > 300 and (pairs["by_time"] == pairs["above"]).all()


def test_graph_launches_and_work_without_launch_are_counted(data: Path) -> None:
    graph = link(*read(data / "tracelens" / "mi300_vllm_graph_execution.json.gz"))
    per_call = graph.launches.group_by("launch").len().sort("len")
    assert per_call["len"].to_list()[-1] > 400 and stat(graph, "graph_launches") == 1
    h100 = link(*read(data / "tracelens" / "h100_qwen.json.gz"))
    assert h100.launches["launch"].null_count() == stat(h100, "launch_missing") == 509
    assert h100.launches.filter(pl.col("launch").is_null())["operator"].null_count() == 509


@pytest.mark.parametrize(
    ("name", "work", "early", "late"),
    [
        # The host runs ahead of the device: what it had launched when the recording began has no call in it, and
        # what it launched at the end has no device work.
        ("nsys/h100_2gpu_1s.sqlite.gz", 2184, 1138, 1140),
        ("tracelens/h100_qwen.json.gz", 1707, 509, 0),
        ("tracelens/mi300_qwen.json.gz", 1517, 463, 0),
        ("hta_misc/negative_queue_a100.json.gz", 7747, 872, 0),
    ],
)
def test_gpu_activity_without_a_launch_was_launched_before_the_recording(
    data: Path, name: str, work: int, early: int, late: int
) -> None:
    whole = formats.read(data / name)
    traces = [whole] if isinstance(whole, Trace) else list(whole.values())
    for trace in map(link, traces):
        assert trace.launches.height == work
        assert stat(trace, "launch_missing") == stat(trace, "launched_before_recording") == early
        assert stat(trace, "activity_after_recording") == late
        others = (
            "launched_after_recording",
            "launch_not_recorded",
            "without_correlation",
            "no_calls_recorded",
        )
        assert [stat(trace, other) for other in others] == [0, 0, 0, 0]
        notes = dict(summarize_links(trace).select("subject", "note").rows())
        assert notes["device work"].startswith(f"{early:,} launched before the recording began (")


def test_quality_counts_gpu_activity_by_category(nccl: Trace) -> None:
    counts = {row[0]: row[1:] for row in summarize_links(nccl).select("subject", "total", "linked").rows()}
    assert (
        counts["kernels"] == (2700, 2700) and counts["copies"] == (960, 960) and counts["sets"] == (114, 114)
    )


def test_launches_and_links_of_lost_events_are_counted(data: Path) -> None:
    trace = link(*read(data / "critical_path" / "event_sync.json.gz"))
    lost = trace.events["id"].head(2)
    for kept in (trace.events.head(0), trace.events.tail(5)):
        links = trace.links.clear().vstack(
            trace.links.clear().extend(
                pl.DataFrame({"event": lost}).match_to_schema(trace.links.schema, missing_columns="insert")
            )
        )
        damaged = trace.replace(events=kept, links=links)
        assert is_in_scope(damaged, pl.Series([None] * trace.launches.height, dtype=pl.UInt32)).all()


def test_recorded_waits_point_to_the_work_they_waited_for(data: Path) -> None:
    trace = link(*read(data / "critical_path" / "event_sync.json.gz"))
    events = trace.events.select("id", pl.col("name").cast(pl.String).str.slice(0, 12), "correlation")
    waits = (
        trace.sync_dependencies.join(events, left_on="event", right_on="id")
        .join(events, left_on="on", right_on="id", suffix="_on")
        .select("kind", "name", "correlation_on", "how")
    )
    assert sorted(waits.rows()) == [
        ("Blocking Copy", "cudaMemcpyAs", 1511, "inferred"),
        ("Context Sync", "cudaDeviceSy", 1526, "recorded"),
        ("Event Sync", "cudaEventSyn", 1526, "recorded"),
        ("Stream Sync", "cudaStreamSy", 1511, "recorded"),
    ]
    streams = link(*read(data / "critical_path" / "event_sync_multi_stream.json.gz"))
    lanes = streams.events.select("id", "stream")
    both = streams.sync_dependencies.join(lanes, left_on="event", right_on="id").join(
        lanes, left_on="on", right_on="id", suffix="_on"
    )
    assert both.filter(pl.col("kind") == "Stream Wait Event").select("stream", "stream_on").rows() == [
        (24, 20)
    ]
    assert sorted(both.filter(pl.col("kind") == "Context Sync")["stream_on"]) == [20, 24, 28]


def test_waits_are_inferred_if_the_tracer_records_none(nccl: Trace) -> None:
    events = nccl.events.select("id", "ts", (pl.col("ts") + pl.col("dur")).alias("end"), "stream")
    waits = nccl.sync_dependencies.join(events, left_on="event", right_on="id").join(
        events, left_on="on", right_on="id", suffix="_on"
    )
    assert set(waits["how"].to_list()) == {"inferred"}
    streams = waits.filter(pl.col("kind") == "Stream Wait Event")
    assert streams.height > 50 and (streams["end_on"] <= streams["ts"]).all()
    assert (streams["stream"] != streams["stream_on"]).all()


def test_a_trace_of_one_side_is_linked_within_itself(data: Path) -> None:
    host = link(*read(data / "nccl_ddp" / "torch_et_0.json.gz"))
    assert host.links.height == 0 and host.meta["link"]["coverage"] is None
    device = link(*read(data / "nccl_ddp" / "kineto_trace_0.json.gz"))
    assert device.launches.height == 3774 and device.events["depth"].max() == 7


def test_two_traces_of_one_kind_are_an_error(data: Path) -> None:
    one = read(data / "simple_add" / "benchmark_simple_add_trace.json.gz")[0]
    with pytest.raises(LinkError, match="2 profiler traces of one rank"):
        link(one, one)
    with pytest.raises(LinkError, match="no trace to link"):
        link()


def test_ranks_that_differ_are_an_error_in_the_stats(data: Path) -> None:
    host, device = read(
        data / "simple_add" / "benchmark_simple_add_et.json.gz",
        data / "simple_add" / "benchmark_simple_add_trace.json.gz",
    )
    trace = link(host.replace(meta={"rank": 3}), device.replace(meta={"rank": 1}))
    assert trace.stats.filter(pl.col("name") == "link.ranks_differ")["severity"].to_list() == ["error"]


@pytest.mark.slow
def test_links_in_the_file_are_kept(data: Path, tmp_path: Path) -> None:
    folder = data / "simple_add"
    paths = (folder / "benchmark_simple_add_et.json.gz", folder / "benchmark_simple_add_trace.json.gz")
    first, second = tmp_path / "both.etplus.json", tmp_path / "again.etplus.json"
    etloom.export(link(*read(*paths)), first)
    again = link(etloom.read(first))
    # 36 operators and 4 pieces of device work, which an ET+ has as nodes too.
    assert again.links.height == 40 and again.links["how"].unique().to_list() == ["file"]
    assert again.launches["operator"].null_count() == 0
    rows = {
        row["subject"]: (row["how"], row["total"], row["linked"])
        for row in summarize_links(again).rows(named=True)
    }
    assert rows["host operators"] == ("file", 36, 36) and rows["device work"] == ("file", 4, 4)
    etloom.export(again, second)
    nodes = [json.loads(path.read_text())["nodes"] for path in (first, second)]
    told = [
        [(node["id"], node["ctrl_deps"], node.get("ts"), node.get("cat")) for node in one] for one in nodes
    ]
    assert told[0] == told[1]


def test_operators_without_a_profile_have_that_reason(data: Path) -> None:
    alone = etloom.link(etloom.read(data / "et_schemas/pt2_triton.json.gz"))
    note = summarize_links(alone).filter(pl.col("subject") == "host operators")["note"].item()
    assert note is not None and note.startswith("no profile of operators")
