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
    from etloom.core.text import count_noun
    from etloom.formats.io.mirror import list_copies, prune_copies
    from etloom.loading.cache import clear_cache, list_entries

    if clear:
        before = [*list_entries(), *list_copies()]
        prune_copies(0)
        clear_cache()
        removed = sum(size for _, size, path in before if not path.exists())
        write_text(f"{cache_folder()}: {removed / 1e6:,.1f} MB removed\n", None)
        return
    parts = [
        f"{count_noun(len(sizes), noun, plural)}, {sum(sizes) / 1e6:,.1f} MB"
        for noun, plural, sizes in (
            ("entry", "entries", [size for _, size, _ in list_entries()]),
            ("copy of a remote run", "copies of remote runs", [size for _, size, _ in list_copies()]),
        )
    ]
    write_text(f"{cache_folder()}: {'; '.join(parts)}\n", None)
