"""Shortens C++ kernel names for tables: removes namespaces, parameters and lambdas.

``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int,
at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)`` becomes ``vectorized_elementwise_kernel<4,
CUDAFunctor_add<float>, array<char*, 3ul>>``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

MAX_LABEL = 96
"""Maximum length of a name in a table; the middle of a longer name is omitted."""
SEQUENCE_SEPARATOR = " -> "
_COMPILER_GENERATED = re.compile(r"^(?:void |[\w:]+(?:::|<)|\S{97})")
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")
_LAMBDAS = re.compile(
    r"::(?:operator ?\(\)(?:\(\))?(?: const)?|\{lambda\([^{}]*\)#\d+\}|\[lambda\([^\[\]]*\) \(instance \d+\)\])"
)
"""Lambdas as CUPTI and Nsight Systems write them."""
_INNERMOST = re.compile(r"\([^()]*\)(?: const)?")
_SCOPES = re.compile(r"\b[A-Za-z_]\w*::(?=\w)")


def shorten_labels(texts: Sequence[str | None]) -> list[str | None]:
    """Shorten the kernel names in a column (also sequences of them, joined by " -> ").

    Names that would become equal keep more, up to their full length; other texts are unchanged.
    """
    remaining = {text for text in texts if text}
    labels: dict[str, str] = {}
    for limit, lambdas in ((MAX_LABEL, False), (2 * MAX_LABEL, True), (4 * MAX_LABEL, True)):
        short = {
            text: SEQUENCE_SEPARATOR.join(
                _shorten(part, limit, lambdas) for part in text.split(SEQUENCE_SEPARATOR)
            )
            for text in remaining
        }
        occurrences = Counter([*short.values(), *labels.values()])
        labels |= {text: label for text, label in short.items() if occurrences[label] == 1}
        remaining -= labels.keys()
    return [labels.get(text, text) if text else text for text in texts]


def _shorten(name: str, limit: int, lambdas: bool) -> str:
    """Shorten a C++ kernel name to at most ``limit`` characters; ``lambdas`` retains the lambdas in it."""
    if len(name) <= MAX_LABEL or not _COMPILER_GENERATED.match(name):
        return name
    plain = _UNNAMED.sub("", name.replace("void ", ""))
    plain = plain if lambdas else _LAMBDAS.sub("", plain)
    # Remove parameters from the inside out: template arguments already distinguish kernels.
    while (shorter := _INNERMOST.sub("", plain)) != plain:
        plain = shorter
    plain = _SCOPES.sub("", plain).replace(" >", ">").strip()
    if len(plain) <= limit:
        return plain
    tail = limit // 3
    return f"{plain[: limit - tail - 1]}…{plain[-tail:]}"
