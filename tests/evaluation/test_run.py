"""Evaluations: lines and summary, resuming, and what must not be mistaken, lost or mixed."""

import dataclasses
import json
import math
import resource
import sys
from contextlib import contextmanager

import pytest

from questions import ANSWERS, NEW, QUESTIONS, make_tokenizer, push
from stepjepa.base.errors import UserError
from stepjepa.base.files import locked, write_json, write_jsonl
from stepjepa.chat.template import ChatTemplate
from stepjepa.data.sources import read_records
from stepjepa.evaluation.answering import Batcher
from stepjepa.evaluation.prompts import make_examples
from stepjepa.evaluation.run import Evaluation, evaluate
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.models.generation import Generator
from stepjepa.models.presets import train_tokenizer
from stepjepa.models.sampling import Sampling
from stepjepa.store.fingerprint import model_fingerprint
from tiny import make_model

SAMPLING = [field.name for field in dataclasses.fields(Sampling)]


@pytest.fixture
def loaded(model, tokenizer):
    return model, tokenizer


def settings(test_file, name="out.jsonl", **changes):
    sampling = {"max_new_tokens": NEW} | {key: changes.pop(key) for key in SAMPLING if key in changes}
    fields = {"model_path": "tiny", "batch_size": 2, "task": "generic", "sampling": Sampling(**sampling)} | changes
    return EvaluationSettings(test_file=test_file, output_file=test_file.parent / name, **fields)


def run(loaded, test_file, name="out.jsonl", **changes):
    return Evaluation(settings(test_file, name, **changes)).run(lambda: loaded)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def never():
    raise AssertionError("the model was loaded")


class KilledError(Exception):
    """Stands for the end of the process."""


@contextmanager
def killed_before(batch_number):
    """Evaluations die before a batch."""
    lines = Batcher.lines

    def dying(self, batch, number):
        if number == batch_number:
            raise KilledError
        return lines(self, batch, number)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Batcher, "lines", dying)
        yield


