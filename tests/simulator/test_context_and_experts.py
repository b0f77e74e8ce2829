"""Other sizes of context and expert parallelism, compared with the same program generated for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.simulator.recorded_run import describe_recording
from etloom.simulator.resizing import resize, synthesize_job
from etloom.simulator.resizing.context_shares import find_context_shares
from etloom.simulator.scenario import Basis
from support import mesh_jobs
from support.mesh_jobs import context_calls, context_groups, count_differences, expert_calls, expert_groups

EXCHANGES = ("all_gather", "all_to_all", "ring")


def open_context(folder: Path, cp: int, exchange: str) -> Job:
    return mesh_jobs.open_job(folder / str(cp), context_calls(cp, exchange), context_groups(cp))


def open_experts(folder: Path, ep: int, dp: int) -> Job:
    return mesh_jobs.open_job(folder / f"{ep}_{dp}", expert_calls(ep, dp), expert_groups(ep, dp))


def predict(job: Job, **sizes: int) -> Job:
    return synthesize_job(resize(describe_recording(job), None, sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_other_sizes_of_context_parallelism_are_predicted_to_the_nanosecond(
    tmp_path: Path, exchange: str, old: int, new: int
) -> None:
    predicted = predict(open_context(tmp_path, old, exchange), cp=new)
    assert count_differences(predicted, open_context(tmp_path, new, exchange)) == 0
    groups = predicted[new].groups.select(pl.col("pg_name", "ranks").cast(pl.String))
    assert dict(groups.iter_rows())["cp"] == str(list(range(new, 2 * new)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"), [((2, 4), (4, 8)), ((4, 8), (2, 4)), ((2, 4), (2, 8)), ((2, 8), (4, 8))]
)
def test_other_sizes_of_expert_parallelism_are_predicted_to_the_nanosecond(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int]
) -> None:
    predicted = predict(open_experts(tmp_path, *old), ep=new[0], dp=new[1])
    assert count_differences(predicted, open_experts(tmp_path, *new)) == 0
    groups = predicted[new[1] - 1].groups.select(pl.col("pg_name", "ranks").cast(pl.String))
    expected = {
        name: next(ranks for ranks in lists if new[1] - 1 in ranks)
        for name, lists in expert_groups(*new).items()
    }
    assert dict(groups.iter_rows()) == {name: str(ranks) for name, ranks in expected.items()}


@pytest.mark.slow
def test_answers_name_the_basis_and_have_wider_intervals(tmp_path: Path) -> None:
    for job, sizes, reason in (
        (
            open_context(tmp_path, 2, "all_gather"),
            {"cp": 4},
            "cp=2 becomes 4: kernels on the tokens of a rank",
        ),
        (
            open_context(tmp_path, 2, "ring"),
            {"cp": 4},
            "exchanges 3 messages in a ring instead of 1, so each recorded one stands for 3",
        ),
        (open_experts(tmp_path, 2, 4), {"ep": 4}, "ep=2 becomes 4: kernels keep their time"),
    ):
        prediction = etloom.predict(job, parallel=sizes)
        assert any(reason in line for line in prediction.reasons)
        recorded = prediction.scenario.replace(basis=np.zeros_like(prediction.scenario.basis))
        widths = []
        for answer in (replace(prediction, scenario=recorded), prediction):
            row = answer.table.row(0, named=True)
            widths.append(row["upper_bound_ns"] / row["lower_bound_ns"])
        assert widths[1] > widths[0] > 1


@pytest.mark.slow
def test_an_impossible_size_is_one_line(tmp_path: Path) -> None:
    experts = open_experts(tmp_path, 2, 4)
    pair = open_experts(tmp_path, 2, 2)
    for job, sizes, message in (
        (experts, {"cp": 2}, "recorded with cp=1, and without the messages of context parallelism"),
        (experts, {"ep": 8}, r"cannot predict ep=8 with dp=4.*--parallel dp=8,ep=8"),
        (pair, {"dp": 4}, None),
        (pair, {"ep": 2, "dp": 4}, "2 replicas of experts: the recorded run has one"),
        (pair, {"ep": 2, "dp": 1}, "cannot predict ep=2 with dp=1"),
        (experts, {"ep": 0}, "expected sizes of .*, got ep=0"),
        (experts, {"xp": 2}, "expected sizes of .*, got xp=2"),
        (pair, {"ep": 4, "dp": 8}, "2 replicas of experts: the recorded run has one"),
        (
            open_context(tmp_path, 2, "ring"),
            {"ep": 2},
            "recorded with ep=1, and without the messages of expert",
        ),
    ):
        if message is None:
            assert len(predict(job, **sizes)) == 4
            continue
        with pytest.raises(EtloomError, match=message):
            resize(describe_recording(job), None, sizes)


@pytest.mark.slow
def test_calls_that_do_not_show_their_tokens_are_refused(tmp_path: Path) -> None:
    calls = [call for call in context_calls(2, "ring") if "attention" not in call.name]
    job = mesh_jobs.open_job(tmp_path, calls, context_groups(2))
    with pytest.raises(EtloomError, match="no matrix product has the tokens of its attention as a dimension"):
        resize(describe_recording(job), None, {"cp": 4})


def test_weights_keep_their_bytes() -> None:
    calls = [
        (
            "aten::_scaled_dot_product_flash_attention",
            "[[2, 8, 64, 16], [2, 8, 128, 16], [2, 8, 128, 16]]",
            None,
        ),
        ("aten::mm", "[[128, 96], [96, 48]]", None),
        ("aten::mm", "[[96, 100], [100, 48]]", None),
        ("aten::add_", "[[2, 64, 96]]", None),
        ("aten::_foreach_mul_", "[[[128, 96]]]", None),
        ("aten::add_", "[[96, 48]]", None),
        ("aten::copy_", None, None),
    ]
    shares = find_context_shares(calls, 2, 4)
    activations, weight = 128 * 96 + 128 * 48, 96 * 48
    assert shares[1] == (0.5, (activations / 2 + weight) / (activations + weight), Basis.ROOFLINE)
    assert shares[0] == shares[3] == (0.5, 0.5, Basis.ROOFLINE)
    assert shares[2] == (0.5, 0.5, Basis.GUESSED)
    assert shares[4] == shares[5] == (1.0, 1.0, Basis.RECORDED)
    assert shares[6] == (1.0, 1.0, Basis.GUESSED)


@pytest.mark.slow
def test_experts_of_all_replicas_grow_with_them_and_a_line_states_it(tmp_path: Path) -> None:
    scenario = resize(describe_recording(open_experts(tmp_path, 2, 2)), None, {"dp": 4})
    assert any(
        "ep=2 becomes 4: as recorded, all replicas share the experts" in note for note in scenario.notes
    )
    scenario = resize(describe_recording(open_experts(tmp_path, 2, 4)), None, {"dp": 8})
    assert not any("share the experts" in note for note in scenario.notes)
