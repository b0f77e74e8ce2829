"""Mutations of traces: odd values at arguments, damaged structure, damaged bytes."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from fuzzing.values import odd_value

Slot = tuple[Any, Any]
"""A container (a dict or a list), and a key or an index in it."""

_TIMES = (
    "ts",
    "dur",
    "time_us",
    "time_created_ns",
    "time_discovered_started_ns",
    "startTime_ns",
    "inclusive_dur",
)
_IDS = (
    "id",
    "correlation",
    "External id",
    "ctrl_deps",
    "rf_id",
    "Record function id",
    "parent",
    "pid",
    "tid",
)
_CONTAINERS = (dict, list)
_TOKENS = (
    b"null", b"NaN", b"-1", b"1e400", b"[]", b"{}", b'"', b"\\", b"\\ud800", b"\xff", b"\x00", b",", b":", b"[[[[", b"}}",
    b"18446744073709551616", b"true", b'"x"', b"-9223372036854775808", b"\n", b"\xc3", b"Infinity",
)  # fmt: skip


def mutate_tree(rng: random.Random, tree: Any, keys: Iterable[str] = ()) -> Any:
    """Return a tree of lists and dicts with one to three mutations.

    Args:
        rng: The source of randomness.
        tree: The tree, which is changed.
        keys: Arguments that the schema knows, which are also added where they are absent.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.03:
            tree = rng.choice(([], {}, None, [tree], {"x": tree}, odd_value(rng)))
            continue
        slots = _find_slots(tree)
        if slots:
            mutate = rng.choices(
                (_set_odd, _add_argument, _change_structure, _change_times, _change_ids), (6, 2, 2, 2, 2)
            )[0]
            mutate(rng, slots, tuple(keys))
    return tree


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with one to eight changes; sometimes cut off."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, length = rng.randint(0, len(content)), rng.randint(0, rng.choice((4, 40, 400)))
        other = rng.randint(0, len(content))
        changes: tuple[Callable[[], bytes], ...] = (
            lambda length=length: rng.randbytes(min(length, 8)),
            lambda: rng.choice(_TOKENS),
            lambda: b"",
            lambda other=other, length=length: bytes(content[other : other + length]),
        )
        end = at + (length if rng.random() < 0.7 else 0)
        content[at:end] = rng.choice(changes)()
    if rng.random() < 0.2:
        del content[rng.randint(0, len(content)) :]
    return bytes(content)


def _find_slots(tree: Any) -> dict[str, list[Slot]]:
    """Return the places of a tree by name: that of the key, or of the attribute ({"name": ..., "value": ...})."""
    slots: dict[str, list[Slot]] = defaultdict(list)
    queue, seen = [("", tree)], set()
    while queue:
        name, node = queue.pop()
        if id(node) in seen:  # one odd value in many places: each change of it would multiply
            continue
        seen.add(id(node))
        if type(node) is list:
            inner = f"{name}[]"
            slots[inner] += [(node, index) for index in range(len(node))]
            queue += [(inner, value) for value in node if type(value) in _CONTAINERS]
            continue
        attribute = node.get("name")
        for key, value in node.items():
            inner = key if type(key) is str else f"{name}[]"
            if key == "value" and type(attribute) is str:
                inner = attribute
            slots[inner].append((node, key))
            if type(value) in _CONTAINERS:
                queue.append((inner, value))
    return slots


def _choose(rng: random.Random, places: list[Slot]) -> list[Slot]:
    """Return one place, some, or all."""
    count = rng.choice((1, max(1, len(places) // 10), len(places)))
    return rng.sample(places, count)


def _set_odd(rng: random.Random, slots: dict[str, list[Slot]], keys: tuple[str, ...]) -> None:
    value = odd_value(rng)
    varied = rng.random() < 0.3
    for container, key in _choose(rng, slots[rng.choice(sorted(slots))]):
        container[key] = odd_value(rng) if varied else value


def _add_argument(rng: random.Random, slots: dict[str, list[Slot]], keys: tuple[str, ...]) -> None:
    containers = [
        container[key]
        for places in slots.values()
        for container, key in places
        if isinstance(container[key], dict)
    ]
    names = keys or tuple(name for name in slots if not name.endswith("[]"))
    if not containers or not names:
        return
    name = rng.choice(sorted(names))
    for container in rng.sample(containers, rng.choice((1, max(1, len(containers) // 10), len(containers)))):
        container[name] = odd_value(rng)


def _change_structure(rng: random.Random, slots: dict[str, list[Slot]], keys: tuple[str, ...]) -> None:
    """Delete, repeat, move or exchange parts."""
    places = _choose(rng, slots[rng.choice(sorted(slots))])
    action = rng.randrange(4)
    for container, key in sorted(places, key=lambda place: str(place[1]).zfill(9), reverse=True):
        if isinstance(container, dict):
            if action == 0:
                container.pop(key, None)
            elif action == 1:
                other = rng.choice(sorted(container, key=str))
                container[key], container[other] = container[other], container.get(key)
            elif action == 2 and key in container:
                container[f"{key}x"] = container.pop(key)
            else:
                container[key] = copy.deepcopy(next(iter(container.values()), None))
        elif action == 0 and key < len(container):
            del container[key]
        elif container:
            container.insert(rng.randint(0, len(container)), copy.deepcopy(rng.choice(container)))


def _change_times(rng: random.Random, slots: dict[str, list[Slot]], keys: tuple[str, ...]) -> None:
    """Exchange, negate, shift, and equalize times."""
    places = [place for name in _TIMES for place in slots.get(name, ())]
    if not places:
        return
    action, shift = rng.randrange(5), rng.choice((-1e6, 1e15, 9e15, 1, 0.001))
    for container, key in _choose(rng, places):
        value = container[key]
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
        other_container, other_key = rng.choice(places)
        container[key] = (
            lambda number=number: -number,
            lambda number=number: number + shift,
            lambda: 0,
            lambda number=number: number * 1000,
            lambda c=other_container, k=other_key: _leaf(c[k]),
        )[action]()


def _change_ids(rng: random.Random, slots: dict[str, list[Slot]], keys: tuple[str, ...]) -> None:
    """Give several rows one id, or rows the ids of others: duplicates, wrong joins and cycles."""
    names = sorted(name for name in _IDS if slots.get(name))
    if not names:
        return
    target, source = slots[rng.choice(names)], slots[rng.choice(names)]
    values = [_leaf(container[key]) for container, key in source]
    for container, key in _choose(rng, target):
        container[key] = rng.choice(values)


def _leaf(value: Any) -> Any:
    """Return a value, or null for one that holds containers: put into itself, it would make the tree a cycle."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return None if any(isinstance(item, (dict, list)) for item in items) else copy.copy(value)
    return value
