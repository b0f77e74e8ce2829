"""The command ``etloom-et-replay``: replays an execution trace with the flags of PARAM's et_replay.

``--input`` replays the operators of one file; ``--trace-path`` those of all ranks with their communication, on as many
processes as ranks. Flags without an effect here are named on stderr; unknown flags are errors.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from etloom import api
from etloom.compat._command import run_command
from etloom.compat.comms_replay import print_table
from etloom.core.errors import EtloomError
from etloom.core.paths import expand_home
from etloom.replayer.comms.comms_options import CommsOptions, resolve_options
from etloom.replayer.comms.results import TOTAL_HEADERS
from etloom.replayer.launch_environment import Process

_COMMAND = "etloom-et-replay"
_MODES = {"comp": "compute", "compute": "compute", "comm": "comms", "comms": "comms", "full": "full"}
_NO_CODE = "no code is generated"
_SYNTHETIC = (
    "indices are in the recorded range, see ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE"
)
_SKIPPED = "operators that fail are skipped and listed"
_MEMORY = "tensors are allocated and freed as the recording needs them"
_IGNORED_FLAGS = {
    "--replay-config": "flags are read from the command line",
    "--dump-path": _NO_CODE,
    "--batch-size": "times are per iteration",
    "--delay": "communication is replayed",
    "--rows": _SYNTHETIC,
    "--pooling-factor": _SYNTHETIC,
    "--alpha": _SYNTHETIC,
    "--skip-node-file": _SKIPPED,
    "--device-memory-threshold": _MEMORY,
}
"""Flags with a value."""
_IGNORED_SWITCHES = {
    "--profile-replay": "every iteration is timed; etloom replay compute --out writes a trace",
    "--profile-memory": "the peak is always printed",
    "--et": "etloom replay compute --out writes a trace",
    "--debug": "operators are listed with times",
    "--dump": _NO_CODE,
    "--tf32": "products have the precision that torch is set to",
    "--separate": "tensors of communication are its own",
    "--regenerate_tensors": _MEMORY,
    "--update-skip-node-file": _SKIPPED,
    "--enable-lazy-tensor-allocation": _MEMORY,
}


def make_parser() -> argparse.ArgumentParser:
    """Return a command-line parser for the flags of PARAM's et_replay."""
    parser = argparse.ArgumentParser(
        _COMMAND, description="Replay an execution trace, with PARAM's flags.", allow_abbrev=False
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", help="execution trace of one rank: its operators are replayed")
    source.add_argument("--trace-path", "--trace_path", help="folder of all ranks, or one file")
    add("--replay-mode", choices=_MODES, help="default: full with --trace-path, else comp")
    add("-c", "--compute", action="store_true", help="as --replay-mode comp")
    add("--warmup-iter", type=int, default=5, help="replays before those that are timed (default: 5)")
    add("--iter", type=int, default=10, help="replays that are timed (default: 10)")
    add("--subgraph", default="", help="replay only operators and annotations of this name")
    add("--cpu", action="store_true", help="replay on the CPU")
    add("--cuda", type=int, default=-1, help="index of the GPU (default: the first)")
    add("-g", "--generator", action="store_true", help="an error: no code is generated")
    for flag, reason in _IGNORED_FLAGS.items():
        add(flag, default=None, metavar="VALUE", help=f"no effect: {reason}")
    for flag, reason in _IGNORED_SWITCHES.items():
        add(flag, *(["-s"] if flag == "--separate" else []), default=None, action="store_true",
            help=f"no effect: {reason}")  # fmt: skip
    return parser


def replay(args: argparse.Namespace) -> None:
    """Replay what the flags specify, and print times and coverage.

    Raises:
        EtloomError: The trace cannot be replayed like this.
    """
    process = Process.current()
    if process.rank == 0:
        for flag, reason in {**_IGNORED_FLAGS, **_IGNORED_SWITCHES}.items():
            if getattr(args, flag.lstrip("-").replace("-", "_")) is not None:
                sys.stderr.write(f"{_COMMAND}: {flag} has no effect: {reason}\n")
    if args.generator:
        raise EtloomError(f"-g, --generator: {_NO_CODE}", remedy="leave it out to run the replay itself")
    mode = _choose_mode(args)
    place = _choose_place(args)
    options: dict[str, Any] = {"repeats": args.iter, "warmup": args.warmup_iter, "device": place.device}
    if mode == "compute":
        options |= {"gpu": max(args.cuda, 0), "trace": False, "subgraph": args.subgraph or None}
        options["rank"] = process.rank if process.world_size > 1 else None
    elif args.subgraph:
        raise EtloomError("--subgraph requires --replay-mode comp", remedy="add --replay-mode comp")
    else:
        options["backend"] = place.backend
    result: Any = api.replay(expand_home(args.input or args.trace_path), mode, notify=_notify, **options)
    if result is not None:
        _print_result(result, mode)


def _choose_mode(args: argparse.Namespace) -> str:
    if args.replay_mode is not None and args.compute and _MODES[args.replay_mode] != "compute":
        raise EtloomError(f"--compute and --replay-mode {args.replay_mode} are mutually exclusive")
    if args.replay_mode is not None:
        return _MODES[args.replay_mode]
    return "compute" if args.compute or args.input else "full"


def _choose_place(args: argparse.Namespace) -> CommsOptions:
    """Return options with the device, and the backend of torch.distributed for it: the GPU if there is one."""
    if importlib.util.find_spec("torch") is None:
        raise EtloomError("a replay requires torch", remedy="pip install torch")
    return resolve_options(CommsOptions("auto", "cpu" if args.cpu else "auto"))


def _print_result(result: Any, mode: str) -> None:
    if mode != "compute":
        comms = result.comms if mode == "full" else result
        print_table(comms.summary.rename(TOTAL_HEADERS))
    if mode != "comms":
        print_table(result.coverage)
    if mode == "compute":
        if result.repeats_ns:
            mean_ms = sum(result.repeats_ns) / len(result.repeats_ns) / 1e6
            sys.stdout.write(f"Replay time per iteration: {mean_ms:.3f} ms\n")
        sys.stdout.write(f"Peak memory between operators: {result.peak_bytes:,} bytes\n")
        if (share := result.covered()) is not None:
            sys.stdout.write(f"Operator coverage: {share:.4f}\n")


def _notify(line: str) -> None:
    sys.stderr.write(f"{_COMMAND}: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``etloom-et-replay``, and return its exit status."""
    args = make_parser().parse_args(argv)
    return run_command(_COMMAND, lambda: replay(args))


if __name__ == "__main__":
    raise SystemExit(main())
