"""python -m etloom.collector --out run --steps 3:5 -- torchrun --nproc-per-node 2 train.py"""

from __future__ import annotations

import argparse
import sys

from etloom.errors import EtloomError

from .launcher import launch


def main(arguments: list[str] | None = None) -> int:
    """The exit status of the command; 1 where it never ran, 2 where the options are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m etloom.collector", description=(launch.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", required=True, help="folder for the traces")
    parser.add_argument("--steps", default="3:5", help="steps to record, as a slice (default: 3:5)")
    parser.add_argument("--no-shapes", action="store_true", help="leave out the shapes of operators' inputs")
    parser.add_argument("--stack", action="store_true", help="record Python stacks")
    parser.add_argument("--memory", action="store_true", help="record allocations")
    parser.add_argument("--with", dest="what", help="all that is recorded, for example kineto,et,shapes")
    parser.add_argument("--observer", default="native", help="native or stock")
    parser.add_argument("--overwrite", action="store_true", help="replace the traces of an earlier run")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command to run")
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    try:
        collected = launch(
            command,
            given.out,
            given.steps,
            shapes=False if given.no_shapes else None,
            stack=given.stack,
            memory=given.memory,
            overwrite=given.overwrite,
            what=given.what,
            observer=given.observer,
        )
    except EtloomError as error:
        print(f"etloom: {error}", file=sys.stderr)
        return 1 if error.option is None else 2
    for warning in collected.warnings:
        print(f"etloom: {warning}", file=sys.stderr)
    return collected.returncode


if __name__ == "__main__":
    sys.exit(main())
