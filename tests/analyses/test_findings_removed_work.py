"""Findings whose remedy removes work of host and device: the gain is that of the same program without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import etloom
from support.gpu_programs import Program, run_steps
from support.small_traces import RankBuilder

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, 2>"
PARAMETERS = 24
Step = Callable[[Program], None]


def run_layers(program: Program, attention: bool = True, gemm_us: float = 60, types: str = "float") -> None:
    for _ in range(6):
        program.op("aten::linear", ("ampere_bf16_s16816gemm", gemm_us))
        if attention:
            program.op("aten::scaled_dot_product_attention", ("pytorch_flash::flash_fwd_kernel", 40))
        else:
            program.op("aten::bmm", ("ampere_bf16_s16816gemm", 30))
            program.op("aten::div", (ELEMENTWISE.format("MulFunctor"), 25))
            program.op("aten::softmax", ("softmax_warp_forward", 30))
            program.op("aten::dropout", (ELEMENTWISE.format("fused_dropout"), 25))
            program.op("aten::bmm", ("ampere_bf16_s16816gemm", 30))
        slower = 2 if types == "double" else 1
        shapes = [[1024, 1024]] * 2
        program.op("aten::mul", (ELEMENTWISE.format("MulFunctor"), 20 * slower), shapes=shapes, types=types)


def update(program: Program, foreach: bool = True) -> None:
    """An optimizer of two operators, for each parameter or for all."""
    with program.inside("Optimizer.step#Adam.step", "user_annotation"):
        for name in ("lerp_", "addcdiv_"):
            if foreach:
                program.op(f"aten::_foreach_{name}", ("multi_tensor_apply_kernel", 2 * PARAMETERS), host=20)
        for _ in range(0 if foreach else PARAMETERS):
            for name in ("lerp_", "addcdiv_"):
                program.op(f"aten::{name}", (ELEMENTWISE.format("Functor"), 4))


def clip(program: Program, in_loop: bool) -> None:
    if not in_loop:
        program.op("aten::_foreach_norm", ("multi_tensor_apply_kernel", 30), host=20)
        program.op("aten::_foreach_mul_", ("multi_tensor_apply_kernel", 30), host=20)
        return
    for _ in range(PARAMETERS):
        program.op("aten::linalg_vector_norm", ("reduce_kernel", 4))
        program.item()
    for _ in range(PARAMETERS):
        program.op("aten::mul_", (ELEMENTWISE.format("MulFunctor"), 3))


def chain(*parts: Step) -> Step:
    def step(program: Program) -> None:
        for part in parts:
            part(program)

    return step


FRAME = "transformers/tokenization_utils_base.py(2855): __call__"
CLEAN = chain(run_layers, update, Program.item)
AHEAD = chain(run_layers, update)
"""Without a synchronization the host runs ahead of the device."""
UNFUSED = partial(run_layers, attention=False)
PROBLEMS: dict[str, tuple[str, Step, Step]] = {
    "attention": ("unfused-attention", chain(UNFUSED, update, Program.item), CLEAN),
    "attention, host-bound": (
        "unfused-attention",
        chain(partial(UNFUSED, gemm_us=5), update, Program.item),
        chain(partial(run_layers, gemm_us=5), update, Program.item),
    ),
    "optimizer": ("parameter-loops", chain(run_layers, partial(update, foreach=False), Program.item), CLEAN),
    "clipping": (
        "item-calls",
        chain(run_layers, partial(clip, in_loop=True), update),
        chain(run_layers, partial(clip, in_loop=False), update),
    ),
    "tokenizer, frame": ("tokenization", chain(partial(Program.pause, us=600, name=FRAME), CLEAN), CLEAN),
    "tokenizer, annotation": (
        "tokenization",
        chain(partial(Program.pause, us=600, name="tokenize", cat="user_annotation"), CLEAN),
        CLEAN,
    ),
    "tokenizer, partly hidden": (
        "tokenization",
        chain(partial(Program.pause, us=2_000, name=FRAME), AHEAD),
        AHEAD,
    ),
    "float64": ("double-precision", chain(partial(run_layers, types="double"), update, Program.item), CLEAN),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_gain_is_that_of_the_program_without_the_work(problem: str, tmp_path: Path) -> None:
    pattern, step, other = PROBLEMS[problem]
    job, duration = run_steps(tmp_path / "with", step)
    clean, least = run_steps(tmp_path / "without", other)
    findings = etloom.analyze(job, "findings")
    assert findings["pattern"][0] == pattern
    assert findings["job_gain_pct"][0] == pytest.approx(100 * (1 - least / duration), abs=6)
    assert pattern not in set(etloom.analyze(clean, "findings")["pattern"])


def test_counters_on_the_host_are_not_a_loop_over_parameters(tmp_path: Path) -> None:
    def step(program: Program) -> None:
        run_layers(program)
        with program.inside("Optimizer.step#FusedAdam.step", "user_annotation"):
            for _ in range(PARAMETERS):
                program.op("aten::add_")
            program.op(
                "aten::mul_", ("multi_tensor_apply_kernel<FusedAdamMathFunctor<float>, double, double>", 50)
            )

    job, _ = run_steps(tmp_path / "run", step)
    patterns = etloom.analyze(job, "findings", min_pct=0)["pattern"].to_list()
    assert not {"parameter-loops", "double-precision"} & set(patterns)


def test_a_number_in_float64_is_no_work_in_float64(tmp_path: Path) -> None:
    def step(program: Program) -> None:
        for _ in range(20):
            program.op("aten::mul", (ELEMENTWISE.format("MulFunctor"), 50), shapes=[[1024, 1024], []])
        program.item()

    run_steps(tmp_path / "run", step)
    path = tmp_path / "run" / "kineto_trace_0.json"
    path.write_text(path.read_text().replace('["float", "float"]', '["float", "double"]'))
    assert '["float", "double"]' in path.read_text()
    assert "double-precision" not in set(etloom.analyze(etloom.open(path), "findings", min_pct=0)["pattern"])


@pytest.mark.parametrize(
    "name", ["sglang/srt/managers/tokenizer_manager.py(1): event_loop", "tokenize.py(406): tokenize"]
)
def test_servers_of_tokenizers_and_compilers_are_not_a_cause(name: str, tmp_path: Path) -> None:
    run_steps(tmp_path / "run", CLEAN)
    path = tmp_path / "run" / "kineto_trace_0.json"
    document = json.loads(path.read_text())
    frame = {
        **document["traceEvents"][-1],
        "cat": "python_function",
        "ts": 0,
        "dur": 10**4,
        "tid": 99,
        "pid": 10,
    }
    document["traceEvents"].append(
        {**frame, "name": "sglang/srt/managers/tokenizer_manager.py(1): event_loop"}
    )
    path.write_text(json.dumps(document))
    assert "tokenization" not in set(etloom.analyze(etloom.open(path), "findings", min_pct=0)["pattern"])


def test_an_optimizer_of_a_cpu_run_is_named(tmp_path: Path) -> None:
    rank = RankBuilder().step(1, 0, 2_000)
    rank.op("Optimizer.step#SGD.step", 10, 1_900, "user_annotation")
    for number in range(120):
        rank.op(("aten::mul_", "aten::add_", "aten::add_", "aten::item")[number % 4], 20 + 15 * number, 10)
    patterns = etloom.analyze(rank.trace(tmp_path), "findings")["pattern"].to_list()
    assert "parameter-loops" in patterns
    assert not {"tiny-operators", "item-calls"} & set(patterns)


def test_operators_in_float64_count_inside_of_others_without_types(tmp_path: Path) -> None:
    rank = RankBuilder().step(1, 0, 2_000)
    for number in range(4):
        start = 20 + 400 * number
        rank.op("autograd::engine::evaluate_function: MmBackward0", start, 300)
        rank.op("aten::mm", start + 10, 200, **{"Input Dims": [[64, 64]] * 2, "Input type": ["double"] * 2})
    table = etloom.analyze(rank.trace(tmp_path), "findings", pattern="double-precision")
    assert table["cost_ns"].to_list() == [4 * 100_000]


def test_a_stall_inside_of_removed_work_is_another_cause(tmp_path: Path) -> None:
    """A call of 5 ms in the loop would still be made without it; a save in another thread is none of its time."""

    def update_with_pause(program: Program, pause_us: float) -> None:
        with program.inside("Optimizer.step#Adam.step", "user_annotation"):
            for number in range(2 * PARAMETERS):
                if pause_us and number == PARAMETERS:
                    program.pause(pause_us, "cuModuleLoadData", "cuda_driver")
                program.op("aten::lerp_", (ELEMENTWISE.format("Functor"), 4))

    def cost(name: str, pause_us: float) -> int:
        step = chain(run_layers, partial(update_with_pause, pause_us=pause_us), Program.item)
        run_steps(tmp_path / name, step)
        path = tmp_path / name / "kineto_trace_0.json"
        if name == "save":
            document = json.loads(path.read_text())
            save = {
                "ph": "X",
                "cat": "python_function",
                "name": "torch/serialization.py(900): save",
                "pid": 10,
            }
            document["traceEvents"].append(save | {"tid": 99, "ts": 0, "dur": 10**6})
            path.write_text(json.dumps(document))
        table = etloom.analyze(etloom.open(path), "findings", pattern="parameter-loops", min_pct=0)
        return int(table["cost_ns"].item())

    alone = cost("alone", 0)
    assert cost("call", 5_000) < 2 * alone  # not 20 times; the device has less queued after the call
    assert cost("save", 0) == alone


def test_a_grouped_gemm_is_not_in_float64(tmp_path: Path) -> None:
    def step(program: Program) -> None:
        for name in (
            "moe_grouped_gemm_kernel",
            "void grouped_gemm::GroupedGemm<bf16>",
            "volta_dgemm_64x64_nn",
        ):
            program.op("my::experts", (name, 100))

    job, _ = run_steps(tmp_path / "run", step)
    (row,) = etloom.analyze(job, "findings", pattern="double-precision", min_pct=0).to_dicts()
    assert (row["name"], row["count"]) == (
        "volta_dgemm_64x64_nn",
        len(job[0].events.filter(name="my::experts")) // 3,
    )