def test_lines_and_summary_say_what_happened(loaded, test_file):
    summary = run(loaded, test_file)
    lines = read(test_file.parent / "out.jsonl")
    assert [line["index"] for line in lines] == list(range(5))
    assert [line["truth"] for line in lines] == ANSWERS
    assert lines[0]["prompt"] == (
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert set(lines[0]["scores"]) == {"exact", "prefix", "contains"}
    assert summary == json.loads((test_file.parent / "out.summary.json").read_text(encoding="utf-8"))
    assert (summary["n"], summary["task"], summary["generated_now"]) == (5, "generic", 5)
    assert summary["generated_tokens"] == sum(line["new_tokens"] for line in lines)
    tokens = sum(line["gold_tokens"] for line in lines)
    assert summary["gold_loss"] == pytest.approx(sum(ln["gold_loss"] * ln["gold_tokens"] for ln in lines) / tokens)
    assert summary["tokens_per_second"] == pytest.approx(summary["generated_tokens"] / summary["seconds"])


def test_two_evaluations_into_one_file_at_once_are_refused(loaded, test_file):
    """With other settings and `overwrite` the second would remove the lines of the first, which go on to be added."""
    first, second = Evaluation(settings(test_file)), Evaluation(settings(test_file, num_samples=2, temperature=1.0))
    with locked(test_file.parent / "out.jsonl"), pytest.raises(UserError, match=r"out.jsonl: is in use by process"):
        second.run(never)
    # The lines of one that has ended meanwhile are read.
    same = Evaluation(settings(test_file))
    summary = first.run(lambda: loaded)
    assert same.run(never) == summary
    with pytest.raises(UserError, match="was begun with another"):
        second.run(never)
    assert not list(test_file.parent.glob(".*"))


WEIGHED = {"task": "user_task:Weighing", "temperature": 1.0, "num_samples": 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("keep", "changes"), [(0.01, {}), (0.7, {"temperature": 1.5}), (0.6, WEIGHED), (1.0, WEIGHED)])
def test_a_killed_run_goes_on_to_the_same_file(keep, changes, loaded, test_file):
    """Also with several samples and with likelihoods."""
    whole, path = test_file.parent / "whole.jsonl", test_file.parent / "part.jsonl"
    run(loaded, test_file, whole.name, **changes)
    part = settings(test_file, "part.jsonl", **changes)
    with killed_before(2):
        Evaluation(part).run(lambda: loaded)
    written = path.read_bytes()
    assert written.count(b"\n") == 4
    # What was killed while it wrote leaves half a line.
    cut = written[: int(keep * len(written))]
    path.write_bytes(cut)
    # Killed once more, and only then left in peace.
    second = Evaluation(part)
    assert second.finished == cut.count(b"\n")
    # Unchanged so far: it may be that of a process that is writing the line now, and holds the lock.
    assert path.read_bytes() == cut
    assert (second.finished == 4) == (keep == 1.0)
    with killed_before(2):
        second.run(lambda: loaded)
    last = Evaluation(part)
    assert last.finished == 4
    assert last.run(lambda: loaded)["generated_now"] == 1
    assert path.read_bytes() == whole.read_bytes()
    assert all(line.get("likelihoods") for line in read(path)) == (changes is WEIGHED)


def test_a_finished_file_is_summarised_without_the_model(loaded, test_file):
    first = run(loaded, test_file)
    assert Evaluation(settings(test_file)).run(never) == first
    for damage in (None, "{"):
        summary = test_file.parent / "out.summary.json"
        summary.unlink() if damage is None else summary.write_text(damage, encoding="utf-8")
        again = Evaluation(settings(test_file)).run(never)
        assert (again["generated_now"], again["tokens_per_second"]) == (0, None)
        same = ("n", "scores", "gold_loss", "generated_tokens")
        assert {name: again[name] for name in same} == {name: first[name] for name in same}


def test_what_does_not_belong_together_is_not_mixed(loaded, test_file):
    run(loaded, test_file)
    before = (test_file.parent / "out.jsonl").read_bytes()
    for changes, words in (
        ({"max_new_tokens": 3}, r"out\.jsonl: was begun with another max_new_tokens \(11, now 3\);.*`overwrite`"),
        (
            {"temperature": 1.0},
            r"another temperature \(0.0, now 1.0\), seed \(none, now 42\), batch_size \(none, now \d+\);",
        ),
        ({"max_examples": 2}, r"another number of examples \(5, now 2\);"),
        ({"plain": True}, r"another prompt: plain \(false, now true\);"),
        ({"model_path": "other"}, r"another model \(tiny, now other\);"),
    ):
        with pytest.raises(UserError, match=words):
            Evaluation(settings(test_file, **changes))
    # Greedy answers do not depend on how they are batched: after running out of memory a smaller batch goes on.
    assert Evaluation(settings(test_file, batch_size=1, seed=7)).finished == 5
    text = test_file.read_text(encoding="utf-8")
    test_file.write_text(text.replace("2+2?", "2+3?"), encoding="utf-8")
    with pytest.raises(UserError, match="another test_file;"):
        Evaluation(settings(test_file))
    assert (test_file.parent / "out.jsonl").read_bytes() == before


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


def test_overwrite_starts_anew_but_only_once_there_are_answers(loaded, test_file):
    run(loaded, test_file)
    before = {file.name: file.read_bytes() for file in test_file.parent.iterdir()}
    changed = settings(test_file, max_new_tokens=3, overwrite=True)

    def missing():
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"):
        Evaluation(changed).run(missing)
    # Which scores a task has shows at the first answers.
    with pytest.raises(UserError, match=r"no score 'prefix'.*leave `startswith` out"):
        run(loaded, test_file, task="user_task:LastWord", startswith=True, overwrite=True)
    assert {file.name: file.read_bytes() for file in test_file.parent.iterdir()} == before
    with killed_before(2):
        Evaluation(changed).run(lambda: loaded)
    # Nothing of the old file is among the new lines.
    again = Evaluation(settings(test_file, max_new_tokens=3))
    assert again.finished == 4
    assert again.run(lambda: loaded)["generated_tokens"] <= 15
    assert len(read(test_file.parent / "out.jsonl")) == 5


def test_a_file_of_another_kind_or_with_a_damaged_line_is_left_alone(loaded, test_file):
    path = test_file.parent / "out.jsonl"
    path.write_text("mine\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"out\.jsonl: is no output of an evaluation.*`overwrite`"):
        Evaluation(settings(test_file))
    path.unlink()
    run(loaded, test_file)
    lines = read(path)
    incomplete = {name: value for name, value in lines[2].items() if name != "stopped"}
    for damaged in (*(lines[2] | {"index": index} for index in (None, 9, 1)), incomplete):
        write_jsonl(path, [*lines[:2], damaged, *lines[3:]])
        with pytest.raises(UserError, match=r"out\.jsonl:3: is no line of this evaluation; remove it, or"):
            Evaluation(settings(test_file))
    path.write_text(path.read_text(encoding="utf-8").replace("{", "", 1), encoding="utf-8")
    told = r"out\.jsonl:1: not valid JSON .*; remove the line, or name another `output_file`, or pass `overwrite`"
    with pytest.raises(UserError, match=told):
        Evaluation(settings(test_file))
    # What the message says.
    write_jsonl(path, lines[:2] + lines[3:])
    assert run(loaded, test_file)["generated_now"] == 1


def test_an_output_file_that_is_a_link_stays_one(loaded, test_file):
    link, file = test_file.parent / "out.jsonl", test_file.parent / "disk.jsonl"
    file.write_text("mine\n", encoding="utf-8")
    link.symlink_to(file.name)
    run(loaded, test_file, overwrite=True)
    assert link.is_symlink() and len(read(file)) == 5


def test_a_full_disk_names_the_file_and_costs_nothing_that_is_there(loaded, test_file):
    """By the largest size that a file may have."""
    run(loaded, test_file, "whole.jsonl")
    path = test_file.parent / "out.jsonl"
    whole = (test_file.parent / "whole.jsonl").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 2 // 3, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            run(loaded, test_file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(path)
    assert 0 < Evaluation(settings(test_file)).finished < 5
    run(loaded, test_file)
    assert path.read_bytes() == whole


def test_the_tokenizer_of_the_caller_is_not_changed(model, test_file):
    own = make_tokenizer()
    own.pad_token = None
    own.padding_side = "right"
    before = own.backend_tokenizer.to_str()
    run((model, own), test_file)
    assert own.backend_tokenizer.to_str() == before
    assert (own.pad_token, own.padding_side) == (None, "right")


def test_what_the_model_can_not_do_is_refused_with_the_line(model, tokenizer, test_file, monkeypatch):
    too_long = r"questions\.jsonl:\d: prompt and answer \(of 500 new tokens .* 509 positions"
    with pytest.raises(UserError, match=too_long):
        run((model, tokenizer), test_file, max_new_tokens=500)
    broken = push(model, 0, math.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match=r"questions\.jsonl:\d: the model's loss on this record is nan.*float32"):
            run((broken, tokenizer), test_file, temperature=temperature)

    def fails(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Generator, "answer", fails)
    with pytest.raises(UserError, match="out of memory with `batch_size 2`; lower it"):
        run((model, tokenizer), test_file)
    assert not (test_file.parent / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": math.nan}, "temperature: expected 0 or more"),
        ({"num_samples": 2}, "`num_samples` does nothing without `temperature`"),
        ({"similarity": "jepa"}, "similarity: expected one of own, llm-jepa, step-jepa, got 'jepa'"),
        ({"name": "questions.jsonl"}, "`output_file` is the test file"),
        ({"name": ""}, "is a folder"),
    ],
)
def test_wrong_settings_are_refused(change, words, test_file):
    with pytest.raises(UserError, match=words):
        settings(test_file, **change)


def test_a_hub_id_needs_a_name_for_the_output(test_file, tmp_path, monkeypatch):
    """The folder of its name that the answers went to was taken for the model, now and later."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expected an output_file where model_path is no folder but a hub id"):
        evaluate("somebody/some-model", test_file)
    assert not (tmp_path / "somebody").exists()


def test_what_a_task_leaves_out_is_counted_and_the_others_keep_their_places(loaded, test_file):
    chosen = settings(test_file, task="user_task:Choosy", batch_size=1)
    with killed_before(1):
        Evaluation(chosen).run(lambda: loaded)
    evaluation = Evaluation(chosen)
    assert evaluation.finished == 1
    summary = evaluation.run(lambda: loaded)
    assert (summary["n"], summary["left_out"]) == (2, {"no number": 3})
    lines = read(test_file.parent / "out.jsonl")
    assert [(line["index"], line["truth"]) for line in lines] == [(index, ANSWERS[index]) for index in (0, 2)]
    assert all(QUESTIONS[line["index"]] in line["prompt"] for line in lines)
    test_file.write_text(test_file.read_text(encoding="utf-8").splitlines()[1], encoding="utf-8")
    with pytest.raises(UserError, match=r"no record is left \(no number: 1\)"):
        Evaluation(settings(test_file, "o.jsonl", task="user_task:Choosy"))


def test_training_a_model_or_the_base_of_an_adapter_changes_its_fingerprint(loaded, tmp_path):
    model, tokenizer = loaded
    folder, adapter = tmp_path / "run", tmp_path / "adapter"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    adapter.mkdir()
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(folder)})
    first, adapted = model_fingerprint(folder), model_fingerprint(adapter)
    (folder / "out.summary.json").write_text("{}", encoding="utf-8")
    assert (model_fingerprint(folder), model_fingerprint(adapter)) == (first, adapted)
    push(model, 5, 0.5).save_pretrained(folder)
    assert model_fingerprint(folder) != first
    assert model_fingerprint(adapter) != adapted
    assert model_fingerprint("org/name") == "org/name"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "task", "headline", "zero"),
    # Of regular expressions also that none is left undecided is shown, as a score of 0.
    [("synth_test", "nl-rx", "equivalent", {"undecided"}), ("gsm8k_test", "gsm8k", "correct", set())],
)
def test_a_model_that_says_the_right_answer_gets_full_marks(
    name, task, headline, zero, shared_data, tmp_path, monkeypatch
):
    """The whole way through files, template, tokens and back, on real records; only the model's words are given."""
    path = shared_data / "llm_jepa" / f"{name}.jsonl"
    records = read_records(path)
    tokenizer = train_tokenizer([record.answer for record in records], 599)
    model = make_model("llama", vocab_size=len(tokenizer))
    examples = make_examples(enumerate(records), tokenizer, ChatTemplate(tokenizer))
    gold = {tuple(example.prompt_ids): example.gold.ids for example in examples}

    def oracle(self, prompts, batch_number):
        return [[self._decode(gold[tuple(prompt)][len(prompt) :])] for prompt in prompts]

    monkeypatch.setattr(Generator, "answer", oracle)
    model.config.max_position_embeddings = 10**6
    chosen = EvaluationSettings(
        model_path="tiny", test_file=path, output_file=tmp_path / "out.jsonl", max_examples=67, batch_size=13
    )
    summary = Evaluation(chosen).run(lambda: (model, tokenizer))
    assert (summary["task"], summary["headline"], summary["n"]) == (task, headline, 67)
    assert {name: value["mean"] for name, value in summary["scores"].items() if value["mean"] != 1.0} == dict.fromkeys(
        zero, 0.0
    )
