"""A pool of processes: each call has its own limits, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepjepa.answers.workers import Outcome, Workers
from stepjepa.errors import UserError


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
    elif kind == "leave":
        sys.exit("no")
    elif kind == "raise":
        raise ValueError("x" * int(amount))
    elif kind == "print":
        print("this is not an outcome", flush=True)
        os.write(1, b"nor is this\n")
    elif kind == "unpicklable":
        return lambda: None
    elif kind == "modules":
        return sorted(sys.modules)
    elif kind == "pid":
        return os.getpid()
    return kind


@pytest.fixture
def make_workers():
    made = []

    def make(**settings):
        made.append(Workers(work, **{"seconds": 20, "memory": 1024, "processes": 2, **settings}))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Ended, but nobody has asked how: as good as gone.
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone_soon(pids):
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_values_come_back_in_the_order_of_the_calls(make_workers):
    workers = make_workers()
    assert workers.map([]) == []
    assert workers.map([("sleep", 0.3), ("b",), ("c",)]) == [Outcome("sleep"), Outcome("b"), Outcome("c")]
    assert workers.map([(f"{number}",) for number in range(300)]) == [Outcome(f"{number}") for number in range(300)]


def test_large_arguments_and_values_pass(make_workers):
    text = "ж\ud800" * 10**6
    assert make_workers().map([(text,)]) == [Outcome(text)]


@pytest.mark.parametrize(
    ("call", "failure", "message"),
    [
        (("sleep", 60), "time", "took longer than 1 s"),
        (("compute", 10**8), "time", "took longer than 1 s"),
        (("allocate", 5000), "memory", "took more than 1024 MiB"),
        (("exit", 3), "crash", "the process ended with code 3"),
        (("exit", 0), "crash", "the process ended with code 0"),
        (("leave",), "crash", "the process ended with code 1"),
        (("raise", 3), "error", "ValueError: xxx"),
        (("raise", 10**6), "error", "ValueError: " + "x" * 488),
        (("sleep", "long"), "error", "TypeError: 'str' object cannot be interpreted as an integer"),
    ],
    ids=str,
)
def test_a_call_that_fails_says_how_and_spares_the_others(make_workers, call, failure, message):
    workers = make_workers(seconds=1)
    others = [("a",), ("b",), ("c",)]
    expected = [Outcome(value) for (value,) in others]
    first, *rest = workers.map([call, *others])
    assert first == Outcome(None, failure, message)
    assert rest == expected
    # In the middle of others, twice, and again afterwards.
    assert [outcome.failure for outcome in workers.map([*others, call, *others, call])] == [
        *[None] * 3,
        failure,
        *[None] * 3,
        failure,
    ]
    assert workers.map(others) == expected


def test_a_value_that_cannot_be_sent_is_an_error(make_workers):
    (outcome,) = make_workers().map([("unpicklable",)])
    assert outcome.failure == "error"
    assert "pickle" in outcome.message


def test_what_the_function_prints_is_no_outcome(make_workers, capfd):
    assert make_workers().map([("print",), ("a",)]) == [Outcome("print"), Outcome("a")]
    assert capfd.readouterr().err == "this is not an outcome\nnor is this\n"


def test_time_counts_from_the_beginning_of_a_call_not_from_when_it_was_queued(make_workers):
    workers = make_workers(seconds=1, processes=1)
    began = time.monotonic()
    assert [outcome.failure for outcome in workers.map([("sleep", 0.6)] * 4)] == [None] * 4
    assert time.monotonic() - began > 2.4


def test_a_limit_is_kept_closely_and_many_late_calls_do_not_add_up(make_workers):
    workers = make_workers(seconds=1, processes=4)
    workers.map([("a",)] * 4)
    began = time.monotonic()
    outcomes = workers.map([("sleep", 60)] * 4)
    assert [outcome.failure for outcome in outcomes] == ["time"] * 4
    assert 1 <= time.monotonic() - began < 3


def test_as_many_processes_as_asked_for_and_used_again(make_workers):
    workers = make_workers(processes=2)
    pids = {outcome.value for _ in range(5) for outcome in workers.map([("pid",)] * 4)}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


def test_processes_are_small(make_workers):
    (outcome,) = make_workers(memory=150).map([("modules",)])
    assert not {"torch", "transformers", "numpy"}.intersection(outcome.value)


def test_close_ends_all_processes_also_twice_and_unused(make_workers):
    make_workers().close()
    workers = make_workers(processes=3)
    workers.map([("sleep", 0.2)] * 3)
    pids = [process._popen.pid for process in workers._processes]
    assert len(pids) == 3
    assert all(map(alive, pids))
    workers.close()
    assert not any(map(alive, pids))
    workers.close()
    with pytest.raises(RuntimeError):
        workers.map([("a",)])


def test_a_process_that_died_idle_costs_no_call(make_workers):
    workers = make_workers(processes=1)
    (outcome,) = workers.map([("pid",)])
    os.kill(outcome.value, signal.SIGKILL)
    assert gone_soon([outcome.value])
    assert workers.map([("a",)]) == [Outcome("a")]


def test_too_little_memory_to_start_is_said(make_workers, capfd):
    with pytest.raises(
        UserError, match=r"a process for test_workers\.work ended .* allow it more than 1 MiB of memory"
    ):
        make_workers(memory=1).map([("a",)])


@pytest.mark.parametrize(
    ("function", "settings", "words"),
    [
        (lambda: None, {}, "function: expected one at the top level"),
        (Path.exists, {}, "function: expected one at the top level"),
        (work, {"seconds": 0}, "seconds: expected more than 0, got 0"),
        (work, {"memory": -1}, "memory: expected more than 0, got -1"),
        (work, {"processes": 0}, "processes: expected more than 0, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(function, settings, words):
    with pytest.raises(ValueError, match=words):
        Workers(function, **{"seconds": 1, "memory": 100, **settings})


JOB = """
import os, sys, time
def pid(): return os.getpid()
def modules(): return sorted(sys.modules)
def forever(path):
    with open(path, "a") as stream: stream.write(f"{os.getpid()}\\n")
    while True: time.sleep(1)
