"""The network model: costs of collectives, shared links, topologies, and a recording that the model reproduces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom import linker
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.simulator import Network
from etloom.simulator.network import parse_target, parse_topology
from etloom.simulator.network.fit import _find_buffer, _fit_rate
from etloom.simulator.network.model import Flow, NetworkModel, Transfer, TransferTimes, share_links
from etloom.simulator.network.placement import Share, place_group, split_collective
from etloom.simulator.network.topology import PRESETS, Level, Topology, get_preset
from etloom.simulator.scenario import INSTANCE_COLUMNS, PARTICIPATION_COLUMNS, Communications
from support.paths import ROOT


def transfer(begin: float, alone: float, *links: int, queue: object = None) -> Transfer:
    return Transfer((begin,), (queue,), 0.0, (Flow(alone, links),))


def split(collective: str, size: float, topology: Topology, *ranks: int, **options: Any) -> list[Share]:
    side = options.pop("side", "device")
    return split_collective(collective, size, place_group(topology, ranks, **options), side) or []


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
    a = Transfer((0.0, 1.0), ("x", "y"), 0.0, (Flow(5, (0,)),), 1)
    b = Transfer((1.0, 0.0), ("x", "y"), 0.0, (Flow(5, (0,)),), 1)
    assert max(share_links([a, b])) == pytest.approx(11)


def test_many_transfers_in_opposite_orders_end() -> None:
    count = 2000
    queued = [Transfer((float(i), float(count - i)), ("a", "b"), 1.0, ()) for i in range(count)]
    assert max(share_links(queued)) < 2 * count


def test_ranks_that_wait_for_each_other_go_on_when_nothing_moves() -> None:
    """Two transfers are issued in opposite orders, each queue takes one; a third one shares its link for a while."""
    flow = Flow(100.0, (0,))
    crossed = [
        Transfer((0.0, 1.0), ("a", "b"), 0.0, (Flow(10.0, (1,)),), 1),
        Transfer((1.0, 0.0), ("a", "b"), 0.0, (Flow(10.0, (1,)),), 1),
    ]
    alone = [Transfer((0.0,), (None,), 0.0, (flow,)), Transfer((0.0,), (None,), 0.0, (Flow(10.0, (0,)),))]
    finish = share_links([*crossed, *alone])
    assert finish[2:] == [110.0, 20.0]  # without the second one's time, the first one would end at 100
    assert finish[:2] == [120.0, 130.0]


@pytest.mark.slow
def test_thousands_of_transfers_on_a_link_end() -> None:
    transfers = [Transfer((float(i),), (None,), 0.0, (Flow(1e6, (0,)),)) for i in range(20_000)]
    assert max(share_links(transfers)) == pytest.approx(20_000 * 1e6)


@pytest.mark.parametrize(
    ("collective", "n", "rounds", "moved"),
    [
        ("all_reduce", 4, 6, 1.5),
        ("all_gather", 4, 3, 0.75),
        ("reduce_scatter", 8, 7, 0.875),
        ("all_to_all", 8, 7, 0.875),
        ("broadcast", 8, 3, 1),
        ("message", 2, 1, 1),
    ],
)
def test_costs_of_algorithms(collective: str, n: int, rounds: int, moved: float) -> None:
    (share,) = split(collective, 1024, Topology("flat", (Level("wire", 8),)), *range(n))
    assert (share.rounds, share.bytes / 1024) == (rounds, moved)


HOSTS = Topology("hosts of four with two cards", (Level("bus", 4), Level("wire", 8, cards=2)))


def test_a_ring_enters_each_host_once_per_member() -> None:
    """NCCL: a host's link carries the ring of all members; members in a host run as many rings at a time."""
    inside, across = split("all_reduce", 800, HOSTS, *range(8))
    assert inside.bytes == 2 * 7 / 8 * 800
    assert across.bytes == 2 * 7 / 8 * 800 / 4
    (alone,) = split("all_reduce", 800, HOSTS, 0, 4)
    assert alone.bytes == 800
    uneven = split("all_gather", 800, HOSTS, 0, 1, 2, 4)
    assert [share.bytes for share in uneven] == [600, 600]  # a single member of the second host
    assert split("all_reduce", 800, HOSTS, *range(8), side="host")[1].bytes == 2 * 7 / 8 * 800
    assert sum(share.bytes for share in split("reduce_scatter", 800, HOSTS, 0, 1, 2, 3, side="host")) == 1200


