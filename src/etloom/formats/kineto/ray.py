"""Categories of the events in Ray's timeline (`ray timeline`, `ray.timeline`): tasks, their phases, calls of Ray.

A process is a node, a thread a worker or driver. Tasks and what happens inside them become operators, so that the
analyses of threads (top-ops, call-stacks, idle time) answer; the category that Ray wrote stays in the arguments.
"""

from __future__ import annotations

import polars as pl

from etloom.core.trace import Trace

_WORKER = r"^(?:worker|driver):[0-9a-f]{8,64}$"
_TASK = r"^(?:task(?::|$)|ray[.:]|worker_idle|submit_task|wait_for_function|\w+_remote_function)"


def is_timeline(trace: Trace) -> bool:
    """Return whether the threads of a trace are workers and drivers of Ray, which wrote it."""
    names = trace.threads.filter(pl.col("tid").is_not_null())["name"].cast(pl.String).drop_nulls()
    return names.len() > 0 and bool(names.str.contains(_WORKER).all())


def categorize(trace: Trace) -> Trace:
    """Return the trace with tasks, their phases and calls of Ray as operators."""
    cat, args = pl.col("cat").cast(pl.String), pl.col("args").cast(pl.String)
    is_task = cat.str.contains(_TASK) & pl.col("dur").is_not_null()
    word = cat.str.replace_all(r'[\\"\x00-\x1f]', "")
    member = pl.lit('"ray_category": "') + word + pl.lit('"')
    rest = args.str.strip_prefix("{").str.strip_suffix("}")
    joined = (
        pl.lit("{")
        + member
        + pl.when(rest.str.len_bytes() > 0).then(pl.lit(", ") + rest).otherwise(pl.lit(""))
        + pl.lit("}")
    )
    events = trace.events.with_columns(
        cat=pl.when(is_task).then(pl.lit("cpu_op")).otherwise(cat).cast(pl.Categorical),
        args=pl.when(is_task).then(joined).otherwise(args).cast(pl.Categorical),
    )
    return trace.replace(None, events=events)
