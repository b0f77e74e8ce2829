"""CCL-Bench's workload card: a YAML file beside the traces that says what was run, on what and how.

Read: version 1, as the mapping that it is. Keys: description, workload (model, data, hardware), Model-executor
(framework, model_plan_parallelization, communication_library), metric_source, ...; unknown ones are kept.
YAML is read with the safe loader, which makes plain values only, and without aliases, which could grow without bound.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def is_card(head: bytes) -> bool:
    """Whether a YAML file looks like a workload card, by the keys at its left margin."""
    lines = head.split(b"\n")
    return any(line.startswith(b"version:") for line in lines) and any(
        line.startswith((b"workload:", b"Model-executor:", b"metric_source:")) for line in lines
    )


def find_cards(folder: Path) -> Iterator[Path]:
    """The workload cards in a folder, by name."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        with path.open("rb") as file:
            if is_card(file.read(1 << 16)):
                yield path


def read_card(path: Path) -> dict[str, Any]:
    """The card as plain values that JSON can hold.

    Raises ReadError for a file that is no card, has tags, aliases or another version, LimitError above 1 MiB.
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
    # ValueError: what the safe loader raises for 0o9, an impossible date or bytes that are no UTF-8.
    except (yaml.YAMLError, ValueError) as error:
        raise ReadError(f"is no workload card: {error}", where=path) from None
    if not isinstance(card, dict) or not card.keys() & {"workload", "Model-executor", "metric_source"}:
        raise ReadError("is no workload card: it has no workload", where=path)
    if card.get("version") != VERSION:
        raise ReadError(
            f"is a workload card of version {card.get('version')!r}", where=path, remedy="version 1 is read"
        )
    return {str(key): _to_plain(value) for key, value in card.items()}


def _to_plain(value: Any) -> Any:
    """Dates and keys that are no text as text."""
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, set, tuple)):
        return [_to_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
