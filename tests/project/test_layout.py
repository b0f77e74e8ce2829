"""The layout of the code base: levels, imports between packages, private modules, sizes of functions.

docs/architecture.md describes the levels. Every form of import counts, also those inside functions and those for type
checkers, so that the picture holds for a reader as well as for the interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "src" / "etloom"
LEVELS = {
    "core": 1,
    "formats": 2, "timeline": 2, "linker": 2, "collector": 2,
    "collectives": 3,
    "graphs": 4, "loading": 4, "replayer": 4,
    "analyses": 5,
    "comparison": 6,
    "exports": 7, "simulator": 7,
    "reports": 8,
    "api": 9,
    "cli": 10, "compat": 10,
}  # fmt: skip
"""Package -> level. A package imports from lower levels only; packages of one level do not know each other."""
TORCH_PACKAGES = {"collector", "replayer"}
HEAVY = ("numpy", "polars", "pyarrow", "torch", "rich", "click")
MAX_IMPORTS = 81
MAX_PRIVATE_MODULES = 15
MAX_LINES, LONG_LINES, MAX_LONG = 80, 60, 10
MAX_PARAMETERS = 10


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def package_of(module: str) -> str:
    """etloom.formats.kineto -> formats; "" for etloom itself."""
    return [*module.split("."), ""][1]


@cache
def imports(module: str) -> tuple[tuple[str, str, bool], ...]:
    """(module imported from, name or "", whether it happens when the module is imported) of every import."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, early: bool) -> Iterator[tuple[str, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, "", early) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield from ((base, alias.name, early) for alias in child.names)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from visit(child, early and not lazy)

    return tuple(visit(tree(module), True))


def imported_package(base: str, name: str) -> str | None:
    """The package of etloom that an import takes something from; "" for `import etloom`; None for others."""
    if base == "etloom":
        return name if name in LEVELS else "" if name not in ("_native", "__version__") else None
    return package_of(base) if base.startswith("etloom.") and package_of(base) in LEVELS else None


@cache
def package_imports() -> dict[tuple[str, str], set[str]]:
    """(package, package it imports) -> the modules that do."""
    pairs: dict[tuple[str, str], set[str]] = {}
    for module in modules():
        for base, name, _ in imports(module):
            imported = imported_package(base, name)
            if imported and package_of(module) in LEVELS and imported != package_of(module):
                pairs.setdefault((package_of(module), imported), set()).add(module)
    return pairs


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def test_every_package_has_a_level() -> None:
    packages = {package_of(module) for module in modules()} - {"", "__main__"}
    assert packages == set(LEVELS), "a new package: give it a level here and in docs/architecture.md"
    assert len(LEVELS) <= 18


@pytest.mark.parametrize("package", LEVELS)
def test_a_package_imports_from_lower_levels_only(package: str) -> None:
    wrong = {
        f"{module} imports {imported}"
        for (importer, imported), importers in package_imports().items()
        for module in importers
        if importer == package and LEVELS[imported] >= LEVELS[package]
    }
    assert not wrong


def test_only_the_command_line_and_the_fronts_import_the_public_face() -> None:
    wrong = [
        module
        for module in modules()
        if package_of(module) not in ("", "__main__", "cli", "compat")
        for base, name, _ in imports(module)
        if imported_package(base, name) == ""
    ]
    assert not wrong, (
        "the version is etloom.core.version.__version__; what is shared belongs to a lower level"
    )


def test_few_imports_between_packages() -> None:
    assert len(package_imports()) <= MAX_IMPORTS


def test_few_private_modules() -> None:
    private = [
        module
        for module in modules()
        if module.rpartition(".")[2].startswith("_") and not module.endswith("__main__")
    ]
    assert len(private) <= MAX_PRIVATE_MODULES, private


