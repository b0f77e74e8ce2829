"""Split the ranks of a run into batches; a process reads, links and analyzes the ranks of a batch one at a time.

A batch is JSON text, so that a process, on this host or another, can prepare it: it writes the tables of each rank to
``rank=N``, and the answers of its ranks to one part. Both appear when they are complete; a batch that was killed is
prepared again, without the ranks that it had finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etloom.exports.store.summaries import summarize_ranks
from etloom.loading.plan import RankPlan
from etloom.loading.rank_discovery import DiscoveredRun
from etloom.loading.rank_stores import RankFolder
from etloom.loading.reading_tasks import describe_ranks, read_ranks

MAX_RANKS = 256
"""Ranks of a batch: starting a process takes about as long as ten small ranks."""
MIN_RANKS = 8


@dataclass(frozen=True)
class Batch:
    """A group of ranks that one process reads, links and analyzes.

    Attributes:
        folder: of the run that is being added.
        part: the folder for the answers of these ranks.
        ranks: the plan of each rank.
        for_report: only what a report needs is computed.
    """

    folder: Path
    part: Path
    ranks: Mapping[int, RankPlan]
    for_report: bool = False

    @property
    def files(self) -> list[Path]:
        """The files of all ranks."""
        return [file for rank in self.ranks.values() for file in rank.all_files]

    def to_json(self) -> str:
        """Return the batch as JSON text."""
        facts = {"folder": str(self.folder.resolve()), "part": str(self.part.resolve())}
        return describe_ranks(self.ranks, for_report=self.for_report, **facts)


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
        plans = {
            rank: RankPlan(
                tuple(discovered.ranks[rank]), captures=tuple(discovered.captures.get(rank, ()))
            ).to_absolute()
            for rank in members
        }
        batches.append(Batch(folder, part, plans, for_report))
    return batches


def prepare_batch(text: str) -> None:
    """Read, link and analyze the ranks of a batch (JSON text), and write their tables and analysis results.

    Files that cannot be read are left to the process that adds the run, which reports them.
    """
    batch = json.loads(text)
    folder = RankFolder(Path(batch["folder"]), batch["for_report"])
    summarize_ranks(read_ranks(batch, folder), Path(batch["part"]), batch["for_report"])
