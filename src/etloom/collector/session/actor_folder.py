"""Chooses the folder of a Ray actor's traces: the ranks of one actor class are not those of another.

Learners may be the ranks of a process group while each rollout worker is a process of its own. So the actors of a class
that have joined a process group share `actor_<class>`, and each other actor has `actor_<class>_<number>`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..rank_environment import current_rank, is_distributed


def choose_actor_folder(out: Path) -> Path:
    """Return the folder for the traces of this process: `out`, or for a Ray actor one in it, which is created.

    Raises OSError.
    """
    name = _find_actor_class()
    if name is None:
        return out
    folder = out / f"actor_{re.sub(r'[^A-Za-z0-9]+', '-', name)}"
    if is_distributed() and current_rank()[1] > 1:
        folder.mkdir(exist_ok=True)
        return folder
    number = 0
    while True:
        numbered = folder.with_name(f"{folder.name}_{number}")
        try:
            numbered.mkdir()
        except FileExistsError:
            number += 1
        else:
            return numbered


def _find_actor_class() -> str | None:
    """Return the class of the Ray actor that runs in this process, None if there is none."""
    ray = sys.modules.get("ray")
    try:
        # The name of the running task is that of a method, and unknown on other threads.
        actors = ray._private.worker.global_worker.actors if ray is not None else {}
        return next((type(actor).__name__ for actor in actors.values()), None)
    except AttributeError:  # of another version of Ray
        return None
