"""Shortens kernel names as HTA does."""

from __future__ import annotations

MEMORY_OPERATIONS = ("Memcpy", "Memset", "hipMemcpy", "hipMemset")


def shorten_kernel_name(name: str) -> str:
    """Return the bare name of a kernel, without template arguments, parameters and return type.

    Names of memcpys and memsets, and names without "<" and "(" (of annotations and operators), stay as they are.
    """
    if name.startswith(MEMORY_OPERATIONS) or not ("<" in name or "(" in name):
        return name
    chars, depth = [], 0
    for char in name.replace("(anonymous namespace)::", "").replace("->", ""):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            chars.append(char)
    words = "".join(chars).split()
    return words[-1] if words else name
