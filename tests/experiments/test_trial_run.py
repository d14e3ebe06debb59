"""One trial at work: never two at once, and only as long as the trial is its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_sweep import folder_of, trials_of

from stepjepa.experiments.sweep import sweep
from stepjepa.experiments.sweep_folder import SweepFolder
from stepjepa.experiments.trial_run import TrialRun, end_all


def test_two_are_never_at_work_on_one_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is locked by whoever writes it, whatever else was forgotten."""
    monkeypatch.setattr("stepjepa.experiments.trial_run._LOCKED_FOR", 0.2)
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}})
    folder = folder_of(tmp_path, trials)
    folder.run_folder(trials[0]).parent.mkdir(parents=True)
    code = "import fcntl, sys, time; fcntl.flock(sys.stdout, fcntl.LOCK_EX); sys.stderr.write('held'); time.sleep(60)"
    with folder.log_file(trials[0]).open("ab") as log:
        other = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=subprocess.PIPE)
    assert other.stderr is not None
    assert other.stderr.read(4) == b"held"
    words = "another process is at work on this trial; wait for it or stop it"
    assert sweep(folder, trials).failed == {"regular/seed1": f"{folder.log_file(trials[0])}: {words}"}
    other.kill()
    other.communicate()
    assert sweep(folder, trials).finished == trials


def test_one_that_is_ended_may_go_on(tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}}, slow=0.3)
    folder = folder_of(tmp_path, trials)
    run = TrialRun(folder, trials[0], os.environ)
    while folder.next_step(trials[0]) != "resumed":
        assert run.ended() is None
        time.sleep(0.02)
    end_all([run], lambda: False)
    assert folder.read_record(trials[0])["status"] == "running"
    assert folder.state(trials[0]) == "resumed"
    assert sweep(folder, trials).finished == trials


@pytest.mark.parametrize(
    ("code", "status"), [(143, "interrupted"), (130, "interrupted"), (1, "failed"), (139, "failed")]
)
def test_one_that_was_stopped_from_outside_has_not_failed(code: int, status: str, tmp_path: Path) -> None:
    trials = trials_of(seeds=(1,), arms={"regular": {"lbd": 0}})
    folder = SweepFolder(tmp_path, trials, {}, (sys.executable, "-S", "-c", f"import sys; sys.exit({code})"))
    run = TrialRun(folder, trials[0], os.environ)
    while (ending := run.ended()) is None:
        time.sleep(0.02)
    assert ending.status == folder.read_record(trials[0])["status"] == status
    words = {143: "was ended by signal 15 (Terminated)", 130: "was ended by signal 2 (Interrupt)"}
    assert words.get(code, f"failed with exit code {code}") in ending.reason
