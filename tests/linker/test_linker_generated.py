"""Random traces with a known truth are linked exactly, whatever the file's order and zero of time."""

from __future__ import annotations

import random

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etloom.core.errors import InvalidValue, LinkError
from etloom.core.trace import Trace
from etloom.linker import link
from etloom.linker.quality import summarize_links
from support.examples import examples
from support.random_traces import LinkedTrace, LinkedTraceGenerator

SEED = st.integers(0, 2**32)


def positions(trace: Trace) -> list[int]:
    return trace.events["position"].to_list()


def named(trace: Trace, column: pl.Series) -> list[int | None]:
    """Ids of events as positions in the file."""
    known = dict(trace.events.select("id", "position").rows())
    return [None if at is None else known[at] for at in column.to_list()]


def facts(trace: Trace) -> dict[str, object]:
    """All that linking found, in terms that sorting, shuffling and shifting leave alone."""
    where = positions(trace)
    et = dict(trace.nodes.select("id", "et_id").rows())
    return {
        "parent": dict(zip(where, named(trace, trace.events["parent"]), strict=True)),
        "depth": dict(zip(where, trace.events["depth"].to_list(), strict=True)),
        "step": dict(zip(where, trace.events["step"].to_list(), strict=True)),
        "launches": {
            device: (call, operator)
            for device, call, operator in zip(
                *(named(trace, trace.launches[name]) for name in ("device_event", "launch", "operator")),
                strict=True,
            )
        },
        "links": set(
            zip((et[node] for node in trace.links["node"]), named(trace, trace.links["event"]), strict=True)
        ),
        "thread_dependencies": set(
            zip(
                named(trace, trace.thread_dependencies["event"]),
                named(trace, trace.thread_dependencies["after"]),
                trace.thread_dependencies["kind"].to_list(),
                strict=True,
            )
        ),
        "waits": set(
            zip(
                named(trace, trace.sync_dependencies["event"]),
                named(trace, trace.sync_dependencies["on"]),
                strict=True,
            )
        ),
        "stats": set(trace.stats.drop("example").rows()),
        "quality": trace.meta["link"],
    }


def check(made: LinkedTrace, trace: Trace) -> None:
    found = facts(trace)
    parent, launches = found["parent"], found["launches"]
    assert isinstance(parent, dict) and isinstance(launches, dict)
    assert {at: parent[at] for at in made.parent} == made.parent
    assert launches == made.launch
    step = found["step"]
    assert isinstance(step, dict)
    assert {at: step[at] for at in made.step} == made.step
    assert found["waits"] == made.waits
    handoffs = found["thread_dependencies"]
    assert isinstance(handoffs, set)
    assert {(at, after) for at, after, kind in handoffs if kind == "fwd_bwd"} == set(made.forward.items())
    by_id = {node["rf_id"]: node["et_id"] for node in made.nodes}
    assert found["links"] == {
        (by_id[row["rf_id"]], row["position"]) for row in made.rows if row.get("rf_id") in by_id
    }


@given(SEED)
@settings(max_examples=examples(12))
def test_ids_link_a_generated_trace_exactly(seed: int) -> None:
    made = LinkedTraceGenerator(random.Random(seed)).linked
    trace = link(made.execution_trace(), made.host())
    check(made, trace)
    assert trace.meta["linked"] is True
    assert trace.meta["link"]["how"] == "rf_id" and trace.meta["link"]["coverage"] == 1


@given(SEED)
@settings(max_examples=examples(15))
def test_order_links_a_generated_trace_without_ids_exactly(seed: int) -> None:
    made = LinkedTraceGenerator(random.Random(seed)).linked
    profile = made.host()
    nameless = profile.replace(
        events=profile.events.with_columns(pl.lit(None, dtype=pl.Int64).alias("rf_id"))
    )
    trace = link(nameless, made.execution_trace())
    check(made, trace)
    assert trace.meta["link"]["how"] == "align" and trace.meta["link"]["score"] == 1


