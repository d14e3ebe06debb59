"""Commands killed when they are about to change something on the disk, and started again, come to the same result."""

import re
from pathlib import Path

import pytest

import kills
from forked import Commands

STEPS, SIZE = 6, 19


@pytest.fixture(scope="module")
def trained(commands: Commands, material: Path) -> Path:
    """A run that nobody disturbed."""
    run = material / "undisturbed" / "run"
    run.parent.mkdir()
    arguments = ["train", *kills.train_flags(material, STEPS), "--output_dir", run]
    assert commands.run(arguments, run.with_suffix(".log"), folder=run) == 0
    return run


# Of all moments that many, from the first to the last; those that are met by no more than a look are all gone through.
MOMENTS = {"train": 3, "prepare": 3, "evaluate": 3, "export": 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_killed_at_any_moment_it_comes_to_the_same(
    name: str, commands: Commands, material: Path, trained: Path, tmp_path: Path
) -> None:
    (case,) = (case for case in kills.cases(material, steps=STEPS, size=SIZE, trained=trained) if case.name == name)
    whole = tmp_path / "whole"
    whole.mkdir()
    log = tmp_path / "whole.log"
    assert commands.run(case.first(whole), log, folder=whole) == 0, log.read_text()
    changes = int(re.findall(r"^changes (\d+),", log.read_text(), re.MULTILINE)[-1])
    moments = sorted({1 + (changes - 1) * number // (MOMENTS[name] - 1) for number in range(MOMENTS[name])})
    assert len(moments) == MOMENTS[name]
    expected = case.results(whole)
    for moment in moments:
        folder, log = tmp_path / f"killed-{moment}", tmp_path / f"killed-{moment}.log"
        folder.mkdir()
        assert commands.run(case.first(folder), log, at=moment, folder=folder) == -9, log.read_text()
        assert not kills.half_files(folder)
        if not case.is_whole(folder, expected):
            assert commands.run(case.again(folder), log, folder=folder) == 0, log.read_text()
            assert not kills.left_behind(folder)
        assert not kills.half_files(folder)
        results = case.results(folder)
        assert results.keys() == expected.keys()
        for file, content in expected.items():
            assert results[file] == content, f"killed at change {moment} of {changes}: {file}"
