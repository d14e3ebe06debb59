"""Which checkpoint a run is resumed from, which damage is found, and which folders a new run may use."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.store.folder import (
    PART,
    checkpoint_fault,
    checkpoints,
    move_into_place,
    open_run_folder,
    remove_old_checkpoints,
    run_folder_of,
    save_atomically,
    set_checkpoints_aside,
    write_checksums,
)
from stepjepa.store.record import remove_start


def make(folder: Path) -> Path:
    """A checkpoint of four files."""
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json", "shards/rank0.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(f"{name} of {folder.name}".encode())
    digits = "".join(filter(str.isdecimal, folder.name))
    write_json(folder / "trainer_state.json", {"global_step": int(digits or 0)})
    write_checksums(folder)
    return folder


def flip(path: Path) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], ["config.json", "model.safetensors"]),
        (["config.json", "model.safetensors"], ["adapter_config.json", "adapter_model.safetensors"]),
        (
            ["model.safetensors"],
            ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"],
        ),
        (
            ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"],
            ["model.safetensors"],
        ),
    ],
)
def test_weights_of_an_earlier_save_are_not_loaded_in_place_of_those_of_the_last(
    first: list[str], second: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model-of-mine.safetensors").touch()
    for names in (first, second):

        def save(folder: str, names: list[str] = names) -> None:
            for name in (*names, *(["predictor_head.safetensors"] if names is first else [])):
                Path(folder, name).write_text(name)

        save_atomically(tmp_path, save)
    own = ["model-of-mine.safetensors", "predictor_head.safetensors", "checksums.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*second, *own])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda folder: flip(folder / "optimizer.pt"), "optimizer.pt is not what was saved"),
        (lambda folder: (folder / "shards/rank0.bin").write_bytes(b""), "shards/rank0.bin is not what was saved"),
        (lambda folder: (folder / "checksums.json").write_text("{"), "can't be read"),
    ],
)
def test_the_newest_complete_checkpoint_is_resumed(damage: Callable[[Path], object], told: str, tmp_path: Path) -> None:
    for step in (7, 13, 101):
        make(tmp_path / f"checkpoint-{step}")
    # 101 is newer than 13, which a comparison of words would not find; only folders with a number are checkpoints.
    (tmp_path / "checkpoint-999-backup").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-101", "checkpoint-13", "checkpoint-7"]
    assert open_run_folder(str(tmp_path), "last") == (tmp_path, str(tmp_path / "checkpoint-101"))
    damage(tmp_path / "checkpoint-101")
    output: list[str] = []
    assert open_run_folder(str(tmp_path), "last", output.append) == (tmp_path, str(tmp_path / "checkpoint-13"))
    assert len(output) == 1 and f"checkpoint-101 ({told}" in output[0]
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        open_run_folder(str(tmp_path), str(tmp_path / "checkpoint-101"))


def test_a_checkpoint_without_checksums_is_accepted(tmp_path: Path) -> None:
    (make(tmp_path / "checkpoint-5") / "checksums.json").unlink()
    assert open_run_folder(str(tmp_path), "last")[1] == str(tmp_path / "checkpoint-5")
    # Transformers would resume without the optimizer's states, and say nothing.
    (tmp_path / "checkpoint-5" / "optimizer.pt").unlink()
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        open_run_folder(str(tmp_path), "last")
    # As --save_only_model leaves it, with checksums.
    write_checksums(tmp_path / "checkpoint-5")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        open_run_folder(str(tmp_path), "last")


def test_a_file_of_the_users_own_beside_checkpoints_of_another_program_is_not_written_over(tmp_path: Path) -> None:
    """Such a folder has no run.json, so that nothing says whose its files are."""
    checkpoint = str(make(tmp_path / "checkpoint-5"))
    for name in ("tokenizer.json", "model.safetensors", "chat_template.jinja", "metrics.png", "checksums.json"):
        mine = tmp_path / name
        mine.touch()
        for resume in ("last", checkpoint):
            with pytest.raises(UserError, match=f"{name}: would be written over"):
                open_run_folder(str(tmp_path), resume)
        mine.unlink()
    (tmp_path / "thesis.txt").touch()
    assert open_run_folder(str(tmp_path), "last")[1] == checkpoint


def test_an_older_checkpoint_is_resumed_only_where_no_later_one_stays(tmp_path: Path) -> None:
    """A later 'last' would return to what was left behind."""
    older, newer = (make(tmp_path / f"checkpoint-{step}") for step in (7, 13))
    with pytest.raises(UserError, match="checkpoint-7: is older than checkpoint-13; move that elsewhere"):
        open_run_folder(str(tmp_path), str(older))
    # A copy of it is as old.
    (tmp_path / "run.json").write_text("{}")
    copy = shutil.copytree(older, tmp_path.with_name("copies") / "best")
    with pytest.raises(UserError, match="best: is older than checkpoint-13; move that elsewhere"):
        open_run_folder(str(tmp_path), str(copy))
    newer.rename(tmp_path / "later")
    for each in (older, copy):
        assert open_run_folder(str(tmp_path), str(each)) == (tmp_path, str(each))
    assert open_run_folder(str(tmp_path / "new"), str(older)) == (tmp_path / "new", str(older))


def test_a_checkpoint_survives_a_kill_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is saved a second time where a run stops at it, or is resumed from before it."""
    (tmp_path / "run.json").touch()
    make(tmp_path / "checkpoint-5")
    part = make(tmp_path / PART / "checkpoint-5")
    (part / "README.md").write_text("the second save")
    replace, renamed = Path.replace, list[Path]()

    def killed_after_the_first(path: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(path)
        return replace(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed_after_the_first)
        move_into_place(part, tmp_path / "checkpoint-5")
    assert not checkpoints(tmp_path)
    assert open_run_folder(str(tmp_path), "auto")[1] == str(tmp_path / "checkpoint-5")
    assert (tmp_path / "checkpoint-5" / "README.md").is_file()
    assert not (tmp_path / PART).exists()
    # One whose checksums are not there yet is not complete.
    shutil.move(tmp_path / "checkpoint-5", tmp_path / PART / "checkpoint-5")
    (tmp_path / PART / "checkpoint-5" / "checksums.json").unlink()
    assert open_run_folder(str(tmp_path), "auto")[1] is None


def test_a_new_run_needs_an_empty_folder_and_auto_resumes_where_there_is_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert open_run_folder(str(run), None) == open_run_folder(str(run), "auto") == (run, None)
    run.mkdir()
    (run / "thesis.txt").touch()
    for resume in (None, "auto"):
        with pytest.raises(UserError, match="is not empty"):
            open_run_folder(str(run), resume)
    with pytest.raises(UserError, match="is not empty"):
        open_run_folder(str(run), str(make(tmp_path / "other" / "checkpoint-5")))
    (run / "run.json").write_text("{}")
    (run / ".saving" / "checkpoint-5").mkdir(parents=True)
    (run / ".run.json.0123456789abcdef").touch()
    (run / ".run.json.swp").touch()  # an editor's
    assert open_run_folder(str(run), "auto") == (run, None)
    # The remains of a killed write are removed, and nothing else.
    assert sorted(path.name for path in run.iterdir()) == [".run.json.swp", "run.json", "thesis.txt"]
    make(run / "checkpoint-5")
    assert open_run_folder(str(run), "auto") == (run, str(run / "checkpoint-5"))
    shutil.rmtree(run / "checkpoint-5")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        open_run_folder(str(run), "last")
    with pytest.raises(UserError, match=r"thesis.txt: is a file; name a folder as `output_dir`"):
        open_run_folder(str(run / "thesis.txt"), None)
    with pytest.raises(UserError, match=rf"a: can't be made, since {run}/thesis.txt is a file; name another place"):
        open_run_folder(str(run / "thesis.txt" / "a"), None)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [2, 4, 6, 10]),
        (0, None, [2, 4, 6, 10]),
        (4, None, [2, 4, 6, 10]),
        (2, None, [6, 10]),
        (1, None, [10]),
        (1, 2, [2, 10]),
        (2, 4, [4, 10]),
        (3, 2, [2, 6, 10]),
        (1, 10, [10]),
    ],
)
def test_the_oldest_checkpoints_are_removed_and_nothing_of_the_users(
    limit: int | None, best: int | None, left: list[int], tmp_path: Path
) -> None:
    folders = ("run", "theirs")
    for number, folder in itertools.product((2, 4, 6, 10), folders):
        make(tmp_path / folder / f"checkpoint-{number}")
    copies = ("checkpoint-2-good", "checkpoint-4.bak", "checkpoint-best")
    for name in copies:
        shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "run" / name)
    run, theirs = (str(tmp_path / folder) for folder in folders)
    remove_old_checkpoints(Path(run), limit, best and f"{run}/checkpoint-{best}")
    numbered = sorted(f"checkpoint-{number}" for number in left)
    assert sorted(path.name for path in Path(run).iterdir()) == sorted([*numbered, *copies])
    # What transformers leaves where there are no copies.
    rotate_checkpoints(theirs, limit, best and f"{theirs}/checkpoint-{best}")
    assert sorted(path.name for path in Path(theirs).iterdir()) == numbered


