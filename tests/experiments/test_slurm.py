"""Sweeps whose trials are jobs, through submitit's executor for this machine; and on SLURM, where there is one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_sweep import FAKE, folder_of, running_pids, trials_of, wait_for

from stepjepa.errors import UserError
from stepjepa.experiments.cluster import CLUSTER, Cluster, read_options
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.slurm import Slurm, TrialJob, jobs_of
from stepjepa.experiments.sweep import Local, sweep
from stepjepa.experiments.sweep_folder import SweepFolder

pytest.importorskip("submitit", reason="jobs are handed in through submitit, which is not installed")

# A sweep in a process of its own: ``folder, trials as JSON``.
DRIVER = f"""
import json, sys
from pathlib import Path
from stepjepa.experiments.cluster import Cluster, read_options
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.slurm import Slurm
from stepjepa.experiments.sweep import sweep
from stepjepa.experiments.sweep_folder import SweepFolder
trials = [Trial(**dict(trial, train=tuple(trial["train"]), evaluate=())) for trial in json.loads(sys.argv[2])]
folder = SweepFolder(Path(sys.argv[1]), trials, {{}}, {FAKE!r})
cluster = Cluster(folder.jobs_folder, read_options(["time=3"]), 2)
print("stopped", sweep(folder, trials, Slurm(cluster, look=0.05, ask=0.5)).stopped)
"""


Make = Callable[[SweepFolder], Slurm]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines whose jobs are processes of this machine; waits for them in the end."""
    monkeypatch.setenv(CLUSTER, "local")
    made = []

    def make(folder: SweepFolder) -> Slurm:
        made.append(Cluster(folder.jobs_folder, read_options(["time=3"])))
        return Slurm(made[-1], look=0.05, ask=0.5)

    yield make
    # A trial is done a moment before its job is.
    for cluster in made:
        wait_for(lambda cluster=cluster: not cluster.states(cluster._jobs))


def driver(path: Path, trials: list[Trial]) -> subprocess.Popen[bytes]:
    """A sweep in a process and a terminal of its own: what ends it must not end its jobs."""
    given = json.dumps([{**vars(trial)} for trial in trials])
    command = [sys.executable, "-c", DRIVER, str(path), given]
    # Not a pipe: jobs of this machine have it as theirs, and hold it open.
    with said_by(path).open("ab") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)


def said_by(path: Path) -> Path:
    return path.with_name("said.txt")


