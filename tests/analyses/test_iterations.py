"""Iterations of inference engines: recognized by their names, with phase, batch, times and gaps; steps work on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core import names
from etloom.core.errors import EtloomError
from etloom.core.iterations import Iteration, parse_iteration
from etloom.core.known_names import SERVING
from etloom.core.trace import Job

DECODE = "execute_context_0(0)_generation_{0}({0})"
NAMES = [
    ("execute_context_2(300)_generation_3(3)", Iteration(SERVING, "mixed", None, 5, 303, 300)),
    ("execute_context_1(128)_generation_0(0)", Iteration(SERVING, "prefill", None, 1, 128, 128)),
    (DECODE.format(7), Iteration(SERVING, "decode", None, 7, 7, 0)),
    (
        "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
        Iteration(SERVING, "decode", None, 32, 32, 0, keys=55086, pairs=55086),
    ),
    (
        "execute_9_context_1(sq4sk10sqsq16sqsk40)_generation_5(sq5sk50sqsq5sqsk50)",
        Iteration(SERVING, "mixed", None, 6, 9, 4, keys=60, pairs=40 - 8 + 50),
    ),
    ("execute_context_1(888_788544)_generation_0(0)", Iteration(SERVING, "prefill", None, 1, 888, 888)),
    ("execute_new_1_cached_4", Iteration(SERVING, "mixed", None, 5, None, None)),
    (
        "[Executor] _forward_step 12: 1 ctx reqs, 100 ctx tkns, 8 gen reqs",
        Iteration(SERVING, "mixed", 12, 9, 108, 100),
    ),
    (
        "[Executor] _forward_step 13: 0 ctx reqs, 8 gen reqs",
        Iteration(SERVING, "decode", 13, 8, 8, None),
    ),
    ("step[DECODE bs=4 toks=4]", Iteration(SERVING, "decode", None, 4, 4, None)),
    ("denoise_step_3", Iteration(SERVING, "denoise", 3, None, None, None)),
    ("aten::mm", None),
]


def event(cat: str, name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
    pid = 9 if cat == "kernel" else 1
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": 1, "args": args}


def iteration(
    name: str,
    start: int,
    kernels: int,
    cat: str = "user_annotation",
    call: str = "cudaLaunchKernel",
    late: int = 0,
) -> list[dict[str, Any]]:
    """An iteration of 60 us on the host, whose kernels of 20 us each start 30 us later."""
    rows = [event(cat, name, start, 60)]
    for i in range(kernels):
        correlation = start + i + 1
        rows.append(event("cuda_runtime", call, start + 5 + i, 1, correlation=correlation))
        rows.append(
            event(
                "kernel", "gemm", start + 30 + late + 20 * i, 20, correlation=correlation, stream=7, device=0
            )
        )
    return rows


def open_run(folder: Path, *ranks: list[dict[str, Any]], **options: Any) -> Job:
    folder.mkdir(exist_ok=True)
    for rank, rows in enumerate(ranks):
        content = {
            "schemaVersion": 1,
            "baseTimeNanoseconds": 10**18,
            "distributedInfo": {"rank": rank, "world_size": len(ranks)},
            "traceEvents": rows,
        }
        (folder / f"kineto_trace_{rank}.json").write_text(json.dumps(content))
    return etloom.open(folder, use_cache=False, **options)


@pytest.mark.parametrize(("name", "expected"), NAMES)
def test_a_name_states_phase_and_batch(name: str, expected: Iteration | None) -> None:
    assert parse_iteration(name) == expected


@pytest.mark.parametrize(
    ("evidence", "engine"),
    [
        ([], SERVING),
        ([("cpu_op", "vllm::unified_attention")], "vLLM"),
        ([("python_function", "/env/vllm/lib/site-packages/other/model.py(3): forward")], SERVING),
        ([("python_function", "/usr/lib/vllm/v1/engine/core.py(3): step")], "vLLM"),
        (
            [("cpu_op", "sglang::unified_attention"), ("kernel", "void vllm::rms_norm_kernel<float>()")],
            "SGLang",
        ),
        ([("kernel", "void tensorrt_llm::kernels::rope<float>()")], "TensorRT-LLM"),
    ],
)
@pytest.mark.parametrize("name", [DECODE.format(4), "step[DECODE bs=4 toks=4]"])
def test_the_engine_follows_from_its_names_and_not_from_the_annotation(
    name: str, evidence: list[tuple[str, str]], engine: str, tmp_path: Path
) -> None:
    rows = iteration(name, 0, 1) + [event(cat, row, 2, 5, stream=7, device=0) for cat, row in evidence]
    assert etloom.analyze(open_run(tmp_path / "run", rows), "iterations")["engine"].to_list() == [engine]


def test_times_of_iterations(tmp_path: Path) -> None:
    run = open_run(
        tmp_path / "run",
        iteration("execute_context_1(128)_generation_0(0)", 0, 3)
        + iteration(DECODE.format(2), 200, 1, call="cudaGraphLaunch")
        + iteration(DECODE.format(2), 300, 1, call="cudaGraphLaunch"),
    )
    table = etloom.analyze(run, "iterations")
    assert table["phase"].to_list() == ["prefill", "decode", "decode"]
    assert table["launch"].to_list() == ["eager", "graph", "graph"]
    assert table["tokens"].to_list() == [128, 2, 2]
    us = 1000
    assert table["host_ns"].to_list() == [60 * us] * 3
    assert table["scheduler_ns"].to_list() == [None, 140 * us, 40 * us]
    assert table["device_ns"].to_list() == [60 * us, 20 * us, 20 * us]
    assert table["idle_ns"].to_list() == [140 * us, 80 * us, None]
    assert table["first_token_ns"].to_list() == [90 * us, None, None]
    assert table["per_token_ns"].to_list() == [None, 160 * us, 100 * us]
    steps = etloom.analyze(run, "steps")
    assert steps.select("step", "kernels").rows() == [(0, 3), (1, 1), (2, 1)]
    assert etloom.select(run, step=1).events.filter(pl.col("cat").cast(pl.String) == "kernel").height == 1


def test_skew_between_ranks(tmp_path: Path) -> None:
    ranks = [
        iteration(DECODE.format(1), 0, 1, late=late) + iteration(DECODE.format(1), 200, 1) for late in (0, 7)
    ]
    table = etloom.analyze(open_run(tmp_path / "run", *ranks), "iterations")
    assert table.sort("step", "rank").select("rank", "skew_ns").rows() == [(0, 0), (1, 7_000), (0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("times", "late", "skews"),
    [
        (((0, 200, 400), (200, 400)), (0, 7), [None, 0, 7_000, 0, 7_000]),
        (((200, 400, 600), (0, 200, 400)), (0, 7), [None, 0, 7_000, 0, 7_000, None]),
        (((0, 200), (0, 200, 400)), (7, 0), [7_000, 0, 7_000, 0, None]),
        (((0, 200), (0, 200)), (0, 90), [0, 90_000, 0, 90_000]),
    ],
)
def test_skew_if_the_recordings_begin_with_different_iterations(
    times: tuple[tuple[int, ...], ...], late: tuple[int, ...], skews: list[int | None], tmp_path: Path
) -> None:
    ranks = [
        [event for at in starts for event in iteration(DECODE.format(1), at, 1, late=by)]
        for by, starts in zip(late, times, strict=True)
    ]
    table = etloom.analyze(open_run(tmp_path / "run", *ranks), "iterations")
    assert table.sort("start_ns", "rank")["skew_ns"].to_list() == skews


@pytest.mark.parametrize("name", ["ProfilerStep#{0}", "denoise_step_{0}"])
def test_skew_of_numbered_steps_follows_their_numbers(name: str, tmp_path: Path) -> None:
    ranks = [
        [event for step in range(3) for event in iteration(name.format(step), 200 * step, 1, late=late)]
        for late in (0, 180)
    ]
    table = etloom.analyze(open_run(tmp_path / "run", *ranks), "iterations")
    assert table.filter(rank=1)["skew_ns"].to_list() == [180_000] * 3


def test_functions_of_sglang_determine_the_phase(tmp_path: Path) -> None:
    batch, forward = (
        "sglang/srt/managers/scheduler.py(1): run_batch",
        "sglang/srt/model_executor/model_runner.py(2): forward_",
    )
    rows = iteration(batch, 0, 1, "python_function") + iteration(batch, 200, 1, "python_function")
    rows += [
        event("python_function", f"{forward}extend", 2, 50),
        event("python_function", f"{forward}decode", 202, 50),
    ]
    table = etloom.analyze(open_run(tmp_path / "run", rows), "iterations")
    assert table.select("engine", "phase").rows() == [("SGLang", "prefill"), ("SGLang", "decode")]


def test_annotated_steps_prevail_and_an_option_prevails_over_them(tmp_path: Path) -> None:
    rows = [*iteration(DECODE.format(1), 10, 1), event("user_annotation", "ProfilerStep#5", 0, 150)]
    rows += [event("user_annotation", "serve 42", 5, 100)]
    assert etloom.analyze(open_run(tmp_path / "run", rows), "steps")["step"].to_list() == [5]
    named = open_run(tmp_path / "run", rows, step_name=r"^serve (\d+)")
    assert etloom.analyze(named, "steps")["step"].to_list() == [42]
    with pytest.raises(EtloomError, match=r"invalid regular expression '\('"):
        open_run(tmp_path / "run", rows, step_name="(")


def test_users_add_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_user_files", {})
    file = tmp_path / "mine.yaml"
    file.write_text(
        "iterations:\n  - engine: mine\n    phase: decode\n"
        "    pattern: '^turn (?P<number>\\d+) of (?P<decode_requests>\\d+)'\n"
    )
    names.add_names(file)
    try:
        assert parse_iteration("turn 3 of 8") == Iteration("mine", "decode", 3, None, None, None)
        assert parse_iteration(DECODE.format(1)) is not None
    finally:
        monkeypatch.undo()
        names.list_names.cache_clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iterations: 3", "section iterations: expected a list"),
        ("iteration: []", "unknown section 'iteration'"),
        ("iterations:\n - engine: x", "row 1 of iterations has no pattern"),
        ("iterations:\n - pattern: '('", "is not a regular expression"),
        ("iterations:\n - pattern: x\n   colour: y", "unknown key 'colour'"),
        ("[", "is not YAML at line"),
        ("- x", "expected sections of names"),
    ],
)
def test_a_wrong_file_of_names_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "names.yaml"
    file.write_text(text)
    with pytest.raises(EtloomError, match=message) as error:
        names.read_names(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dims", "tokens"), [([[5, 2], [3]], 3), ([[5, 2]], None), ([[5], 4], None)])
def test_tokens_come_from_the_indices_of_an_embedding_if_there_are_any(
    tmp_path: Path, dims: list[Any], tokens: int | None
) -> None:
    rows = iteration("execute_new_1_cached_4", 0, 1)
    rows.append(event("cpu_op", "aten::embedding", 2, 1, **{"Input Dims": dims}))
    assert etloom.analyze(open_run(tmp_path / "run", rows), "iterations")["tokens"].to_list() == [tokens]