def test_checkpoints_of_earlier_calls_are_ordered_by_call_and_never_written_over(tmp_path: Path) -> None:
    for step, call in ((10, 1), (9, 2), (3, 3)):
        make(tmp_path / f"checkpoint-{step}")
        # The number of a call whose checkpoints are there is not taken again.
        assert set_checkpoints_aside(tmp_path, 1) == [tmp_path / f"checkpoint-{step}-of-call-{call}"]
        assert not checkpoints(tmp_path)
    make(tmp_path / "checkpoint-2")
    copy = make(tmp_path / "checkpoint-2-of-call-1.bak")
    for limit, left in ((4, "10-of-call-1 9-of-call-2 3-of-call-3 2"), (3, "9-of-call-2 3-of-call-3 2"), (1, "2")):
        remove_old_checkpoints(tmp_path, limit, None)
        assert {*tmp_path.iterdir()} == {copy, *(tmp_path / f"checkpoint-{name}" for name in left.split())}


def test_a_kill_among_the_checkpoints_of_an_earlier_call_leaves_its_newest_one_to_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 10):
        make(tmp_path / f"checkpoint-{step}")
    rename, renamed = Path.rename, list[Path]()

    def killed_after_the_second(path: Path, target: Path) -> Path:
        if len(renamed) == 2:
            raise KeyboardInterrupt
        renamed.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed_after_the_second)
        set_checkpoints_aside(tmp_path, 1)
    assert open_run_folder(str(tmp_path), "last")[1] == str(tmp_path / "checkpoint-10")


