"""The network model: costs of collectives, shared links, topologies, and a recording that the model reproduces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import linker
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.simulator import Network
from etloom.simulator.network import parse_target, parse_topology
from etloom.simulator.network.model import (
    Flow,
    Transfer,
    find_dims,
    share_links,
    split_collective,
    split_gloo,
)
from etloom.simulator.network.topology import PRESETS, Topology, get_preset


def transfer(begin: float, alone: float, *links: int, queue: object = None) -> Transfer:
    return Transfer((begin,), (queue,), 0.0, (Flow(alone, links),))


@pytest.mark.parametrize(
    ("transfers", "finish"),
    [
        ([transfer(0, 10, 0), transfer(20, 10, 0)], [10, 30]),
        ([transfer(0, 10, 0), transfer(0, 10, 1)], [10, 10]),
        ([transfer(0, 10, 0), transfer(0, 10, 0)], [20, 20]),
        ([transfer(0, 10, 0), transfer(5, 10, 0)], [15, 20]),  # 5 alone, 10 shared, 5 alone
        ([transfer(0, 10, 0, 1), transfer(0, 4, 1)], [14, 8]),
        (
            [transfer(0, 10, 0, queue="q"), transfer(1, 10, 1, queue="q"), transfer(2, 5, 2, queue="q")],
            [10, 11, 15],
        ),
        ([Transfer((3.0, 7.0), (None, None), 2.0, (Flow(5, (0,)),))], [14]),
        ([Transfer((3.0, 7.0), ("a", "b"), 2.0, ())], [9]),
    ],
)
def test_transfers_on_a_link_divide_it(transfers: list[Transfer], finish: list[float]) -> None:
    assert share_links(transfers) == pytest.approx(finish)


def test_ranks_that_wait_for_each_other_in_other_orders_end() -> None:
    a = Transfer((0.0, 1.0), ("x", "y"), 0.0, (Flow(5, (0,)),))
    b = Transfer((1.0, 0.0), ("x", "y"), 0.0, (Flow(5, (0,)),))
    assert max(share_links([a, b], workers=1)) == pytest.approx(11)


def test_many_transfers_in_opposite_orders_end() -> None:
    count = 2000
    queued = [Transfer((float(i), float(count - i)), ("a", "b"), 1.0, ()) for i in range(count)]
    assert max(share_links(queued)) < 2 * count


def test_ranks_that_wait_for_each_other_go_on_when_nothing_moves() -> None:
    """Two transfers are issued in opposite orders, each queue takes one; a third one shares its link for a while."""
    flow = Flow(100.0, (0,))
    crossed = [
        Transfer((0.0, 1.0), ("a", "b"), 0.0, (Flow(10.0, (1,)),)),
        Transfer((1.0, 0.0), ("a", "b"), 0.0, (Flow(10.0, (1,)),)),
    ]
    alone = [Transfer((0.0,), (None,), 0.0, (flow,)), Transfer((0.0,), (None,), 0.0, (Flow(10.0, (0,)),))]
    finish = share_links([*crossed, *alone], workers=1)
    assert finish[2:] == [110.0, 20.0]  # without the second one's time, the first one would end at 100
    assert finish[:2] == [120.0, 130.0]


def test_thousands_of_transfers_on_a_link_end() -> None:
    transfers = [Transfer((float(i),), (None,), 0.0, (Flow(1e6, (0,)),)) for i in range(20_000)]
    assert max(share_links(transfers)) == pytest.approx(20_000 * 1e6)


@pytest.mark.parametrize(
    ("collective", "algorithm", "n", "rounds", "moved"),
    [
        ("all_reduce", "ring", 4, 6, 1.5),
        ("all_reduce", "halving-doubling", 8, 6, 1.75),
        ("all_reduce", "tree", 8, 6, 2),
        ("all_gather", "ring", 4, 3, 0.75),
        ("reduce_scatter", "direct", 4, 1, 0.75),
        ("all_to_all", "ring", 8, 7, 0.875),
        ("broadcast", "ring", 8, 3, 1),
        ("message", "ring", 2, 1, 1),
    ],
)
def test_costs_of_algorithms(collective: str, algorithm: str, n: int, rounds: int, moved: float) -> None:
    (share,) = split_collective(collective, 1024, [(0, n)], algorithm) or []
    assert (share.rounds, share.bytes / 1024) == (rounds, moved)


def test_levels_reduce_from_the_inside() -> None:
    shares = split_collective("all_reduce", 800, [(0, 8), (1, 2)]) or []
    assert [(share.level, share.bytes) for share in shares] == [(0, 1400), (1, 100)]
    assert sum(share.bytes for share in split_gloo("reduce_scatter", 800, [(0, 4)]) or []) == 1200
    assert split_collective(None, 800, [(0, 4)]) is None


def test_groups_find_their_levels() -> None:
    topology = parse_topology(
        {"levels": [{"size": 4, "bandwidth": "100GB/s"}, {"size": 3, "bandwidth": "10GB/s", "kind": "ring"}]}
    )
    assert find_dims(topology, list(range(12))) == [(0, 4), (1, 3)]
    assert find_dims(topology, [0, 1, 2, 3]) == [(0, 4)]
    assert find_dims(topology, [1, 5, 9]) == [(1, 3)]
    assert find_dims(topology, [0, 1, 4]) == [(1, 3)]


LEVEL: dict[str, Any] = {"size": 8, "bandwidth": "50GB/s"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "topology: expected keys and values, got None"),
        ({"levels": []}, "levels: expected a list of 1 to 8 levels"),
        ({"levels": [LEVEL], "speed": 1}, "unknown key 'speed'"),
        ({"levels": [{"size": 8}]}, "levels[0]: bandwidth is missing"),
        ({"levels": [{**LEVEL, "size": True}]}, "levels[0].size: expected a whole number"),
        ({"levels": [{**LEVEL, "kind": "torus"}]}, "unknown kind 'torus'; expected one of switch"),
        ({"levels": [{**LEVEL, "bandwidth": "2x"}]}, "levels[0]: expected a bandwidth with a unit"),
        ({"levels": [{**LEVEL, "efficiency": 0}]}, "expected a number above 0 and up to 1, got 0"),
        ({"levels": [LEVEL, LEVEL], "devices_per_host": 4}, "devices_per_host: 4 differs"),
        ({"levels": [LEVEL], "hosts": 3, "devices_per_host": 4}, "hosts x devices_per_host = 12 differs"),
    ],
)
def test_a_wrong_topology_is_one_line(document: Any, message: str) -> None:
    with pytest.raises(EtloomError) as error:
        parse_topology(document)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_network_names(tmp_path: Path) -> None:
    assert parse_target("x0.2") == 0.2
    rate = parse_target("200Mbit/s")
    assert isinstance(rate, Topology)
    assert rate.levels[0].bytes_per_second == 25e6
    assert get_preset("dgx-h100").size == 1024
    assert all(get_preset(name).levels for name in PRESETS)
    for text, message in (
        ("nonsense", "unknown network 'nonsense'"),
        (str(tmp_path / "a.yaml"), "No such file"),
    ):
        with pytest.raises(EtloomError, match=message):
            parse_target(text)
    (tmp_path / "b.yaml").write_text("levels: [")
    with pytest.raises(EtloomError, match=r"b\.yaml: not a YAML file"):
        parse_target(str(tmp_path / "b.yaml"))


def overlapping_rank(rank: int, ends: tuple[float, float]) -> Trace:
    """Two all-reduces of 4 MB that begin at 0 and 2 ms on two streams and share the link."""
    events = [
        {"id": i, "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": ts}
        | {"dur": int(1e6 * end) - ts, "pid": 0, "tid": 20 + i, "device": 0, "stream": 20 + i}
        for i, (ts, end) in enumerate(zip((0, 2_000_000), ends, strict=True))
    ]
    comms = [
        {
            "id": i,
            "event": i,
            "collective": "all_reduce",
            "pg_name": str(i),
            "ranks": "[0, 1]",
            "group_size": 2,
        }
        | {"seq": 0, "dtype": "Float", "in_nelems": 1_000_000, "out_nelems": 1_000_000}
        for i in range(2)
    ]
    tables = {"events": pl.DataFrame(events), "comms": pl.DataFrame(comms)}
    return linker.link(Trace(tables, {"rank": rank, "clock": "relative", "world_size": 2}))


def test_overlapping_transfers_are_predicted_from_their_shared_times() -> None:
    # At 1 GB/s each takes 4 ms alone. Scaling their recorded 6 ms would give 14 ms instead of 16 ms.
    job = Job({rank: overlapping_rank(rank, (6.0, 8.0)) for rank in (0, 1)})
    prediction = etloom.predict(job, network="x0.5")
    assert prediction.reproduction_error == pytest.approx(0, abs=0.01)
    row = prediction.table.row(0, named=True)
    assert row["before_ns"] == 8_000_000
    assert row["predicted_ns"] == pytest.approx(16_000_000, rel=0.01)
    assert row["lower_bound_ns"] < 16_000_000 < row["upper_bound_ns"]
    absolute = etloom.predict(job, network="500MB/s", recorded_network="1GB/s").table["predicted_ns"][0]
    assert absolute == pytest.approx(row["predicted_ns"], rel=0.01)
    assert prediction.job[1].events["dur"].to_list() == pytest.approx([14e6, 14e6], rel=0.02)
    assert "error" in prediction.reasons[0]
    assert "GB/s" in prediction._repr_html_()
    simulated = etloom.simulate(job, Network(0.5)).table.row(0, named=True)
    assert simulated["upper_bound_ns"] == pytest.approx(16_000_000, rel=0.01)


def test_a_run_without_communication_has_no_network() -> None:
    trace = overlapping_rank(0, (6.0, 8.0))
    job = Job({0: trace.replace(None, comms=trace.comms.clear())})
    with pytest.raises(EtloomError, match="no network could be fitted"):
        etloom.predict(job, network="x0.5")
    assert etloom.predict(job, network="dgx-h100").reproduction_error is None


def test_communications_of_unknown_groups_fit_no_network() -> None:
    traces = {rank: overlapping_rank(rank, (6.0, 8.0)) for rank in (0, 1)}
    unknown = [pl.lit(None, traces[0].comms.schema[name]).alias(name) for name in ("group_size", "ranks")]
    job = Job(
        {rank: trace.replace(None, comms=trace.comms.with_columns(unknown)) for rank, trace in traces.items()}
    )
    with pytest.raises(EtloomError, match="no network could be fitted"):
        etloom.predict(job, network="x0.5")
