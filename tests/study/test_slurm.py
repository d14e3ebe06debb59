"""Sweeps whose trials are jobs: options, submission, and whole sweeps through submitit's executor for this machine."""

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sweep import folder_of, running_pids, table, trials_of, wait_for

from stepjepa.base.errors import UserError
from stepjepa.base.signals import Interruptions
from stepjepa.study.grid import Trial
from stepjepa.study.local import Local
from stepjepa.study.slurm import CLUSTER, Slurm, TrialJob, read_options
from stepjepa.study.sweep import sweep
from stepjepa.study.sweep_folder import SweepFolder

submitit = pytest.importorskip("submitit", reason="jobs are submitted through submitit, which is not installed")


def test_options_go_by_the_names_of_submitit_and_of_sbatch() -> None:
    arguments = ["partition=gpu", "slurm_account=abc", "timeout_min=240", "mem_gb=3.5", 'setup=["module load cuda"]']
    assert read_options([*arguments, "cpus-per-task=3"]) == {
        "slurm_partition": "gpu",
        "slurm_account": "abc",
        "timeout_min": 240,
        "mem_gb": 3.5,
        "slurm_setup": ["module load cuda"],
        "cpus_per_task": 3,
        # What srun no longer takes over from sbatch.
        "slurm_srun_args": ["--cpus-per-task=3"],
    }


def test_a_text_is_a_line_of_the_script_and_words_of_srun(fake_slurm: Path) -> None:
    """Letters of a text were words of srun's command line; a text as a line of the script failed without its name."""
    trials = trials_of(seeds=(1,))
    folder = folder_of(fake_slurm / "sweep", trials)
    lines = ["setup=module load cuda", "teardown=echo 'a b'", "srun_args=--mpi=none --label"]
    Slurm(folder, read_options(["timeout_min=90", "cpus_per_task=3", *lines]), 2).begin(folder, trials)
    script = (folder.path / "_slurm" / "7_submission.sh").read_text().splitlines()
    command = next(line for line in script if line.startswith("srun "))
    assert " --mpi=none --label --cpus-per-task=3 " in command
    assert script.index("module load cuda") < script.index(command) < script.index("echo 'a b'")
    own = read_options(["timeout_min=90", "cpus_per_task=3", 'srun_args=["-c", "5"]'])
    assert own["slurm_srun_args"] == ["-c", "5"]


