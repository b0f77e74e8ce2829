"""A kind of problem, and what its functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from etloom.graphs.graph import EdgeKind

from ..draft import Draft, Slot, find_slots

Random = np.random.Generator


@dataclass(frozen=True)
class Kind:
    """A kind of problem.

    Attributes:
        name: Its name in tables.
        bases: The clean runs into which it is injected.
        inject: Adds events and weights to a draft; returns the rank that is to blame, None for all.
        patterns: The findings that name it, the best first; empty for a decoy, which no finding may name.
        scaled: If False, the strength is the shift in percent of a step, and no lag grows.
    """

    name: str
    bases: tuple[str, ...]
    inject: Callable[[Draft, Random], int | None]
    patterns: tuple[str, ...]
    scaled: bool = True


def on_one_rank(inject: Callable[[Draft, Random], int | None]) -> Callable[[Draft, Random], int]:
    """Return the function that injects the same on one rank only."""

    def inject_on_one(draft: Draft, random: Random) -> int:
        draft.rank = draw_rank(draft, random)
        inject(draft, random)
        return draft.rank

    return inject_on_one


GPU, MULTI, CPU = ("ddp", "resnet"), ("ddp",), ("cpu",)


def draw_rank(draft: Draft, random: Random) -> int:
    return int(random.choice(list(draft.base.job)))


def find_edges(draft: Draft, *kinds: EdgeKind, rank: int | None = None) -> np.ndarray:
    """Return the edges of these kinds, of one rank or all, in the annotated steps."""
    graph = draft.graph
    is_kind = np.isin(graph.kind, kinds) & (graph.time[graph.source] >= draft.base.begin_ns)
    return np.flatnonzero(is_kind if rank is None else is_kind & (draft.base.edge_ranks == rank))


def draw_slots(
    draft: Draft,
    random: Random,
    per_step: int,
    *,
    low: float = 0.0,
    high: float = 1.0,
    rank: int | None = None,
    skip: int = 0,
) -> Iterator[tuple[int, list[Slot]]]:
    """Yield the index of an occurrence and its slots: the same place on each rank, in each step, in order of time.

    Args:
        low: First place, as a share of the step's slots.
        high: Last place.
        rank: Only this rank.
        skip: Number of first steps to leave out.
    """
    rank = draft.rank if rank is None else rank
    places = np.sort(random.uniform(low, high, per_step))
    by_rank = {r: find_slots(draft.base, r) for r in draft.base.job if rank is None or r == rank}
    steps = sorted({slot.step for slots in by_rank.values() for slot in slots})[skip:]
    chosen = np.argsort(random.random(len(steps) * per_step)) < max(
        1, round(draft.share * len(steps) * per_step)
    )
    index = -1
    for step in steps:
        of_step = {r: [slot for slot in slots if slot.step == step] for r, slots in by_rank.items()}
        for place in places:
            index += 1
            if chosen[index]:
                yield (
                    index,
                    [slots[min(int(place * len(slots)), len(slots) - 1)] for slots in of_step.values()],
                )
