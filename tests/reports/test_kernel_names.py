"""Names of kernels in tables: short, told apart, and whole where a file is written."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from etloom.cli import app
from etloom.cli.output import format_lines
from etloom.reports.kernel_labels import MAX_LABEL, shorten_labels

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
MUL = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&, at::native::X const&)"
    "::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<float>(at::TensorIteratorBase&)::{lambda(int)#1})"
)
POW = (
    "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long, "
    "at::PhiloxCudaState, at::native::templates::cuda::normal_and_transform<float>(at::TensorIteratorBase&)"
    "::{lambda()#1})"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (ADD, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3ul>>"),
        (
            MUL,
            "elementwise_kernel<128, 2, gpu_kernel_impl_nocast<BinaryFunctor…oat, float, MulFunctor<float>>>>",
        ),
        (POW, "distribution_elementwise_grid_stride_kernel<float, 4>"),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, void at::native::<unnamed>::pow_impl<float, float>"
            "(at::TensorIteratorBase &, T2)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int)",
            "vectorized_elementwise_kernel<4, pow_impl<float, float>, array<char *, 2>>",
        ),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)", None),
        ("Increase the number of workers; " * 9, None),
        ("aten::mm", None),
        ("k" * 200, "k" * 63 + "…" + "k" * 32),
        (
            f"{ADD} -> aten::mm",
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3ul>> -> aten::mm",
        ),
        (None, None),
    ],
)
def test_labels_of_kernels_are_shortened(name: str | None, short: str | None) -> None:
    assert shorten_labels([name]) == [short or name]


def test_names_that_would_look_the_same_keep_more() -> None:
    other = ADD.replace("(int,", "(long,")
    assert shorten_labels([ADD, other, ADD, MUL])[:3] == [ADD, other, ADD]
    first, second = ("k" * 100 + mark + "k" * 200 for mark in "ab")
    assert shorten_labels([first, second]) == [f"{'k' * 100}{mark}{'k' * 26}…{'k' * 64}" for mark in "ab"]


@pytest.mark.slow
@given(
    st.lists(
        st.text("ab<>(): ->,v", min_size=80, max_size=300) | st.sampled_from([ADD, MUL, POW]), max_size=6
    )
)
def test_different_names_look_different(names: list[str]) -> None:
    found = shorten_labels(names)
    assert len(set(found)) == len(set(names))
    assert all(
        len(short or "") <= max(MAX_LABEL, len(name)) for short, name in zip(found, names, strict=True)
    )


def test_names_are_short_in_tables_and_complete_in_files(tmp_path: Path, data: Path) -> None:
    assert (
        max(
            map(
                len,
                format_lines(pl.DataFrame({"name": [ADD, MUL], "advice": ["word " * 40] * 2})).splitlines(),
            )
        )
        < 320
    )
    run = str(data / "tracelens" / "h100_qwen.json.gz")
    shown = CliRunner().invoke(app, ["analyze", "kernel-breakdown", run]).stdout.splitlines()
    assert max(map(len, shown)) < 260
    whole = json.loads(
        CliRunner().invoke(app, ["analyze", "kernel-breakdown", run, "--format", "json"]).stdout
    )
    assert max(len(row["name"]) for row in whole) > 500
    assert len(set(shown[1:])) == len(whole)
