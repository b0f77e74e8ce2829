"""Tests a compiled observer library by recording operators; run as a script with the library's path, never imported.

Between them they use what differs between builds: printed schemas with default values, tensors, lists, another thread.
"""

import ctypes
import sys
import tempfile
from pathlib import Path

import torch

observer = ctypes.CDLL(sys.argv[1])
observer.etloom_open.restype = ctypes.c_void_p
observer.etloom_open.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_char_p,
]
for function in (observer.etloom_start, observer.etloom_stop):
    function.argtypes = [ctypes.c_void_p]
observer.etloom_close.argtypes = [ctypes.c_void_p, ctypes.c_int]

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "trial.etob"
    session = observer.etloom_open(
        str(path).encode(), torch.__version__.encode(), 1 << 26, 0, 1, folder.encode()
    )
    if not session or observer.etloom_start(session):
        raise SystemExit("it cannot open a file")
    weight = torch.ones(4, 4, requires_grad=True)
    values = torch.add(torch.ones(4, 4), weight, alpha=2).view(2, 8).sum(dim=[0, 1])
    torch.autograd.backward(torch.cat([values.reshape(1), torch.zeros(2)]).square().mean())
    with torch.autograd.profiler.record_function("trial"):
        torch.cat([weight, values.reshape(1, 1).expand(4, 4)]).to(torch.float64).tolist()
    observer.etloom_stop(session)
    observer.etloom_close(session, 1)
    if path.stat().st_size < 100:
        raise SystemExit("it recorded nothing")
