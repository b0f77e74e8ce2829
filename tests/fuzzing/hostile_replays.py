"""Execution traces that were written to break a replay: operators with odd schemas and arguments, and collectives.

Everything that the file may state is varied: texts of schemas, nesting, sizes, strides, offsets, counts of nodes, cycles,
operators that take long, groups and messages. A document is determined by its random number generator.
"""

from __future__ import annotations

import json
import random
from typing import Any

from fuzzing.values import odd_value
from support.replays import all_reduce_call, operator_node, recorded_calls

DEEP = 20_000
SCHEMAS = (
    "aten::relu(Tensor self) -> Tensor",
    "aten::relu(Dict(str, Tensor) self) -> Tensor",
    "aten::relu(Future(Tensor) self) -> Tensor",
    "aten::wait(Future(t) self) -> t",
    "aten::keys.str(Dict(str, t) self) -> str[](*)",
    f"aten::relu({'Future(' * DEEP}Tensor{')' * DEEP} self) -> Tensor",
    f"aten::relu({'Dict(str, ' * DEEP}Tensor{')' * DEEP} self) -> Tensor",
    f"aten::relu({'(' * DEEP}Tensor{')' * DEEP} self) -> Tensor",
    f"aten::relu(Tensor{'[]' * DEEP} self) -> Tensor",
    "aten::sum.dim_IntList(Tensor self, int[99999999999]? dim=1) -> Tensor",
    "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor",
    f"aten::relu({', '.join(f'int a{number}' for number in range(5000))}) -> Tensor",
    "aten::relu(Tensor self",
    "aten::" + "a" * 100_000 + "(Tensor self) -> Tensor",
    "aten::relu\0(Tensor self) -> Tensor",
    "aten::__import__(str self) -> Tensor",
    "prim::Print(Tensor self) -> ()",
    "aten::save(t item, str filename) -> ()",
    "aten::from_file(str filename, bool? shared=None, int? size=0) -> Tensor",
    "aten::zeros(SymInt[] size) -> Tensor",
    "aten::arange(Scalar end) -> Tensor",
    "aten::repeat(Tensor self, SymInt[] repeats) -> Tensor",
    "aten::as_strided(Tensor self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor",
    "aten::cat(Tensor[] tensors, int dim=0) -> Tensor",
    "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
    "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)",
    "aten::resize_(Tensor(a!) self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor(a!)",
    "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "aten::linalg_matrix_power(Tensor self, int n) -> Tensor",
    "aten::combinations(Tensor self, int r=2, bool with_replacement=False) -> Tensor",
)
"""Schemas that torch's parser does not survive or that no trace may run, and operators whose arguments decide the work."""
_NUMBERS = (0, 1, -1, 2, 7, 1000, 10**5, 10**9, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64)


def hostile_operators(rng: random.Random, schemas: tuple[str, ...] = SCHEMAS) -> dict[str, Any]:
    """Return an execution trace of operators."""
    count = rng.choice((1, 3, 20, 200))
    nodes = [_operator(rng, number + 2, rng.choice(schemas)) for number in range(count)]
    if rng.random() < 0.1:
        nodes += [{**nodes[-1], "id": number + 1000, "ctrl_deps": number + 999} for number in range(20_000)]
    if rng.random() < 0.2:
        for node in nodes:
            node["ctrl_deps"] = rng.choice(nodes)["id"]  # also cycles
    return {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "", "start_ts": 0, "nodes": nodes}


def _operator(rng: random.Random, number: int, schema: str) -> dict[str, Any]:
    count = rng.randint(0, 4)
    arguments = [_argument(rng) for _ in range(count)]
    values, types, shapes, strides = (
        [argument[part] for argument in arguments] for part in ("value", "type", "shape", "stride")
    )
    node = operator_node(number, schema, values, types, shapes)
    node["inputs"]["strides"] = strides
    if rng.random() < 0.7:
        output = _argument(rng, always_tensor=True)
        node["outputs"] = {"values": [output["value"]], "shapes": [output["shape"]], "strides": [output["stride"]],
                           "types": [output["type"]]}  # fmt: skip
    return node


def _argument(rng: random.Random, *, always_tensor: bool = False) -> dict[str, Any]:
    if always_tensor or rng.random() < 0.7:
        dimensions = rng.choice((0, 1, 2, 2, 4, 70))
        numbers = _NUMBERS if rng.random() < 0.5 else (1, 2, 4, 1000)
        shape = [rng.choice(numbers) for _ in range(dimensions)]
        stride = [rng.choice(numbers) for _ in range(dimensions + rng.choice((0, 0, 0, 1)))]
        value = [
            rng.randint(0, 5),
            rng.randint(0, 3),
            rng.choice((0, 0, *numbers)),
            rng.choice(numbers),
            4,
            "cpu",
        ]
        kind = rng.choice(
            ("Tensor(float)", "Tensor(long int)", "Tensor(Future)", "GenericList[Tensor(float)]")
        )
        return {"value": [value] if kind[0] == "G" else value, "type": kind, "shape": shape, "stride": stride}
    value: Any = odd_value(rng)
    if rng.random() < 0.2:
        for _ in range(rng.choice((3, 900, 1500))):
            value = [value]
    if rng.random() < 0.3:
        value = rng.choice((rng.choice(_NUMBERS), [rng.choice(_NUMBERS) for _ in range(3)], {"a": value}))
    return {
        "value": value,
        "type": rng.choice(("Int", "Dict(String, Int)", "Future", "None")),
        "shape": [],
        "stride": [],
    }


def hostile_calls(rng: random.Random) -> dict[str, Any]:
    """Return an execution trace of collectives of one rank."""
    calls = [all_reduce_call(rng.choice((4, *_NUMBERS))) for _ in range(rng.choice((1, 3, 50)))]
    for call in calls:
        for name in rng.sample(
            sorted({*call, "pg_size", "pg_name", "in_split_size", "global_rank_start"}), rng.randint(0, 3)
        ):
            call[name] = odd_value(rng) if rng.random() < 0.5 else rng.choice(_NUMBERS)
        if rng.random() < 0.3:
            call["collective_name"] = rng.choice(
                ("wait", "alltoallv", "send", "recv", "init", "coalesced", "x")
            )
    document = recorded_calls(calls, rng.choice((1, 1, 2, 2**31)))
    if rng.random() < 0.3:
        ranks: list[Any] = rng.choice(([0], [0, 0], [-1], [2**40], [], list(range(100_000))))
        config = [
            {"pg_name": "0", "pg_desc": "default_pg", "ranks": ranks, "group_size": rng.choice(_NUMBERS)}
        ]
        text = json.dumps(config)
        values = {"values": [text], "shapes": [[]], "types": ["String"]}
        document["nodes"].insert(
            1, {**document["nodes"][0], "id": 999_999, "name": "## process_group:init ##", "inputs": values}
        )
    return document
