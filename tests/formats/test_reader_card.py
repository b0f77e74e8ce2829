"""CCL-Bench's workload card: plain values from a safe loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import etloom
from etloom.core.errors import LimitError, ReadError
from etloom.formats.io import workload_card
from support import small_traces

CARD = """
version: 1
description: Llama 3.1 8B on 16 H100
date: 2026-05-24
workload:
  model:
    phase: training
    moe: false
    precision: bf16
    model_arch: {num_params: 8030000000, num_layers: 32}
  data: {batch_size: 64, seq_len: 4096, dataset: null}
  hardware:
    network_topo: {topology: slingshot, bandwidth_gbps: [200, 2400]}
    xpu_spec: {type: gpu, model: h100, total_count: 16, count_per_node: 4}
Model-executor:
  framework: {name: torchtitan, compiler_tool_selection: plain_pytorch}
  model_plan_parallelization: {dp_replicate: 1, dp_shard: 4, tp: 4, pp: 1}
  communication_library: {name: NCCL, version: 2.21.5, env: {NCCL_IB_DISABLE: 1}}
metric_source:
  traces: [json]
7: a key that is a number
"""


def test_a_card_contains_plain_values_for_json(tmp_path: Path) -> None:
    path = tmp_path / "llama.yaml"
    path.write_text(CARD)
    card = workload_card.read_card(path)
    assert json.loads(json.dumps(card)) == card
    assert card["workload"]["hardware"]["xpu_spec"]["total_count"] == 16
    assert card["workload"]["hardware"]["network_topo"]["bandwidth_gbps"] == [200, 2400]
    assert card["workload"]["model"]["moe"] is False
    assert card["workload"]["data"]["dataset"] is None
    assert card["Model-executor"]["model_plan_parallelization"]["tp"] == 4
    assert card["date"] == "2026-05-24"
    assert card["7"] == "a key that is a number"


def test_cards_are_recognized_by_content(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(CARD)
    (tmp_path / "a.yml").write_text("version: 1\nmetric_source: {traces: [nsys]}\n")
    (tmp_path / "compose.yaml").write_text("version: '3'\nservices: {}\n")
    (tmp_path / "c.json").write_text(CARD)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "broken.yml").symlink_to(tmp_path / "absent")
    assert [path.name for path in sorted(tmp_path.glob("*.y*ml")) if workload_card.is_card(path)] == [
        "a.yml",
        "b.yaml",
    ]


@pytest.mark.parametrize("name", ["folder.yaml", "broken.yml"])
def test_a_yaml_path_that_is_not_a_file_does_not_stop_a_run(tmp_path: Path, name: str) -> None:
    run = small_traces.write_run(tmp_path / "run")
    (run / name).symlink_to(tmp_path if name == "folder.yaml" else tmp_path / "absent")
    assert etloom.open(run, use_cache=False).ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "version: 1\nworkload: !!python/object/apply:os.system ['touch {marker}']\n",
            "could not determine a constructor",
        ),
        ("version: 1\nworkload: !!python/name:os.system\n", "could not determine a constructor"),
        ("version: 1\na: &a [x]\nworkload: [*a, *a]\n", "an alias"),
        ("version: 2\nworkload: {}\n", "of version 2; only version 1 is supported"),
        ("workload: {}\n", "of version None"),
        ("version: 1\n", "has no workload"),
        ("- version: 1\n", "has no workload"),
        ("", "has no workload"),
        ("version: 1\nworkload: {\n", "is not a workload card"),
        ("version: 1\nworkload: 2026-99-99\n", "is not a workload card"),
        ("version: 1\nworkload: " + "[" * 20_000, "nested too deeply"),
        ("version: 1\n? [a, b]\n: 3\nworkload: {[1]: 2}\n", "is not a workload card"),
    ],
    ids=range(12),
)
def test_an_invalid_card_is_one_line_and_runs_nothing(text: str, complaint: str, tmp_path: Path) -> None:
    path, marker = tmp_path / "x.yaml", tmp_path / "ran"
    path.write_text(text.replace("{marker}", str(marker)))
    with pytest.raises(ReadError, match=complaint) as error:
        workload_card.read_card(path)
    assert "\n" not in str(error.value)
    assert not marker.exists()


def test_bytes_that_are_not_utf8_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"version: 1\nworkload: \xff\n")
    with pytest.raises(ReadError, match="is not a workload card"):
        workload_card.read_card(path)
    with pytest.raises(ReadError, match="cannot be read"):
        workload_card.read_card(tmp_path / "absent.yaml")


def test_a_large_file_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(CARD + "# padding\n" * 200_000)
    with pytest.raises(LimitError, match="larger than 1,048,576 bytes"):
        workload_card.read_card(tmp_path / "x.yaml")
