"""The flags of PARAM's communication replay: of comm_replay, and of commsTraceReplay, its predecessor.

Names, aliases and defaults are PARAM's. `IGNORED_FLAGS` and `IGNORED_SWITCHES` list those without an effect here,
with the reason.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from etloom.core.errors import UnknownName
from etloom.replayer.comms.comms_options import check_backend
from etloom.replayer.plan import COLLECTIVES, MESSAGES

_NOT_QUANTIZED = "nothing is quantised"
_ALWAYS_TIMED = "every replay is timed; --output-path holds a trace of the last"
_CHECKED_BY_COMPUTATION = "results are compared with computed ones, not with a saved run"
IGNORED_FLAGS = {
    ("--nw-stack",): "communication runs on torch.distributed",
    ("--dtype",): "types are those of the recording",
    ("--num-tpu-cores",): "TPUs are not supported",
    ("--init-device",): "tensors are created on --device",
    ("--init-method", "--pg-init-method"): "processes meet at --master-ip and --master-port",
    ("--bitwidth",): _NOT_QUANTIZED,
    ("--quant-a2a-embedding-dim",): _NOT_QUANTIZED,
    ("--quant-threshold",): _NOT_QUANTIZED,
    ("--log", "--log-level"): "there is one log level",
    ("--profiler-num-replays-start",): _ALWAYS_TIMED,
    ("--profiler-num-replays",): _ALWAYS_TIMED,
    ("--data-accuracy-savemodepath",): _CHECKED_BY_COMPUTATION,
    ("--data-accuracy-checkmodepath",): _CHECKED_BY_COMPUTATION,
    ("--data-accuracy-uploadpath",): "nothing is uploaded",
    ("--data-accuracy-rtol",): "results are compared bit by bit",
    ("--data-accuracy-atol",): "results are compared bit by bit",
    ("--data-accuracy-dtype",): "results are compared in their own type",
    ("--data-accuracy-numelems",): "all elements are compared",
    ("--use-perf-logger", "--use-custom-perf-logger"): "results are files",
    ("--ibv-devices",): "the backend chooses its devices; for NCCL set NCCL_IB_HCA",
}
"""Flags with a value, or with several."""
IGNORED_SWITCHES = {
    ("--init-only",): "PARAM's replay does not read it either; --dry-run starts nothing",
    ("--use-ext-dist", "--use-ext-pg"): "torch.distributed is used",
    ("--enable-local-report",): "rank 0 reports for all",
    ("--enable-profiler",): _ALWAYS_TIMED,
    ("--disable-parallel-read",): "rank 0 reads for all",
    ("--reuse-tensors",): "nothing is allocated during timed passes",
    ("--use-nvshmem",): "communication runs on torch.distributed",
    ("--eager-init",): "groups are created before the timed passes",
    ("--enable-torch-nccl-timing",): "the replay measures times itself",
}
WITHOUT_EFFECT = {**IGNORED_FLAGS, **IGNORED_SWITCHES}

_SUFFIXES = ("", "v", "base", "single", "coalesced", "intotensorcoalesced", "tensorcoalesced")
_SPELLINGS: dict[str, tuple[str, ...]] = {
    **{f"{name.replace('_', '')}{end}": (name,) for name in COLLECTIVES | MESSAGES for end in _SUFFIXES},
    **dict.fromkeys(("isend",), ("send",)),
    **dict.fromkeys(("irecv", "recvanysource"), ("recv",)),
    **dict.fromkeys(("batchisendirecv", "pt2pt"), ("send", "recv")),
    **dict.fromkeys(("wait", "init", "noop"), ()),
}
"""PARAM's names of calls, without underscores -> etloom's names. Waits are replayed with the calls they wait for."""


class _Parser(argparse.ArgumentParser):
    """A command-line parser that reports an error in a single line, because the process of every rank prints it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the flags\n")


