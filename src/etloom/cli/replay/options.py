"""Options that several replay commands share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import click

from etloom.cli.command import FiniteFloat, Flag
from etloom.cli.output import Format
from etloom.replayer.comms.comms_options import CommsOptions, Rendezvous


@dataclass(frozen=True)
class ProcessOptions:
    """Backend, device, timeout and rendezvous address of the processes of a replay."""

    backend: Annotated[str, "nccl, gloo, mpi, ucc, or another backend registered with torch."] = "gloo"
    device: Annotated[Literal["cpu", "cuda"] | None, "Default: the device of the backend."] = None
    timeout: Annotated[float, "Seconds after which a call counts as hung.", Flag(type=FiniteFloat(min=1))] = (
        60.0
    )
    master_addr: Annotated[str | None, "Host of rank 0; default: set by the launcher."] = None
    master_port: Annotated[
        int | None,
        "A free port on that host; default: derived from the launcher's settings.",
        Flag(type=click.IntRange(0, 65_535)),
    ] = None

    def comms_options(self, run: CommsOptions) -> CommsOptions:
        """Return the options of a replay of communication: ``run``, with these."""
        return replace(run, backend=self.backend, device=self.device or "auto", timeout_s=self.timeout)

    def rendezvous(self) -> Rendezvous:
        return Rendezvous(self.master_addr, self.master_port)


AT_LEAST_0, AT_LEAST_1 = (Flag(type=click.IntRange(min=minimum)) for minimum in (0, 1))
TableFormat = Annotated[Format | None, "Format of the printed table; default: table."]
AllowedNamespaces = Annotated[
    tuple[str, ...],
    "Also run the operators of this namespace, such as torchvision; may be repeated.",
]
