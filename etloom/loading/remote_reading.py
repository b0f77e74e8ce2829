"""Read ranks on a Ray cluster: each task reads and links one rank and writes its tables to the shared cache.

The caller then opens them from there, as it does when a run is opened again. So a rank that no task could read (a path
that another host does not see, a host without etloom) is read by the caller, with the same result.
"""

from __future__ import annotations

import json
from pathlib import Path

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.names import add_names, list_user_paths
from etloom.loading import cache, engines
from etloom.loading.executor import execute_plan, make_entry_key
from etloom.loading.plan import LoadOptions, LoadPlan, RankPlan, Source, Storage


def read_on_cluster(plan: LoadPlan) -> None:
    """Read and link the ranks of a plan that are not in the cache, each in a task on the Ray cluster.

    Raises:
        UnknownName: there is no such engine.
        InvalidValue: the cache is not used.
        EtloomError: see `etloom.loading.engines.run_on_ray`.
    """
    engines.check_engine(plan.options.engine)
    if not plan.options.use_cache:
        raise InvalidValue(
            "the engine ray returns tables through the cache, which is turned off",
            remedy="use the cache (without --no-cache), in a folder that all hosts share: $ETLOOM_CACHE",
            option="engine",
        )
    tasks = []
    for rank, part in plan.ranks.items():
        if part.source is not Source.FILES or rank is None:
            continue
        key = make_entry_key(rank, part, plan.options)
        if key is None or cache.has_entry(key):
            continue
        task = {
            "rank": rank,
            "files": [str(path.resolve()) for path in part.files],
            "captures": [str(path.resolve()) for path in part.captures],
            "linking": dict(plan.options.linking),
            "names": [str(path.resolve()) for path in list_user_paths()],
        }
        tasks.append(json.dumps(task))
    if tasks:
        engines.run_on_ray(read_into_cache, tasks)


def read_into_cache(text: str) -> None:
    """Read a rank's files, link them and write the result to the cache; errors are ignored.

    ``text``: the task as JSON. The caller reads the rank again, and reports the errors.
    """
    task = json.loads(text)
    add_names(*map(Path, task["names"]))
    files, captures = (tuple(map(Path, task[name])) for name in ("files", "captures"))
    options = LoadOptions(jobs=1, linking=task["linking"])
    part = RankPlan(files, Source.FILES, Storage.EVICTABLE, captures)
    try:
        execute_plan(LoadPlan({task["rank"]: part}, options, max_table_bytes=0))
    except EtloomError:
        return
