"""Chooses the observer, and compiles the native one once for the installed torch, into the user's cache folder.

One call of the C++ compiler ($CXX, else c++) takes some 20 s, under a lock, so that the ranks of a job do not build it
several times. The name of the library contains a hash of torch's version, the flags and the sources. A failure is kept
next to it and repeated for some minutes, so that a job waits for it once and not once per rank.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..atomic_file import write_atomically
from ..options import CollectOptions

_SOURCES = Path(__file__).resolve().parent / "native"
_TRIAL = Path(__file__).resolve().parent / "library_trial.py"
_TIMEOUT_S, _TRIAL_TIMEOUT_S = 900, 120
_MAX_MESSAGE_LENGTH = 300
_FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra"),
    "-DNDEBUG",  # without it the header declares a member that torch's own build does not have
    # Without it every function of the library can be replaced by another library, so none is inlined.
    "-fno-semantic-interposition",
)
_MAX_FAILURE_AGE_S = 600


class BuildError(Exception):
    """Raised if the native observer cannot be built here; the message is the reason, on a single line."""


def find_library() -> Path | None:
    """Return the path of the native observer library for the installed torch, or None if it is not built yet."""
    path = _library_path()
    return path if path.is_file() else None


def find_failure() -> str | None:
    """Return the reason why the compiler failed to build the observer library in the last 10 minutes; else None."""
    return _read_failure(_failure_path(_library_path()))


def build_library(sources: Path = _SOURCES, name: str = "observer", *, retry: bool = False) -> Path:
    """Return the path of the native library for the installed torch; compile the library if necessary.

    Args:
        sources: Folder of the C++ sources.
        name: What the name of the library begins with.
        retry: Compile also if that failed a short time ago, with the same compiler.

    Raises:
        BuildError: It cannot be built.
    """
    path = _library_path(sources, name)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _build_lock(path.parent / "lock"):
            if not path.is_file():
                _compile_unless_failed(path, sources, retry)
    except OSError as error:
        raise BuildError(f"{error.filename or path.parent}: {error.strerror}") from error
    return path


def _compile_unless_failed(path: Path, sources: Path, retry: bool) -> None:
    """Compile the library unless that failed recently; store the reason of a failure for other processes."""
    failure = _failure_path(path)
    reason = None if retry else _read_failure(failure)
    if reason is not None:
        raise BuildError(f"{reason} (tried a short time ago; `etloom collect --build` tries again)")
    failure.unlink(missing_ok=True)
    try:
        _compile(path, sources)
    except BuildError as error:
        with suppress(OSError):
            write_atomically(failure, f"{_identify_compiler()}\n{error}\n", failure.parent)
        raise


def _failure_path(library: Path) -> Path:
    return library.with_suffix(".failure")


def _read_failure(path: Path) -> str | None:
    """Return the stored reason if this compiler failed to build the library in the last 10 minutes, else None."""
    try:
        age_s = time.time() - path.stat().st_mtime
        compiler, reason = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return reason if 0 <= age_s < _MAX_FAILURE_AGE_S and compiler == _identify_compiler() else None


def _identify_compiler() -> str:
    """Return text that changes when another compiler is selected or installed."""
    words = _compiler_words()
    program = shutil.which(words[0])
    state = Path(program).stat() if program else None
    return json.dumps([words, program, state and [state.st_ino, state.st_size, state.st_mtime_ns]])


def _compiler_words() -> list[str]:
    try:
        return shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise BuildError(f"CXX={os.environ['CXX']}: {error}") from None


def _library_path(sources: Path = _SOURCES, name: str = "observer") -> Path:
    """Return the path of a library for the installed torch, which is not imported. Raises ImportError without torch."""
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"the native observer does not support {sys.platform}")
    torch = _find_torch()
    try:
        version = (torch / "version.py").read_text(encoding="utf-8")
        library = next((torch / "lib").glob("libtorch_python.*"), torch / "version.py").stat()
    except OSError as error:
        raise BuildError(f"{error.filename}: {error.strerror}") from None
    number = re.search(r"^__version__ = ['\"]([\w.+-]+)['\"]", version, re.MULTILINE)
    facts = (version, str(torch), f"{library.st_size} {library.st_mtime_ns}", platform.machine(), *_FLAGS)
    digest = hashlib.sha256("\0".join(facts).encode())
    for source in sorted(sources.glob("*.*pp") if sources != _SOURCES else sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cache_folder() / f"{name}-{number[1] if number else 'torch'}-{digest.hexdigest()[:16]}.so"


def _find_torch() -> Path:
    """Return the folder of torch without importing it. Raises ImportError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed")
    return Path(spec.origin).parent


def _cache_folder() -> Path:
    """Return the folder for compiled libraries: $ETLOOM_OBSERVER_CACHE, else etloom/observer in the user's cache."""
    if folder := os.environ.get("ETLOOM_OBSERVER_CACHE"):
        return Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "etloom" / "observer"