def test_no_package_imports_a_private_name_of_another() -> None:
    wrong = [
        f"{module} imports {base}.{name}"
        for module in modules()
        for base, name, _ in imports(module)
        if base.startswith("etloom")
        and imported_package(base, name) != package_of(module)
        and any(part.startswith("_") and not part.startswith("__") for part in [*base.split("."), name])
        and not f"{base}.{name}".startswith("etloom._native")
    ]
    assert not wrong


def test_the_collector_imports_nothing_of_etloom_but_errors() -> None:
    """It runs inside the user's job, also under another name and without the other packages."""
    wrong = [
        f"{module} imports {base}.{name}"
        for module in modules()
        if package_of(module) == "collector"
        for base, name, early in imports(module)
        if base.split(".")[0] == "etloom" and package_of(base) != "collector"
        if early or base != "etloom.core.errors"
    ]
    assert not wrong


def test_the_two_replays_do_not_import_each_other() -> None:
    for module in modules():
        for mine, other in (("comms", "compute"), ("compute", "comms")):
            if module.startswith(f"etloom.replayer.{mine}"):
                assert not [base for base, _, _ in imports(module) if f"replayer.{other}" in base], module


def test_functions_are_short_and_take_few_parameters() -> None:
    lines = {
        name: (node.end_lineno or 0)
        - min(node.lineno, *(d.lineno for d in node.decorator_list), node.lineno)
        + 1
        for name, node in functions()
    }
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}
    long = {name: count for name, count in lines.items() if count > LONG_LINES}
    assert len(long) <= MAX_LONG, long
    parameters = {
        name: len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        for name, node in functions()
    }
    assert not {name: count for name, count in parameters.items() if count > MAX_PARAMETERS}


def test_torch_is_imported_only_by_code_that_runs_in_a_job() -> None:
    wrong = [
        module
        for module in modules()
        if package_of(module) not in TORCH_PACKAGES
        for base, _, _ in imports(module)
        if base.split(".")[0] == "torch"
    ]
    assert not wrong


def test_only_the_command_line_prints_sets_logging_and_exits() -> None:
    effects = {"print", "logging.basicConfig", "os._exit", "sys.exit", "exit", "quit"}
    wrong = [
        f"{module}: {ast.unparse(node.func)}"
        for module in modules()
        if package_of(module) not in ("cli", "compat", "__main__")
        and not module.endswith(("sitecustomize", "repro.operator_script", "repro.collective_script"))
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in effects
    ]
    assert not wrong


def loaded_after(code: str) -> set[str]:
    """Those of HEAVY that are loaded after the code ran in a new Python process."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


def test_importing_etloom_is_cheap() -> None:
    assert loaded_after("import etloom; dir(etloom); etloom.__version__") == set()
    assert loaded_after("import etloom; etloom.EtloomError") == set()


def test_record_brings_no_table_library_into_a_training_job() -> None:
    assert loaded_after("import etloom; etloom.record") == set()


def test_the_command_line_starts_without_the_table_libraries() -> None:
    assert loaded_after("import etloom.cli") <= {"click", "rich"}


def test_reading_analysing_and_exporting_never_load_torch(tmp_path: Path) -> None:
    code = f"""
sys.path.insert(0, {str(ROOT / "tests")!r})
import pathlib, etloom
from support import small_traces
job = etloom.open(small_traces.write_run(pathlib.Path({str(tmp_path)!r}, "run")), use_cache=False)
etloom.analyze(job, "top-ops")
etloom.export(job, {str(tmp_path / "a.json")!r})
etloom.export(job, {str(tmp_path / "a.parquet")!r})
"""
    assert "torch" not in loaded_after(code)


@pytest.mark.parametrize("module", ["api", "cli.run_arguments", "core.names", "loading", "loading.engines"])
def test_numpy_is_imported_before_polars(module: str) -> None:
    """Otherwise polars reaches numpy through a proxy, and converting an array takes twice as long."""
    code = f"import etloom.{module}, sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    order = process.stdout.split()
    assert "polars" not in order or order.index("numpy") < order.index("polars")