def ending(path: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """The lines that a sweep and its jobs said, once it has ended."""
    process.wait(timeout=60)
    return said_by(path).read_text().splitlines()


def table_of(path: Path, trials: list[Trial]) -> str:
    """The table of an undisturbed sweep on this machine."""
    folder = folder_of(path, trials)
    assert sweep(folder, trials, Local(2)).finished == trials
    return folder.table(trials)


def test_a_whole_sweep_is_that_of_this_machine(
    engine: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = trials_of(arms={"regular": {"lbd": 0}, "jepa": {"lbd": [1]}})
    expected = table_of(tmp_path / "here", trials)
    capsys.readouterr()
    folder = folder_of(tmp_path / "jobs", trials)
    outcome = sweep(folder, trials, engine(folder))
    assert (outcome.finished, outcome.failed, outcome.stopped) == (trials, {}, 0)
    assert folder.table(trials) == expected
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("slurm: 4 jobs handed in (")
    assert [line.split("]")[0] for line in said[1:]] == [f"[{n}/4" for n in range(1, 5)]
    records = [folder.read_record(trial) for trial in trials]
    assert {record["status"] for record in records} == {"finished"}
    noted = json.loads((folder.jobs_folder / "jobs.json").read_text())
    assert [noted[record["token"]] for record in records] == [record["job"] for record in records]
    # Once more: nothing is run. And the other engine takes it from there.
    assert sweep(folder, trials, engine(folder)).finished == sweep(folder, trials, Local()).finished == trials
    assert capsys.readouterr().out == ""


def test_a_failed_trial_is_kept_and_retried_only_when_asked(engine: Make, tmp_path: Path) -> None:
    cure = tmp_path / "cure"
    trials = [Trial("a/seed1", "a", "a", 1, ("--finetune_seed=1", "--fail_in=train", f"--cure={cure}"), ())]
    folder = folder_of(tmp_path / "sweep", trials)
    failed = {"a/seed1": "train failed with exit code 3: reason of train"}
    assert sweep(folder, trials, engine(folder)).failed == failed
    cure.touch()
    assert sweep(folder, trials, engine(folder)).failed == failed
    assert sweep(folder, trials, engine(folder), retry_failed=True).finished == trials


def test_at_work_are_those_that_their_jobs_have_begun(engine: Make, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.1)
    folder = folder_of(tmp_path, trials)
    made = engine(folder)
    made.begin(folder, trials, None)
    assert wait_for(made.at_work) == trials
    ended = wait_for(made.ended)
    assert [(trial, ending.status) for trial, ending in ended] == [(trials[0], "finished")]
    assert made.at_work() == []


def test_a_killed_sweep_leaves_its_jobs_and_the_next_one_watches_them(
    engine: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = trials_of(seeds=(1,), slow=0.4)
    process = driver(tmp_path / "sweep", trials)
    wait_for(lambda: len(running_pids(tmp_path / "sweep")) == 3)
    process.kill()
    process.wait()
    pids = set(running_pids(tmp_path / "sweep"))
    assert len(pids) == 3
    folder = folder_of(tmp_path / "sweep", trials)
    assert sweep(folder, trials, engine(folder)).finished == trials
    assert capsys.readouterr().out.startswith("slurm: 3 jobs of an earlier start still there\n[1/3] ")
    # Nothing was begun twice.
    begun = [int(pid) for file in (tmp_path / "sweep").glob("*/seed1/pids.txt") for pid in file.read_text().split()]
    assert set(begun) == pids
    assert folder.table(trials) == table_of(tmp_path / "here", trials_of(seeds=(1,)))


def test_killed_while_jobs_are_handed_in_they_are_handed_in_again(engine: Make, tmp_path: Path) -> None:
    """What a sweep leaves that ends between handing in and noting it: a token, and a job that nobody knows of."""
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.1)
    folder = folder_of(tmp_path, trials)
    folder.run_folder(trials[0]).parent.mkdir()
    folder.record(trials[0], "submitted", token="lost")
    late = TrialJob(folder, trials[0], "lost")
    assert jobs_of(folder, trials) == {}
    assert sweep(folder, trials, engine(folder)).finished == trials
    # The job that was lost comes to its turn, and does nothing.
    log = folder.log_file(trials[0]).read_bytes()
    assert late() == "given to another job"
    assert folder.log_file(trials[0]).read_bytes() == log
    assert folder.read_record(trials[0])["status"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_cancels_its_jobs_and_goes_on_later(engine: Make, number: signal.Signals, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), slow=0.2)
    process = driver(tmp_path / "sweep", trials)
    wait_for(lambda: len(list((tmp_path / "sweep").glob("*/seed1/checkpoint-2/trainer_state.json"))) == 3)
    process.send_signal(number)
    said = ending(tmp_path / "sweep", process)
    assert {"slurm: 3 jobs cancelled", f"stopped {number.value}"} < set(said)
    folder = folder_of(tmp_path / "sweep", trials)
    assert {folder.read_record(trial)["status"] for trial in trials} == {"interrupted"}
    # The next start waits for those that are still ending.
    assert sweep(folder, trials, engine(folder)).finished == trials
    assert folder.table(trials) == table_of(tmp_path / "here", trials_of(seeds=(1,)))
    # Gone on with, not begun again: of one training each only the end is missing.
    assert not list((tmp_path / "sweep").glob("*/interrupted-*"))


def test_a_lost_terminal_leaves_the_jobs(engine: Make, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), slow=0.2)
    process = driver(tmp_path / "sweep", trials)
    wait_for(lambda: len(running_pids(tmp_path / "sweep")) == 3)
    process.send_signal(signal.SIGHUP)
    assert "slurm: 3 jobs left to go on; the same command watches again" in ending(tmp_path / "sweep", process)
    folder = folder_of(tmp_path / "sweep", trials)
    wait_for(lambda: {folder.read_record(trial)["status"] for trial in trials} == {"finished"})


def test_a_job_that_is_gone_is_no_fault_of_the_trial(engine: Make, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.4)
    process = driver(tmp_path / "sweep", trials)
    pid = wait_for(lambda: running_pids(tmp_path / "sweep"))[0]
    job = int(folder_of(tmp_path / "sweep", trials).read_record(trials[0])["job"])
    # As a node that fails: the job and all below it.
    for victim in (job, parent_of(pid), pid):
        os.kill(victim, signal.SIGKILL)
    out = "\n".join(ending(tmp_path / "sweep", process))
    assert f"regular/seed1: job {job} ended (unknown to SLURM) before the trial did: started (log: " in out
    folder = folder_of(tmp_path / "sweep", trials)
    assert folder.read_record(trials[0])["status"] == "interrupted"
    assert sweep(folder, trials, engine(folder)).finished == trials


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_job_whose_time_is_up_goes_on_in_the_queue(engine: Make, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.3)
    process = driver(tmp_path / "sweep", trials)
    run = tmp_path / "sweep" / "regular" / "seed1"
    wait_for(lambda: list(run.glob("checkpoint-2/*")))
    pid = running_pids(tmp_path / "sweep")[0]
    # What submitit has SLURM send; its executor for this machine puts the job back by itself.
    os.kill(parent_of(pid), signal.SIGUSR2)
    assert any(line.startswith("[1/1] regular/seed1: correct ") for line in ending(tmp_path / "sweep", process))
    assert len((run / "pids.txt").read_text().split()) == 2
    assert "--resume_from_checkpoint last" in run.with_name("seed1.log").read_text()


def test_refused_jobs_leave_everything_as_it_was(engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(seeds=(1,))
    folder = folder_of(tmp_path, trials)
    folder.run_folder(trials[0]).parent.mkdir()
    folder.record(trials[0], "interrupted", reason="killed")
    made = engine(folder)

    def refuse(*_: object) -> None:
        raise UserError("the jobs were refused: sbatch: error: no such partition")

    monkeypatch.setattr(Cluster, "submit", refuse)
    with pytest.raises(UserError, match="the jobs were refused"):
        sweep(folder, trials, made)
    assert folder.reason(trials[0]) == "killed"
    assert [folder.read_record(trial) for trial in trials[1:]] == [{}, {}]
    # So the grid may be changed.
    changed = trials_of(seeds=(1,), more=2)
    assert set(folder_of(tmp_path, changed).states(changed[1:]).values()) == {"new"}


def test_this_machine_refuses_what_is_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}})
    folder = folder_of(tmp_path / "sweep", trials)
    folder.run_folder(trials[0]).parent.mkdir(parents=True)
    folder.record(trials[0], "running", token="t", job="7_0")
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    squeue.write_text("#!/bin/sh\necho 7_0 PENDING\n")
    squeue.chmod(0o755)
    with pytest.raises(UserError, match="regular/seed1 is in SLURM's queue as job 7_0; go on with --engine slurm, or"):
        sweep(folder, trials)
    squeue.write_text("#!/bin/sh\necho 7_0 COMPLETED\n")
    assert sweep(folder, trials).finished == trials


def test_on_a_real_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where SLURM is: a kill, a start that watches, the table of this machine."""
    monkeypatch.delenv(CLUSTER, raising=False)
    if shutil.which("sbatch") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no SLURM here")
    trials = trials_of(seeds=(1,), slow=0.5)
    process = driver(tmp_path / "sweep", trials)
    wait_for(lambda: running_pids(tmp_path / "sweep"), 60)
    process.kill()
    process.wait()
    time.sleep(0.5)
    folder = folder_of(tmp_path / "sweep", trials)
    assert sweep(folder, trials, Slurm(Cluster(folder.jobs_folder, read_options(["time=3"]), 2))).finished == trials
    assert all(len(file.read_text().split()) == 1 for file in (tmp_path / "sweep").glob("*/seed1/pids.txt"))
    assert folder.table(trials) == table_of(tmp_path / "here", trials_of(seeds=(1,)))
