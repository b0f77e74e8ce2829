"""Communications matched across ranks, and clocks: on made jobs of which the truth is known, and on real ones."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.analyses import collectives as analysis
from etloom.collectives import (
    add_waits,
    compute_message_size,
    estimate_clocks,
    get_bus_factor,
    list_participations,
    match_collectives,
    match_participations,
    matching,
)
from etloom.collectives.clocks import MIN_FOR_SPREAD, correct_clocks
from etloom.collectives.matching import MAX_UNMATCHED_SHARE
from etloom.collectives.participations import COLUMNS
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job
from support.examples import examples
from support.real_runs import open_run

RING = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")


def made(seed: int, offsets: list[int], drifts: list[float], *, numbered: bool, count: int) -> pl.DataFrame:
    """The parts of a job of len(offsets) ranks with their true ``instance`` in place of bytes; a rank's clock is
    its offset ahead and runs its drift (ppm) fast."""
    chance = random.Random(seed)
    rows = []
    now = 1_700_000_000_000_000_000
    since = now
    for at in range(count):
        group = chance.choice(["world", "pair"]) if len(offsets) > 2 else "world"
        ranks = range(len(offsets)) if group == "world" else range(2)
        starts = {rank: now + chance.randrange(4_000_000) for rank in ranks}
        end = max(starts.values()) + chance.randrange(100_000, 1_000_000)
        name = chance.choice(RING)
        for rank in ranks:
            left = end + chance.randrange(2_000)

            def on_clock(time: int, rank: int = rank) -> int:
                return time + offsets[rank] + round(drifts[rank] * (time - since) / 1e6)

            rows.append(
                {
                    "rank": rank,
                    "event": at,
                    "where": "device",
                    "collective": name,
                    "pg_name": group,
                    "seq": at if numbered else None,
                    "bytes": at,
                    "start": on_clock(starts[rank]),
                    "end": on_clock(left),
                }
            )
        now = end + chance.randrange(200_000_000)
    chance.shuffle(rows)
    return pl.DataFrame(rows, schema={**COLUMNS})


def pairs(matched: pl.DataFrame, by: str) -> set[tuple[tuple[int, int], ...]]:
    """The sets of (rank, event) that share a value of ``by``."""
    groups = matched.drop_nulls(by).group_by(by).agg(pl.struct("rank", "event"))
    return {tuple(sorted((one["rank"], one["event"]) for one in row)) for row in groups.to_series(1)}


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    offsets=st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=4),
    count=st.integers(1, 40),
)
def test_numbered_calls_are_matched_and_clocks_estimated(seed: int, offsets: list[int], count: int) -> None:
    offsets[0] = 0
    parts = made(seed, offsets, [0.0] * len(offsets), numbered=True, count=count)
    matched = match_participations(parts)
    assert pairs(matched, "instance") == pairs(matched, "bytes")
    assert set(matched["how"]) == {"seq"}
    for row in estimate_clocks(matched).iter_rows(named=True):
        if row["rank"] == 0:
            assert row["verdict"] == "reference"
        elif row["verdict"] != "unknown":
            assert row["lower_bound_ns"] <= offsets[row["rank"]] <= row["upper_bound_ns"]
            # Ends lie within 2 us of each other, so the median of their differences does.
            assert abs(row["offset_ns"] - offsets[row["rank"]]) <= 4_000
            told = row["communications"] >= MIN_FOR_SPREAD and abs(row["offset_ns"]) > 10_000
            contradicted = not row["lower_bound_ns"] <= 0 <= row["upper_bound_ns"]
            assert (row["verdict"] == "corrected") == (told or contradicted)
            taken = row["offset_ns"] if row["verdict"] == "corrected" else 0
            assert abs(offsets[row["rank"]] - taken) <= row["residual_ns"]
            assert row["verdict"] != "agrees" or row["residual_ns"] <= 10_000


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 4), count=st.integers(1, 30))
def test_calls_without_numbers_are_matched_in_order(seed: int, ranks: int, count: int) -> None:
    matched = match_participations(made(seed, [0] * ranks, [0.0] * ranks, numbered=False, count=count))
    assert pairs(matched, "instance") == pairs(matched, "bytes")
    assert set(matched["how"]) == {"order"}


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    offset=st.integers(-(10**9), 10**9) | st.integers(-(10**6), 10**6),
    drift=st.floats(-1, 1),
    count=st.integers(10, 40),
    cut=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    has_one_kind=st.booleans(),
)
def test_calls_without_numbers_are_matched_on_clocks_that_differ(
    seed: int, offset: int, drift: float, count: int, cut: tuple[int, int], has_one_kind: bool
) -> None:
    """By more than the time between collectives, too, and if one rank's recording begins later or ends earlier."""
    parts = made(seed, [0, offset], [0.0, drift], numbered=False, count=count)
    is_recorded = (pl.col("rank") == 0) | pl.col("event").is_between(cut[0], count - 1 - cut[1])
    kind = pl.lit("all_reduce") if has_one_kind else pl.col("collective")
    matched = match_participations(parts.filter(is_recorded).with_columns(collective=kind))
    whole = {((0, event), (1, event)) for event in range(cut[0], count - cut[1])}
    # The rest of a rare kind, of which one rank recorded one less, is too uncertain.
    assert pairs(matched, "instance") <= whole
    assert matched["instance"].null_count() <= MAX_UNMATCHED_SHARE * matched.height or any(cut)
    if not drift and matched["instance"].count():
        row = estimate_clocks(matched).row(1, named=True)
        assert row["lower_bound_ns"] <= offset <= row["upper_bound_ns"]


