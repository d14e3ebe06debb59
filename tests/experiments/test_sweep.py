"""Sweeps, with a stand-in for the commands: what is skipped, kept, gone on with; stops and kills at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial, expand, make_grid
from stepjepa.experiments.sweep import Local, sweep, table, visible_gpus
from stepjepa.experiments.sweep_folder import SweepFolder

FAKE = (sys.executable, "-S", str(Path(__file__).with_name("fake_stepjepa.py")))
ARMS: dict[str, Any] = {"regular": {"lbd": 0}, "jepa": {"lbd": [1, 2]}}

# A sweep in a process of its own: ``folder, jobs, trials as JSON``.
DRIVER = f"""
import json, sys
from pathlib import Path
from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.sweep import Local, sweep, table, visible_gpus
from stepjepa.experiments.sweep_folder import SweepFolder
trials = [Trial(**dict(trial, train=tuple(trial["train"]), evaluate=())) for trial in json.loads(sys.argv[3])]
folder = SweepFolder(Path(sys.argv[1]), trials, {{}}, {FAKE!r})
try:
    outcome = sweep(folder, trials, Local(int(sys.argv[2])))
except UserError as error:
    sys.exit(str(error))
print("stopped", outcome.stopped)
"""


def trials_of(*, seeds: Sequence[int] = (1, 2), arms: dict[str, Any] = ARMS, **train: Any) -> list[Trial]:
    return expand(make_grid({"arms": arms, "seeds": list(seeds), "train": train}), str, str)


def folder_of(path: Path, trials: list[Trial]) -> SweepFolder:
    return SweepFolder(path, trials, {"asked": "for"}, FAKE)


def driver(path: Path, trials: list[Trial], jobs: int = 2) -> subprocess.Popen[str]:
    given = json.dumps([{**vars(trial)} for trial in trials])
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(path), str(jobs), given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return found


def running_pids(path: Path) -> list[int]:
    """Processes of trainings that are alive and belong to this sweep."""
    pids = [int(line) for file in path.glob("*/seed*/pids.txt") for line in file.read_text().split()]
    return [pid for pid in pids if _is_fake(pid)]


def _is_fake(pid: int) -> bool:
    try:
        return b"fake_stepjepa" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_whole_sweep_and_what_it_leaves(tmp_path: Path, capsys: Any) -> None:
    trials = trials_of()
    folder = folder_of(tmp_path / "deep" / "sweep", trials)
    assert set(folder.states(trials).values()) == {"new"}
    outcome = sweep(folder, trials, Local(2))
    assert (outcome.finished, outcome.failed, outcome.stopped) == (trials, {}, 0)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6
    assert [line.split("]")[0] for line in said] == [f"[{n}/6" for n in range(1, 7)]
    # Started seed by seed, whatever the order of the table. With two at a time the third to end may
    # be the first of the next seed; the first two can't.
    assert {line.split()[1].rpartition("/")[2] for line in said[:2]} == {"seed1:"}
    written = json.loads((folder.path / "sweep.json").read_text())
    assert written["grid"] == {"asked": "for"}
    assert [trial["name"] for trial in written["trials"]] == [trial.name for trial in trials]
    assert "torch" in written["versions"]
    log = folder.log_file(trials[0]).read_text()
    assert log.count("$ ") == log.count("started") == 2
    assert " train --lbd=0 --finetune_seed=1 --output_dir " in log
    lines = [line.split() for line in table(folder, trials).splitlines()]
    first = next(number for number, line in enumerate(lines) if line[:1] == ["run"])
    assert [line[0] for line in lines[first + 2 : first + 8]] == [trial.name for trial in trials]
    assert len({line[3] for line in lines[first + 2 : first + 8]}) == 6
    # Once more: nothing is run.
    before = {path: path.stat().st_mtime_ns for path in folder.path.glob("*/**/*")}
    assert sweep(folder, trials).finished == trials
    assert before == {path: path.stat().st_mtime_ns for path in folder.path.glob("*/**/*")}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_failed_trial_is_kept_with_its_log_and_retried_only_when_asked(
    stage: str, tmp_path: Path, capsys: Any
) -> None:
    cure = tmp_path / "cure"
    trials = trials_of(arms={**ARMS, "ill": {"lbd": 5}}, cure=str(cure))
    # Both commands get all flags from the same places here.
    ill = [trial for trial in trials if trial.arm == "ill"]
    trials = [
        Trial(
            t.name, t.arm, t.label, t.seed, (*t.train, f"--fail_in={stage}"), (f"--fail_in={stage}", f"--cure={cure}")
        )
        if t in ill
        else t
        for t in trials
    ]
    folder = folder_of(tmp_path / "sweep", trials)
    outcome = sweep(folder, trials, Local(3))
    reason = f"{stage} failed with exit code 3: reason of {stage}"
    assert outcome.failed == {"ill/seed1": reason, "ill/seed2": reason}
    assert len(outcome.finished) == 6
    assert f"ill/seed1: {reason} (log: {tmp_path}/sweep/ill/seed1.log)" in capsys.readouterr().out
    cure.touch()
    size = folder.log_file(trials[-1]).stat().st_size
    assert sweep(folder, trials).failed == {"ill/seed1": reason, "ill/seed2": reason}
    assert folder.log_file(trials[-1]).stat().st_size == size
    outcome = sweep(folder, trials, retry_failed=True)
    assert (outcome.finished, outcome.failed) == (trials, {})
    assert reason.rpartition(": ")[2].split()[0] in folder.log_file(trials[-1]).read_text()
    # What the failed training had left is there still.
    assert (tmp_path / "sweep/ill/interrupted-1-seed1/run.json").exists() == (stage == "train")


def test_other_flags_under_an_old_name_are_refused_with_the_difference(tmp_path: Path) -> None:
    trials = trials_of(more=1)
    sweep(folder_of(tmp_path, trials), trials[:1])
    changed = trials_of(more=2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UserError, match=r"regular/seed1: was begun with other flags of 'stepjepa train' \(--more=1 bec"
    ):
        sweep(folder_of(tmp_path, changed), changed)
    with pytest.raises(UserError, match=r"nothing became --new"):
        folder_of(tmp_path, trials).state(Trial(**{**vars(trials[0]), "evaluate": ("--new",)}))
    assert sorted(tmp_path.rglob("*")) == before
    # In what order flags stand means nothing; ...
    turned = Trial(**{**vars(trials[0]), "train": tuple(reversed(trials[0].train))})
    assert folder_of(tmp_path, trials).state(turned) == "finished"
    # Those that were not begun may change.
    assert set(folder_of(tmp_path, changed).states(changed[1:]).values()) == {"new"}


def test_a_folder_that_no_sweep_made_is_left_alone(tmp_path: Path) -> None:
    trials = trials_of()
    (tmp_path / "sweep/jepa_lbd1/seed2").mkdir(parents=True)
    assert set(folder_of(tmp_path / "sweep", trials).states(trials).values()) == {"new"}
    (tmp_path / "sweep/jepa_lbd1/seed2/thesis.txt").touch()
    with pytest.raises(UserError, match=r"jepa_lbd1/seed2: is there already, and no sweep made it"):
        sweep(folder_of(tmp_path / "sweep", trials), trials)
    assert [path.name for path in (tmp_path / "sweep").rglob("*") if path.is_file()] == ["thesis.txt"]


def test_cores_and_gpus_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def environments(path: Path, **options: Any) -> list[dict[str, Any]]:
        trials = trials_of(seeds=(1,), slow=0.03)
        sweep(folder_of(path, trials), trials, Local(**options))
        return [json.loads((path / t.name / "run.json").read_text())["results"]["environment"] for t in trials]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    three = environments(tmp_path / "three", jobs=3, gpus=["4", "GPU-x", "6"])
    assert {found["OMP_NUM_THREADS"] for found in three} == {"2"}
    assert sorted(found["CUDA_VISIBLE_DEVICES"] for found in three) == ["4", "6", "GPU-x"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert {found["OMP_NUM_THREADS"] for found in environments(tmp_path / "set", gpus=["0"])} == {"5"}


def test_gpus_are_found_without_loading_cuda(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": " 3, GPU-ab "}) == ["3", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert visible_gpus({"PATH": str(tmp_path)}) == []
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\necho "GPU 0: H200 (UUID: GPU-1)"\necho "  MIG 1g"\necho "GPU 1: H200 (UUID: GPU-2)"\n'
    )
    program.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == ["0", "1"]


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    trials = trials_of(slow=30)
    first = driver(tmp_path, trials)
    # Both are in their first step, which is a long one: the first sweep writes nothing meanwhile.
    wait_for(lambda: len(list(tmp_path.glob("*/*/run.json"))) == 2 and len(running_pids(tmp_path)) == 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = ending(driver(tmp_path, trials))
    assert (code, out) == (1, "")
    assert err.startswith(f"{tmp_path}: is in use by stepjepa sweep, process {first.pid} on ")
    assert len(err.strip().splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    first.send_signal(signal.SIGTERM)
    assert ending(first)[1].endswith(f"stopped {signal.SIGTERM.value}\n")


def test_a_signal_ends_all_and_the_next_start_goes_on(tmp_path: Path) -> None:
    number = signal.SIGTERM
    trials = trials_of(seeds=(1,), slow=0.1)
    process = driver(tmp_path, trials)
    wait_for(
        lambda: len(running_pids(tmp_path)) == 2 and list(tmp_path.glob("*/seed1/checkpoint-2/trainer_state.json"))
    )
    process.send_signal(number)
    began = time.monotonic()
    assert ending(process) == (0, f"stopped {number.value}\n", "")
    assert time.monotonic() - began < 5
    assert not running_pids(tmp_path)
    states = list(folder_of(tmp_path, trials).states(trials).values())
    assert "resumed" in states
    assert sweep(folder_of(tmp_path, trials), trials, Local(2)).finished == trials


def test_a_second_signal_ends_what_ignores_the_first(tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[0]).with_name('up').touch()\ntime.sleep(60)\n"
    )
    trials = trials_of(seeds=(1,))
    given = json.dumps([{**vars(trial)} for trial in trials])
    code = DRIVER.replace(repr(FAKE), repr((sys.executable, "-S", str(stubborn))))
    assert code != DRIVER
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "sweep"), "1", given], stdout=subprocess.PIPE
    )
    wait_for((tmp_path / "up").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.communicate(timeout=30)[0] == b"stopped 2\n"
    assert time.monotonic() - began < 3


def test_a_killed_child_is_not_at_fault_and_goes_on_at_the_next_start(tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), slow=0.1)
    process = driver(tmp_path, trials)
    pid = wait_for(lambda: running_pids(tmp_path))[0]
    os.kill(pid, signal.SIGKILL)
    assert ending(process)[0] == 0
    folder = folder_of(tmp_path, trials)
    states = folder.states(trials)
    assert sorted(states.values())[1:] == ["finished", "finished"]
    ended = next(trial for trial in trials if states[trial.name] != "finished")
    assert folder.reason(ended).startswith("train was ended by signal 9 (Killed): ")
    assert sweep(folder, trials).finished == trials


def test_killed_at_random_moments_it_comes_to_the_same_table(tmp_path: Path) -> None:
    """Killed again and again, now and then after one of its children, and at once started again."""
    trials = trials_of(slow=0.02, arms={"regular": {"lbd": 0}, "jepa": {"lbd": [1]}})
    undisturbed, folder = folder_of(tmp_path / "undisturbed", trials), folder_of(tmp_path / "killed", trials)
    assert sweep(undisturbed, trials, Local(2)).finished == trials
    chance, seen = random.Random(7), set()
    for number in range(4):
        before = written(folder)
        process = driver(folder.path, trials)
        # The driver itself takes a moment to start, and writes this when it has the folder for itself.
        wait_for(lambda before=before: written(folder) != before)
        if number == 0:
            # However busy the machine is, one kill finds something begun.
            wait_for(lambda: set(folder.states(trials).values()) != {"new"})
        time.sleep(chance.uniform(0, 0.6))
        if chance.random() < 0.3 and (pids := running_pids(folder.path)):
            os.kill(chance.choice(pids), signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.1))
        process.kill()
        process.communicate()
        seen |= {state for state in folder.states(trials).values() if state != "new"}
    # Not a moment later: what is left of the last one must not go on beside this one.
    assert sweep(folder, trials, Local(2)).finished == trials
    assert not running_pids(folder.path)
    assert table(folder, trials) == table(undisturbed, trials)
    for trial in trials:
        ours, theirs = (f.run_folder(trial) / "test.summary.json" for f in (folder, undisturbed))
        assert ours.read_bytes() == theirs.read_bytes()
    assert seen


def written(folder: SweepFolder) -> int:
    """When the grid was written last."""
    file = folder.path / "sweep.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def test_a_training_killed_before_its_first_checkpoint_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = trials_of(seeds=(1,))
    # Not among the flags, so that the same trial can be quick later.
    monkeypatch.setenv("FAKE_SLOW", "60")
    process = driver(tmp_path, trials, jobs=1)
    wait_for(lambda: running_pids(tmp_path) and list(tmp_path.glob("*/seed1/run.json")))
    process.kill()
    process.communicate()
    # Long before it would end by itself.
    wait_for(lambda: not running_pids(tmp_path), 5)
    folder = folder_of(tmp_path, trials)
    assert list(folder.states(trials).values()) == ["begun again", "new", "new"]
    monkeypatch.delenv("FAKE_SLOW")
    assert sweep(folder, trials).finished == trials
    aside = tmp_path / "regular" / "interrupted-1-seed1"
    assert json.loads((aside / "run.json").read_text()) == {"status": "running"}
    assert (folder.run_folder(trials[0]) / "checkpoint-6").is_dir()


@pytest.mark.parametrize(("code", "status"), [(143, "interrupted"), (130, "interrupted"), (139, "failed")])
def test_a_trial_that_was_stopped_from_outside_has_not_failed(code: int, status: str, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}})
    folder = SweepFolder(tmp_path, trials, {}, (sys.executable, "-S", "-c", f"import sys; sys.exit({code})"))
    said = {143: "was ended by signal 15 (Terminated)", 130: "was ended by signal 2 (Interrupt)"}
    assert said.get(code, f"failed with exit code {code}") in sweep(folder, trials).failed["regular/seed1"]
    assert folder.read_record(trials[0])["status"] == status
