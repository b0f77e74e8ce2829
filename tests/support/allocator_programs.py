"""Random programs of requests to a caching allocator, with settings and memory from before, by a seed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from etloom import _native
from etloom.timeline.memory.settings import MIB, Settings
from support import reference_allocator
from support.reference_allocator import ALLOC, EMPTY_CACHE, FREE, RELEASE_POOL

SIZES = (1, 511, 512, 513, 4096, 100_000, MIB - 1, MIB, MIB + 1, 2 * MIB, 3_500_000, 10 * MIB - 1, 10 * MIB)
LARGE_SIZES = (12_345_678, 20 * MIB, 21 * MIB + 512, 30 * MIB, 64 * MIB, 100 * MIB)


class Program(NamedTuple):
    action: Any
    value: Any
    stream: Any
    pool: Any
    segments: list[tuple[int, int, int, int, bool, int]]
    blocks: list[tuple[int, int, int]]
    driver: list[tuple[int, int]]
    settings: Settings


def make_program(seed: int, most: int = 120) -> Program:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, most))
    streams, pools = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 1, 3])
    free_share, empty_share = draw.uniform(0.1, 0.7), draw.choice([0, 0, 0.05])
    sizes = draw.choice(SIZES + LARGE_SIZES, draw.integers(1, 10))
    segments, blocks = make_memory(draw) if draw.random() < 0.3 else ([], [])
    action, value = np.zeros(count, np.uint8), np.zeros(count, np.int64)
    live = [-1 - number for number in range(len(blocks))]
    for at in range(count):
        kind = draw.random()
        if kind < empty_share:
            action[at] = EMPTY_CACHE
        elif pools > 1 and kind > 0.98:
            action[at], value[at] = RELEASE_POOL, draw.integers(1, pools)
        elif live and draw.random() < free_share:
            action[at], value[at] = FREE, live.pop(draw.integers(len(live)))
        else:
            action[at] = ALLOC
            value[at] = draw.choice(sizes) if draw.random() < 0.8 else draw.integers(1, 40 * MIB)
            live.append(at)
    driver = [(int(draw.integers(1, 99)) << 30, int(draw.choice([2, 20, 64])) * MIB) for _ in range(3)]
    return Program(
        action, value, draw.integers(0, streams, count), draw.integers(0, pools, count).astype(np.int32),
        segments, blocks, driver, make_settings(draw),
    )  # fmt: skip


def make_settings(draw: np.random.Generator) -> Settings:
    return Settings(
        capacity=int(draw.choice([0, 44, 100, 256, 1000])) * MIB,
        max_split_size=int(draw.choice([Settings().max_split_size, 21 * MIB, 30 * MIB, 64 * MIB])),
        max_non_split_rounding=int(draw.choice([20, 1, 50])) * MIB,
        large_segment_size=int(draw.choice([20, 20, 22, 40])) * MIB,
        garbage_collection_threshold=float(draw.choice([0, 0, 0.3, 0.8])),
        expandable_segments=bool(draw.random() < 0.4),
        roundup_power2_divisions=tuple(
            int(draw.choice([0, 1, 2, 4, 8])) if varied else 0 for varied in [draw.random() < 0.3] * 16
        ),
    )


def make_memory(draw: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Make segments and blocks from before a program; address spaces of expandable segments do not overlap."""
    segments, blocks = [], []
    for number in range(draw.integers(1, 4)):
        is_small, address = bool(draw.random() < 0.4), (number + 1) << 44
        size = (2 if is_small else int(draw.choice([20, 40, 80]))) * MIB
        space = int(draw.choice([0, 0, size, 5 * size, 1 << 40]))
        segments.append((address, size, int(draw.integers(2)), 0, is_small, space))
        at = address
        while at < address + size and draw.random() < 0.8:
            length = min(int(draw.integers(1, 40)) * (512 if is_small else MIB), address + size - at)
            if draw.random() < 0.6:
                blocks.append((at, length, length - int(draw.integers(512))))
            at += length
    return segments, blocks


def run_native(program: Program, stop: int = 1 << 40) -> tuple[Any, Any, Any]:
    settings = program.settings

    def columns(rows: list[Any], count: int) -> tuple[Any, ...]:
        return tuple(np.array([row[i] for row in rows], np.int64) for i in range(count))

    after, events, ends = _native.run_allocator(
        program.action, program.value, program.stream, program.pool,
        columns(program.segments, 6), columns(program.blocks, 3), columns(program.driver, 2),
        (
            settings.capacity, settings.max_split_size, settings.max_non_split_rounding, settings.large_segment_size,
            settings.expandable_segments,
        ),
        settings.garbage_collection_threshold, settings.roundup_power2_divisions, stop,
    )  # fmt: skip
    return (
        [column.tolist() for column in after],
        list(zip(*(column.tolist() for column in events), strict=True)),
        list(zip(*(column.tolist() for column in ends), strict=True)),
    )


def run_reference(program: Program, stop: int = 1 << 40) -> tuple[Any, Any, Any]:
    return reference_allocator.run_allocator(*program, stop)
