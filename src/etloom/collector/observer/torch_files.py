"""Writes the files that users of torch's ExecutionTraceObserver expect: JSON, and a folder of resources."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

_WRITER = """
import sys
sys.path += [path for path in sys.argv[4:] if path not in sys.path]
from etloom.compat import observer_json
observer_json.main(*sys.argv[1:4])
"""
_MAX_REASON_LENGTH = 500


def write_json(recording: str, path: str) -> None:
    """Write the JSON of an observer file and delete that file; if it fails, warn and keep it.

    Another process does it: the job needs none of the libraries, memory and threads for it.
    """
    # Isolated: the bootstrap of etloom collect would start a recorder in it.
    arguments = (recording, path, name_resources(path))
    command = [sys.executable, "-I", "-c", _WRITER, *arguments, *filter(None, sys.path)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        reason = process.stderr.strip()[-_MAX_REASON_LENGTH:] if process.returncode else None
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error)
    if reason is not None:
        warnings.warn(
            f"{path} was not written: {reason}; the recording is in {recording} (etloom convert {recording} {path} "
            "--to execution-trace)",
            RuntimeWarning,
            stacklevel=2,
        )


def create_temporary_file() -> str:
    """Create an empty file with a name like those of torch's observer; return its path."""
    with tempfile.NamedTemporaryFile(suffix=".et.json", delete=False) as file:
        return file.name


def name_resources(trace_path: str) -> str:
    """Return the path of the folder of resources of a trace file, as torch names it."""
    return f"{Path(trace_path).with_suffix('')}_resources"


def find_resources(trace_path: str, *, create: bool = False) -> str | None:
    """Return the folder of resources of a trace file; None if it does not exist and is not or cannot be created."""
    folder = Path(name_resources(trace_path))
    if create:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    return str(folder) if folder.is_dir() else None


def copy_kernel_sources(folder: str) -> None:
    """Copy the sources of the kernels that torch.compile generated in this process to a folder."""
    cache = sys.modules.get("torch._inductor.codecache")
    for module in list(cache.PyCodeCache.modules) if cache is not None else ():
        source = getattr(module, "__file__", None)
        if source is not None and Path(source).is_file():
            with contextlib.suppress(OSError):
                shutil.copyfile(source, Path(folder, Path(source).name))