def test_a_group_alone_has_the_network_cards_of_its_hosts() -> None:
    """Two devices share a card: a group of one of them has twice the rate while the other is silent."""
    assert split("all_reduce", 800, HOSTS, 0, 4, exclusive=True)[0].bytes == 400
    assert split("all_reduce", 800, HOSTS, 0, 1, 4, 5, exclusive=True)[1].bytes == 2 * 3 / 4 * 800 / 2
    assert split("message", 800, HOSTS, 1, 6, exclusive=True)[0].bytes == 400
    assert split("message", 800, HOSTS, 1, 6)[0].bytes == 800


def test_members_of_an_all_to_all_send_over_the_levels_between_them() -> None:
    assert [share.bytes for share in split("all_to_all", 800, HOSTS, *range(8))] == [300, 400]
    assert [share.level for share in split("all_to_all", 800, HOSTS, 0, 4)] == [1]
    assert split_collective(None, 800, place_group(HOSTS, (0, 1))) is None


def communicate(*rows: tuple[str, int, list[int], str]) -> Communications:
    """Communications (name, bytes, ranks, where) of which every rank begins at points 0, 1, ..."""
    instances, parts = [], []
    for instance, (collective, size, ranks, side) in enumerate(rows):
        described = (instance, collective, size, len(ranks), ranks, "group", side)
        instances.append(dict(zip(INSTANCE_COLUMNS, described, strict=True)))
        for rank in ranks:
            part = (instance, rank, len(parts), len(parts), -1, -1)
            parts.append(dict(zip(PARTICIPATION_COLUMNS, part, strict=True)))
    return Communications(
        pl.DataFrame(instances, schema=INSTANCE_COLUMNS), pl.DataFrame(parts, schema=PARTICIPATION_COLUMNS)
    )


WIRE = NetworkModel(Topology("wire", (Level("wire", 8, "switch", 1e9),)))


def finish_ms(
    network: NetworkModel, *rows: tuple[str, int, list[int], str], begins_ms: list[float] | None = None
) -> list[float]:
    times = TransferTimes(communicate(*rows), network)
    begins = np.zeros(len(times.parts)) if begins_ms is None else 1e6 * np.array(begins_ms)
    return [float(time / 1e6) for time in times.finish(begins)]


def test_messages_share_links_by_direction_and_keep_their_order() -> None:
    forth, back = ("message", 10_000_000, [0, 1], "host"), ("message", 10_000_000, [1, 0], "host")
    assert finish_ms(WIRE, forth, back) == pytest.approx([10, 10])
    assert finish_ms(WIRE, forth, forth) == pytest.approx([10, 20])
    assert finish_ms(WIRE, forth, ("message", 10_000_000, [0, 2], "host")) == pytest.approx([20, 20])
    assert finish_ms(WIRE, back, ("all_gather", 10_000_000, [0, 1], "device")) == pytest.approx([15, 10])


def test_a_buffer_is_announced_behind_the_data_that_its_rank_sends() -> None:
    """Rank 1 sends to rank 0, and then receives from it: gloo's announcement waits for the end of what it sends."""
    sent, received = ("message", 10_000_000, [1, 0], "host"), ("message", 10_000_000, [0, 1], "host")
    assert finish_ms(WIRE, sent, received, begins_ms=[0, 0, 0, 1]) == pytest.approx([10, 20])
    assert finish_ms(WIRE, sent, received, begins_ms=[1, 0, 0, 0]) == pytest.approx([11, 10])
    on_device = [(*row[:3], "device") for row in (sent, received)]
    assert finish_ms(WIRE, *on_device, begins_ms=[0, 0, 0, 1]) == pytest.approx([10, 11])


