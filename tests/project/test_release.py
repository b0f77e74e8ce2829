"""What a release consists of: pinned actions, and the same requirements in pyproject.toml and the conda recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import etloom
from support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONDA_NAMES = {"isal": "python-isal"}


def quoted_requirements(name: str) -> list[str]:
    """The requirements of a list in pyproject.toml; tomllib came with Python 3.11."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r'"([^"]+)"', match[1])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_to_a_commit_with_its_version(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["jobs"]
    for line in re.findall(r"uses: (.+)", text):
        if not line.startswith(("./", "docker://")):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d[\d.]*", line), line


def test_the_conda_recipe_has_the_requirements_of_the_package() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8"))
    expected = set()
    for requirement in quoted_requirements("dependencies"):
        name, _, version = requirement.partition(">=")
        expected.add(f"{CONDA_NAMES.get(name, name).lower()} >={version}")
    assert set(recipe["requirements"]["run"]) - {"python >=3.10"} == expected
    for requirement in quoted_requirements("requires"):
        assert requirement.replace(">=", " >=") in recipe["requirements"]["host"]


def test_every_file_states_the_same_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == version == etloom.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_container_copies_what_the_build_needs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for part in ("pyproject.toml", "CMakeLists.txt", "cmake", "native", "src"):
        assert re.search(rf"^COPY .*\b{re.escape(part)}\b", text, re.MULTILINE), part
        assert f"!{part}" in (ROOT / ".dockerignore").read_text().splitlines()
