"""Runs one recorded operator: checks its result, and measures its time next to the recorded one.

Needs torch only. The README.md in this folder lists what was recorded and how to profile it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# BEGIN recorded call
NAME = "aten::mul.Tensor"
RECORDED_NS: int | None = 4000
RECORDED_CALLS = 1
RECORDED_ON = "host"
RECORDED_PAUSE_NS: int | None = 20_000  # since its last call, in which other operators ran
BELOW_AUTOGRAD = False  # whether the kernel of another operator called it, which has passed autograd
OPERATOR = torch.ops.aten.mul.Tensor
STORAGES: tuple[tuple[int, torch.dtype, str, float, float], ...] = (
    # elements, type, contents, from, to
    (64, torch.float32, "uniform", 0.0, 1.0),
)
TENSORS: tuple[tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...], bool], ...] = (
    # storage, type, offset in elements, shape, strides, whether it is on the host
    (0, torch.float32, 0, (8, 8), (8, 1), False),
)


def call(t: list[torch.Tensor], device: torch.device) -> Any:
    """Call the operator; ``t``: the tensors of TENSORS."""
    return OPERATOR(t[0], 2.0)


# END recorded call

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest norm of the difference from a result in float64, relative to the norm of that result."""
MAX_SECONDS, MIN_CALLS, MAX_CALLS = 2.0, 10, 1000
MARK = "recorded call"
OTHER_ELEMENTS = 1 << 15
LONG_PAUSE_NS = 1_000_000
"""After other work of this time, little of an operator's code and data is in the processor's caches."""


def make_contents(elements: int, dtype: torch.dtype, kind: str, low: float, high: float) -> torch.Tensor:
    """Return the initial contents of a storage, on the CPU."""
    if kind == "uniform":
        plain = dtype if dtype.itemsize > 1 else torch.float32
        return (torch.rand(elements, dtype=plain) * high).to(dtype)
    if kind == "integers":
        return torch.randint(int(low), int(high), (elements,), dtype=dtype)
    if kind == "range":
        return torch.arange(elements).to(dtype)
    return torch.full((elements,), int(low), dtype=torch.int64).to(dtype)


def make_tensors(bases: list[torch.Tensor], device: torch.device, wide: bool = False) -> list[torch.Tensor]:
    """Return the tensors of the call on copies of the contents of the storages.

    Args:
        bases: The contents of the storages.
        device: The device for those that were not on the host.
        wide: With float64 in place of other floating point types.

    Raises:
        TypeError: wide, and a tensor has another type than its storage.
    """
    tensors, storages = [], {}
    for number, dtype, offset, shape, strides, on_host in TENSORS:
        place = torch.device("cpu") if on_host else device
        base = bases[number]
        if wide and dtype != base.dtype:
            raise TypeError("a tensor has another type than its storage")
        if number not in storages:
            widened = base.to(torch.float64) if wide and base.is_floating_point() else base
            storages[number] = widened.to(place, copy=True)
        stored = storages[number].dtype if wide else dtype
        tensor = torch.empty(0, dtype=stored, device=place)
        tensors.append(tensor.set_(storages[number].untyped_storage(), offset, shape, strides))  # type: ignore[call-overload]
    return tensors


def list_leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in list_leaves(item)] if isinstance(value, (list, tuple)) else []


def check(bases: list[torch.Tensor], device: torch.device) -> tuple[bool | None, str]:
    """Compare the results, and what the operator writes, with float64 on the CPU, else with the CPU's result.

    Returns:
        Whether they are equal (None: not checked), and how it was checked.
    """
    if "empty" in NAME or "resize" in NAME:
        return None, "not checked: its results have no defined contents"
    cpu = torch.device("cpu")
    tensors = make_tensors(bases, device)
    results = list_leaves(call(tensors, device)) + tensors
    if torch.Tag.nondeterministic_seeded in OPERATOR.tags:
        tensors = make_tensors(bases, device)
        again = list_leaves(call(tensors, device)) + tensors
        if not all(compare(a, b)[1] for a, b in zip(results, again, strict=True)):
            return None, "not checked: its results are random"
    reason = "results of the CPU are what is measured"
    for wide in (True, False) if device != cpu else (True,):
        try:
            tensors = make_tensors(bases, cpu, wide)
            expected = list_leaves(call(tensors, cpu)) + tensors
        except (RuntimeError, TypeError, IndexError) as error:
            # torch has no kernel of this operator for the type or for the CPU: the line "check" states it
            reason = str(error).strip().partition("\n")[0][:120]
            continue
        if any(a.shape != b.shape for a, b in zip(results, expected, strict=True)):
            reason = "the reference has other shapes"
            continue
        errors = [compare(a, b) for a, b in zip(results, expected, strict=True)]
        basis = "float64 on the CPU" if wide else "the same type on the CPU"
        worst = max((error for error, _ in errors), default=0.0)
        return all(equal for _, equal in errors), f"largest relative difference from {basis}: {worst:.2g}"
    return None, f"not checked: {reason}"


def compare(result: torch.Tensor, expected: torch.Tensor) -> tuple[float, bool]:
    """Return the relative difference of two tensors (of integers: the share that differs), and whether it is small."""
    if not result.numel():
        return 0.0, True
    if result.layout is not torch.strided or result.is_complex():
        result, expected = result.to_dense().abs(), expected.to_dense().abs()
    a, b = result.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)
    if not result.is_floating_point():
        share = float((a != b).double().mean())
        return share, share <= 1e-3
    finite = torch.isfinite(a) & torch.isfinite(b)
    same_special = torch.equal(torch.isnan(a), torch.isnan(b))
    difference = float(torch.linalg.vector_norm((a - b)[finite]))
    difference /= max(float(torch.linalg.vector_norm(b[finite])), 1e-30)
    return difference, same_special and difference <= TOLERANCES.get(result.dtype, 0.25)


