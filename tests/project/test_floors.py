"""The house: a room imports only from lower floors, rooms of one floor do not know each other, importing is cheap.

The floors are those of docs/architecture.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

import etloom

PACKAGE = Path(etloom.__file__).parent
FLOORS = {
    "errors": 0, "schema": 0, "kinds": 0, "system": 0, "ledger": 0, "_native": 0,
    "sql": 0.5, "ranks": 0.5,
    "trace": 1, "registry": 1, "intervals": 1, "graphs": 1, "stacks": 1,
    "selection": 2, "given": 2,
    "readers": 2, "linker": 2,
    "activity": 2, "calls": 2, "collectives": 2.5,
    "dependencies": 3, "chakra": 3, "patterns": 3.5,
    "exports": 4, "analyses": 4, "simulator": 4, "replayer": 4, "comparing": 4.5,
    "reports": 5, "cache": 5, "salvage": 5,
    "opening": 5.5,
    "api": 6,
    "compat": 7, "cli": 7,
    "__main__": 8,
}  # fmt: skip
"""Room -> floor. kinds and stacks are what linker and analyses share; opening composes readers, linker and cache."""
TORCH_ROOMS = {"collector", "replayer"}
HEAVY = ("numpy", "polars", "pyarrow", "torch", "rich", "typer")


def room_of(module: str) -> str:
    """etloom.formats.kineto -> readers; etloom itself -> __init__."""
    return [*module.split("."), "__init__"][1]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Full names of what a module imports, and whether that happens on import (not in a function, not for types)."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, early: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, early) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield from ((f"{base}.{alias.name}", early) for alias in child.names)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from visit(child, early and not lazy)

    yield from visit(ast.parse(path.read_text()), True)


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module) for module in MODULES} - {"__init__", "collector"}
    assert rooms <= set(FLOORS), "a new room: give it a floor here and in docs/architecture.md"


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) in FLOORS])
def test_a_room_imports_only_from_lower_floors(module: str) -> None:
    room = room_of(module)
    for name, _ in imports(module):
        if not name.startswith("etloom."):
            continue
        other = room_of(name)
        if other == room or name == "etloom.__version__":
            continue
        if FLOORS[room] == 7 and (other in etloom.__all__ or other == "collector"):
            continue  # the command line calls the public verbs
        assert other in FLOORS, f"{module} imports {name}"
        assert FLOORS[other] < FLOORS[room], (
            f"{module} (floor {FLOORS[room]}) imports {name} (floor {FLOORS[other]})"
        )


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) == "collector"])
def test_the_collector_imports_nothing_of_the_house_but_errors(module: str) -> None:
    for name, early in imports(module):
        if name.startswith("etloom.") and room_of(name) != "collector":
            assert room_of(name) == "errors", f"{module} imports {name}"
            assert not early, f"{module} imports {name} when it is imported"


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_imported_in_few_rooms(module: str) -> None:
    torch = [(name, early) for name, early in imports(module) if name.split(".")[0] == "torch"]
    assert not torch or room_of(module) in TORCH_ROOMS, f"{module} imports torch"


@pytest.mark.parametrize(
    "module",
    [m for m in MODULES if room_of(m) not in ("cli", "compat") and not m.endswith("bootstrap.sitecustomize")],
)
def test_only_the_command_line_prints_sets_logging_and_exits(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "logging.basicConfig", "os._exit", "exit", "quit"), (
                f"{module}: {called}"
            )
            assert called != "sys.exit" or module == "etloom.__main__", f"{module}: {called}"


def loaded_after(code: str) -> set[str]:
    """Those of HEAVY that are loaded after the code, in a Python of its own."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_etloom_is_cheap() -> None:
    assert loaded_after("import etloom; dir(etloom); etloom.__version__") == set()
    assert loaded_after("import etloom; etloom.EtloomError") == set()


def test_record_brings_no_table_library_into_a_training_job() -> None:
    assert loaded_after("import etloom; etloom.record") == set()


def test_the_command_line_starts_without_the_table_libraries() -> None:
    assert loaded_after("import etloom.cli") <= {"typer", "rich"}


def test_reading_analysing_and_exporting_never_load_torch(tmp_path: Path) -> None:
    code = f"""
sys.path.insert(0, {str(ROOT / "tests")!r})
import pathlib, small, etloom
job = etloom.open(small.write_run(pathlib.Path({str(tmp_path)!r}, "run")), use_cache=False)
etloom.analyze(job, "top-ops")
etloom.export(job, {str(tmp_path / "a.json")!r})
etloom.export(job, {str(tmp_path / "a.parquet")!r})
"""
    assert "torch" not in loaded_after(code)
