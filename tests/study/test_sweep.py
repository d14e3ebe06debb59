"""Sweeps, with a stand-in for the commands: what is skipped, kept, resumed; stops and kills at any moment."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.store.environment import versions
from stepjepa.study.grid import Grid, Trial, expand
from stepjepa.study.local import Local, visible_gpus
from stepjepa.study.run_report import report, report_text
from stepjepa.study.sweep import sweep
from stepjepa.study.sweep_folder import LAUNCHER, SweepFolder

FAKE = (sys.executable, "-S", str(Path(__file__).with_name("fake_stepjepa.py")))
ARMS: dict[str, Any] = {"regular": {"lbd": 0}, "jepa": {"lbd": [1, 2]}}

# A sweep in a process of its own: ``folder, jobs, trials as JSON``.
DRIVER = f"""
import json, sys
from pathlib import Path
from stepjepa.base.errors import UserError
from stepjepa.study.grid import Trial
from stepjepa.study.local import Local
from stepjepa.study.sweep import sweep
from stepjepa.study.sweep_folder import SweepFolder
trials = [Trial(**dict(trial, evaluate=())) for trial in json.loads(sys.argv[3])]
try:
    outcome = sweep(SweepFolder(Path(sys.argv[1]), trials, {{}}, {FAKE!r}), trials, Local(int(sys.argv[2])))
except UserError as error:
    sys.exit(str(error))