def periodic(ranks: dict[int, tuple[int, range]], lag: int, size: int | None) -> pl.DataFrame:
    """An all-reduce each ms of the ranks of group 0 or 1, which is ``lag`` ns late; ``bytes`` is the true instance."""
    chance = random.Random(1)
    ends = {
        (group, at): 10**18 + at * 10**6 + chance.randrange(-15_000, 15_000) + lag * group
        for group in (0, 1)
        for at in range(100)
    }
    rows = [
        {
            "rank": rank,
            "event": at,
            "where": "device",
            "collective": "all_reduce",
            "pg_name": None if size is None else "tp",
            "group_size": size,
            "bytes": 1000 * group + at,
            "start": ends[group, at] - 60_000,
            "end": ends[group, at] + chance.randrange(2_000),
        }
        for rank, (group, recorded) in ranks.items()
        for at in recorded
    ]
    return pl.DataFrame(rows, schema={**COLUMNS})


@pytest.mark.parametrize("size", [None, 2])
def test_groups_in_step_on_one_clock_are_not_aligned(size: int | None) -> None:
    every = range(100)
    parts = periodic({0: (0, every), 1: (0, every), 2: (1, every), 3: (1, every)}, 300_000, size)
    matched = match_participations(parts)
    assert pairs(matched, "instance") == pairs(matched, "bytes")


@pytest.mark.parametrize("recorded", [range(50, 95), range(35, 100), range(20)])
def test_a_rank_with_a_shorter_recording_is_not_aligned(recorded: range) -> None:
    matched = match_participations(
        periodic({0: (0, range(100)), 1: (0, range(100)), 2: (0, recorded)}, 0, None)
    )
    assert pairs(matched, "instance") == pairs(matched, "bytes")


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 10**6), drift=st.floats(-80, 80).filter(lambda ppm: abs(ppm) > 5))
def test_a_clock_drift_is_reported_and_removed(seed: int, drift: float) -> None:
    parts = made(seed, [0, 5_000_000], [0.0, drift], numbered=True, count=60)
    matched = match_participations(parts)
    table = estimate_clocks(matched)
    row = table.row(1, named=True)
    assert row["verdict"] == "corrected"
    assert row["drift_ppm"] == pytest.approx(drift, abs=0.5)
    ends = correct_clocks(matched, table).group_by("instance").agg(pl.col("end").max() - pl.col("end").min())
    assert ends["end"].max() < 10_000


def test_ranks_that_share_nothing_are_not_compared() -> None:
    parts = pl.concat(
        made(seed, [0], [0.0], numbered=False, count=30).with_columns(pl.lit(rank, pl.Int32).alias("rank"))
        for rank, seed in enumerate((1, 2))
    )
    matched = match_participations(parts)
    assert matched["instance"].null_count() == matched.height
    assert estimate_clocks(matched)["verdict"].to_list() == ["reference", "unknown"]