@given(SEED, st.integers(-(10**12), 10**18))
@settings(max_examples=examples(15))
def test_neither_the_order_of_the_file_nor_the_zero_of_time_matters(seed: int, shift: int) -> None:
    made = LinkedTraceGenerator(random.Random(seed)).linked
    plain = facts(link(made.execution_trace(), made.host()))
    other = facts(link(made.host(random.Random(seed + 1), shift), made.execution_trace()))
    for what, found in plain.items():
        assert other[what] == found, what


@given(SEED)
@settings(max_examples=examples(12))
def test_linking_twice_changes_nothing(seed: int) -> None:
    made = LinkedTraceGenerator(random.Random(seed)).linked
    once = link(made.host(), made.execution_trace())
    assert facts(link(once)) == facts(once)


def repeated(made: LinkedTrace, times: int) -> Trace:
    """A profile without ids in which the operators of one come so many times, in different time each."""
    length = max(row["ts"] + row["dur"] for row in made.rows) + 10_000
    one = made.host().events.filter(pl.col("cat") == "cpu_op")
    many = pl.concat(
        one.with_columns(
            (pl.col("ts") * (1 + at)) + length * at * times,
            pl.col("dur") * (1 + at),
            (pl.col("position") + 10_000 * at).cast(pl.UInt32),
            pl.lit(None, dtype=pl.Int64).alias("rf_id"),
        )
        for at in range(times)
    ).sort(pl.col("ts"), -pl.col("dur"), maintain_order=True)
    return Trace({"events": many.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("id"))})


def operators(made: LinkedTrace) -> tuple[Trace, set[tuple[int, int]]]:
    """The execution trace without annotations, and its true pairs: (et_id, position)."""
    names = {row["rf_id"]: row["position"] for row in made.rows if row["cat"] == "cpu_op"}
    kept = {node["et_id"] for node in made.nodes if node["rf_id"] in names}
    made.nodes = [
        node | {"parent": node["parent"] if node["parent"] in kept else 1}
        for node in made.nodes
        if node["et_id"] in kept
    ]
    return made.execution_trace(), {(node["et_id"], names[node["rf_id"]]) for node in made.nodes}


