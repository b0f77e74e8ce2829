"""The simulated allocator next to a slow implementation, its laws, and PyTorch's documented rules."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from etloom import _native
from etloom.timeline.memory.settings import MIB, parse_settings
from support.allocator_programs import Program, make_program, run_native, run_reference
from support.examples import examples
from support.reference_allocator import (
    ALLOC,
    EMPTY_CACHE,
    FREE,
    OOM,
    RETRY,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
)

BLOCKS = 20


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_slow_implementation_agrees_under_all_settings(block: int) -> None:
    count = examples(600) // BLOCKS
    for seed in range(block * count, (block + 1) * count):
        program = make_program(seed)
        assert run_native(program) == run_reference(program), f"seed {seed}"


@pytest.mark.parametrize("seed", range(40))
def test_blocks_tile_segments_without_overlap(seed: int) -> None:
    program = make_program(1_000_000 + seed, most=300)
    after, _, blocks = run_native(program)
    assert sum(block[1] for block in blocks) == after[1][-1]
    in_use = [block for block in blocks if block[3] > -(1 << 62)]
    assert (
        sum(block[1] for block in in_use) == after[2][-1]
        and sum(block[2] for block in in_use) == after[3][-1]
    )
    for block, following in itertools.pairwise(blocks):
        end = block[0] + block[1]
        is_same_segment = block[4] == following[4]
        assert end == following[0] if is_same_segment and not block[8] else end <= following[0]
        # Free neighbours are merged.
        both_free = block[3] == following[3] == -(1 << 62)
        assert not (both_free and is_same_segment and end == following[0])
    assert all(size % 512 == 0 and requested <= size for _, size, requested, *_ in in_use if size % 512 == 0)


def run(requests: list[tuple[int, int]], settings: str = "", **columns: Any) -> tuple[Any, Any, Any]:
    """Run operations (kind, value) on stream 0 and pool 0, unless ``columns`` state others."""
    action, value = (np.array(column) for column in zip(*requests, strict=True))
    zeros = np.zeros(len(action), np.int64)
    program = Program(
        action.astype(np.uint8), value.astype(np.int64), np.array(columns.get("stream", zeros), np.int64),
        np.array(columns.get("pool", zeros), np.int32), [], [], [], parse_settings(settings),
    )  # fmt: skip
    result = run_native(program)
    assert result == run_reference(program)
    return result


def events(result: tuple[Any, Any, Any]) -> list[tuple[int, int]]:
    return [(kind, size) for _, kind, _, size in result[1]]


def test_requests_below_10_mib_share_segments_of_20_mib() -> None:
    assert events(run([(ALLOC, 1), (ALLOC, MIB + 1), (ALLOC, 10 * MIB), (ALLOC, 11 * MIB)])) == [
        (SEGMENT_ALLOC, 2 * MIB), (SEGMENT_ALLOC, 20 * MIB), (SEGMENT_ALLOC, 12 * MIB),
    ]  # fmt: skip


def test_a_large_block_keeps_a_rest_of_up_to_1_mib() -> None:
    sizes = [block[1] for block in run([(ALLOC, 19 * MIB), (ALLOC, 20 * MIB - 512)])[2]]
    assert sizes == [20 * MIB, 20 * MIB]


def test_free_blocks_serve_only_their_stream_and_their_pool() -> None:
    requests = [(ALLOC, 20 * MIB), (FREE, 0), (ALLOC, 20 * MIB)]
    assert len(events(run(requests))) == 1
    assert len(events(run(requests, stream=[0, 0, 1]))) == 2
    assert len(events(run(requests, pool=[0, 0, 1]))) == 2


def test_cached_segments_are_released_before_an_allocation_fails() -> None:
    result = run([(ALLOC, 30 * MIB), (FREE, 0), (ALLOC, 40 * MIB), (ALLOC, 40 * MIB)], "capacity=60MiB")
    assert events(result) == [
        (SEGMENT_ALLOC, 30 * MIB), (RETRY, 40 * MIB), (SEGMENT_FREE, 30 * MIB), (SEGMENT_ALLOC, 40 * MIB),
        (RETRY, 40 * MIB), (OOM, 40 * MIB),
    ]  # fmt: skip


def test_empty_cache_releases_whole_segments_only() -> None:
    result = run(
        [(ALLOC, 12 * MIB), (ALLOC, 2 * MIB), (FREE, 0), (ALLOC, 3 * MIB), (FREE, 1), (EMPTY_CACHE, 0)]
    )
    assert events(result)[-1] == (SEGMENT_FREE, 20 * MIB)


def test_split_blocks_fragment_what_expandable_segments_do_not() -> None:
    # Blocks of 30 MiB between blocks of 12 MiB; then 60 MiB are needed where only single gaps of 30 MiB are free.
    requests = [(ALLOC, size * MIB) for _ in range(4) for size in (30, 12)]
    requests += [(FREE, at) for at in (0, 2, 4, 6)] + [(ALLOC, 60 * MIB)]
    assert run(requests)[0][1][-1] == 4 * 42 * MIB + 60 * MIB
    expandable = run(requests, "expandable_segments:True")
    assert expandable[0][1][-1] == 240 * MIB
    assert {kind for kind, _ in events(expandable)} == {SEGMENT_MAP}


def test_rounding_to_divisions_of_powers_of_two() -> None:
    four = parse_settings("roundup_power2_divisions:4")
    assert [four.round_size(size) for size in (1200, 512 * 4 + 1, 5000, 1 << 20)] == [
        1536,
        2560,
        5120,
        1 << 20,
    ]
    listed = parse_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert listed.roundup_power2_divisions == (*(1,) * 9, 2, 4, *(8,) * 5)


def test_blocks_from_max_split_size_on_are_not_split_and_fit_only_with_a_rest_of_20_mib() -> None:
    large, small = 100 * MIB, 30 * MIB
    requests = [(ALLOC, large), (FREE, 0), (ALLOC, small)]
    assert len(events(run(requests))) == 1
    assert len(events(run(requests, "max_split_size_mb:64"))) == 2
    assert len(events(run([(ALLOC, large), (FREE, 0), (ALLOC, 85 * MIB)], "max_split_size_mb:64"))) == 1
    assert len(events(run([(ALLOC, large), (FREE, 0), (ALLOC, 79 * MIB)], "max_split_size_mb:64"))) == 2


def test_garbage_collection_releases_segments_that_were_not_used_for_long() -> None:
    requests = [(ALLOC, 40 * MIB), (ALLOC, 30 * MIB), (FREE, 0), (FREE, 1), (ALLOC, 50 * MIB)]
    assert SEGMENT_FREE not in dict(events(run(requests, "capacity=200MiB")))
    collected = events(run(requests, "capacity=200MiB,garbage_collection_threshold:0.3"))
    assert (SEGMENT_FREE, 40 * MIB) in collected


@pytest.mark.parametrize(
    "segments", [[(0, 100), (50, 100)], [(0, 0)], [(-5, 10)], [(1 << 62, 10)], [(0, 1 << 60)]]
)
def test_impossible_segments_are_refused(segments: list[tuple[int, int]]) -> None:
    program = make_program(1)._replace(
        segments=[(a, size, 0, 0, False, 0) for a, size in segments], blocks=[]
    )
    with pytest.raises(ValueError, match="segments overlap"):
        run_native(program)


@pytest.mark.parametrize(
    "blocks", [[(100, 60, 1), (150, 10, 1)], [(90, 20, 1)], [(100, 10, 11)], [(190, 20, 1)]]
)
def test_impossible_blocks_are_refused(blocks: list[tuple[int, int, int]]) -> None:
    program = make_program(1)._replace(segments=[(100, 100, 0, 0, False, 0)], blocks=blocks)
    with pytest.raises(ValueError, match="blocks overlap"):
        run_native(program)


def test_values_anywhere_in_64_bits_are_survived() -> None:
    ends = [-(1 << 63), -1, 0, 1, 1 << 50, (1 << 50) + 1, 1 << 62, (1 << 63) - 1]
    draw = np.random.default_rng(1)
    for _ in range(300):
        program = make_program(int(draw.integers(1 << 30)))
        value = draw.choice(np.array(ends), len(program.value))
        stream = draw.choice(np.array(ends), len(program.value))
        action = draw.integers(0, 9, len(program.value)).astype(np.uint8)
        run_native(program._replace(action=action, value=value, stream=stream, segments=[], blocks=[]))


def test_columns_of_different_length_are_refused() -> None:
    numbers = np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="differ in length"):
        _native.run_allocator(
            np.zeros(2, np.uint8), numbers, numbers, np.zeros(3, np.int32), (numbers,) * 6, (numbers,) * 3,
            (numbers,) * 2, (0, 1, 1, 1, 0), 0.0, (0,) * 16, 9,
        )  # fmt: skip
