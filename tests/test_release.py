"""What a release says of itself in several files agrees, and its image is made of what is there."""

import re
import tomllib
from pathlib import Path

import yaml

import treadle

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_has_one_place_and_its_copies_agree() -> None:
    assert PROJECT["dynamic"] == ["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == treadle.__version__
    assert citation["license"] == PROJECT["license"] and citation["cff-version"] == "1.2.0"
    for page in (ROOT / "README.md", ROOT / "docker" / "Dockerfile", *(ROOT / "docs").glob("*.md")):
        named = re.findall(r"treadle-(\d+\.\d+\.\d+)", page.read_text())
        assert not named, f"{page.name} names version {named}"


def test_the_changelog_tells_of_this_version_in_few_lines() -> None:
    _, *sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    titles = [section.partition("\n")[0].partition(" - ")[0] for section in sections]
    assert titles[:2] == ["[Unreleased]", f"[{treadle.__version__}]"]
    released = sections[1].splitlines()
    assert len(released) <= 80 and sum(line.startswith("- ") for line in released) > 20
    for target in re.findall(r"\]\(([\w./-]+)[^)]*\)", sections[1]):
        assert (ROOT / target).exists(), target


def test_the_image_is_made_of_files_and_extras_that_exist() -> None:
    file = ROOT / "docker" / "Dockerfile"
    lines = file.read_text().replace("\\\n", " ").splitlines()
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    kept = {line[1:] for line in file.with_suffix(".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"pyproject.toml", "src", "locks/treadle.txt"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists() and source.partition("/")[0] in kept, source
    [extras] = re.findall(r"'\.\[([\w,-]+)\]'", "\n".join(lines))
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert all("--constraint locks/treadle.txt" in line for line in lines if "pip install" in line)
    last = "\n".join(lines).rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!0|root)\S+$", last, re.MULTILINE)


def test_issue_forms_are_as_the_host_reads_them() -> None:
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        content = yaml.safe_load(form.read_text())
        if form.name != "config.yml":
            assert content.keys() == {"name", "description", "body"}
            assert all(item["attributes"]["label"] for item in content["body"])