def measure(bases: list[torch.Tensor], device: torch.device, cold: bool) -> list[float]:
    """Return the durations of calls in ns: by events of the GPU, or as PyTorch's profiler records them on the host.

    Contents and shapes that the operator changes are restored before each call, outside of the measured time.
    """
    for _ in range(3):
        call(make_tensors(bases, device), device)
    if device.type == "cuda":
        return run_calls(bases, device, cold)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as recorder:
        times = run_calls(bases, device, cold)
    events = recorder.events() or []
    inside = [event for event in events if event.cpu_parent is not None and event.cpu_parent.name == MARK]
    recorded = [
        event.time_range.elapsed_us() * 1e3 for event in inside if event.name == NAME.partition(".")[0]
    ]
    # An operator that records no event of its own is measured by the clock.
    return recorded if len(recorded) == len(times) else times


def disturb(pause_ns: int) -> None:
    """Run up to seven other operators on the CPU, for at most the pause between two calls of the program."""
    values = torch.ones(OTHER_ELEMENTS)
    table = values.view(-1, 64)
    works: list[Callable[[], Any]] = [
        lambda: values.mul_(1.0).add_(0.0),
        lambda: table.t().contiguous(),
        lambda: torch.mm(table[:, :64], table[:64]).relu(),
        lambda: torch.cat([table, table]).unsqueeze(0).cumsum(0),
        lambda: torch.nn.functional.layer_norm(table, table.shape),
        lambda: table.softmax(0).argmax().item(),
        lambda: values.clamp(0, 1).topk(3),
    ]
    end = time.perf_counter_ns() + pause_ns
    for work in works:
        if time.perf_counter_ns() >= end:
            return
        work()


def enter_kernel() -> Any:
    """Return a context in which operators are called as kernels call them, if the recorded one was."""
    return torch._C._AutoDispatchBelowAutograd() if BELOW_AUTOGRAD else contextlib.nullcontext()


def run_calls(bases: list[torch.Tensor], device: torch.device, cold: bool) -> list[float]:
    """Call the operator again and again; return the duration of each call in ns."""
    tensors = make_tensors(bases, device)
    is_mutable = OPERATOR._schema.is_mutable
    flushed = torch.empty(256 << 20 if cold else 0, dtype=torch.uint8, device=device)
    times: list[float] = []
    deadline = time.perf_counter() + MAX_SECONDS
    while len(times) < MIN_CALLS or (len(times) < MAX_CALLS and time.perf_counter() < deadline):
        tensors = make_tensors(bases, device) if is_mutable else tensors
        if cold:
            flushed.zero_()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]  # the host is ahead: no launch is measured
            start.record()
            result = call(tensors, device)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e6)
        else:
            disturb(LONG_PAUSE_NS if RECORDED_PAUSE_NS is None else RECORDED_PAUSE_NS)
            with enter_kernel(), torch.profiler.record_function(MARK):
                began = time.perf_counter_ns()
                result = call(tensors, device)
                times.append(float(time.perf_counter_ns() - began))
        del result
    return times


def profile(bases: list[torch.Tensor], device: torch.device) -> None:
    """Call the operator once while a profiler of kernels records, after warm-up."""
    for last in (False, False, True):
        tensors = make_tensors(bases, device)
        if last and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        call(tensors, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=f"Run {NAME} as it was recorded.")
    default = "cuda" if RECORDED_ON == "device" and torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cpu or cuda; default here: {default}")
    parser.add_argument("--threads", type=int, help="threads on the CPU; no recording states them")
    parser.add_argument("--cold", action="store_true", help="clear the caches before each call")
    parser.add_argument("--profile", action="store_true", help="one call, for a profiler of kernels")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    bases = [make_contents(*storage) for storage in STORAGES]
    if options.profile:
        profile(bases, device)
        return 0
    is_equal, text = check(bases, device)
    times = measure(bases, device, options.cold)
    median = statistics.median(times)
    if options.json:
        figures = {"name": NAME, "recorded_ns": RECORDED_NS, "median_ns": median, "min_ns": min(times)}
        figures |= {"calls": len(times), "device": str(device), "check": is_equal, "check_text": text}
        print(json.dumps(figures))
        return int(is_equal is False)
    print(NAME)
    print(f"check:    {'' if is_equal is None else 'passed: ' if is_equal else 'FAILED: '}{text}")
    processor = (
        f"{device}, {torch.get_num_threads()} threads"
        if device.type == "cpu"
        else torch.cuda.get_device_name()
    )
    print(
        f"measured: {median / 1e3:.3f} us (median of {len(times)}, min {min(times) / 1e3:.3f}; {processor})"
    )
    if RECORDED_NS is not None:
        calls = "one call" if RECORDED_CALLS < 2 else f"median of {RECORDED_CALLS} equal calls"
        print(f"recorded: {RECORDED_NS / 1e3:.3f} us ({RECORDED_ON}, {calls})")
        print(f"ratio:    {median / max(RECORDED_NS, 1):.3f} (measured over recorded)")
    print("profile:  ncu --profile-from-start off --set full python repro.py --profile")
    print("          rocprof-compute profile -n repro -- python repro.py --profile")
    return int(is_equal is False)


if __name__ == "__main__":
    raise SystemExit(main())