print("stopped", outcome.stopped)
"""


def trials_of(*, seeds: Sequence[int] = (1, 2), arms: dict[str, Any] = ARMS, **train: Any) -> list[Trial]:
    return expand(Grid(Path("grid.yaml"), train, {}, arms, tuple(seeds), "regular"), dict, lambda _: ())


def table(folder: SweepFolder, trials: list[Trial]) -> str:
    return report_text(report([folder.run_folder(trial) for trial in trials], [trial.name for trial in trials]))


def folder_of(path: Path, trials: list[Trial]) -> SweepFolder:
    return SweepFolder(path, trials, {"asked": "for"}, FAKE)


def driver(path: Path, trials: list[Trial], jobs: int = 2, code: str = DRIVER) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(path), str(jobs), json.dumps([vars(trial) for trial in trials])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], Any], seconds: float = 90) -> Any:
    until = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return result


def running_pids(path: Path) -> list[int]:
    """Processes of trainings that are alive and belong to this sweep."""

    def is_fake(pid: int) -> bool:
        try:
            return b"fake_stepjepa" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    pids = [int(line) for file in path.glob("*/seed*/pids.txt") for line in file.read_text().split()]
    return [pid for pid in pids if is_fake(pid)]


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_whole_sweep_and_what_it_leaves(tmp_path: Path, capsys: Any) -> None:
    trials = trials_of()
    folder = folder_of(tmp_path / "deep" / "sweep", trials)
    assert set(folder.states(trials).values()) == {"new"}
    outcome = sweep(folder, trials, Local(2))
    assert (outcome.finished, outcome.failed, outcome.stopped) == (trials, {}, 0)
    output = capsys.readouterr().out.splitlines()
    assert [line.split("]")[0] for line in output] == [f"[{n}/6" for n in range(1, 7)]
    # Seed by seed, whatever the order of the table: of two at a time the first two to end are of the first seed.
    assert {line.split()[1].rpartition("/")[2] for line in output[:2]} == {"seed1:"}
    written = json.loads((folder.path / "sweep.json").read_text())
    assert written["grid"] == {"asked": "for"} and "torch" in written["versions"]
    assert [trial["name"] for trial in written["trials"]] == [trial.name for trial in trials]
    log = folder.log_file(trials[0]).read_text()
    assert log.count("$ ") == log.count("started") == 2
    lines = [line.split() for line in table(folder, trials).splitlines()]
    first = next(number for number, line in enumerate(lines) if line[:1] == ["run"])
    assert [line[0] for line in lines[first + 2 : first + 8]] == [trial.name for trial in trials]
    # Once more: nothing is run.
    before = {path: path.stat().st_mtime_ns for path in folder.path.glob("*/**/*")}
    assert sweep(folder, trials).finished == trials
    assert before == {path: path.stat().st_mtime_ns for path in folder.path.glob("*/**/*")}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_failed_trial_is_retried_by_the_next_start(stage: str, tmp_path: Path, capsys: Any) -> None:
    cure = tmp_path / "cure"
    ill = {"fail_in": stage, "cure": str(cure)}
    flags = tuple(f"--{name}={value}" for name, value in ill.items())
    trials = [
        replace(trial, train={**trial.train, **ill}, evaluate=flags) if trial.arm == "ill" else trial
        for trial in trials_of(arms={**ARMS, "ill": {"lbd": 5}})
    ]
    folder = folder_of(tmp_path / "sweep", trials)
    reason = f"{stage} failed with exit code 3: reason of {stage}"
    failed = {"ill/seed1": reason, "ill/seed2": reason}
    outcome = sweep(folder, trials, Local(3))
    assert (outcome.failed, len(outcome.finished)) == (failed, 6)
    printed = capsys.readouterr().out
    assert f"ill/seed1: {reason} (log: {tmp_path}/sweep/ill/seed1.log)" in printed
    *others, last = [line for line in printed.splitlines() if line.startswith("[")]
    assert all(re.search(r"; about [\d.]+ .*left$", line) for line in others) and "left" not in last
    # An evaluation that failed may be asked for otherwise; one that has answers may not.
    changed = [replace(trial, evaluate=(*trial.evaluate, "--more=1")) for trial in trials]
    if stage == "evaluate":
        assert set(folder.states([trial for trial in changed if trial.arm == "ill"]).values()) == {"failed"}
        with pytest.raises(UserError, match=r"compare --evaluation NAME' reads"):
            folder.states(changed)
    cure.touch()
    outcome = sweep(folder, trials)
    assert (outcome.finished, outcome.failed) == (trials, {})
    assert f"reason   of {stage}" in folder.log_file(trials[-1]).read_text()


def test_other_flags_under_an_old_name_are_refused_with_the_difference(tmp_path: Path) -> None:
    trials = trials_of(more=1)
    sweep(folder_of(tmp_path, trials), trials[:1])
    changed = trials_of(more=2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UserError,
        match=r"regular/seed1: .* 'stepjepa train' \(they are in seed1.trial.json\): more 1 -> 2; change the grid back",
    ):
        sweep(folder_of(tmp_path, changed), changed)
    with pytest.raises(UserError, match=r"other flags of 'stepjepa evaluate' \(.*\): .* -> .*--new; change"):
        folder_of(tmp_path, trials).states([replace(trials[0], evaluate=("--new",))])
    assert sorted(tmp_path.rglob("*")) == before
    # Numbers are compared, not their spelling: earlier versions recorded 0.7 for 0.70.
    record = tmp_path / "regular" / "seed1.trial.json"
    write_json(record, {**json.loads(record.read_text()), "evaluate": ["--t=0.7"]})
    for spelled in ("--t=0.7", "--t=0.70"):
        assert folder_of(tmp_path, trials).states([replace(trials[0], evaluate=(spelled,))])
    with pytest.raises(UserError, match=r"--t=0\.7 -> --t=0\.75;"):
        folder_of(tmp_path, trials).states([replace(trials[0], evaluate=("--t=0.75",))])
    # They recorded True for true, and 1000 for 1_000.
    write_json(record, {**json.loads(record.read_text()), "evaluate": ["--t=True", "--n=1000"]})
    assert folder_of(tmp_path, trials).states([replace(trials[0], evaluate=("--n=1_000", "--t=true"))])
    with pytest.raises(UserError, match=r"--t=true -> --t=false;"):
        folder_of(tmp_path, trials).states([replace(trials[0], evaluate=("--n=1_000", "--t=false"))])
    write_json(record, {**json.loads(record.read_text()), "evaluate": []})
    # In what order flags stand means nothing; those that were not begun may change.
    turned = replace(trials[0], train=dict(reversed(trials[0].train.items())))
    assert folder_of(tmp_path, trials).states([turned]) == {"regular/seed1": "finished"}
    assert set(folder_of(tmp_path, changed).states(changed[1:]).values()) == {"new"}


@pytest.mark.slow
@pytest.mark.parametrize("outcome", [["begun"], ["failed", "no such column"], ["finished"]])
def test_settings_may_change_where_nothing_is_trained(outcome: list[str], tmp_path: Path) -> None:
    """A trial was stopped before its run folder was there, or somebody has removed the folder."""
    trials, changed = trials_of(more=1), trials_of(more=2)
    folder_of(tmp_path, trials).log_file(trials[0]).parent.mkdir(parents=True)
    folder_of(tmp_path, trials).record(trials[0], *outcome)
    outcome_now = sweep(folder_of(tmp_path, changed), changed)
    assert outcome_now.finished == changed
    with pytest.raises(UserError, match=r"more 2 -> 1; .*, move the folder away to train it anew, or name another"):
        folder_of(tmp_path, trials).states(trials)
    shutil.move(tmp_path / trials[0].name, tmp_path / "away")
    assert set(folder_of(tmp_path, trials).states(trials[:1]).values()) == {"begun"}


def test_finished_trials_that_the_grid_has_no_more_are_found(tmp_path: Path) -> None:
    trials = trials_of()
    sweep(folder_of(tmp_path, trials), trials[:3])
    others = trials_of(seeds=(2,))
    assert folder_of(tmp_path, trials).finished_outside_grid() == []
    assert folder_of(tmp_path, others).finished_outside_grid() == ["jepa_lbd1/seed1", "regular/seed1"]


def test_a_trial_has_its_name_in_trackers_unless_the_grid_names_it(tmp_path: Path) -> None:
    named, *_ = trials_of(run_name="mine")
    trial, *_ = trials_of()
    assert "--run_name=regular/seed1" in folder_of(tmp_path, [trial]).command(trial, "train")
    assert "run_name" not in " ".join(folder_of(tmp_path, [named]).command(named, "train"))


def refused(trial: Trial, text: str) -> Trial:
    return replace(trial, train={**trial.train, "refuse": text})


@pytest.mark.slow
def test_the_same_error_in_every_combination_ends_a_sweep_early(tmp_path: Path) -> None:
    trials = [refused(trial, "no such column") for trial in trials_of()]
    outcome = sweep(folder_of(tmp_path, trials), trials)
    reason = "train failed with exit code 2: no such column"
    assert outcome.failed == dict.fromkeys([f"{arm}/seed1" for arm in ("regular", "jepa_lbd1", "jepa_lbd2")], reason)
    assert (outcome.finished, outcome.stopped) == ([], 0)
    # Nothing was trained, so the settings may be corrected; those of a trial that has trained may not.
    corrected = trials_of()
    assert sweep(folder_of(tmp_path, corrected), corrected).finished == corrected
    with pytest.raises(UserError, match="was begun with other flags"):
        folder_of(tmp_path, trials).states(trials)


@pytest.mark.slow
def test_a_full_disk_ends_a_sweep_at_once(tmp_path: Path, capsys: Any) -> None:
    trials = [refused(trial, "runs/a: No space left on device; checkpoint-2 is complete") for trial in trials_of()]
    outcome = sweep(folder_of(tmp_path, trials), trials)
    assert list(outcome.failed) == ["regular/seed1"]
    assert "; about" not in capsys.readouterr().out
    assert outcome.describe(len(trials))[-1] == (
        "5 other trials were not run, since every trial would meet it: free some space or name a place on another "
        "disk, then run it again"
    )


def test_versions_that_have_changed_since_trials_were_begun(tmp_path: Path) -> None:
    trials = trials_of()
    folder = folder_of(tmp_path, trials)
    sweep(folder, trials[:1])
    run = folder.run_folder(trials[0]) / "run.json"
    now = {**versions(), "platform": "another"}
    for recorded, others in ((now, []), ({**now, "torch": "2.3"}, [f"torch 2.3 (now {now['torch']})"]), ([], [])):
        write_json(run, {**json.loads(run.read_text()), "versions": recorded})
        assert folder.other_versions(trials) == others


@pytest.mark.slow
@pytest.mark.parametrize("other", ["another reason", None])
def test_other_errors_let_the_rest_of_a_sweep_run(other: str | None, tmp_path: Path) -> None:
    first, *rest = trials_of()
    trials = [refused(each, "no such column") for each in rest]
    trials.insert(0, first if other is None else refused(first, other))
    outcome = sweep(folder_of(tmp_path, trials), trials)
    assert len(outcome.failed) == 6 if other else 5


def test_a_folder_that_no_sweep_made_is_left_alone(tmp_path: Path) -> None:
    trials = trials_of()
    (tmp_path / "jepa_lbd1/seed2").mkdir(parents=True)
    assert set(folder_of(tmp_path, trials).states(trials).values()) == {"new"}
    (tmp_path / "jepa_lbd1/seed2/thesis.txt").touch()
    with pytest.raises(UserError, match="jepa_lbd1/seed2: is no run of this sweep"):
        sweep(folder_of(tmp_path, trials), trials)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["thesis.txt"]
    (tmp_path / "jepa_lbd1/seed2/thesis.txt").unlink()
    for name in ("sweep.json", "jepa_lbd1/seed2.yaml", "jepa_lbd1/seed2.log", "jepa_lbd1/seed2.trial.json"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(UserError, match=f"{name}: was not written by this sweep, and would be written over; move"):
            sweep(folder_of(tmp_path, trials), trials)
        assert (tmp_path / name).read_text() == "[]"
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="jepa_lbd1/seed2/file: is a file; name a folder as `output_dir`"):
        (tmp_path / "jepa_lbd1/seed2/file").touch()
        sweep(folder_of(tmp_path / "jepa_lbd1/seed2/file", trials), trials)
    # ``compare`` would read the folder of a run as that run.
    (tmp_path / "run" / "run.json").parent.mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="run: is the folder of a run"):
        sweep(folder_of(tmp_path / "run", trials), trials)


@pytest.mark.slow
def test_cores_and_gpus_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def environments(path: Path, **options: Any) -> list[dict[str, Any]]:
        trials = trials_of(seeds=(1,), slow=0.03)
        sweep(folder_of(path, trials), trials, Local(**options))
        return [json.loads((path / t.name / "run.json").read_text())["results"]["environment"] for t in trials]

    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    three = environments(tmp_path / "three", jobs=3, gpus=["4", "GPU-x", "6"])
    assert {result["OMP_NUM_THREADS"] for result in three} == {"2"}
    assert sorted(result["CUDA_VISIBLE_DEVICES"] for result in three) == ["4", "6", "GPU-x"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert {result["OMP_NUM_THREADS"] for result in environments(tmp_path / "set", gpus=["0"])} == {"5"}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": " 3, GPU-ab "}) == ["3", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    trials = trials_of(slow=30)
    first = driver(tmp_path, trials)
    wait_for(lambda: len(running_pids(tmp_path)) == 2)
    code, out, err = ending(driver(tmp_path, trials))
    assert (code, out) == (1, "")
    assert err.startswith(f"{tmp_path}: is in use by process {first.pid} on ")
    first.send_signal(signal.SIGTERM)
    assert ending(first)[1].endswith(f"stopped {signal.SIGTERM.value}\n")


def test_a_signal_ends_all_and_the_next_start_resumes(tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), slow=0.1)
    process = driver(tmp_path, trials)
    wait_for(lambda: len(running_pids(tmp_path)) == 2 and list(tmp_path.glob("*/seed1/checkpoint-2.json")))
    process.send_signal(signal.SIGTERM)
    assert ending(process) == (0, f"stopped {signal.SIGTERM.value}\n", "")
    assert not running_pids(tmp_path)
    folder = folder_of(tmp_path, trials)
    assert list(folder.states(trials).values()) == ["begun", "begun", "new"]
    assert sweep(folder, trials, Local(2)).finished == trials
    assert "resumed at step 2" in "".join(folder.log_file(trial).read_text() for trial in trials)


def test_a_stopped_sweep_names_no_time_that_is_left(tmp_path: Path, capsys: Any) -> None:
    class Stopped(Local):
        """A scheduler that ends a job signals all of its processes at once."""

        def ended(self) -> list[Trial]:
            ended = super().ended()
            if ended:
                signal.raise_signal(signal.SIGTERM)
            return ended

    trials = trials_of(seeds=(1,))
    outcome = sweep(folder_of(tmp_path, trials), trials, Stopped())
    assert (outcome.stopped, len(outcome.finished)) == (signal.SIGTERM, 1)
    assert capsys.readouterr().out == "[1/3] regular/seed1: finished\n"


@pytest.mark.slow
def test_a_second_signal_ends_what_ignores_the_first(tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[0]).with_name('up').touch()\ntime.sleep(60)\n"
    )
    code = DRIVER.replace(repr(FAKE), repr((sys.executable, "-S", str(stubborn))))
    process = driver(tmp_path / "sweep", trials_of(seeds=(1,)), 1, code)
    wait_for((tmp_path / "up").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(2.1)  # within two seconds it counts as the same request
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "stopped 2\n"


@pytest.mark.slow
def test_killed_at_random_moments_it_comes_to_the_same_table(tmp_path: Path) -> None:
    """Killed again and again, now and then after one of its children, and at once started again."""
    trials = trials_of(slow=0.02, arms={"regular": {"lbd": 0}, "jepa": {"lbd": [1]}})
    undisturbed, folder = folder_of(tmp_path / "undisturbed", trials), folder_of(tmp_path / "killed", trials)
    assert sweep(undisturbed, trials, Local(2)).finished == trials
    chance = random.Random(7)
    for number in range(3):
        process = driver(folder.path, trials)
        # The driver itself takes a moment to start. However busy the machine is, one kill finds something begun.
        wait_for(lambda number=number: number or set(folder.states(trials).values()) != {"new"})
        time.sleep(chance.uniform(0, 0.6))
        if chance.random() < 0.3 and (pids := running_pids(folder.path)):
            os.kill(chance.choice(pids), signal.SIGKILL)
        process.kill()
        process.communicate()
    # Not a moment later: what is left of the last one must not go on beside this one.
    assert sweep(folder, trials, Local(2)).finished == trials
    assert not running_pids(folder.path)
    assert table(folder, trials) == table(undisturbed, trials)
    for trial in trials:
        ours, theirs = (f.run_folder(trial) / "test.summary.json" for f in (folder, undisturbed))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("code", "words"), [(143, "signal 15"), (3, "exit code 3"), (255, "exit code 255"), (0, "left no result")]
)
def test_it_is_said_how_a_trial_ended(code: int, words: str, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}})
    folder = SweepFolder(tmp_path, trials, {}, (sys.executable, "-S", "-c", f"import sys; sys.exit({code})"))
    assert words in sweep(folder, trials).failed["regular/seed1"]


def test_no_file_of_the_current_folder_takes_the_place_of_a_module(tmp_path: Path) -> None:
    for name in ("pickle", "difflib", "json"):
        (tmp_path / f"{name}.py").write_text(f"import sys\nsys.exit('{name} of the current folder was run')\n")
    done = subprocess.run([*LAUNCHER, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