REFUSED = [
    ([], "name the time limit of one trial in minutes, as in `slurm timeout_min=240`"),
    (["timeout_min=1", "partitoin=a"], "Unknown argument 'partitoin' for executor 'slurm'"),
    (["timeout_min=1", "setup=[1]"], "setup: expected a text or a JSON list of texts, got '[1]'"),
    (
        ["timeout_min=1", "additional_parameters=x"],
        "additional_parameters: expected a JSON object of options of sbatch",
    ),
    (["nodes=3"], "nodes is set by the sweep; `jobs N` says how many"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_wrong_option_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLUSTER, "local")
    with pytest.raises(UserError) as caught:
        Slurm(folder_of(tmp_path, []), read_options(arguments))
    assert message in str(caught.value)
    assert str(caught.value).startswith("slurm: ")


def program(folder: Path, name: str, code: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stand for those of SLURM; what they were called with is in ``called``."""
    monkeypatch.delenv(CLUSTER, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("sbatch", "srun", "sacct", "scancel"):
        program(tmp_path, name, f'echo {name} "$@" >> {tmp_path}/called; echo "Submitted batch job 7"')
    return tmp_path


def test_jobs_are_an_array_that_bars_later_starts_and_that_ctrl_c_cancels(
    fake_slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = trials_of(seeds=(1,))
    folder = folder_of(fake_slurm / "sweep", trials)
    options = read_options(["partition=gpu", "timeout_min=90", "cpus_per_task=3"])
    Slurm(folder, options, 2).begin(folder, trials)
    script = (folder.path / "_slurm" / "7_submission.sh").read_text()
    asked = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"array=0-2%2", "partition=gpu", "time=90", "cpus-per-task=3", "job-name=stepjepa"} < asked
    assert " --cpus-per-task=3 " in script.splitlines()[-1]
    assert capsys.readouterr().out.startswith("slurm: 3 jobs submitted, from 7_0;")
    # A later start: while one may still run, none is submitted; when the last was lost with its node, all are.
    program(fake_slurm, "sbatch", 'echo "Submitted batch job 11"')
    engine = Slurm(folder, options, 2)
    lost = "JobID|State|NodeList\\n7_0|NODE_FAIL|a\\n7_1|CANCELLED|a\\n7_2"
    for state in ("RUNNING", "PENDING", "REQUEUED"):
        program(fake_slurm, "sacct", f'printf "{lost}|{state}|a\\n"')
        submitit.SlurmJob.watcher.clear()
        with pytest.raises(UserError, match=r"jobs of an earlier start have not ended \(7_2\); wait, or scancel"):
            engine.begin(folder, trials)
    program(fake_slurm, "sacct", f'printf "{lost}|NODE_FAIL|a\\n"')
    submitit.SlurmJob.watcher.clear()
    engine.begin(folder, trials)
    assert capsys.readouterr().out.startswith("slurm: 3 jobs submitted, from 11_0;")
    with Interruptions() as interruptions:
        interruptions.count, interruptions.first = 1, signal.SIGHUP
        engine.end(interruptions)
        assert "scancel" not in (fake_slurm / "called").read_text()
        interruptions.first = signal.SIGINT
        engine.end(interruptions)
    cancelled = [line for line in (fake_slurm / "called").read_text().splitlines() if line.startswith("scancel")]
    assert cancelled == ["scancel 11_0", "scancel 11_1", "scancel 11_2"]


@pytest.mark.parametrize("closed", [False, True])
def test_jobs_that_would_all_fail_are_cancelled(
    closed: bool, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said that they were not run, and they were; the next start was refused until they had ended."""
    trials = trials_of(seeds=(1, 2))
    folder = folder_of(fake_slurm / "sweep", trials)
    engine = Slurm(folder, read_options(["timeout_min=90"]))
    program(fake_slurm, "sacct", 'printf "JobID|State|NodeList\\n7_0|RUNNING|a\\n"')
    submit = engine.begin

    def begin(*arguments: Any) -> None:
        submit(*arguments)
        for trial in trials:
            if trial.seed == 1:
                folder.record(trial, "failed", "train failed with exit code 2: no such column")
        if closed:  # the pipe that reads what the sweep prints
            monkeypatch.setattr(engine, "ended", unreadable)

    def unreadable() -> list[Trial]:
        raise BrokenPipeError

    monkeypatch.setattr(engine, "begin", begin)
    with pytest.raises(BrokenPipeError) if closed else contextlib.nullcontext():
        outcome = sweep(folder, trials, engine)
        assert len(outcome.failed) == 3 and outcome.not_run.startswith("every arm failed with this error")
        assert "slurm: 3 jobs cancelled" in capsys.readouterr().out
    cancelled = [line for line in (fake_slurm / "called").read_text().splitlines() if line.startswith("scancel")]
    assert cancelled == ([] if closed else ["scancel 7_3", "scancel 7_4", "scancel 7_5"])


def test_what_the_cluster_refuses_is_said(fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(fake_slurm, "sbatch", "echo 'sbatch: error: invalid partition specified: gqu' >&2; exit 1")
    trials = trials_of(seeds=(1,))
    folder = folder_of(tmp_path / "sweep", trials)
    with pytest.raises(UserError, match=r"the jobs were refused .*sbatch: error: invalid partition specified: gqu"):
        sweep(folder, trials, Slurm(folder, read_options(["partition=gqu", "timeout_min=1"])))
    assert set(folder.states(trials).values()) == {"new"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match='slurm: Could not detect "srun"'):
        Slurm(folder, read_options(["timeout_min=1"]))


Make = Callable[[SweepFolder], Slurm]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines whose jobs are processes of this machine; waits for them in the end."""
    monkeypatch.setenv(CLUSTER, "local")
    monkeypatch.setattr(Slurm, "pause", 0.05)
    submitted: list[submitit.Job] = []

    def make(folder: SweepFolder) -> Slurm:
        made = Slurm(folder, read_options(["timeout_min=3"]))
        submit = made._executor.submit_array
        monkeypatch.setattr(
            made._executor, "submit_array", lambda jobs: submitted.extend(submit(jobs)) or submitted[-len(jobs) :]
        )
        return made

    yield make
    # A trial is done a moment before its job is.
    wait_for(lambda: all(job.done() for job in submitted))


@pytest.mark.slow
def test_a_whole_sweep_is_that_of_this_machine(engine: Make, tmp_path: Path) -> None:
    cure = tmp_path / "cure"
    ill = {"lbd": 5, "fail_in": "train", "cure": str(cure)}
    trials = trials_of(arms={"regular": {"lbd": 0}, "ill": ill}, seeds=(1,))
    here, folder = folder_of(tmp_path / "here", trials), folder_of(tmp_path / "jobs", trials)
    failed = {"ill/seed1": "train failed with exit code 3: reason of train"}
    assert sweep(here, trials, Local(2)).failed == sweep(folder, trials, engine(folder)).failed == failed
    cure.touch()
    assert sweep(here, trials).finished == trials
    assert sweep(folder, trials, engine(folder)).finished == trials
    assert table(folder, trials) == table(here, trials)
    # Once more: nothing is run. And the other engine finds that all is done.
    assert sweep(folder, trials, engine(folder)).finished == sweep(folder, trials, Local()).finished == trials


@pytest.mark.slow
def test_cancelled_jobs_and_lost_ones_resume_later(engine: Make, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), slow=0.6)
    folder = folder_of(tmp_path / "sweep", trials)
    made = engine(folder)
    with Interruptions() as asked:
        made.begin(folder, trials)
        wait_for(lambda: len(list(folder.path.glob("*/seed1/checkpoint-2.json"))) == 3)
        # One ends as on a node that fails: the job and all below it.
        job = made._watched[trials[0]]
        pid = next(pid for pid in running_pids(folder.path) if parent_of(parent_of(pid)) == int(job.job_id))
        for victim in (int(job.job_id), parent_of(pid), pid):
            os.kill(victim, signal.SIGKILL)
        assert wait_for(made.ended) == [trials[0]]
        reason = folder.read_record(trials[0])["reason"]
        assert reason.startswith(f"job {job.job_id} ended (INTERRUPTED) before the trial did: ")
        asked.count, asked.first = 1, signal.SIGINT
        made.end(asked)
    assert sweep(folder, trials, engine(folder)).finished == trials
    assert all("resumed at step" in folder.log_file(trial).read_text() for trial in trials)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_job_whose_time_is_up_continues_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.1)
    folder = folder_of(tmp_path, trials)
    job = TrialJob(folder, trials[0])

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.45)
    with pytest.raises(TimeoutError):
        job()
    signal.signal(signal.SIGALRM, before)
    again = job.checkpoint().function
    assert folder.states(trials) == {"regular/seed1": "begun"}
    again()
    assert folder.states(trials) == {"regular/seed1": "finished"}


def test_a_job_that_is_asked_to_end_ends_its_trial_and_says_by_which_signal(tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.1)
    folder = folder_of(tmp_path, trials)
    threading.Timer(0.45, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(SystemExit) as ended:
        TrialJob(folder, trials[0])()
    assert ended.value.code == 128 + signal.SIGTERM
    assert folder.states(trials) == {"regular/seed1": "begun"}


def test_no_file_of_the_folder_that_a_job_starts_in_takes_the_place_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLUSTER, "local")
    executor = Slurm(folder_of(tmp_path / "sweep", []), read_options(["timeout_min=3"]))._executor._executor
    (tmp_path / "pickle.py").write_text("raise SystemExit('hostile')\n")
    # What a script of sbatch would run; without a job it can only fail.
    command = shlex.split(executor._submitit_command_str)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "submitit" in done.stderr and "hostile" not in done.stderr
