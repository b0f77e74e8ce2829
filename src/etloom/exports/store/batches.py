"""Split the ranks of a run into batches; a process reads, links and analyzes the ranks of a batch one at a time.

A batch is JSON text, so that a process, on this host or another, can prepare it: it writes the tables of each rank to
``rank=N``, and the answers of its ranks to one part. Both appear when they are complete; a batch that was killed is
prepared again, without the ranks that it had finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.core.names import add_names, list_user_paths
from etloom.core.trace import Trace
from etloom.exports.store.summaries import summarize_ranks
from etloom.formats.parquet import sniff_folder
from etloom.loading import LoadOptions
from etloom.loading.executor import execute_plan
from etloom.loading.plan import plan_ranks
from etloom.loading.rank_discovery import DiscoveredRun
from etloom.loading.rank_stores import RankFolder

MAX_RANKS = 256
"""Ranks of a batch: starting a process takes about as long as ten small ranks."""
MIN_RANKS = 8
MAX_TABLE_BYTES = 256_000_000
"""Memory for the tables of ranks, of which the most recently used ones stay loaded."""


@dataclass(frozen=True)
class Batch:
    """A group of ranks that one process reads, links and analyzes.

    Attributes:
        folder: of the run that is being added.
        part: the folder for the answers of these ranks.
        files: rank -> its files.
        captures: rank -> traces of the capture of its device graphs.
        names: the user's files of names.
        for_report: only what a report needs is computed.
    """

    folder: str
    part: str
    files: dict[int, list[str]]
    captures: dict[int, list[str]]
    names: list[str]
    for_report: bool = False

    def to_json(self) -> str:
        """Return the batch as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Batch:
        """Create a batch from the JSON text of `to_json`."""
        content = json.loads(text)
        for name in ("files", "captures"):
            content[name] = {int(rank): files for rank, files in content[name].items()}
        return cls(**content)


def list_batches(
    discovered: DiscoveredRun, folder: Path, parts: Path, jobs: int, for_report: bool = False
) -> list[Batch]:
    """Split the ranks of a folder into batches; omit batches whose analysis results exist already in ``parts``."""
    ranks = sorted(discovered.ranks)
    size = min(MAX_RANKS, max(MIN_RANKS, math.ceil(len(ranks) / jobs)))
    batches = []
    for start in range(0, len(ranks), size):
        members = ranks[start : start + size]
        part = parts / f"ranks-{members[0]}-{members[-1]}"
        if part.exists():
            continue
        files = {rank: [str(file.absolute()) for file in discovered.ranks[rank]] for rank in members}
        captures = {
            rank: [str(file.absolute()) for file in discovered.captures[rank]]
            for rank in members
            if rank in discovered.captures
        }
        names = [str(path.resolve()) for path in list_user_paths()]
        batches.append(Batch(str(folder.resolve()), str(part.resolve()), files, captures, names, for_report))
    return batches


def prepare_batch(text: str) -> None:
    """Read, link and analyze the ranks of a batch (JSON text), and write their tables and analysis results.

    Files that cannot be read are left to the process that adds the run, which reports them.
    """
    batch = Batch.from_json(text)
    add_names(*map(Path, batch.names))
    summarize_ranks(_read_ranks(batch), Path(batch.part), batch.for_report)


def _read_ranks(batch: Batch) -> Iterator[tuple[int, Trace]]:
    """Yield (rank, trace) of a batch's readable ranks, with at most about `MAX_TABLE_BYTES` of tables in memory."""
    options = LoadOptions(
        jobs=1,
        use_cache=False,
        max_table_bytes=MAX_TABLE_BYTES,
        rank_folder=RankFolder(Path(batch.folder), batch.for_report),
    )
    for rank, paths in batch.files.items():
        captures = {rank: list(map(Path, batch.captures.get(rank, ())))}
        plan = plan_ranks({rank: list(map(Path, paths))}, options, captures)
        try:
            job = execute_plan(plan, skip_unreadable=True)
        except EtloomError:
            continue
        if sniff_folder(Path(batch.folder, f"rank={rank}")):  # not a file that holds several ranks
            yield rank, job[rank]