def uneven(where: str = "host", offset: int = 0) -> pl.DataFrame:
    """Communications by a backend on the host: the ranks leave up to 3 ms after the last has come."""
    parts = made(5, [0, 0], [0.0, 0.0], numbered=True, count=30)
    later = (pl.struct("event", "rank").hash(7) % 3_000_000).cast(pl.Int64)
    moved = pl.when(pl.col("rank") == 1).then(offset).otherwise(0)
    start, end = pl.col("start") + moved, pl.col("end") + later + moved
    return match_participations(parts.with_columns(start=start, end=end, where=pl.lit(where)))


@pytest.mark.parametrize(
    ("hosts", "verdict", "same"),
    [
        ({0: "a", 1: "a"}, "agrees", True),
        ({0: "a", 1: "b"}, "unsure", False),
        ({0: "localhost", 1: "localhost"}, "unsure", None),
        ({}, "unsure", None),
    ],
)
def test_one_host_has_one_clock(hosts: dict[int, str | None], verdict: str, same: bool | None) -> None:
    row = estimate_clocks(uneven(), hosts).row(1, named=True)
    assert (row["verdict"], row["same_host"]) == (verdict, same)
    assert row["lower_bound_ns"] <= 0 <= row["upper_bound_ns"] and row["spread_ns"] > 100_000
    assert row["residual_ns"] == 10_000 if same else 10_000 < row["residual_ns"] < 3_000_000


def test_devices_of_one_host_are_less_sure_of_its_clock() -> None:
    row = estimate_clocks(uneven("device"), {0: "a", 1: "a"}).row(1, named=True)
    assert (row["verdict"], row["same_host"], row["residual_ns"]) == ("unsure", True, 100_000)


def test_a_rank_of_the_host_that_always_leaves_late_keeps_its_clock() -> None:
    """By 90 us, evenly, where the bounds would allow it: of two hosts a clock that is off, of one a habit."""
    matched = match_participations(
        made(5, [0, 0], [0.0, 0.0], numbered=True, count=30).with_columns(where=pl.lit("host"))
    )
    matched = matched.with_columns(end=pl.col("end") + pl.when(pl.col("rank") == 1).then(90_000).otherwise(0))
    one, two = (estimate_clocks(matched, {0: "a", 1: host}).row(1, named=True) for host in "ab")
    assert (one["verdict"], two["verdict"]) == ("unsure", "corrected")
    assert 90_000 < one["residual_ns"] < 100_000 and abs(two["offset_ns"] - 90_000) < 2_000


def test_a_clock_that_cannot_be_right_is_moved_though_the_host_has_the_name_of_another() -> None:
    row = estimate_clocks(uneven(offset=60_000_000), {0: "a", 1: "a"}).row(1, named=True)
    assert row["verdict"] == "corrected"
    assert abs(row["offset_ns"] - 60_000_000) <= row["residual_ns"] < 3_000_000


def test_one_communication_gives_bounds_only() -> None:
    """Both leave when they like: that one left 1 ms later says nothing of its clock."""
    matched = match_participations(made(6, [0, 0], [0.0, 0.0], numbered=True, count=1))
    matched = matched.with_columns(
        end=pl.col("end") + pl.when(pl.col("rank") == 1).then(1_000_000).otherwise(0)
    )
    row = estimate_clocks(matched).row(1, named=True)
    assert row["verdict"] == "unsure"
    assert row["residual_ns"] == max(-row["lower_bound_ns"], row["upper_bound_ns"])


def test_ranks_that_share_no_group_have_a_reference_each() -> None:
    """The clocks of 0 and 1, and those of 2 and 3, an hour apart: nothing tells, and nothing has to."""
    first, second = (made(seed, [0, 50_000_000], [0.0, 0.0], numbered=True, count=12) for seed in (8, 9))
    second = second.with_columns(
        pl.col("rank") + 2, pl.lit("other").alias("pg_name"), pl.col("start", "end") + 3_600_000_000_000
    )
    table = estimate_clocks(match_participations(pl.concat((first, second))))
    assert table["reference"].to_list() == [0, 0, 2, 2]
    assert table["verdict"].to_list() == ["reference", "corrected"] * 2
    assert (table["offset_ns"] - pl.Series([0, 50_000_000] * 2)).abs().max() <= 4_000  # type: ignore[operator]


