"""A slow implementation of PyTorch's caching allocator, to compare native/allocator.cpp with.

It follows c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.x (malloc, get_free_block, alloc_block, free_block, release_*,
expandable segments) with plain lists: every search goes over all free blocks. Arguments and results are those of
`etloom._native.run_allocator`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etloom.timeline.memory.settings import MIN_BLOCK, Settings

ALLOC, FREE, EMPTY_CACHE, RELEASE_POOL = range(4)
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, RETRY, OOM = range(6)
EVENT_NAMES = ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "retry", "oom")
SMALL, SMALL_SEGMENT, MIN_LARGE, ROUND_LARGE = 1 << 20, 2 << 20, 10 << 20, 2 << 20
ADDRESS_SPACE = 1 << 42
NO_OWNER = -(1 << 62)


@dataclass(eq=False)
class Segment:
    """What the driver gave at once, or the address space of an expandable segment: its blocks tile it."""

    address: int
    size: int
    stream: int
    pool: tuple[int, bool]
    expandable: bool
    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    segment: Segment
    address: int
    size: int
    mapped: bool = True
    owner: int = NO_OWNER
    requested: int = 0
    since: int = 0

    @property
    def is_free(self) -> bool:
        return self.mapped and self.owner == NO_OWNER

    @property
    def key(self) -> tuple[int, int, int]:
        return self.segment.stream, self.size, self.address

    def neighbour(self, offset: int) -> Block | None:
        place = self.segment.blocks.index(self) + offset
        return self.segment.blocks[place] if 0 <= place < len(self.segment.blocks) else None


class Allocator:
    def __init__(self, settings: Settings, segments: Any, blocks: Any, driver: list[tuple[int, int]]) -> None:
        self.settings = settings
        self.segments: list[Segment] = []
        self.released_pools: set[int] = set()
        self.searches: dict[tuple[int, bool], int] = {}
        self.reserved = self.allocated = self.requested = 0
        self.events: list[tuple[int, int, int, int]] = []
        self.operation = -1
        self.live: dict[int, Block] = {}
        for address, size, stream, pool, is_small, space in segments:
            segment = Segment(address, size, stream, (pool, is_small), space > 0)
            inside = [b for b in enumerate(blocks) if address <= b[1][0] < address + size]
            end = address
            for number, (start, length, requested) in sorted(inside, key=lambda b: b[1][0]):
                if start > end:
                    segment.blocks.append(Block(segment, end, start - end))
                block = Block(segment, start, length, owner=-1 - number, requested=requested)
                segment.blocks.append(block)
                self.live[-1 - number] = block
                self.allocated += length
                self.requested += requested
                end = start + length
            if end < address + size:
                segment.blocks.append(Block(segment, end, address + size - end))
            self.reserved += size
            if space > size:
                segment.size = space
                segment.blocks.append(Block(segment, address + size, space - size, mapped=False))
            self.segments.append(segment)
        known = [*((s.address, s.size) for s in self.segments), *driver]
        page = 1 << 21
        self.next_address = -(-max((a + s for a, s in known), default=page) // page) * page
        self.driver: dict[int, list[int]] = {}
        for address, size in driver:
            self.driver.setdefault(size, []).append(address)

    # Requests

    def segment_size(self, size: int) -> int:
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.settings.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def alloc(self, requested: int, stream: int, pool_id: int) -> int:
        size = self.settings.round_size(requested)
        pool = (pool_id, size <= SMALL)
        block = self.find(size, stream, pool)
        if block is None:
            self.collect_garbage()
            block = self.extend(size, stream, pool)
        if block is None and self.release_oversize(size, stream, pool):
            block = self.extend(size, stream, pool)
        if block is None and pool_id == 0:
            self.log(RETRY, 0, size)
            self.empty_cache()
            block = self.extend(size, stream, pool)
        if block is None:
            self.log(OOM, 0, size)
            return -1
        rest = block.size - size
        if pool[1] or self.settings.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            split = size < self.settings.max_split_size and rest > SMALL
        if split:
            block.size = size
            self.insert(Block(block.segment, block.address + size, rest), block)
        block.owner, block.requested = self.operation, requested
        self.live[self.operation] = block
        self.allocated += block.size
        self.requested += requested
        return block.address

    def free(self, owner: int) -> int:
        block = self.live.pop(owner, None)
        if block is None:
            return -1
        address = block.address
        self.allocated -= block.size
        self.requested -= block.requested
        block.owner, block.requested = NO_OWNER, 0
        self.merge(block)
        block.since = self.searches.get(block.segment.pool, 0)
        return address

    # Free blocks

    def free_blocks(self, pool: tuple[int, bool]) -> list[Block]:
        blocks = [b for s in self.segments if s.pool == pool for b in s.blocks if b.is_free]
        return sorted(blocks, key=lambda b: b.key)

    def find(self, size: int, stream: int, pool: tuple[int, bool]) -> Block | None:
        settings = self.settings
        if settings.collects_garbage:
            self.searches[pool] = self.searches.get(pool, 0) + 1
        fits = [b for b in self.free_blocks(pool) if b.segment.stream == stream and b.size >= size]
        if not fits:
            return None
        at = 0
        if fits[0].segment.expandable:
            if settings.expandable_segments:

                def expandable_size(block: Block) -> int:
                    after = block.neighbour(1)
                    return block.size + (after.size if after and not after.mapped else 0)

                while (
                    fits[at].segment.expandable
                    and at + 1 < len(fits)
                    and expandable_size(fits[at + 1]) < expandable_size(fits[at])
                ):
                    at += 1
            else:
                while at < len(fits) and fits[at].segment.expandable:
                    at += 1
                if at == len(fits):
                    return None
        block = fits[at]
        if size < settings.max_split_size <= block.size:
            return None
        if size >= settings.max_split_size and block.size >= size + settings.max_non_split_rounding:
            return None
        return block

    def insert(self, block: Block, after: Block) -> None:
        block.since = self.searches.get(block.segment.pool, 0)
        block.segment.blocks.insert(block.segment.blocks.index(after) + 1, block)

    def merge(self, block: Block) -> None:
        for offset in (-1, 1):
            other = block.neighbour(offset)
            if other is not None and other.owner == NO_OWNER and other.mapped == block.mapped:
                block.address = min(block.address, other.address)
                block.size += other.size
                block.segment.blocks.remove(other)

    # Segments

    def log(self, kind: int, address: int, size: int) -> None:
        self.events.append((self.operation, kind, address, size))

    def new_address(self, size: int) -> int:
        addresses = self.driver.get(size, [])
        while addresses:
            address = addresses.pop(0)
            if all(address + size <= s.address or s.address + s.size <= address for s in self.segments):
                return address
        address = self.next_address
        self.next_address += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address

    def extend(self, size: int, stream: int, pool: tuple[int, bool]) -> Block | None:
        """Return a new free block of at least ``size``, or None if the device has no room."""
        capacity, total = self.settings.capacity, self.segment_size(size)
        if self.settings.collects_garbage and self.reserved + total > capacity:
            return None
        if self.settings.expandable_segments:
            return self.expand(size, stream, pool)
        if capacity and self.reserved + total > capacity:
            return None
        segment = Segment(self.new_address(total), total, stream, pool, False)
        segment.blocks.append(Block(segment, segment.address, total, since=self.searches.get(pool, 0)))
        self.segments.append(segment)
        self.reserved += total
        self.log(SEGMENT_ALLOC, segment.address, total)
        return segment.blocks[0]

    def page(self, is_small: bool) -> int:
        return SMALL_SEGMENT if is_small else self.settings.large_segment_size

    def expandable_size(self, is_small: bool) -> int:
        capacity, page = self.settings.capacity, self.page(is_small)
        return -(-(capacity + capacity // 8 if capacity else ADDRESS_SPACE) // page) * page

    def expand(self, size: int, stream: int, pool: tuple[int, bool]) -> Block | None:
        block = self.find_expandable(size, stream, pool)
        if block is None or (not block.mapped and not self.map(block, min(block.size, size))):
            return None
        while block.size < size:
            after = block.neighbour(1)
            assert after is not None
            if not self.map(after, min(size - block.size, after.size)):
                return None
            block = after
        return block

    def find_expandable(self, size: int, stream: int, pool: tuple[int, bool]) -> Block | None:
        segments = [s for s in self.segments if s.pool == pool and s.expandable and s.stream == stream]
        for segment in sorted(segments, key=lambda s: s.address):
            for start, block in enumerate(segment.blocks):
                if block.mapped:
                    continue
                first = start - 1 if start and segment.blocks[start - 1].is_free else start
                room = 0
                for candidate in segment.blocks[first:]:
                    if candidate.owner != NO_OWNER or room >= size:
                        break
                    room += candidate.size
                if room >= size:
                    return segment.blocks[first]
        total = self.expandable_size(pool[1])
        if total < size:
            return None
        segment = Segment(self.next_address, total, stream, pool, True)
        self.next_address += -(-total // ROUND_LARGE) * ROUND_LARGE
        segment.blocks.append(Block(segment, segment.address, total, mapped=False))
        self.segments.append(segment)
        return segment.blocks[0]

    def map(self, block: Block, size: int) -> bool:
        page, segment = self.page(block.segment.pool[1]), block.segment
        size = -(-size // page) * page
        if self.settings.capacity and self.reserved + size > self.settings.capacity:
            return False
        start = block.address
        block.mapped = True
        if size < block.size:
            self.insert(Block(segment, start + size, block.size - size, mapped=False), block)
            block.size = size
        self.merge(block)
        block.since = self.searches.get(segment.pool, 0)
        self.reserved += size
        self.log(SEGMENT_MAP, start, size)
        return True

    def unmap(self, block: Block) -> None:
        segment, (start, end) = block.segment, self.whole_pages(block)
        if start >= end:
            return
        if end < block.address + block.size:
            self.insert(Block(segment, end, block.address + block.size - end), block)
        if start > block.address:
            before = Block(segment, block.address, start - block.address)
            before.since = self.searches.get(segment.pool, 0)
            segment.blocks.insert(segment.blocks.index(block), before)
        block.address, block.size, block.mapped = start, end - start, False
        self.merge(block)
        self.reserved -= end - start
        self.log(SEGMENT_UNMAP, start, end - start)

    def whole_pages(self, block: Block) -> tuple[int, int]:
        base, page = block.segment.address, self.page(block.segment.pool[1])
        return base + -(-(block.address - base) // page) * page, base + (
            block.address + block.size - base
        ) // page * page

    def releasable(self) -> int:
        total = 0
        for segment in self.segments:
            for block in segment.blocks:
                if block.is_free and segment.expandable:
                    start, end = self.whole_pages(block)
                    total += max(end - start, 0)
                elif block.is_free and len(segment.blocks) == 1:
                    total += block.size
        return total

    def release(self, segment: Segment) -> None:
        self.reserved -= segment.size
        self.log(SEGMENT_FREE, segment.address, segment.size)
        self.segments.remove(segment)

    def empty_cache(self) -> None:
        for pool in (
            (0, False),
            (0, True),
            *((i, small) for i in sorted(self.released_pools) for small in (True, False)),
        ):
            blocks = self.free_blocks(pool)
            for block in blocks:
                if not block.segment.expandable and len(block.segment.blocks) == 1:
                    self.release(block.segment)
            for block in blocks:
                if block.segment.expandable:
                    self.unmap(block)
                    if len(block.segment.blocks) == 1 and not block.mapped:
                        self.segments.remove(block.segment)

    def release_oversize(self, size: int, stream: int, pool: tuple[int, bool]) -> bool:
        limit = self.settings.max_split_size
        if limit == Settings().max_split_size:
            return False
        size = max(size, limit)
        blocks = self.free_blocks(pool)
        at = next((i for i, b in enumerate(blocks) if b.key >= (stream, size, 0)), len(blocks))

        def can_go(block: Block) -> bool:
            return not block.segment.expandable and len(block.segment.blocks) == 1

        if at < len(blocks) and blocks[at].segment.stream == stream and can_go(blocks[at]):
            self.release(blocks[at].segment)
            return True
        released = 0
        for block in reversed(blocks[:at]):
            if released >= size or block.size < limit or block.segment.stream != stream:
                break
            if can_go(block):
                released += block.size
                self.release(block.segment)
        return released >= size

    def collect_garbage(self) -> None:
        settings = self.settings
        if not settings.collects_garbage:
            return
        threshold = int(settings.garbage_collection_threshold * settings.capacity)
        if self.reserved <= threshold:
            return
        target, reclaimed, searches = self.reserved - threshold, 0, self.searches.get((0, False), 0)
        whole = [b for b in self.free_blocks((0, False)) if len(b.segment.blocks) == 1]
        total_age, freeable, freed = sum(searches - b.since for b in whole), len(whole), True
        while reclaimed < target and freed and freeable:
            threshold_age, freed = total_age / freeable, False
            for block in list(whole):
                if not block.segment.expandable and searches - block.since >= threshold_age:
                    freed = True
                    reclaimed += block.size
                    total_age -= searches - block.since
                    freeable -= 1
                    whole.remove(block)
                    self.release(block.segment)


def run_allocator(
    action: Any, value: Any, stream: Any, pool: Any, segments: Any, blocks: Any, driver: Any,
    settings: Settings, stop: int,
) -> tuple[list[list[int]], list[tuple[int, int, int, int]], list[tuple[int, ...]]]:  # fmt: skip
    """Run the operations before ``stop``.

    Returns:
        For each operation its address (-1: none), and the bytes reserved, allocated, requested and releasable after
        it; the events of the driver (operation, kind, address, bytes); and at the end the blocks (address, bytes,
        requested bytes, owner, segment address, stream, pool, is_small, is_expandable), by address.
    """
    allocator = Allocator(settings, segments, blocks, driver)
    rows = []
    for operation in range(min(len(action), stop)):
        allocator.operation, address = operation, -1
        kind, amount = int(action[operation]), int(value[operation])
        if kind == ALLOC:
            address = allocator.alloc(amount, int(stream[operation]), int(pool[operation]))
        elif kind == FREE:
            address = allocator.free(amount)
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        else:
            allocator.released_pools.add(amount)
        rows.append(
            [address, allocator.reserved, allocator.allocated, allocator.requested, allocator.releasable()]
        )
    ends = [
        (
            block.address, block.size, block.requested, block.owner, segment.address, segment.stream, *segment.pool,
            segment.expandable,
        )
        for segment in allocator.segments
        for block in segment.blocks
        if block.mapped
    ]  # fmt: skip
    return np.array(rows, np.int64).reshape(-1, 5).T.tolist(), allocator.events, sorted(ends)
