"""etloom cache: states what the cache of linked traces takes on disk, and removes it."""

from __future__ import annotations

from typing import Annotated

from etloom.cli.command import command
from etloom.cli.output import write_text
from etloom.core.paths import cache_folder


@command()
def cache(*, clear: Annotated[bool, "Remove everything that no process has open."] = False) -> None:
    """Show how large the cache is, or remove it.

    It holds the tables of files that are slow to read, and copies of remote runs, in the folder ETLOOM_CACHE, else in
    etloom of the user's cache folder. What was not used for longest is removed when the tables exceed
    ETLOOM_CACHE_BYTES (default 4 GB), or the copies ETLOOM_REMOTE_CACHE_BYTES.

    Examples:

    \b
      etloom cache
      etloom cache --clear
    """
    from etloom.api.caching import clear_caches, list_cache_sizes
    from etloom.core.text import count_noun

    if clear:
        write_text(f"{cache_folder()}: {clear_caches() / 1e6:,.1f} MB removed\n", None)
        return
    nouns = (("run", "runs"), ("copy of a remote run", "copies of remote runs"))
    parts = [
        f"{count_noun(len(sizes), *noun)}, {sum(sizes) / 1e6:,.1f} MB"
        for noun, sizes in zip(nouns, list_cache_sizes(), strict=True)
    ]
    write_text(f"{cache_folder()}: {'; '.join(parts)}\n", None)