ROOTED = {
    # (rank, start, end), root 0; the transfer is that of the first receiver to have all it waits for; each rank's wait
    "broadcast": (
        [(0, 300, 310), (1, 100, 350), (2, 400, 440)],
        40,
        [0, 200, 0],
    ),  # rank 2 comes after the root left
    "scatter": ([(0, 300, 310), (1, 100, 350), (2, 200, 390)], 50, [0, 200, 100]),
    "gather": ([(0, 100, 460), (1, 400, 410), (2, 200, 205)], 60, [300, 0, 0]),
    "reduce": (
        [(0, 450, 500), (1, 400, 460), (2, 200, 205)],
        50,
        [0, 50, 0],
    ),  # rank 1 stays until the root comes
    "all_reduce": ([(0, 100, 460), (1, 400, 455), (2, 200, 457)], 55, [300, 0, 200]),
}


@pytest.mark.parametrize("collective", ROOTED)
def test_a_rank_that_only_sends_shows_no_transfer(collective: str) -> None:
    ranks, transfer, waits = ROOTED[collective]
    rows = [
        {
            "rank": rank,
            "event": 0,
            "where": "host",
            "collective": collective,
            "root": 0,
            "seq": 1,
            "start": start,
        }
        | {"end": end, "bytes": 120}
        for rank, start, end in ranks
    ]
    found = add_waits(match_participations(pl.DataFrame(rows, schema=COLUMNS)).with_columns(error=pl.lit(0)))
    assert found.sort("rank")["wait"].to_list() == waits
    row = analysis.summarize_instances(found).row(0, named=True)
    starts = [start for _, start, _ in ranks]
    assert (row["recorded"], row["wait_ns"], row["transfer_ns"]) == (3, max(waits), transfer)
    assert row["start_spread_ns"] == max(starts) - min(starts)
    assert row["algo_gb_per_s"] == pytest.approx(120 / transfer)
    assert ranks[starts.index(max(starts))][0] == row["last_rank"]


@settings(max_examples=examples(60))
@given(
    stays=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=5),
    collective=st.sampled_from(["message", *ROOTED]),
)
def test_a_wait_ends_when_another_comes_or_the_rank_leaves(
    stays: list[tuple[int, int]], collective: str
) -> None:
    is_message = collective == "message"
    rows = [
        {
            "rank": rank,
            "event": 0,
            "collective": collective,
            "instance": 1,
            "start": start,
            "end": start + stay,
        }
        | ({"source": 0, "destination": 1} if is_message else {"root": 0})
        for rank, (start, stay) in enumerate(stays[:2] if is_message else stays)
    ]
    found = add_waits(pl.DataFrame(rows, schema={**COLUMNS, "instance": pl.Int64}))
    for row in found.iter_rows(named=True):
        if row["wait"]:
            came = [other["start"] for other in rows if other["rank"] != row["rank"]]
            assert row["start"] + row["wait"] in [*came, row["end"]]
        assert 0 <= row["wait"] <= row["end"] - row["start"]
        assert row["wait"] <= max(start for start, _ in stays) - row["start"]


def test_roles_in_columns_equal_roles_in_rows() -> None:
    asked = itertools.product((0, 1), (None, 0, 1), (None, 0, 1), (None, "message", "wait", *ROOTED))
    rows = list(asked)
    table = pl.DataFrame(
        rows,
        schema={"rank": pl.Int32, "source": pl.Int64, "root": pl.Int64, "collective": pl.String},
        orient="row",
    )
    found = table.select(sends=matching.is_sender(), receives=matching.is_receiver()).rows()
    assert found == [matching.get_roles(*row) for row in rows]


def test_a_name_of_messages_does_not_determine_its_group() -> None:
    """Sends and receives that run as one (send_recv) state how many take part in them."""
    parts = made(4, [0] * 4, [0.0] * 4, numbered=True, count=12).filter(pl.col("pg_name") == "world")
    of_two = (pl.col("seq") % 2 == 0) & (pl.col("rank") < 2)
    mixed = parts.with_columns(
        collective=pl.when(of_two).then(pl.lit("send_recv")).otherwise("collective"),
        group_size=pl.when(of_two).then(2).otherwise(4),
    )
    whole = match_participations(mixed).filter(pl.col("collective") != "send_recv")
    assert whole.filter(pl.col("seq") % 2 == 1)["instance"].null_count() == 0


