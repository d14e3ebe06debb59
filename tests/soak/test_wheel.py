"""The built wheel in an environment of its own, used from outside the checkout, as somebody who installs it does.

What it depends on is borrowed from the environment of the tests, unless ``STEPJEPA_WHEEL_TEST=full``: then it is
installed as well (``make wheel-test``), which takes minutes and a package index. ``STEPJEPA_WHEEL_PYTHON`` names
another interpreter for that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tiny
from stepjepa.base.files import write_jsonl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("STEPJEPA_WHEEL_TEST") == "full"
PYTHON = os.environ.get("STEPJEPA_WHEEL_PYTHON", sys.executable) if FULL else sys.executable


def call(*command: object, folder: Path) -> str:
    """Run a command; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building writes into the folder that is built."""
    place = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "src", place / "source" / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source" / name)
    # As the interpreter is; the build needs setuptools alone, which is there.
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    call(sys.executable, "-m", "pip", "wheel", *options, "-w", place, place / "source", folder=place)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment that has the wheel."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    call(PYTHON, "-m", "venv", place, folder=place.parent)
    programs = place / ("Scripts" if os.name == "nt" else "bin")
    if FULL:
        # Constraints keep torch from bringing gigabytes of GPU libraries.
        constraints = () if os.environ.get("STEPJEPA_WHEEL_PYTHON") else ("-c", ROOT / "constraints.txt")
        call(programs / "pip", "install", "--quiet", *constraints, wheel, folder=place)
    else:
        call(programs / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, folder=place)
        # A line of a .pth file adds a folder of packages without what its own .pth files add, such as this checkout.
        (site,) = place.glob("[Ll]ib/**/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = (path for path in (source / "stepjepa").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert names == {path.relative_to(source).as_posix() for path in files}
    assert "stepjepa/py.typed" in names


def test_what_it_says_it_needs_is_enough(installed: Path) -> None:
    listed = "import importlib.metadata as m, json; print(json.dumps(m.requires('stepjepa')))"
    requirements = map(Requirement, json.loads(call(installed / "python", "-c", listed, folder=installed)))
    for requirement in (each for each in requirements if each.marker is None):
        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), requirement


def test_it_trains_inspects_and_evaluates_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    place = call(installed / "python", "-c", "import stepjepa; print(stepjepa.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(installed.parent)
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 2])
    program = installed / "stepjepa"
    data = ("--train_file", "data.jsonl", "--model_name", "preset:tiny", "--step_jepa")
    quick = ("--max_steps", "2", "--batch_size", "2", "--grad_accum", "1", "--use_cpu", "--offline")
    call(program, "train", *data, *quick, "--output_dir", "run", folder=tmp_path)
    asked = ("--test_file", "data.jsonl", "--output_file", "run/test.jsonl", "--max_new_tokens", "3", "--offline")
    call(program, "evaluate", "--model_path", "run", *asked, folder=tmp_path)
    call(program, "report", "run", "--output_file", "page.html", folder=tmp_path)
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    made = ("--output_dir", "made", "--train_size", "5", "--test_size", "3")
    call(program, "prepare", "stepmath", *made, folder=tmp_path)
    assert (tmp_path / "made" / "train.jsonl").is_file()


def test_it_embeds_searches_and_exports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """The commands of docs/how-to/retrieve.md and serve.md, each of which imports modules that the others do not."""
    records = [{"question": f"What is {number} + 1?", "answer": f"It is {number + 1}."} for number in range(7)]
    write_jsonl(tmp_path / "data.jsonl", records)
    program, train = installed / "stepjepa", ("--train_file", "data.jsonl", "--model_name", "preset:tiny")
    quick = ("--max_steps", "2", "--batch_size", "2", "--grad_accum", "1", "--use_cpu", "--offline")
    call(program, "train", *train, *quick, "--jepa_loss_type", "infonce", "--output_dir", "run", folder=tmp_path)
    embed = ("--input_file", "data.jsonl", "--column", "question", "--side", "source", "--output_file", "e.npy")
    call(program, "embed", "--model_path", "run", *embed, folder=tmp_path)
    query = ("--corpus", "data.jsonl", "--query", "What is 3 + 1?", "--k", "3")
    found = call(program, "search", "--model_path", "run", *query, folder=tmp_path)
    asked = ("--test_file", "data.jsonl", "--output_file", "run/test.jsonl", "--max_new_tokens", "3", "--retrieval")
    scores = call(program, "evaluate", "--model_path", "run", *asked, folder=tmp_path)
    call(program, "export", "--model_path", "run", "--embeddings", "--output_dir", "embeddings", folder=tmp_path)
    check = "import numpy as np; e = np.load('e.npy'); print(len(e), np.allclose(np.linalg.norm(e, axis=1), 1))"
    assert call(installed / "python", "-c", check, folder=tmp_path).split() == ["7", "True"]
    assert found.count("It is ") == 3
    assert "of 7 questions" in scores
    assert (tmp_path / "embeddings" / "modules.json").is_file()
