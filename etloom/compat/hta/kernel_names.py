"""Names of kernels as HTA shortens them."""

from __future__ import annotations

MEMORY_OPERATIONS = ("Memcpy", "Memset", "hipMemcpy", "hipMemset")


def shorten_kernel_name(name: str) -> str:
    """A kernel's own name, without what stands in <> and () and what it returns; of copies and sets the whole."""
    if name.startswith(MEMORY_OPERATIONS):
        return name
    kept, depth = [], 0
    for char in name.replace("(anonymous namespace)::", ""):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(char)
    words = "".join(kept).split()
    return words[-1] if words else name
