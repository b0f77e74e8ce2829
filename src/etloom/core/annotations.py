"""Types that carry notes: ``Annotated[int, "number of rows"]``."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin


def split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type and the notes of ``Annotated[type, notes...]``; any other type has none."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    declared, *notes = get_args(annotation)
    return declared, tuple(notes)
