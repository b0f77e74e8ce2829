"""CCL-Bench's workload card: a YAML file next to the traces that describes the workload, hardware and software.

Supported: version 1, read as a mapping. Keys: description, workload (model, data, hardware), Model-executor
(framework, model_plan_parallelization, communication_library), metric_source, ...; unknown ones are kept.
YAML is read with the safe loader, which creates plain values only, and without aliases, which could grow without bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from etloom.core.errors import LimitError, ReadError

VERSION = 1
MAX_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias (*name) is not allowed in a workload card")
        return super().compose_node(parent, index)


def is_card(path: Path) -> bool:
    """Return whether a YAML file has the top-level keys of a workload card. Raises ReadError if it cannot be opened."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            lines = file.read(1 << 16).split(b"\n")
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror}", where=path) from None
    return any(line.startswith(b"version:") for line in lines) and any(
        line.startswith((b"workload:", b"Model-executor:", b"metric_source:")) for line in lines
    )


def read_card(path: Path) -> dict[str, Any]:
    """Read a workload card (YAML) as values that JSON can represent.

    Raises:
        ReadError: If the file is not a card, or has tags, aliases or another version.
        LimitError: Above 1 MiB.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise LimitError(f"is larger than {MAX_BYTES:,} bytes, too large for a workload card", where=path)
        text = path.read_text("utf-8")
        card = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror}", where=path) from None
    except RecursionError:
        raise ReadError("is nested too deeply", where=path) from None
    # ValueError: raised by the safe loader for 0o9, an impossible date or invalid UTF-8.
    except (yaml.YAMLError, ValueError) as error:
        raise ReadError(f"is not a workload card: {error}", where=path) from None
    if not isinstance(card, dict) or not card.keys() & {"workload", "Model-executor", "metric_source"}:
        raise ReadError("is not a workload card: it has no workload", where=path)
    if card.get("version") != VERSION:
        raise ReadError(
            f"is a workload card of version {card.get('version')!r}",
            where=path,
            remedy="only version 1 is supported",
        )
    return {str(key): _to_plain(value) for key, value in card.items()}


def _to_plain(value: Any) -> Any:
    """Convert a YAML value to JSON types: dates and keys become text, sets and tuples become lists."""
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, set, tuple)):
        return [_to_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
