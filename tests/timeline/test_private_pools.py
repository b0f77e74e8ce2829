"""Private pools of CUDA graphs that are freed within the recorded history: twin and slow reference agree on them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import etloom
from etloom.timeline.memory.program import RELEASE_POOL, Program, find_programs
from support.allocator_snapshots import SnapshotWriter
from support.examples import examples

MB = 1 << 20


def read_program(writer: SnapshotWriter, folder: Path) -> Program:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(writer.snapshot()))
    (program,) = find_programs(etloom.open(path, use_cache=False)[0])
    return program


def record_graph(*, names_pools: bool) -> SnapshotWriter:
    """A graph whose memory is free, but kept by its pool, when the cache is emptied; then the graph is destroyed."""
    writer = SnapshotWriter(names_pools=names_pools)
    writer.alloc(30 * MB)
    writer.free(writer.alloc(40 * MB))
    writer.free(writer.alloc(36 * MB, pool=1))  # the free 40 MiB of the default pool do not serve it
    writer.empty_cache()
    writer.alloc(50 * MB)
    writer.release_pool(1)
    writer.empty_cache()
    writer.alloc(10 * MB)
    return writer


def test_a_freed_pool_keeps_its_segments_until_it_is_released(tmp_path: Path) -> None:
    writer = record_graph(names_pools=True)
    program = read_program(writer, tmp_path)
    assert np.count_nonzero(program.action == RELEASE_POOL) == 1
    simulation = program.run()
    assert (simulation.reserved >> 20).tolist() == [30, 70, 70, 106, 106, 66, 116, 116, 80, 90]
    assert program.describe_doubt() is None


def test_an_older_snapshot_states_its_doubt(tmp_path: Path) -> None:
    program = read_program(record_graph(names_pools=False), tmp_path)
    doubt = program.describe_doubt()
    assert (
        doubt is not None
        and "reserves 94.37 MB at its peak instead of 121.63 MB" in doubt
        and "CUDA graphs" in doubt
    )


@pytest.mark.parametrize("seed", range(examples(30)))
def test_random_graphs(tmp_path: Path, seed: int) -> None:
    """With named pools the twin repeats every change of reserved memory; without them it does, or states a doubt."""
    for names_pools in (True, False):
        writer, reserved = run_random_graphs(seed, names_pools=names_pools)
        program = read_program(writer, tmp_path)
        simulation = program.run()
        is_equal = (int(simulation.reserved.max()), int(simulation.reserved[-1])) == (
            max(reserved),
            reserved[-1],
        )
        assert is_equal == (program.describe_doubt() is None)
        if names_pools:
            assert simulation.reserved[program.action != RELEASE_POOL].tolist() == reserved


def run_random_graphs(seed: int, *, names_pools: bool) -> tuple[SnapshotWriter, list[int]]:
    """Run a program with a few pools that are released one after the other; return also the reserved memory after each
    operation that the snapshot shows."""
    draw = np.random.default_rng(seed)
    writer = SnapshotWriter(names_pools=names_pools)
    live: dict[int, list[int]] = {0: []}
    reserved: list[int] = []
    newest = 0
    for _ in range(int(draw.integers(20, 120))):
        kind = draw.random()
        if kind < 0.08:
            before = writer.allocator.reserved
            writer.empty_cache()
            if writer.allocator.reserved == before:
                continue
        elif kind < 0.14:
            newest += 1
            live[newest] = []
            continue
        elif kind < 0.2 and newest in live and newest:
            for request in live.pop(newest):
                writer.free(request)
                reserved.append(writer.allocator.reserved)
            writer.release_pool(newest)
            continue
        else:
            pool = int(draw.choice(list(live)))
            if live[pool] and draw.random() < 0.45:
                writer.free(live[pool].pop(int(draw.integers(len(live[pool])))))
            else:
                size = int(draw.choice([1000, MB, 3 * MB, 12 * MB, 30 * MB]))
                live[pool].append(writer.alloc(size, stream=0, pool=pool))
        reserved.append(writer.allocator.reserved)
    if not reserved:
        live[0].append(writer.alloc(MB))
        reserved.append(writer.allocator.reserved)
    return writer, reserved
