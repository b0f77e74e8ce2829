"""Names of kernels as HTA shortens them."""

from __future__ import annotations

MEMORY_OPERATIONS = ("Memcpy", "Memset", "hipMemcpy", "hipMemset")


def shorten_kernel_name(name: str) -> str:
    """The bare name of a kernel, without template arguments, parameters and return type; memcpy and memset names are
    kept."""
    if name.startswith(MEMORY_OPERATIONS):
        return name
    chars, depth = [], 0
    for char in name.replace("(anonymous namespace)::", ""):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            chars.append(char)
    words = "".join(chars).split()
    return words[-1] if words else name
