"""The caches on this machine: what they take, and removing them."""

from __future__ import annotations


def list_cache_sizes() -> tuple[list[int], list[int]]:
    """Return the sizes in bytes of the entries of linked traces, and of the copies of remote runs."""
    from etloom.formats.io.mirror import list_copies
    from etloom.loading.cache import list_entries

    return [size for _, size, _ in list_entries()], [size for _, size, _ in list_copies()]


def clear_caches() -> int:
    """Remove every entry and copy that no process has open; return the bytes that were removed."""
    from etloom.formats.io.mirror import list_copies, prune_copies
    from etloom.loading.cache import clear_cache, list_entries

    before = [*list_entries(), *list_copies()]
    prune_copies(0)
    clear_cache()
    return sum(size for _, size, path in before if not path.exists())