def test_groups_by_addresses_are_matched_as_far_as_their_sizes_allow() -> None:
    """The names of one group on two ranks, each its own; a third rank of the same size leaves in doubt who met."""
    parts = made(4, [0, 0, 0], [0.0] * 3, numbered=True, count=8).filter(pl.col("pg_name") == "world")
    named = parts.with_columns(pl.format("94{}", "rank").alias("pg_name"), group_size=pl.lit(2, pl.Int64))
    two = match_participations(named.filter(pl.col("rank") < 2))
    assert pairs(two, "instance") == pairs(two, "bytes") and set(two["group"]) == {"#0"}
    three = match_participations(named)
    assert three["instance"].null_count() == three.height
    assert (
        match_participations(named.with_columns(group_size=pl.lit(3, pl.Int64)))["instance"].null_count() == 0
    )


def test_a_match_by_order_has_to_fit() -> None:
    """Parts of one name without numbers: four at a time do not meet in a group of two."""
    parts = made(4, [0] * 4, [0.0] * 4, numbered=False, count=20).filter(pl.col("pg_name") == "world")
    matched = match_participations(parts.with_columns(group_size=pl.lit(2, pl.Int64)))
    assert matched["instance"].null_count() == matched["how"].null_count() == matched.height
    assert match_participations(parts)["instance"].null_count() == 0


def test_without_the_other_end_or_the_root_nothing_is_matched() -> None:
    """Beside parts that name their root, those that do not may be of another group."""
    parts = made(4, [0] * 4, [0.0] * 4, numbered=False, count=12).filter(pl.col("pg_name") == "world")
    root = pl.when(pl.col("rank") < 2).then(0)
    matched = match_participations(
        parts.with_columns(collective=pl.lit("broadcast"), root=root, pg_name=None)
    )
    assert matched.filter(pl.col("rank") < 2)["instance"].null_count() == 0
    assert matched.filter(pl.col("rank") > 1)["instance"].count() == 0
    assert matched.group_by("instance").len().filter(pl.col("instance").is_not_null())["len"].max() == 2
    for name in ("send", "recv"):
        assert match_participations(parts.with_columns(collective=pl.lit(name)))["instance"].count() == 0
        numbered = made(4, [0] * 2, [0.0] * 2, numbered=True, count=5)
        assert match_participations(numbered.with_columns(collective=pl.lit(name)))["instance"].count() == 0


def test_no_offset_accords_with_another_run() -> None:
    ours = made(3, [0, 0], [0.0, 0.0], numbered=True, count=8)
    moved = pl.when(pl.col("rank") == 1).then(pl.col("seq").hash(1) % 10**9).otherwise(0).cast(pl.Int64)
    matched = match_participations(ours.with_columns(pl.col("start", "end") + moved))
    assert estimate_clocks(matched)["verdict"].to_list() == ["reference", "impossible"]


