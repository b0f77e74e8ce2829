"""The available memory of this machine."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def available_memory() -> int:
    """Return the bytes that can be used without swapping; half of the physical memory if that is unknown."""
    with contextlib.suppress(OSError):
        if match := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()):
            return int(match[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
