"""Mutation of one file by its form: a tree (JSON, pickle, YAML), rows (SQLite), messages (protobuf), or bytes."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from etloom.formats.chakra import protobuf as pb
from etloom.formats.io.safe_values import load_plain_values
from etloom.formats.kineto.event_json import ARGUMENT_NAMES, MEMORY_ARGUMENT_NAMES
from fuzzing.mutations import mutate_bytes, mutate_tree
from fuzzing.values import odd_value
from support.saved_folders import update_checksum

KINETO_KEYS = (
    *(name for names in ARGUMENT_NAMES.values() for name in names.values()),
    *MEMORY_ARGUMENT_NAMES.values(),
    *(
        "ph",
        "cat",
        "name",
        "pid",
        "tid",
        "ts",
        "dur",
        "id",
        "args",
        "s",
        "bp",
        "rank",
        "world_size",
        "external id",
    ),
    *(
        "Process Group Ranks",
        "ranks",
        "pg_config",
        "pg_name",
        "pg_size",
        "Collective name",
        "numSms",
        "totalGlobalMem",
    ),
)
_BYTES_SHARE = 0.2


def mutate_file(rng: random.Random, path: Path) -> Path:
    """Mutate a file in place, by its form, or as bytes; return its path, which changes with its compression."""
    name = path.name.removesuffix(".gz")
    packed = name != path.name
    data = path.read_bytes()
    if packed:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):  # damaged by an earlier mutation
            packed = False
    mutate = next((m for suffix, m in _FORMS.items() if name.endswith(suffix)), None)
    if mutate is None or rng.random() < _BYTES_SHARE:
        data = mutate_bytes(rng, data)
    else:
        try:
            data = mutate(rng, data, path)
        except (Exception, pl.exceptions.PanicException):  # polars panics on some damaged Parquet files
            data = mutate_bytes(rng, data)  # a second mutation of what is no longer of that form
    if packed:
        data = gzip.compress(data, 1)
        if rng.random() < 0.1:
            data = mutate_bytes(rng, data)
    path.write_bytes(data)
    return path


def _mutate_json(rng: random.Random, data: bytes, path: Path) -> bytes:
    keys = KINETO_KEYS if "kineto" in path.name else ()
    tree = mutate_tree(rng, json.loads(data), keys)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")


def _mutate_pickle(rng: random.Random, data: bytes, path: Path) -> bytes:
    # What an earlier mutation damaged could take all memory in pickle itself.
    return pickle.dumps(mutate_tree(rng, load_plain_values(data, path)), protocol=2)


def _mutate_yaml(rng: random.Random, data: bytes, path: Path) -> bytes:
    return str(yaml.dump(mutate_tree(rng, yaml.safe_load(data)), allow_unicode=True)).encode(
        "utf-8", "surrogatepass"
    )


def _mutate_sqlite(rng: random.Random, data: bytes, path: Path) -> bytes:
    path.write_bytes(data)
    with closing(sqlite3.connect(path)) as connection:
        tables = [
            name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")
        ]
        for _ in range(rng.choice((1, 1, 2, 4))):
            table = rng.choice(tables)
            columns = [row[1] for row in connection.execute(f'pragma table_info("{table}")')]
            column, value = rng.choice(columns), odd_value(rng)
            action = rng.random()
            if not isinstance(value, (int, float, str, type(None))):
                value = repr(value).encode()
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                value = float(value) if abs(value) < 10**300 else str(value)
            if isinstance(value, str):
                value = (
                    value.encode("utf-8", "surrogatepass")
                    if rng.random() < 0.5
                    else value.replace("\ud800", "").replace("\udfff", "")
                )
            if action < 0.7:
                where = rng.choice(("", f" where rowid % {rng.randint(1, 7)} = 0"))
                connection.execute(f'update "{table}" set "{column}" = ?{where}', (value,))
            elif action < 0.8:
                connection.execute(f'drop table "{table}"')
                tables.remove(table)
            elif action < 0.9:
                connection.execute(f'alter table "{table}" rename column "{column}" to "{column}x"')
            else:
                connection.execute(f'insert into "{table}" select * from "{table}"')
        connection.commit()
    return path.read_bytes()


def _mutate_messages(rng: random.Random, data: bytes, path: Path) -> bytes:
    messages, _ = pb.split_messages(data)
    metadata = pb.parse_metadata(messages[0])
    nodes = [node for message in messages[1:] if (node := pb.parse_node(message)) is not None]
    for _ in range(rng.choice((1, 1, 2, 4))):
        for node in rng.sample(nodes, rng.choice((1, len(nodes)))):
            _mutate_message(rng, node)
    return b"".join(map(pb.delimit_message, [metadata, *nodes]))


def _mutate_message(rng: random.Random, node: Any) -> None:
    """Set a field of a node to an odd value of its type, or an attribute to an odd value of any type."""
    action, value = rng.random(), odd_value(rng)
    number = value if isinstance(value, int) else 3
    if action < 0.5:
        attribute = rng.choice(node.attr) if node.attr and rng.random() < 0.7 else node.attr.add(name="rf_id")
        name = attribute.name
        attribute.Clear()
        attribute.name = name
        if isinstance(value, bool):
            attribute.bool_val = value
        elif isinstance(value, int):
            attribute.int64_val = max(-(2**63), min(value, 2**63 - 1))
        elif isinstance(value, float):
            attribute.double_val = value
        elif isinstance(value, list) and all(type(item) is int for item in value):
            attribute.int64_list.values.extend(max(-(2**63), min(item, 2**63 - 1)) for item in value)
        else:
            attribute.string_val = repr(value).encode("utf-8", "replace").decode()
    elif action < 0.6:
        node.name = repr(value).encode("utf-8", "replace").decode()
    elif action < 0.7:
        node.type = abs(number) % 9
    elif action < 0.9:
        field = rng.choice(("id", "start_time_micros", "duration_micros"))
        setattr(node, field, abs(number) % 2**64)
    else:
        rng.choice((node.data_deps, node.ctrl_deps)).append(abs(number) % 2**64)


def _mutate_parquet(rng: random.Random, data: bytes, path: Path) -> bytes:
    path.write_bytes(data)
    frame = pl.read_parquet(path, glob=False)
    column = rng.choice(frame.columns)
    dtype = frame.schema[column]
    action = rng.random()
    if action < 0.6 and dtype.is_integer():
        values = [
            rng.choice((None, 0, 1, 2**31 - 1, 2**15 - 1, 7, frame.height)) for _ in range(frame.height)
        ]
        frame = frame.with_columns(pl.Series(column, values).cast(dtype, strict=False))
    elif action < 0.6:
        frame = frame.with_columns(pl.lit(None, dtype=dtype).alias(column))
    elif action < 0.7:
        frame = frame.drop(column)
    elif action < 0.8:
        frame = frame.with_columns(pl.col(column).cast(pl.String).alias(column))
    elif action < 0.9:
        frame = frame.sample(fraction=1, shuffle=True, seed=rng.randrange(1 << 30))
    else:
        frame = pl.concat([frame, frame])
    frame.write_parquet(path)
    if rng.random() < 0.5:  # as in a folder that was edited, not damaged
        update_checksum(path)
    return path.read_bytes()


_FORMS: dict[str, Callable[[random.Random, bytes, Path], bytes]] = {
    ".json": _mutate_json,
    ".pickle": _mutate_pickle,
    ".yaml": _mutate_yaml,
    ".sqlite": _mutate_sqlite,
    ".db": _mutate_sqlite,
    ".rpd": _mutate_sqlite,
    ".et": _mutate_messages,
    ".parquet": _mutate_parquet,
}
"""Ending of the name -> mutation of the decompressed content."""