def test_messages_of_a_rank_do_not_shift_its_collectives() -> None:
    """gloo numbers messages and collectives with one counter: rank 0 sends rank 1 a message before every other call."""
    calls = made(4, [0] * 4, [0.0] * 4, numbered=True, count=12).filter(pl.col("pg_name") == "world")
    calls = calls.with_columns(where=pl.lit("host"), seq=pl.col("seq").rank("dense").cast(pl.Int64))
    messages = calls.filter((pl.col("rank") < 2) & (pl.col("seq") % 2 == 0)).with_columns(
        pl.col("start", "end") - 5_000_000,
        pl.lit("message").alias("collective"),
        event=pl.col("event") + 100,
        bytes=-pl.col("bytes") - 1,
        source=pl.lit(0, pl.Int64),
        destination=pl.lit(1, pl.Int64),
        seq=pl.col("seq") + pl.col("seq") // 2 - 1,
    )
    sends = pl.when(pl.col("rank") < 2).then(pl.col("seq") // 2).otherwise(0)
    shifted = calls.with_columns(pl.col("seq") + sends)
    matched = match_participations(pl.concat((shifted, messages)))
    assert matched["instance"].null_count() == 0
    assert pairs(matched, "instance") == pairs(matched, "bytes")


def test_without_exchanged_data_ranks_do_not_wait() -> None:
    """Two ranks with eight collectives, and one of empty tensors, which rank 0 leaves before rank 1 comes."""
    calls = made(3, [0, 0], [0.0, 0.0], numbered=True, count=9).with_columns(synchronizes=pl.lit(True))
    is_last = pl.col("seq") == 8
    early = is_last & (pl.col("rank") == 0)
    calls = calls.with_columns(end=pl.when(early).then(pl.col("start") + 1_000).otherwise("end"))
    calls = calls.with_columns(start=pl.when(is_last & ~early).then(pl.col("end") - 1_000).otherwise("start"))
    late = calls.with_columns(
        pl.when(is_last & ~early).then(pl.col("start", "end") + 10**8).otherwise(pl.col("start", "end"))
    )
    verdicts = {
        synchronizes: estimate_clocks(
            match_participations(late.with_columns(synchronizes=~is_last | pl.lit(synchronizes, pl.Boolean)))
        )["verdict"].to_list()
        for synchronizes in (True, False, None)
    }
    assert verdicts[True][1] == "impossible"
    assert verdicts[False][1] == "agrees"
    assert verdicts[None][1] == "agrees"  # other instances are known to synchronize
    unknown = late.with_columns(synchronizes=pl.lit(None, pl.Boolean))
    assert estimate_clocks(match_participations(unknown))["verdict"][1] == "impossible"


@pytest.mark.parametrize(
    ("name", "sent", "splits", "synchronizes"),
    [
        ("allreduce", 8, None, True),
        ("allreduce", 0, None, False),
        ("broadcast", 8, None, False),
        ("all_to_allv", 8, None, True),
        ("all_to_allv", 6, None, None),  # rank 0 receives 8: some split differs, and may be zero
        ("all_to_allv", 6, ("[4, 2]", "[4, 4]"), True),
        ("all_to_allv", 4, ("[4, 0]", "[4, 4]"), False),
        ("all_to_allv", 4, ("[0, 4]", "[0, 8]"), True),  # nothing to itself
    ],
)
def test_which_collectives_synchronize(
    tmp_path: Path, name: str, sent: int, splits: tuple[str, str] | None, synchronizes: bool | None
) -> None:
    args: dict[str, object] = {
        "Collective name": name, "In msg nelems": sent, "Out msg nelems": 8 if sent else 0, "Group size": 2,
        "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "device": 0, "stream": 7,
    }  # fmt: skip
    if splits:
        args |= {"In split size": splits[0], "Out split size": splits[1]}
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": f"ncclDevKernel_{name}",
        "pid": 0,
        "tid": 7,
        "ts": 1,
        "dur": 5,
    }
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [{**kernel, "args": args}]}))
    trace = etloom.link(etloom.read(tmp_path / "trace.json"))
    assert list_participations(trace, 0)["synchronizes"].to_list() == [synchronizes]


def test_two_kernels_of_one_number_are_matched_in_turn() -> None:
    one = made(4, [0, 0], [0.0, 0.0], numbered=True, count=1)
    later = one.with_columns(pl.col("start", "end") + 10**7, event=pl.lit(1, pl.UInt32))
    matched = match_participations(pl.concat((one, later)))
    assert pairs(matched, "instance") == {((0, 0), (1, 0)), ((0, 1), (1, 1))}


@pytest.mark.parametrize(
    ("collective", "into", "out", "size"),
    [
        ("all_gather", 10, 40, 40),
        ("reduce_scatter", 40, 10, 40),
        ("all_reduce", 8, 8, 8),
        ("message", 6, 0, 6),
        ("barrier", None, None, None),
        ("barrier", 1, 1, None),
    ],
)
def test_message_sizes(collective: str, into: int | None, out: int | None, size: int | None) -> None:
    assert compute_message_size(collective, into, out) == size


def test_bus_factors() -> None:
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "message", "barrier")
    assert [get_bus_factor(name, 4) for name in names] == [1.5, 0.75, 0.75, 0.75, 1.0, 1.0, None]


