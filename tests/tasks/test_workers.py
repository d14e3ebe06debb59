"""A pool of processes: each call has its own limits, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepjepa.base.errors import UserError
from stepjepa.tasks.workers import Outcome, Workers


# What the processes run; by name, so it stands at the top level.
def work(kind, amount=0.0):
    if kind == "sleep":
        time.sleep(amount)
    elif kind == "compute":
        # One call into C that looks at no signal before it is done.
        return len(str(10 ** int(amount) % 7**1000000))
    elif kind == "allocate":
        return len(bytearray(int(amount) * 2**20))
    elif kind == "exit":
        os._exit(int(amount))
    elif kind == "raise":
        raise ValueError("x" * int(amount))
    elif kind == "process":
        print("not for the output", flush=True)
        return os.getpid(), sorted(sys.modules)
    return kind


@pytest.fixture
def make_workers():
    made = []

    def make(**settings):
        made.append(Workers(work, **{"seconds": 20, "memory": 300, "processes": 2, **settings}))
        return made[-1]

    yield make
    made[0].close()


def gone_soon(pids):
    def alive(pid):
        try:
            # Ended, but nobody has asked how: as good as gone.
            return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False

    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.slow
def test_each_call_has_its_own_limits_and_failure(make_workers):
    workers = make_workers(seconds=1)
    calls = [
        (("sleep", 60), "time", "took longer than 1 s"),
        (("compute", 10**8), "time", "took longer than 1 s"),
        (("allocate", 5000), "memory", "took more than 300 MiB"),
        (("exit", 3), "crash", "the process ended with code 3"),
        (("raise", 10**6), "error", "ValueError: " + "x" * 488),
    ]
    fine = ("sleep", 0.1)
    outcomes = workers.map([each for call, _, _ in calls for each in (fine, call)])
    assert outcomes[1::2] == [Outcome(None, failure, message) for _, failure, message in calls]
    assert outcomes[::2] == [Outcome("sleep")] * len(calls)
    # The pool goes on, in the order of the calls.
    assert workers.map([(f"{number}",) for number in range(50)]) == [Outcome(f"{number}") for number in range(50)]


@pytest.mark.slow
def test_processes_are_small_silent_used_again_and_ended(make_workers, capfd):
    workers = make_workers()
    large = "ж\ud800" * 10**6
    echo, *others = workers.map([(large,), *[("process",)] * 9])
    assert echo.value == large
    assert all({"torch", "transformers", "numpy"}.isdisjoint(outcome.value[1]) for outcome in others)
    pids = {outcome.value[0] for outcome in others}
    assert len(pids) <= 2
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "not for the output\n" * 9)
    workers.close()
    workers.close()
    assert gone_soon(pids)


def test_too_little_memory_to_start_is_said(make_workers, capfd):
    with pytest.raises(UserError, match=r"raise `memory_limit` \(it is 1 MiB\)"):
        make_workers(memory=1).map([("a",)])


def test_no_file_of_the_current_folder_takes_the_place_of_a_module(make_workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pickle", "struct", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit('hostile')\n")
    assert make_workers().map([("something",)]) == [Outcome("something")]
    assert not (tmp_path / "ran").exists()


SCRIPT = """
import os, time
def forever(path):
    with open(path, "a") as stream: stream.write(f"{os.getpid()}\\n")
    while True: time.sleep(1)
"""


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_ends_leaves_no_process(tmp_path, kill):
    """Nor is a script without a guard run again by its processes."""
    (tmp_path / "job.py").write_text(SCRIPT)
    run = "Workers(job.forever, seconds=60, memory=300, processes=2).map([('pids',)] * 5)"
    (tmp_path / "script.py").write_text(f"import job\nfrom stepjepa.tasks.workers import Workers\n{run}\n")
    command = [sys.executable, "script.py"]
    program = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, process_group=0)
    pids = tmp_path / "pids"
    until = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().count("\n") == 2):
        assert time.monotonic() < until, "the processes did not start"
        time.sleep(0.05)
    # A terminal sends Ctrl-C to the whole group.
    (os.killpg if kill == signal.SIGINT else os.kill)(program.pid, kill)
    _, errors = program.communicate(timeout=20)
    assert errors.count("Traceback") == (kill == signal.SIGINT)
    assert gone_soon(map(int, pids.read_text().split()))
