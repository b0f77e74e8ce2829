"""Runs the selected ranks of `collect --fake-world` on fake tensors, one after another, each in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..fake_world import FACTS_NAME, FAILURE_NAME, LIBRARY_VARIABLE
from ..observer.native_build import BuildError, build_library
from ..options import (
    CollectOptions,
    RecordingOptions,
    loaded_version,
    local_folder,
    new_scratch_name,
    option_error,
    parse_ranks,
    parse_window,
)
from ..run_folder import claim_folder
from .child_process import run_command

_MAX_WORLD_SIZE = 1 << 20
_DEFAULT_STEPS = "1:2"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RANKS_PER_HOST = 8
_NATIVE = Path(__file__).resolve().parent.parent / "fake_world" / "native"


def record_fake_ranks(
    command: Sequence[str],
    out: str | os.PathLike[str],
    options: CollectOptions,
    environment: Callable[[RecordingOptions], Mapping[str, str]],
    overwrite: bool = False,
) -> tuple[Path, int, tuple[int, ...], tuple[Path, ...], tuple[str, ...]]:
    """Run the command once per rank on fake tensors, and record an execution trace of each.

    Args:
        command: The command of one rank, without a launcher such as torchrun.
        out: Folder for the traces.
        options: Its world size, ranks (default: rank 0) and steps (default: step 1).
        environment: Returns the variables that reach the job, for the options of a recording.
        overwrite: Replace the traces of an earlier run.

    Returns:
        The folder, the exit status of the first rank that failed (else 0), the recorded ranks, the folder again as
        the only window, and one message per rank.

    Raises:
        CollectError: An option is invalid, or the fake device cannot be built.
    """
    from etloom.core.errors import CollectError

    world_size = options.fake_world or 0
    ranks = parse_ranks(options.ranks) or (0,)
    _check_options(options, world_size, ranks)
    if not command:
        raise CollectError("no command to run", remedy="write it after --, for example -- python train.py")
    folder = local_folder(os.fspath(out))
    recording = RecordingOptions(
        folder,
        new_scratch_name(folder),
        *parse_window(options.steps or _DEFAULT_STEPS, None, None, None, False),
        etloom_version=loaded_version(),
        command=tuple(command),
    )
    library = _build_device()
    claim_folder(folder, overwrite)
    Path(recording.scratch).mkdir(mode=0o700)  # for objects that ranks send each other
    variables = {**os.environ, **environment(recording), LIBRARY_VARIABLE: str(library)}
    recorded, received, messages = list[int](), list[int](), list[str]()
    status = 0
    try:
        for rank in ranks:
            if ending := [number for number in received if number in _ENDING]:
                status = status or 128 + ending[0]
                messages.append(f"rank {rank} and later ones did not run: {signal.Signals(ending[0]).name}")
                break
            all_variables = variables | _rank_variables(rank, world_size)
            code, facts = _run_rank(command, Path(folder), rank, all_variables, received)
            status = status or code
            recorded += [rank] if facts is not None else []
            result = _describe_result(facts, _take_failure(Path(folder), rank), code, recording.last)
            messages.append(f"rank {rank}{'' if facts is None else f' of {world_size}'}: {result}")
    finally:
        shutil.rmtree(recording.scratch, ignore_errors=True)
    return Path(folder), status, tuple(recorded), (Path(folder),), tuple(messages)


def _build_device() -> Path:
    """Compile the library of the fake CUDA device, once per torch version; return its path. Raises CollectError."""
    from etloom.core.errors import CollectError

    try:
        return build_library(_NATIVE, "fake-device", retry=True)
    except ImportError:
        remedy = "install etloom in the environment of the job"
        raise CollectError("torch is not installed in this Python", remedy=remedy) from None
    except BuildError as error:
        raise CollectError(f"the fake device cannot be built: {error}", where="fake_world") from None


def _run_rank(
    command: Sequence[str], folder: Path, rank: int, environment: Mapping[str, str], received: list[int]
) -> tuple[int, dict[str, Any] | None]:
    """Run the command as one rank; return its exit status and facts about its recording (None without a recording)."""
    from etloom.core.errors import CollectError

    facts_file = folder / FACTS_NAME.format(rank=rank)
    facts_file.unlink(missing_ok=True)
    try:
        code = run_command(command, environment, received=received)
    except OSError as error:
        raise CollectError(f"cannot run: {error.strerror}", where=command[0]) from error
    try:
        return code, json.loads(facts_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return code, None


def _take_failure(folder: Path, rank: int) -> str:
    """Return why the script of a rank failed, "" if it did not say, and remove the file that says so."""
    path = folder / FAILURE_NAME.format(rank=rank)
    try:
        reason = path.read_text(encoding="utf-8")
        path.unlink()
    except (OSError, ValueError):
        return ""
    return reason


def _describe_result(facts: Mapping[str, Any] | None, failure: str, code: int, last: int | None) -> str:
    if facts is None and failure:
        return f"nothing recorded: {failure}"
    if facts is None:
        return f"nothing recorded: it ended with status {code} before step {last} of its optimizer"
    steps = ", ".join(map(str, facts["steps"]))
    memory = facts["peak_memory_bytes"] / 1e9
    return f"{facts['operators']:,} operators in step {steps}, peak memory {memory:,.2f} GB"


def _check_options(options: CollectOptions, world_size: int, ranks: Sequence[int]) -> None:
    """Raise CollectError if world size or ranks are out of range, or if an option has no effect with --fake-world."""
    if not 1 <= world_size <= _MAX_WORLD_SIZE:
        raise option_error(f"expected 1 to {_MAX_WORLD_SIZE} ranks, got {world_size}", "fake_world")
    if ranks[-1] >= world_size:
        raise option_error(f"unknown rank {ranks[-1]} of {world_size}", "ranks", f"0 to {world_size - 1}")
    ignored = ("every", "length", "on_demand", "max_windows", "step_name", "step_by", "sources", "max_bytes")
    for name in (*ignored, "stack", "memory", "ring"):
        if getattr(options, name):
            raise option_error("cannot be combined with --fake-world", name, "leave it out")


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank, assuming eight ranks per host."""
    local_size = min(world_size, _RANKS_PER_HOST)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