"""


def start(tmp_path, script):
    """A program of its own that uses workers; it stands in for ``stepjepa evaluate`` or a user's script."""
    (tmp_path / "job.py").write_text(JOB.replace("\\\\", "\\"))
    (tmp_path / "script.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def busy_pids(path):
    until = time.monotonic() + 30
    while not (path.exists() and path.read_text().count("\n") == 2):
        assert time.monotonic() < until, "the processes did not start"
        time.sleep(0.05)
    return [int(line) for line in path.read_text().split()]


def test_a_script_without_a_guard_is_not_run_again_by_its_processes(tmp_path):
    program = start(
        tmp_path,
        "import torch, job\n"
        "from stepjepa.answers.workers import Workers\n"
        "workers = Workers(job.modules, seconds=20, memory=300, processes=1)\n"
        "print('torch' in workers.map([()])[0].value)\n",
    )
    # It forgets to close them, too.
    assert program.communicate(timeout=60) == ("False\n", "")
    assert program.returncode == 0


def test_no_file_of_the_current_folder_takes_the_place_of_a_module(make_workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pickle", "struct", "_compat_pickle"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit('hostile')\n")
    # What this process imports from there, its processes do as well, and after everything else.
    (tmp_path / "own_work.py").write_text("def double(number):\n    return 2 * number\n")
    monkeypatch.syspath_prepend(tmp_path / "nothing")
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(tmp_path)])
    assert make_workers().map([("something",)]) == [Outcome("something")]
    import own_work

    workers = Workers(own_work.double, seconds=20, memory=1024, processes=1)
    try:
        assert workers.map([(7,)]) == [Outcome(14)]
    finally:
        workers.close()
    assert not (tmp_path / "ran").exists()


BUSY = (
    "import job\n"
    "from stepjepa.answers.workers import Workers\n"
    "workers = Workers(job.forever, seconds={seconds}, memory=300, processes=2)\n"
    "workers.map([('pids',)] * 5)\n"
)


def test_ctrl_c_leaves_no_process(tmp_path):
    program = start(tmp_path, BUSY.format(seconds=60))
    pids = busy_pids(tmp_path / "pids")
    # As a terminal does it: to the whole group.
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert gone_soon(pids)


def test_a_program_that_is_killed_leaves_no_process_for_long(tmp_path):
    program = start(tmp_path, BUSY.format(seconds=1))
    pids = busy_pids(tmp_path / "pids")
    program.kill()
    program.communicate(timeout=20)
    assert gone_soon(pids)