def test_checkpoints_of_earlier_calls_belong_to_their_run_and_are_not_uploaded(tmp_path: Path) -> None:
    make(tmp_path / "checkpoint-7")
    (moved,) = set_checkpoints_aside(tmp_path, 1)
    assert run_folder_of(moved) == tmp_path
    # What Trainer.push_to_hub leaves out.
    files = [file.relative_to(tmp_path).as_posix() for file in moved.iterdir()]
    assert files and not [*filter_repo_objects(files, ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"])]
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="checkpoint-7-of-call-1: is of an earlier call of train; name another"):
        open_run_folder(str(tmp_path), str(moved))
    assert open_run_folder(str(tmp_path.with_name("new")), str(moved))[1] == str(moved)


@pytest.mark.parametrize(("best", "left"), [(4, [4]), (6, [6]), (None, [6]), (7, [6])])
def test_of_a_finished_run_with_limit_1_the_best_checkpoint_is_left(
    best: int | None, left: list[int], tmp_path: Path
) -> None:
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-6-good"):
        make(tmp_path / name)
    # One in another folder is not among them.
    remove_old_checkpoints(tmp_path, 1, best and str(tmp_path / f"checkpoint-{best}"), finished=True)
    names = [*(f"checkpoint-{number}" for number in left), "checkpoint-6-good"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_fault_of_a_checkpoint_that_may_not_be_read_is_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "checkpoint-2")
    # Whoever runs the tests may be allowed to read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    assert checkpoint_fault(folder) == "you may not read it"


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    def save(text: str, fails: bool) -> Callable[[str], None]:
        def write(folder: str) -> None:
            (Path(folder) / "model.safetensors").write_text(text)
            (Path(folder) / "templates").mkdir()
            if fails:
                raise OSError(28, "No space left on device")

        return write

    save_atomically(tmp_path, save("old", fails=False))
    with pytest.raises(OSError, match="No space left") as error:
        save_atomically(tmp_path, save("new", fails=True))
    assert error.value.filename == str(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "old"
    save_atomically(tmp_path, save("new", fails=False))
    assert (tmp_path / "model.safetensors").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checksums.json", "model.safetensors", "templates"]


def test_a_launch_that_trains_nothing_leaves_no_trace(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.json", "trained_prompts.json"):
        (run / name).write_text("{}")
    remove_start(run)
    assert not run.exists()
