"""The processes of the benchmark: a server that imports what is slow to import once, and forks one process per task.

Every task has a process of its own, so that its peak memory is its own, and starts in a second.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from stepjepa.errors import UserError
from stepjepa.files import write_json


def run_task(task_file: str) -> None:
    """Do what a task file says and write the result to the file that it names.

    ``run`` of the task names a function as ``module:function``; it is called with the task.
    """
    import torch

    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    module, _, function = task["run"].partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(task)
    except UserError as error:
        result = {"error": str(error)}
    write_json(task["result"], result)


def serve(modules: list[str]) -> None:
    """Import modules, then run the tasks whose files are named on standard input, one after the other.

    Writes one line per task to standard output: the exit code of its process. Nothing is computed in this process, so
    that no thread is lost in a fork.

    Args:
        modules: to import.
    """
    for name in modules:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    # What a task prints must not be taken for an answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_task(line.strip())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        # Under torchrun every process runs the one task.
        run_task(sys.argv[1])
        # The result is written. In the interpreter's end threads of the groups that FSDP made now and then abort the
        # process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
