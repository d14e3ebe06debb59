"""What must not be mistaken, lost or mixed: summaries, models, tasks, full disks and full memories."""

import json
import resource
import sys

import pytest
import torch

from questions import NEW
from stepjepa.errors import UserError
from stepjepa.evaluation.generation import Generator
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.evaluation.run import Evaluation
from stepjepa.evaluation.settings import EvaluationSettings, Sampling
from stepjepa.files import write_json, write_jsonl
from tiny import make_model


@pytest.fixture
def loaded(model, tokenizer):
    return model, tokenizer


def settings(test_file, name="out.jsonl", *, task="generic", new=NEW, **changes):
    fields = {"batch_size": 2, "sampling": Sampling(max_new_tokens=new)} | changes
    return EvaluationSettings("tiny", test_file, test_file.parent / name, task=task, **fields)


def test_a_score_that_the_task_lacks_costs_no_file(loaded, test_file):
    """Which scores a task has shows at the first answers."""
    wrong = settings(test_file, task="user_task:LastWord", startswith=True)
    with pytest.raises(UserError, match=r"no score 'prefix'.*leave --startswith out"):
        Evaluation(wrong).run(lambda: loaded)
    assert {file.name for file in test_file.parent.iterdir()} == {test_file.name}
    Evaluation(settings(test_file)).run(lambda: loaded)
    before = {file.name: file.read_bytes() for file in test_file.parent.iterdir()}
    over = settings(test_file, task="user_task:LastWord", startswith=True, overwrite=True)
    with pytest.raises(UserError, match="no score 'prefix'"):
        Evaluation(over).run(lambda: loaded)
    assert {file.name: file.read_bytes() for file in test_file.parent.iterdir()} == before


def test_the_summary_of_another_file_is_not_taken_for_ones_own(loaded, test_file):
    """``a.v1`` and ``a.v2`` have the same stem."""

    def never():
        raise AssertionError("the model was loaded")

    summary = test_file.parent / "a.summary.json"
    first = Evaluation(settings(test_file, "a.v1")).run(lambda: loaded)
    before = summary.read_bytes()
    with pytest.raises(UserError, match=r"a\.summary\.json: exists already and is not the summary of a\.v2;"):
        Evaluation(settings(test_file, "a.v2", new=2))
    assert summary.read_bytes() == before
    assert Evaluation(settings(test_file, "a.v2", new=2, overwrite=True)).run(lambda: loaded) != first
    before = summary.read_bytes()
    with pytest.raises(UserError, match=r"a\.summary\.json: .* not the summary of a\.v1; move it"):
        Evaluation(settings(test_file, "a.v1"))
    assert summary.read_bytes() == before
    summary.unlink()
    assert Evaluation(settings(test_file, "a.v1")).run(never)["generated_tokens"] == first["generated_tokens"]
    # Beside its lines a damaged one can only be their own.
    summary.write_text("{", encoding="utf-8")
    assert Evaluation(settings(test_file, "a.v1")).run(never)["scores"] == first["scores"]


@pytest.mark.parametrize("damage", [None, 9, [2], "field"])
def test_a_damaged_line_is_refused_with_its_number(damage, loaded, test_file):
    Evaluation(settings(test_file)).run(lambda: loaded)
    path = test_file.parent / "out.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if damage == "field":
        del lines[2]["stopped"]
    else:
        lines[2]["index"] = damage
    write_jsonl(path, lines)
    with pytest.raises(UserError, match=r"out\.jsonl:3: is no line of this evaluation; remove it, or"):
        Evaluation(settings(test_file))
    # What the message says.
    write_jsonl(path, lines[:2] + lines[3:])
    assert Evaluation(settings(test_file)).run(lambda: loaded)["generated_now"] == 1


def test_lines_scored_by_an_older_version_of_a_users_task_are_not_taken_up(loaded, test_file, monkeypatch):
    source = "from stepjepa.tasks.generic import GenericTask\nclass Mine(GenericTask):\n    name = 'mine'\n"
    module = test_file.with_name("edited_task.py")
    module.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(module.parent)
    chosen = settings(test_file, task="edited_task:Mine")
    Evaluation(chosen).run(lambda: loaded)
    assert Evaluation(chosen).finished == 5
    module.write_text(f"{source}    lenient = 'contains'\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"out\.jsonl: was begun with another task_source;"):
        Evaluation(chosen)
    sys.modules.pop("edited_task")


def test_an_adapter_is_another_model_if_its_base_is(loaded, tmp_path):
    model, _ = loaded
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    adapter.mkdir()
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(base)})
    first = model_fingerprint(adapter)
    assert model_fingerprint(adapter) == first
    make_model("llama", seed=3, vocab_size=model.config.vocab_size).save_pretrained(base)
    assert model_fingerprint(adapter) != first
    # So has one that names itself.
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(adapter)})
    assert model_fingerprint(adapter) != first


def test_a_full_disk_names_the_file_and_costs_nothing_that_is_there(loaded, test_file):
    """By the largest size that a file may have."""
    whole = settings(test_file, "whole.jsonl")
    Evaluation(whole).run(lambda: loaded)
    path = test_file.parent / "out.jsonl"
    size = len((test_file.parent / "whole.jsonl").read_bytes())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 // 3, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            Evaluation(settings(test_file)).run(lambda: loaded)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(path)
    assert 0 < Evaluation(settings(test_file)).finished < 5
    Evaluation(settings(test_file)).run(lambda: loaded)
    assert path.read_bytes() == (test_file.parent / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        (1, RuntimeError("DefaultCPUAllocator: can't allocate memory"), "--batch_size 2; lower --batch_size$"),
        (3, torch.OutOfMemoryError("CUDA out of memory"), "lower --batch_size or --num_samples$"),
    ],
)
def test_too_little_memory_is_said_on_a_cpu_too(samples, error, words, loaded, test_file, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(Generator, "answer", fails)
    sampling = Sampling(max_new_tokens=2, temperature=1.0 if samples > 1 else 0.0, num_samples=samples)
    with pytest.raises(UserError, match=words):
        Evaluation(settings(test_file, sampling=sampling)).run(lambda: loaded)
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        Evaluation(settings(test_file)).run(lambda: loaded)
