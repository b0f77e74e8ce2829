"""Folders for CCL-Bench: traces in its names that give the same metrics, its card, and what is not replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from click.testing import CliRunner

import etloom
from etloom.cli import app
from etloom.core.errors import EtloomError
from fuzzing.seeds import SEEDS
from support.paths import ROOT

RUNS = ROOT / "tests" / "data"
CARD = """version: 1
description: written by hand
hf_url: https://example.org/model
ours: {"a key": [1, 2.5, null], "yes": true}
workload:
  model: {phase: training, moe: false, precision: bf16}
"""


def metrics(run: Any) -> pl.DataFrame:
    return etloom.analyze(run, "ccl-bench").select("metric", "value", "unit")


def read_card(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = yaml.safe_load((folder / f"{folder.stem}.yaml").read_text())
    return card


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_2", "gpu_small"])
def test_the_folder_reads_back_to_the_same_metrics(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run.ccl-bench"
    etloom.export(RUNS / name, out)
    copy = etloom.open(out, use_cache=False)
    source = etloom.open(RUNS / name, use_cache=False)
    names = {f"{kind}_{rank}.json" for kind in ("kineto_trace", "torch_et") for rank in source.ranks}
    assert {path.name for path in out.iterdir()} == {*names, "run.yaml", "metrics.json"}
    assert copy.ranks == source.ranks and copy.run_stats.is_empty()
    expected = metrics(source)
    assert metrics(copy).equals(expected)
    written = json.loads((out / "metrics.json").read_text())
    assert all("value" in row or "reason" in row for row in written.values())
    assert set(written) == set(expected["metric"])
    del written["scale_up_bw_utility"]  # of a prediction
    rows = dict(expected.drop("unit").rows())
    assert {name: row.get("value") for name, row in written.items()}.items() <= rows.items()


@pytest.mark.slow
def test_a_card_has_what_the_run_and_its_traces_say(tmp_path: Path) -> None:
    etloom.export(RUNS / "gpu_small", tmp_path / "a.ccl-bench")
    card = read_card(tmp_path / "a.ccl-bench")
    facts = json.loads((RUNS / "gpu_small" / "run.json").read_text())["ranks"][0]
    assert card["version"] == 1
    assert card["workload"]["hardware"]["xpu_spec"]["model"] == facts["device_name"]
    assert card["workload"]["model"]["model_arch"]["num_params"] == facts["model"]["parameters"]
    etloom.export(RUNS / "ddp_2", tmp_path / "b.ccl-bench")
    executor = read_card(tmp_path / "b.ccl-bench")["Model-executor"]
    assert executor["communication_library"]["name"] == "gloo"
    assert executor["communicator_groups"] == [{"name": "0", "description": "default_pg", "ranks": [0, 1]}]
    assert executor["model_plan_parallelization"]["dp_replicate"] == 2


@pytest.mark.slow
def test_a_card_of_traces_alone_claims_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    SEEDS["kineto"].write(tmp_path / "run")
    etloom.export(tmp_path / "run", tmp_path / "run.ccl-bench")
    card = read_card(tmp_path / "run.ccl-bench")
    assert card["workload"]["model"]["phase"] is None and card["workload"]["model"]["granularity"] is None
    assert card["workload"]["hardware"]["xpu_spec"]["total_count"] == 2
    assert card["metric_source"]["traces"] == ["json"]


@pytest.mark.slow
def test_a_card_of_the_run_is_kept(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "ddp_2", tmp_path / "run")
    (tmp_path / "run" / "card.yaml").write_text(CARD)
    etloom.export(tmp_path / "run", tmp_path / "run.ccl-bench")
    assert read_card(tmp_path / "run.ccl-bench") == yaml.safe_load(CARD)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        {"ranks": {"a": 1}},
        {"ranks": 5, "world_size": "2", "ended": ["x"], "command": 1},
        {"ranks": [1, {"x": 1}, {"rank": [1]}]},
        *(
            {"ranks": [{name: value}]}
            for name, value in {"model": 5, "groups": [3], "host": {"a": 1}}.items()
        ),
        *(
            {"ranks": [{"model": model}]}
            for model in ({"parallel": 5}, {"batch_of_rank": "x"}, {"dtype": []})
        ),
    ],
)
def test_facts_of_the_wrong_type_are_ignored(damage: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(RUNS / "ddp_2", tmp_path / "run")
    recorded = json.loads((RUNS / "ddp_2" / "run.json").read_text())
    if isinstance(ranks := damage.get("ranks"), list) and len(ranks) == 1:
        damage = {"ranks": [recorded["ranks"][0] | ranks[0], recorded["ranks"][1]]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(recorded | damage))
    etloom.export(tmp_path / "run", tmp_path / "run.ccl-bench")
    card = read_card(tmp_path / "run.ccl-bench")
    assert card["workload"]["hardware"]["xpu_spec"]["total_count"] == 2
    assert card["Model-executor"]["model_plan_parallelization"]["dp_replicate"] == 2


@pytest.mark.slow
def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "run.ccl-bench"
    for _ in range(2):
        result = CliRunner().invoke(app, ["export", str(RUNS / "ddp_2"), "--to", "ccl-bench", "-o", str(out)])
        assert result.exit_code == 0, result.output
    (out / "notes.txt").write_text("mine")
    with pytest.raises(EtloomError, match="not replaced"):
        etloom.export(RUNS / "ddp_2", out)
    assert (out / "notes.txt").read_text() == "mine" and len(list(out.iterdir())) == 7


@pytest.mark.slow
def test_the_utility_of_scale_up_bandwidth_is_predicted(tmp_path: Path) -> None:
    etloom.export(RUNS / "ddp_2", tmp_path / "run.ccl-bench")
    metrics = json.loads((tmp_path / "run.ccl-bench" / "metrics.json").read_text())
    times = [
        etloom.predict(RUNS / "ddp_2", network=network).table["predicted_ns"][0] for network in ("x1", "x2")
    ]
    row = metrics["scale_up_bw_utility"]
    assert row["value"] == pytest.approx(100 * (1 - times[1] / times[0])) and 0 < row["value"] < 50
    assert row["basis"].startswith("prediction, which reproduces the recording with an error of ")
    etloom.export(RUNS / "gpu_small", tmp_path / "one.ccl-bench")
    metrics = json.loads((tmp_path / "one.ccl-bench" / "metrics.json").read_text())
    assert metrics["scale_up_bw_utility"]["reason"] == "one rank has no link to another one"