def _compiler_flags() -> list[str]:
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    if torch.distributed.is_available():
        flags += ["-DUSE_DISTRIBUTED", "-DUSE_C10D"]
        flags += ["-DUSE_C10D_GLOO"] if torch.distributed.is_gloo_available() else []
    headers = Path(torch.__file__).parent / "include"
    for folder in (headers, headers / "torch" / "csrc" / "api" / "include"):
        flags += ["-isystem", str(folder)]
    return [*flags, f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]


def _compile(path: Path, folder: Path) -> None:
    compiler = _compiler_words()
    # All as one translation unit: torch's headers, which cost far more than the sources, are then read once.
    sources = [word for source in sorted(folder.glob("*.cpp")) for word in ("-include", str(source))]
    flags = _compiler_flags()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        library = Path(scratch) / path.name
        inputs = [*sources, "-x", "c++", os.devnull, "-x", "none", *_find_cxx_library()]
        command = [*compiler, *inputs, *flags, "-o", str(library)]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except FileNotFoundError:
            raise BuildError(f"no C++ compiler: {compiler[0]} not found") from None
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler[0]} did not finish within {_TIMEOUT_S} s") from None
        if process.returncode:
            lines = process.stderr.splitlines()
            reason = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
            raise BuildError(f"{compiler[0]} failed: {reason.strip()[:_MAX_MESSAGE_LENGTH]}")
        if folder == _SOURCES:
            _try_library(library, compiler[0])
        library.replace(path)


def _find_cxx_library() -> list[str]:
    """Return the path of the libstdc++ that torch has loaded, in a list for the linker; empty if it is unknown.

    Some compilers bring their own and link it statically. Two copies in a process crash where one writes to a stream of
    the other, as torch does when it prints a schema to ours.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libstdc++.so" in line}
    present = [path for path in paths if Path(path).is_file()]  # an update may have deleted it
    return present if len(paths) == 1 else []


def _try_library(library: Path, compiler: str) -> None:
    """Test a compiled library by recording operators in another process, so that no job loads a library that crashes.

    Raises:
        BuildError: The process failed.
    """
    # Without site: the bootstrap of etloom collect would start a recorder in it.
    code = "import sys; sys.path[:] = sys.argv[2:]\n" + _TRIAL.read_text()
    command = [sys.executable, "-I", "-S", "-c", code, str(library), *filter(None, sys.path)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"the observer compiled by {compiler} hangs; CXX=... chooses another compiler"
        ) from None
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise BuildError(
            f"the observer compiled by {compiler} does not work ({reason[0][:_MAX_MESSAGE_LENGTH]}); "
            "CXX=... chooses another compiler"
        )


@contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock during a build; the kernel releases it if this process dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Chooses the observer that records the execution trace: etloom's native observer if it can be built, else torch's.


def choose_observer(
    options: CollectOptions,
    *,
    records_et: bool,
    needs_gate: bool = False,
    on_build: Callable[[], None] | None = None,
) -> tuple[str, list[str]]:
    """Return the name of the observer to use, "native" (etloom's) or "stock" (torch's), and warnings for the user.

    Args:
        options: The requested observer, and its limits.
        records_et: Whether an execution trace is recorded; without one nothing is built, unless:
        needs_gate: Whether torch's profiler starts and stops in the middle of operators, which only the native
            library makes safe (profiler_gate.py).
        on_build: Called before the native observer is compiled.

    Raises:
        CollectError: A ring or the gate is needed, and the native observer cannot be built.
    """
    from etloom.core.errors import CollectError

    if not (records_et or needs_gate):
        return options.observer, []
    observer, warnings = build_if_native(options.observer, on_build)
    if needs_gate and observer != "native":
        reason = f": {warnings[0]}" if warnings else ", not --observer stock"
        raise CollectError(
            f"--step-by TIME requires the native observer{reason}",
            remedy="count steps in another way, for example with --step-name, or leave out Kineto (--with et)",
        )
    if options.ring and observer != "native":
        raise CollectError(
            f"--ring requires the native observer: {warnings[0]}", remedy="leave out --ring (ring=True)"
        )
    if options.max_bytes is not None and observer != "native":
        warnings.append("--max-size has no effect on torch's observer")
    return observer, warnings


def build_if_native(requested: str, on_build: Callable[[], None] | None = None) -> tuple[str, list[str]]:
    """Build the native observer if it is requested; return the observer's name, and a message if the build failed."""
    if requested == "stock":
        return requested, []
    from . import BuildError, build_library, find_failure, find_library

    try:
        if on_build is not None and find_library() is None and find_failure() is None:
            on_build()
        build_library()
    except ImportError:
        # No torch here. The processes of the job check whether the native observer was built for their torch.
        return requested, []
    except BuildError as error:
        return "stock", [f"the native observer cannot be built, torch's observer is used instead: {error}"]
    return requested, []