def make_parser() -> argparse.ArgumentParser:
    """Return a command-line parser for the flags of PARAM's communication replay."""
    parser = _Parser(
        "etloom-comms-replay",
        usage="%(prog)s --trace-path RUN [flags]",
        description="Replay recorded communication, with PARAM's flags.",
        epilog="example: mpirun -np 8 etloom-comms-replay --trace-path run/ --trace-type et --num-replays 10",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--trace-path",
        default="./",
        help="folder of rank-N files, or one file; if several are listed (a,b), the first that exists",
    )
    add(
        "--trace-type",
        default="et",
        choices=["et", "basic", "kineto"],
        help="fail if there is no trace of this type",
    )
    add("--use-one-trace", action="store_true", help="replay one rank's trace on all processes")
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--auto-shrink", action="store_true", help="replay the first ranks on fewer processes")
    add(
        "--max-msg-cnt",
        type=_integer_from(0),
        default=0,
        help="only the first N of the calls to replay; 0: all",
    )
    add("--num-replays", type=_integer_from(1), default=5, help="replays that are timed")
    add("--warmup-iter", type=_integer_from(0), default=2, help="untimed replays before the timed replays")
    add(
        "--do-warm-up",
        dest="warmup_iter",
        action="store_const",
        const=1,
        help="the old name of --warmup-iter 1",
    )
    add(
        "--allow-ops",
        "--allow-list",
        type=_parse_collectives,
        default="all",
        help="comma list of collectives",
    )
    add("--blocking", "-b", "--z", nargs="?", type=int, const=1, choices=[0, 1], default=0,
        help="wait for each call before the next")  # fmt: skip
    add("--colls-per-batch", type=int, default=-1, help="also report the time of N consecutive calls")
    add("--use-timestamp", action="store_true", help="keep the recorded gaps between calls")
    add("--rebalance-policy", default="", choices=["", "equal"], help="equal shares in all-to-alls")
    add("--output-path", default="", nargs="?", const="", help="folder for replayedCommsPerf.rank-N.json")
    add(
        "--output-ranks",
        type=_parse_ranks,
        default=None,
        help="1,3 or 1:3: ranks that get a file; by default all",
    )
    add(
        "--backend",
        type=_parse_backend,
        default=None,
        help="nccl, gloo, or any other backend of torch; default: the usual one of --device",
    )
    add(
        "--device", default=None, choices=["cpu", "cuda", "rocm"], help="by default cuda where there is a GPU"
    )
    add("--master-ip", default=None, help="by default MASTER_ADDR, or Slurm's first node, or 127.0.0.1")
    add(
        "--master-port",
        type=_integer_from(0),
        default=None,
        help="by default the one after MASTER_PORT, or from 29501 on",
    )
    add("--c", type=int, choices=[0, 1], default=0, help="check every result once, before the timed replays")
    add("--data-accuracy-mode", choices=["none", "save", "check"], default="none", help="check: as --c 1")
    _add_ignored_flags(parser)
    return parser


def _add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    for flags, reason in IGNORED_FLAGS.items():
        parser.add_argument(*flags, default=None, nargs="+", metavar="VALUE", help=f"no effect: {reason}")
    for flags, reason in IGNORED_SWITCHES.items():
        parser.add_argument(*flags, default=None, action="store_true", help=f"no effect: {reason}")


def describe_ignored_flags(args: argparse.Namespace) -> list[str]:
    """Return a line with the reason for each flag on the command line that has no effect."""
    lines = [
        f"{flags[0]} has no effect: {reason}"
        for flags, reason in WITHOUT_EFFECT.items()
        if getattr(args, flags[0].lstrip("-").replace("-", "_")) is not None
    ]
    if args.data_accuracy_mode == "save":
        lines.append(f"--data-accuracy-mode save has no effect: {_CHECKED_BY_COMPUTATION}")
    return lines


def _parse_backend(text: str) -> str:
    try:
        check_backend(text)
    except UnknownName as error:
        raise argparse.ArgumentTypeError(f"{error.what}; {error.remedy}") from None
    return text


def _integer_from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return int(text)

    return number


def _parse_ranks(text: str) -> list[int] | None:
    """Parse 1,3 or 1:3 (both ends included) as a list of ranks; None for all ranks."""
    if text in ("", "all"):
        return None
    if span := re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text):
        return list(range(int(span[1]), int(span[2]) + 1))
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise argparse.ArgumentTypeError(f"expected a list of ranks such as 1,3 or 1:3, got {text!r}")
    return [int(rank) for rank in text.split(",")]


def _parse_collectives(text: str) -> tuple[str, ...]:
    """Convert a comma-separated list of PARAM's collective names to etloom's names; an empty result selects all."""
    if text == "all":
        return ()
    collectives: set[str] = set()
    for spelling in filter(None, (spelling.strip() for spelling in text.split(","))):
        names = _SPELLINGS.get(spelling.lower().replace("_", ""))
        if names is None:
            raise argparse.ArgumentTypeError(
                f"{spelling!r} is not a collective; expected one of {', '.join(sorted(COLLECTIVES | MESSAGES))}"
            )
        collectives.update(names)
    if not collectives:
        raise argparse.ArgumentTypeError(f"{text!r} selects nothing to replay")
    return tuple(sorted(collectives))