@pytest.mark.slow
def test_dlrm_is_on_one_clock(data: Path) -> None:
    job = open_run(data / "dlrm")
    table = etloom.analyze(job, "clocks")
    assert table["offset_ns"].abs().max() <= 10_000  # type: ignore[operator]
    assert table["verdict"].to_list() == ["reference", "agrees", "agrees", "agrees"]
    rows = etloom.analyze(job, "collectives")
    first = rows.row(0, named=True)
    assert (first["collective"], first["seq"], first["recorded"], first["group_size"]) == (
        "all_to_all",
        147,
        4,
        8,
    )
    # The longest kernel of the four takes 7.6 ms: all but 0.5 of it is a wait for rank 2.
    assert (first["wait_ns"], first["transfer_ns"], first["last_rank"]) == (7_116_000, 518_000, 2)
    assert rows["how"].to_list() == ["seq"] * 8
    assert rows["end_spread_ns"].max() <= 7_000  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ranks", "moved_us"),
    [((1,), 300.5), ((1,), 1850.5), ((1,), 50_000), ((2, 3), 300.5), ((2, 3), 1850.5), ((2, 3), -2000.5)],
)
def test_dlrm_without_numbers_on_the_clocks_of_two_hosts(
    data: Path, ranks: tuple[int, ...], moved_us: float
) -> None:
    moved = round(moved_us * 1000)
    job = open_run(data / "dlrm")
    traces = {
        rank: trace.replace(
            comms=trace.comms.clear(),
            events=trace.events.with_columns(pl.col("ts") + (moved if rank in ranks else 0)),
        )
        for rank, trace in job.items()
    }
    other = Job(traces)
    clocks = etloom.analyze(other, "clocks")
    for rank, offset in clocks.select("rank", "offset_ns").iter_rows():
        assert abs(offset - (moved if rank in ranks else 0)) <= 4_000
    assert set(etloom.analyze(other, "collectives")["how"]) == {"order"}
    late = etloom.analyze(other, "stragglers")
    assert late.row(0, named=True)["rank"] == 2
    assert late["delay_ns"][0] == pytest.approx(etloom.analyze(job, "stragglers")["delay_ns"][0], abs=10_000)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "surely"), [("cpu/pp_4", 48), ("cpu/coll_4", 8), ("cpu/ddp_2", 0)])
def test_delays_under_uncertain_clocks(data: Path, run: str, surely: int) -> None:
    """Hosts unknown, gloo leaves when it likes: waits of tens of ms in a pipeline stay, those of two collectives go."""
    job = open_run(data / run)
    nowhere = Job({rank: trace.replace({"host": None}) for rank, trace in job.items()})
    assert set(etloom.analyze(nowhere, "clocks")["verdict"]) == {"reference", "unsure"}
    assert etloom.analyze(nowhere, "stragglers")["late_confirmed"].sum() == surely
    assert set(etloom.analyze(job, "clocks")["residual_ns"]) == {0, 10_000}
    # Times from each file's own zero are on no host's clock.
    own_zero = Job({rank: trace.replace({"clock": "file"}) for rank, trace in job.items()})
    assert set(etloom.analyze(own_zero, "clocks")["verdict"]) == {"reference", "unsure"}
    found = etloom.analyze(nowhere, "findings", pattern="stragglers", min_pct=0)
    assert (found.height > 0) == (surely > 0)


@pytest.mark.parametrize(
    "run", ["dlrm", "cpu/coll_4", "cpu/pp_4", "hta_multirank", "tracelens/b200_eager.json.gz"]
)
def test_aggregated_arrivals_equal_the_table_of_collectives(data: Path, run: str) -> None:
    job = open_run(data / run)
    rows = etloom.analyze(job, "collectives").with_row_index("communication")
    each = etloom.analyze(job, "arrivals")
    sums = each.group_by("communication", maintain_order=True).agg(
        pl.col("start_ns").min(),
        pl.len().alias("recorded"),
        pl.col("arrival_ns").max().alias("start_spread_ns"),
        pl.col("wait_ns").max(),
        pl.col("wait_ns").mean().alias("mean_wait_ns"),
        pl.col("departure_ns").max().alias("end_spread_ns"),
        pl.col("duration_ns").min(),
    )
    assert sums.select(names := sums.columns[1:]).rows() == rows.select(names).rows()
    for name, came in (("first_rank", pl.lit(0, pl.Int64)), ("last_rank", pl.col("start_spread_ns"))):
        said = rows.drop_nulls(name).select("communication", rank=name, arrival_ns=came)
        assert said.join(each, on=["communication", "rank", "arrival_ns"]).height == said.height
    known = each.drop_nulls("wait_ns")
    assert (known["wait_ns"] <= known["duration_ns"]).all()
    if known.height:
        waited = etloom.analyze(job, "stragglers").select("rank", wait_ns="waited_ns").sort("rank")
        assert known.group_by("rank").agg(pl.col("wait_ns").sum()).sort("rank").equals(waited)


