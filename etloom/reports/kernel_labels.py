"""Names of kernels that fit a table: what a C++ compiler wrote, without what tells a reader nothing.

``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int,
at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)`` becomes ``vectorized_elementwise_kernel<4,
CUDAFunctor_add<float>, array<char*, 3ul>>``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

MAX_LABEL = 96
"""Characters of a name in a table; of one that is longer the middle goes."""
SEQUENCE_SEPARATOR = " -> "
_COMPILER_GENERATED = re.compile(r"^(?:void |[\w:]+(?:::|<)|\S{97})")
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")
_LAMBDAS = re.compile(
    r"::(?:operator ?\(\)(?:\(\))?(?: const)?|\{lambda\([^{}]*\)#\d+\}|\[lambda\([^\[\]]*\) \(instance \d+\)\])"
)
"""As CUPTI and Nsight Systems spell them."""
_INNERMOST = re.compile(r"\([^()]*\)(?: const)?")
_SCOPES = re.compile(r"\b[A-Za-z_]\w*::(?=\w)")


def shorten_labels(texts: Sequence[str | None]) -> list[str | None]:
    """The texts of a column, names of kernels among them (and sequences of such, joined by " -> ") made short.

    Names that would look the same keep more, at most all; whatever is no name stays as it is.
    """
    left = {text for text in texts if text}
    found: dict[str, str] = {}
    for most, lambdas in ((MAX_LABEL, False), (2 * MAX_LABEL, True), (4 * MAX_LABEL, True)):
        short = {
            text: SEQUENCE_SEPARATOR.join(
                _shorten(part, most, lambdas) for part in text.split(SEQUENCE_SEPARATOR)
            )
            for text in left
        }
        alike = Counter([*short.values(), *found.values()])
        found |= {text: said for text, said in short.items() if alike[said] == 1}
        left -= found.keys()
    return [found.get(text, text) if text else text for text in texts]


def _shorten(name: str, most: int, lambdas: bool) -> str:
    """A name of at most so many characters, where lambdas are left out if these are not asked for."""
    if len(name) <= MAX_LABEL or not _COMPILER_GENERATED.match(name):
        return name
    plain = _UNNAMED.sub("", name.replace("void ", ""))
    plain = plain if lambdas else _LAMBDAS.sub("", plain)
    # Parameters, from the inside out: what a template is filled with tells kernels apart, and so they do not.
    while (without := _INNERMOST.sub("", plain)) != plain:
        plain = without
    plain = _SCOPES.sub("", plain).replace(" >", ">").strip()
    if len(plain) <= most:
        return plain
    tail = most // 3
    return f"{plain[: most - tail - 1]}…{plain[-tail:]}"