@pytest.mark.slow
@given(SEED, st.integers(2, 7))
@settings(max_examples=examples(15))
def test_one_iteration_is_chosen_among_equal_ones_and_the_tie_is_counted(seed: int, times: int) -> None:
    made = LinkedTraceGenerator(random.Random(seed), threads=2, trees=40).linked
    host, pairs = operators(made)
    assume(all(sum(node["tid"] == tid for node in made.nodes) > 40 for tid in (1, 2)))
    profile = repeated(made, times)

    def found(iterations: str) -> set[object]:
        trace = link(host, profile, iterations=iterations)
        assert (trace.meta["link"]["ties"], trace.meta["link"]["iterations"]) == (times, times)
        links = facts(trace)["links"]
        assert isinstance(links, set)
        return links

    def at(iteration: int) -> set[object]:
        return {(et_id, position + 10_000 * iteration) for et_id, position in pairs}

    assert found("best") == at(times // 2)
    assert found("0") == at(0)
    assert found(str(times - 1)) == at(times - 1)
    assert found("all") == set().union(*(at(iteration) for iteration in range(times)))
    with pytest.raises(
        LinkError, match=f"unknown iteration {times}; the execution trace matches {times} iteration"
    ):
        link(host, profile, iterations=str(times))
    with pytest.raises(InvalidValue, match="unknown iterations 'some'"):
        link(host, profile, iterations="some")


@given(SEED)
@settings(max_examples=examples(15))
def test_operators_that_one_side_lacks_cost_only_themselves(seed: int) -> None:
    draw = random.Random(seed)
    made = LinkedTraceGenerator(draw, threads=1, trees=120).linked
    host, pairs = operators(made)
    profile = repeated(made, 1)
    lost = set(draw.sample(sorted(profile.events["position"].to_list()), profile.events.height // 40))
    kept = profile.events.filter(~pl.col("position").is_in(lost))
    links = facts(link(host, Trace({"events": kept})))["links"]
    assert isinstance(links, set)
    able = {pair for pair in pairs if pair[1] not in lost}
    # Which operator of a run of one name was lost cannot be known, so a lost one may shift the pairs of its run.
    assert len(links & able) >= len(able) - max(4 * len(lost), 8)
    assert len(links) >= 0.9 * len(able)


@given(SEED)
@settings(max_examples=examples(12))
def test_traces_of_two_programs_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    host, _ = operators(LinkedTraceGenerator(draw, threads=2, trees=30).linked)
    other = repeated(LinkedTraceGenerator(draw, threads=2, trees=30).linked, 1)
    assume(host.rows("nodes") >= 20)  # a few names may agree by chance
    with pytest.raises(LinkError, match=r"not of one program: at best \d+ of \d+"):
        link(host, other)


def profile_of(rows: list[dict[str, object]]) -> Trace:
    made = LinkedTrace()
    for row in rows:
        made.add(**({"cat": "cuda_runtime", "name": "call", "dur": 2, "tid": 1} | row))
    return made.host()


def device(ts: int, correlation: int, pid: int = 0) -> dict[str, object]:
    return {
        "cat": "kernel", "name": "k", "ts": ts, "tid": 7, "stream": 7, "pid": pid, "correlation": correlation,
    }  # fmt: skip


def launched(trace: Trace) -> dict[int, tuple[int | None, int | None]]:
    found = facts(trace)["launches"]
    assert isinstance(found, dict)
    return found


def test_of_calls_that_repeat_a_correlation_the_last_before_the_work_is_the_launch() -> None:
    trace = link(
        profile_of(
            [{"ts": 0, "correlation": 5}, {"ts": 100, "correlation": 5}, {"ts": 300, "correlation": 5},
             device(50, 5), device(120, 5), device(200, 5), device(10, 6)]
        )
    )  # fmt: skip
    assert launched(trace) == {3: (0, None), 4: (1, None), 5: (1, None), 6: (None, None)}
    counts = dict(trace.stats.select("name", "count").rows())
    assert counts["link.repeated_correlations"] == 2 and counts["link.launch_missing"] == 1


def test_correlations_belong_to_the_process_that_gpu_activity_names() -> None:
    rows = [{"ts": 0, "pid": 1, "correlation": 5}, {"ts": 1, "pid": 2, "correlation": 5}]
    trace = link(profile_of([*rows, device(50, 5, pid=1), device(60, 5, pid=2)]))
    assert launched(trace) == {2: (0, None), 3: (1, None)}


def test_gpu_activity_without_a_launch_is_counted_by_reason() -> None:
    rows = [{"ts": 0, "correlation": 5}, {"ts": 100, "correlation": 9}]
    odd = [device(10, 3), device(20, 5), device(30, 7), device(40, 12), device(50, 12), device(60, 0)]
    trace = link(profile_of([*rows, *odd]))
    counts = dict(trace.stats.select("name", "count").rows())
    assert {name: counts[f"link.{name}"] for name in COUNTS_OF_LAUNCHES} == COUNTS_OF_LAUNCHES
    assert "link.no_calls_recorded" not in counts
    # A call that launches here and there, but not now: what it launched came after the last device work.
    late = link(profile_of([*rows, device(20, 5)]))
    assert dict(late.stats.select("name", "count").rows()) == {
        "link.activity_after_recording": 1,
        "link.launch_without_operator": 1,
    }
    alone = link(profile_of([device(20, 5)]))
    assert dict(alone.stats.select("name", "count").rows())["link.no_calls_recorded"] == 1


COUNTS_OF_LAUNCHES = {
    "launch_missing": 5,
    "launched_before_recording": 1,
    "launch_not_recorded": 1,
    "launched_after_recording": 2,
    "without_correlation": 1,
    "launches_without_activity": 1,
    "launch_without_operator": 1,
}


def test_an_nsight_trace_joins_on_op_id() -> None:
    made = LinkedTraceGenerator(random.Random(3)).linked
    profile = made.host().replace(meta={"formats": ["nsys"]})
    trace = link(made.execution_trace(), profile)
    assert trace.links["how"].unique().to_list() == ["op_id"] and trace.meta["link"]["coverage"] == 1


def test_pairs_of_an_accepted_join_whose_names_differ_are_dropped_and_counted() -> None:
    made = LinkedTraceGenerator(random.Random(4), trees=20).linked
    host = made.execution_trace()
    names = host.nodes["name"].cast(pl.String)
    other = (
        pl.when(pl.int_range(pl.len()) == 5).then(pl.lit("aten::other")).otherwise(names).cast(pl.Categorical)
    )
    overload = (
        pl.when(pl.int_range(pl.len()) == 6).then(names + ".out").otherwise(pl.col("name").cast(pl.String))
    )
    nodes = host.nodes.with_columns(other.alias("name")).with_columns(
        overload.cast(pl.Categorical).alias("name")
    )
    trace = link(host.replace(nodes=nodes), made.host())
    assert trace.links.height == nodes.height - 2  # the root, and the one of another name
    counts = dict(trace.stats.select("name", "count").rows())
    assert counts["link.name_disagreements"] == counts["link.unlinked_operators"] == 1


def test_reasons_are_reported_per_process() -> None:
    # The numbers of process 2 are all above those of process 1, and one of each is off at its end.
    rows = [{"ts": 0, "pid": 1, "correlation": 5}, {"ts": 9, "pid": 1, "correlation": 7}]
    rows += [{"ts": 1, "pid": 2, "correlation": 500}, {"ts": 8, "pid": 2, "correlation": 700}]
    work = [device(50, 5, 1), device(60, 9, 1), device(70, 400, 2), device(80, 500, 2), device(90, 600, 2)]
    counts = dict(link(profile_of([*rows, *work])).stats.select("name", "count").rows())
    assert {name.removeprefix("link."): count for name, count in counts.items()} == {
        "launch_missing": 3,
        "launched_after_recording": 1,  # 9 of process 1
        "launched_before_recording": 1,  # 400 of process 2
        "launch_not_recorded": 1,  # 600 of process 2
        "activity_after_recording": 1,  # of call 700, but not of 7, after whose process's work 9 was seen
        "launches_without_activity": 1,
        "launch_without_operator": 2,
    }


def test_a_thread_without_a_number_that_the_profiler_missed_is_counted_as_one() -> None:
    made = LinkedTraceGenerator(random.Random(7), threads=2, trees=6).linked
    host = made.execution_trace()
    tids = host.nodes["tid"].unique().drop_nulls().sort()
    missed = host.nodes["tid"] == tids[-1]
    nodes = host.nodes.with_columns(tid=pl.when(~missed).then("tid"))
    profile = made.host()
    seen = host.nodes.filter(~missed)["rf_id"].drop_nulls().implode()
    trace = link(
        host.replace(nodes=nodes), profile.replace(events=profile.events.filter(pl.col("rf_id").is_in(seen)))
    )
    rows = {
        name: (count, example)
        for name, count, example in trace.stats.select("name", "count", "example").rows()
    }
    example = f"operators of no thread ({missed.sum()}), of which the profile contains no event"
    assert rows["link.missing_threads"] == (int(missed.sum()), example)


def test_quality_is_the_sum_over_two_files() -> None:
    made = LinkedTraceGenerator(random.Random(8)).linked
    trace = link(made.execution_trace(), made.host())
    trace = trace.count("link.unlinked_operators", 2, "one").count("link.unlinked_operators", 3, "other")
    note = summarize_links(trace).filter(pl.col("subject") == "host operators")["note"].item()
    assert "5 not in the profile (one)" in note