def test_rings_of_gloo_in_opposite_directions_lose_rate() -> None:
    """An all-gather of gloo sends to the next rank, a reduction to the previous one; two ranks are both neighbors."""
    network = NetworkModel(WIRE.topology, sharing_efficiency=0.5)
    ranks = [0, 1, 2]
    gather, reduction = ("all_gather", 15_000_000, ranks, "host"), ("all_reduce", 7_500_000, ranks, "host")
    # The gather has 10 ms of data, and idles for half of one of its four chunks before; the reduction has 10 ms.
    assert finish_ms(network, gather) == pytest.approx([11.25])
    assert finish_ms(network, reduction, reduction) == pytest.approx([20, 20])
    assert finish_ms(network, gather, gather) == pytest.approx([21.25, 21.25])
    opposite = finish_ms(network, gather, reduction, begins_ms=[0, 0, 0, 1.25, 1.25, 1.25])
    assert opposite == pytest.approx([41.25, 41.25])
    pair = ("all_gather", 20_000_000, [0, 1], "host"), ("all_reduce", 10_000_000, [0, 1], "host")
    assert finish_ms(network, *pair, begins_ms=[0, 0, 5, 5]) == pytest.approx([25, 25])
    devices = [(*row[:3], "device") for row in pair]
    assert finish_ms(network, *devices) == pytest.approx([40, 40])


def test_groups_in_the_same_hosts_share_their_cards() -> None:
    """Groups of the first and the second device of two hosts share a card, those of the first and third do not."""
    network = NetworkModel(
        replace(HOSTS, levels=tuple(replace(level, bytes_per_second=1e9) for level in HOSTS.levels))
    )
    pairs = [("all_reduce", 8_000_000, [first, first + 4], "device") for first in (0, 1, 2)]
    assert finish_ms(network, pairs[0], pairs[2]) == pytest.approx([4, 4])
    assert finish_ms(network, pairs[0], pairs[1]) == pytest.approx([8, 8])
    assert network.time_ns("all_reduce", 8_000_000, [0, 4]) == pytest.approx(8e6)


def test_recorded_senders_show_the_buffers() -> None:
    """Of 10 MB in 10 ms, a sender that continues after 7 ms leaves 3 MB; one that waits until the end shows nothing."""
    communications = communicate(
        ("message", 10_000_000, [1, 0], "host"), ("message", 1_000_000, [0, 1], "host")
    )
    ends = np.array([7_000_000, 10_000_000, 50_000_000, 1_000_000])  # of each participation
    scenario: Any = SimpleNamespace(communications=communications, graph=SimpleNamespace(time=ends))
    spans = pl.DataFrame({"instance": [0, 1], "measured": [1e7, 1e6], "end": [10_000_000, 1_000_000]})
    measured = communications.instances.join(spans, on="instance")
    assert _find_buffer(scenario, measured) == pytest.approx(3_000_000)
    assert _find_buffer(scenario, measured.filter(instance=1)) == 0


def test_the_rate_of_a_backlog_is_fitted() -> None:
    """All-reduces of 5 MB at 1 GB/s begin every 6 ms and take 7.5 ms alone: modelled times are steep in the rate."""
    count = 32
    communications = communicate(*[("all_reduce", 5_000_000, [0, 1, 2, 3], "host")] * count)
    begins = np.repeat(6_000_000 * np.arange(count), 4)
    scenario: Any = SimpleNamespace(communications=communications, graph=SimpleNamespace(time=begins))
    spans = 1e6 * np.array(finish_ms(WIRE, *[("all_reduce", 5_000_000, [0, 1, 2, 3], "host")] * count,
                                     begins_ms=(begins / 1e6).tolist())) - begins[::4]  # fmt: skip
    measured = communications.instances.with_columns(
        measured=pl.Series(spans), begin=pl.Series(begins[::4]), overlaps=pl.lit(True)
    )
    assert _fit_rate(scenario, measured, 0.0, 16e9) == pytest.approx(1e9, rel=0.01)


def test_a_sender_continues_when_the_rest_is_in_buffers() -> None:
    network = replace(WIRE, buffer_bytes=4_000_000)
    times = TransferTimes(
        communicate(("message", 10_000_000, [1, 0], "host"), ("message", 1, [0, 1], "host")), network
    )
    assert times.stays.tolist() == pytest.approx([0.6, 1, 0, 1])


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
        ({"levels": [LEVEL, {**LEVEL, "cards": 3}]}, "levels[1].cards: 3 does not divide the 8 devices"),
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


@pytest.mark.slow
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
    assert prediction.reasons[-1] == "interval not calibrated: communication of GPUs"
    deep = etloom.predict(job, network="dgx-h100", ranks=4).reasons[-1]
    assert deep == "interval not calibrated: several levels of the network, communication of GPUs"
    gloo = etloom.predict(ROOT / "tests" / "data" / "ddp_2", network="x0.5", ranks=4).reasons[-1]
    assert gloo.startswith("interval calibrated: another rate, collectives (30")
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