def test_a_rank_that_had_left_waits_for_no_rank(data: Path) -> None:
    each = etloom.analyze(open_run(data / "cpu/coll_4"), "arrivals").filter(
        pl.col("collective") == "broadcast"
    )
    first = each.filter(pl.col("communication") == each["communication"][0])
    # Root 1 comes last, after 1.32 ms; the others had waited for it.
    assert first.select("rank", "arrival_ns", "wait_ns").rows() == [
        (3, 0, 1_321_220),
        (0, 345_510, 975_710),
        (2, 921_301, 399_919),
        (1, 1_321_220, 0),
    ]


def test_every_message_of_the_pipeline_is_matched(data: Path) -> None:
    rows = etloom.analyze(open_run(data / "cpu/pp_4"), "collectives")
    assert rows.height == 48
    assert set(rows["recorded"]) == {2}
    assert (rows["source"] - rows["destination"]).abs().to_list() == [1] * 48


def test_collectives_of_subgroups_by_gloo_are_matched(data: Path) -> None:
    parts = match_collectives(open_run(data / "cpu/coll_4")).parts
    assert parts["instance"].null_count() == 0
    assert parts.filter(pl.col("collective") == "barrier").height == 4


def test_ranges_of_one_operator_are_one_communication(data: Path) -> None:
    """gloo works off a reduce_scatter of four tensors in four ranges, and one of two in two."""
    job = open_run(data / "cpu/coll_4")
    raw = match_collectives(job).parts.filter(pl.col("collective") == "reduce_scatter")
    rows = etloom.analyze(job, "collectives").filter(pl.col("collective") == "reduce_scatter")
    assert (raw.height, rows.height) == (4 * 8, 4)
    assert rows["start_ns"][0] == raw["start"].min()
    # The four ranges of one call, from the call of rank 1, which came last, to its last end.
    by_hand = raw.filter((pl.col("rank") == 1) & (pl.len().over("rank", "issuer") == 4))
    assert rows["transfer_ns"].to_list()[1] == by_hand["end"].max() - by_hand["start"].min()  # type: ignore[operator]
    assert rows["bytes"].to_list() == [128, 128, 192, 128]


def test_only_collectives_of_a_shared_group_are_matched(data: Path) -> None:
    """All kernels are called SendRecv; the ranks share two all-gathers (16 MiB to 1 GiB) and no other group."""
    table = etloom.analyze(open_run(data / "hta_multirank"), "collectives")
    assert dict(table.group_by("collective", "recorded").len().sort("collective").rows_by_key("collective")) == {
        "all_gather": [(2, 2)], "all_reduce": [(1, 8)], "all_to_all": [(1, 8)]
    }  # fmt: skip


def test_one_rank_does_not_show_who_waited(data: Path) -> None:
    job = open_run(data / "tracelens/b200_eager.json.gz")
    rows = etloom.analyze(job, "collectives")
    assert rows["wait_ns"].null_count() == rows["transfer_ns"].null_count() == rows.height
    with pytest.raises(AnalysisError, match="at least two ranks"):
        etloom.analyze(job, "clocks")


def test_kernels_without_stream_and_arguments_have_queues_and_the_collective_of_their_operator(
    data: Path,
) -> None:
    job = etloom.open(data / "cases/turn3/xpu", use_cache=False)
    assert set(job[0].events.filter(pl.col("cat") == "kernel").select("tid", "stream").iter_rows()) == {
        (0, 64),
        (1, 65),
    }
    assert set(etloom.analyze(job, "collectives")["collective"]) == {"all_reduce"}
    assert set(etloom.analyze(job, "queue-summary")["stream"]) == {64, 65}
