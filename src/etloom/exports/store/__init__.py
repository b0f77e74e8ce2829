"""A store of runs: each run is read and linked once, and saved with the results of common analyses.

adding       adds a run: batches of ranks, then what needs all ranks, then its name
staging      the folder of a run that is being added: its key, its lock, its publication
batches      the ranks that one process prepares
worker       the process that prepares one batch
summaries    the answers that are stored
rank_results what questions to all ranks need of each rank, kept while its batch has it in memory
cached_runs  runs of many ranks in the cache, each a run of a store there
host_delays  ranks, hosts and racks that delay others, over the runs of a store

`etloom.formats.parquet.store_layout` describes the files.
"""

from etloom.exports.store.adding import AddedRun, AddOptions, add_run
from etloom.exports.store.cached_runs import open_cached_run
from etloom.exports.store.host_delays import compare_hosts
from etloom.exports.store.listing import describe_runs, refresh_runs

__all__ = [
    "AddOptions",
    "AddedRun",
    "add_run",
    "compare_hosts",
    "describe_runs",
    "open_cached_run",
    "refresh_runs",
]
