"""Problems of runs without a GPU: operators on processors, and pipelines of them."""

from __future__ import annotations

import numpy as np

from etloom.graphs.graph import EdgeKind

from ..draft import Call, Draft
from .kind import CPU, Kind, Random, draw_rank, draw_slots, find_edges

PIPELINE = ("pipeline",)
INTERRUPTION_NS = 1.5e6


def slow_process(draft: Draft, random: Random) -> int:
    rank = draw_rank(draft, random)
    edges = find_edges(draft, EdgeKind.SEGMENT, rank=rank)
    edges = edges[draft.graph.owner[edges] >= 0]
    draft.weight[edges] += draft.lag[edges]
    return rank


def oversubscription(draft: Draft, random: Random) -> None:
    """Operators are interrupted for one to three milliseconds, on all ranks."""
    count = max(1, round(draft.target_ns / INTERRUPTION_NS))
    for rank in draft.base.job:
        edges = find_edges(draft, EdgeKind.SEGMENT, rank=rank)
        events = draft.base.job[rank].events
        parents = set(events["parent"].drop_nulls().to_list())
        names = events["name"].cast(str).to_list()
        owners = draft.graph.owner[edges]
        is_leaf = np.array([o >= 0 and o not in parents and names[o].startswith("aten::") for o in owners])
        chosen = random.choice(edges[is_leaf], count, replace=False)
        draft.weight[chosen] += random.uniform(0.5, 2.0, len(chosen))


def loop_over_elements(draft: Draft, random: Random) -> None:
    length = max(100, round(draft.target_ns / draft.base.step_count / random.uniform(5e3, 2e4)))
    for _, slots in draw_slots(draft, random, 1):
        for slot in slots:
            calls = [Call(name, 1.0) for _ in range(length // 2) for name in ("aten::select", "aten::add")]
            draft.add_calls(slot, calls)


def read_parameters(draft: Draft, random: Random) -> None:
    length = max(40, round(draft.target_ns / draft.base.step_count / random.uniform(15e3, 4e4)))
    inner = Call("aten::_local_scalar_dense", 1.0)
    for _, slots in draw_slots(draft, random, 1, low=0.8):
        for slot in slots:
            calls = [
                c
                for _ in range(length)
                for c in (Call("aten::norm", 2.0), Call("aten::item", 0.5, children=(inner,)))
            ]
            draft.add_calls(slot, calls)


def python_pause(draft: Draft, random: Random) -> None:
    """Python works between two operators of each step, the same on all ranks."""
    for _, slots in draw_slots(draft, random, 1, low=0.1, high=0.9):
        for slot in slots:
            draft.add_calls(slot, [], pause=1.0)


def slow_loader(draft: Draft, random: Random) -> None:
    for _, slots in draw_slots(draft, random, 1, high=0.02):
        for slot in slots:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            draft.add_calls(slot, [Call(name, 1.0, "user_annotation")])


def copy_tensors(draft: Draft, random: Random) -> None:
    count = int(random.integers(1, 8))
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            inner = Call("aten::clone", children=(Call("aten::copy_", 1.0),))
            draft.add_calls(slot, [Call("aten::contiguous", children=(inner,))])


def evaluate_one_rank(draft: Draft, random: Random) -> int:
    """One rank evaluates the model at the end of each step, and the others wait for it."""
    draft.rank = draw_rank(draft, random)
    names = ("aten::addmm", "aten::gelu", "aten::layer_norm", "aten::softmax")
    for _, slots in draw_slots(draft, random, 1, low=0.2, high=0.5):
        for slot in slots:
            draft.add_calls(slot, [Call(names[i % 4], 1.0, fixed=20_000) for i in range(24)])
    return draft.rank


def save_checkpoint(draft: Draft, random: Random) -> None:
    occurrences = list(draw_slots(draft, random, 1, low=0.95))
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        draft.add_calls(slot, [Call("torch/serialization.py(965): save", 1.0, "python_function")])


PROCESSORS = (
    Kind("evaluation on one rank (CPU)", CPU, evaluate_one_rank, ("stragglers", "additional-work")),
    Kind("checkpoint (CPU)", CPU, save_checkpoint, ("checkpoints",)),
    Kind("slow process", CPU, slow_process, ("stragglers",)),
    Kind("unbalanced stage", PIPELINE, slow_process, ("stragglers",)),
    Kind("oversubscription", CPU, oversubscription, ("oversubscription",)),
    Kind("loop over elements", CPU, loop_over_elements, ("tiny-operators",)),
    Kind(".item() loop (CPU)", CPU, read_parameters, ("item-calls",)),
    Kind("Python between operators", CPU, python_pause, ("idle-host",)),
    Kind("slow loader (CPU)", CPU, slow_loader, ("data-loading",)),
    Kind("copies (CPU)", CPU, copy_tensors, ("copies",)),
)
