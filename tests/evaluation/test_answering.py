"""Lines out of answers: errors, samples, votes, likelihoods; and answers while a model trains."""

import copy
import json

import pytest
import torch
from transformers import TrainingArguments

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.chat.template import ChatTemplate
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.evaluation.answering import COUNT, AnswerScores, spread
from stepjepa.evaluation.judging import Question, judge
from stepjepa.models.loading import add_lora
from stepjepa.models.sampling import Answer
from stepjepa.store.record import read_record
from stepjepa.tasks.base import Likelihood
from stepjepa.tasks.generic import GenericTask
from stepjepa.training.trainer import JepaTrainer
from tiny import make_record
from user_task import LastWord, Weighing


def question(answer="it is four", index=0, **fields):
    return Question(index, make_record(None, "2+2?", answer), **fields)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer("four", True, 2), None),
        (Answer("four", False, 9), None),  # right by its last word, though cut off there
        (Answer("five", True, 2), "wrong answer"),
        (Answer("five and", False, 9), "ran on"),
    ],
)
def test_an_answer_that_is_not_right_says_why(answer, error):
    (line,) = judge(LastWord(), [question()], [[answer]])
    assert line["error"] == error
    assert (line["generated"], line["stopped"], line["new_tokens"]) == answer
    assert (line["index"], line["truth"], line["prompt"]) == (0, "four", None)
    assert line["extracted"] == {"answer": answer.text.split()[-1]}
    assert "samples" not in line


def test_an_answer_is_judged_by_what_stands_behind_its_thought():
    """Of a prompt that opens a thought the answer begins inside it; the line holds all that was generated."""
    output = "it is four"
    for prompt, text, right in (
        (None, f"<think>\nfive?\n</think>\n\n{output}", True),
        ("<think>\n", f"five?\n</think>\n\n{output}", True),
        ("<think>\n", output, False),
        ("Why?", output, True),
    ):
        (line,) = judge(GenericTask(), [question(prompt=prompt)], [[Answer(text, True, 5)]])
        assert line["scores"]["exact"] is line["scores"]["contains"] is right
        assert line["generated"] == text
    assert line["error"] is None


def test_what_likelihoods_decide_did_not_run_on():
    weighed = {"a": Likelihood(-1.5, 2), "b": Likelihood(-2.0, 1)}
    for likelihoods, error in ((None, "ran on"), (weighed, "wrong answer")):
        task = LastWord() if likelihoods is None else Weighing()
        (line,) = judge(task, [question(likelihoods=likelihoods)], [[Answer("five and", False, 9)]])
        assert (line["error"], line["stopped"]) == (error, False)


def test_the_headline_decides_what_is_an_error():
    answers = [[Answer("it is four, I think", True, 5)]]
    assert judge(GenericTask(), [question()], answers)[0]["error"] == "wrong answer"
    assert judge(GenericTask(), [question()], answers, "prefix")[0]["error"] is None
    assert judge(GenericTask(), [question()], [[Answer(" ", True, 5)]])[0]["error"] == "no answer found"


def test_a_score_that_is_not_there_is_refused_with_the_flag_that_asks_for_it():
    words = r"task 'last-word' has no score 'prefix', only last, anywhere; leave `startswith` out$"
    with pytest.raises(UserError, match=words):
        judge(LastWord(), [question()], [[Answer("four")]], LastWord.beginning)
    with pytest.raises(UserError, match=r"no score 'other', only last, anywhere$"):
        judge(LastWord(), [question()], [[Answer("four")]], "other")


def test_a_verdict_that_is_no_scored_is_named(monkeypatch):
    monkeypatch.setattr(LastWord, "score", lambda task, record, response: 1.0)
    words = r"task 'last-word': score gave '1.0', expected stepjepa.tasks.base.Scored\(scores, ...\); see docs/tasks.md"
    with pytest.raises(UserError, match=words):
        judge(LastWord(), [question()], [[Answer("four")]])


def test_an_error_in_the_code_of_a_task_names_the_record_and_its_line(monkeypatch):
    def score(task, record, response):
        return {}[response.content]

    monkeypatch.setattr(LastWord, "score", score)
    records = [question(), question(index=1)]
    words = r"task 'last-word': score failed in test_answering\.py, line \d+ \(KeyError: 'four'\); correct it"
    with pytest.raises(UserError, match=words):
        judge(LastWord(), records, [[Answer("four")], [Answer("five")]])


def test_samples_are_averaged_and_put_to_the_vote():
    output = ["is four", "was five", "four", "six", "five", "four"]
    answers = [[Answer(text, index != 3, 2 + index) for index, text in enumerate(output)]]
    (line,) = judge(LastWord(), [question()], answers)
    assert line["scores"] == {"last": 0.5, "anywhere": 0.5, "pass@1": 0.5, "pass@6": True, "majority": True}
    # The representative is the first that says what most say.
    assert (line["generated"], line["extracted"], line["error"]) == ("is four", {"answer": "four"}, None)
    assert (line["stopped"], line["new_tokens"]) == (pytest.approx(5 / 6), 2 + 3 + 4 + 5 + 6 + 7)
    assert [sample["generated"] for sample in line["samples"]] == output
    assert [sample["error"] for sample in line["samples"]].count("ran on") == 1


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        (["five", "four", "four", "five", "six"], "five"),  # a tie goes to what was said first
        (["", "", "four"], "four"),  # nothing is no vote
    ],
)
def test_the_vote_is_decided_without_chance(said, chosen):
    (line,) = judge(LastWord(), [question()], [[Answer(text) for text in said]])
    assert line["generated"] == chosen
    assert line["scores"]["majority"] == (chosen == "four")
    assert (line["stopped"], line["new_tokens"]) == (None, None)


def test_questions_keep_their_own_answers_and_likelihoods():
    observed = {"a": Likelihood(-1.5, 2), "b": Likelihood(-2.0, 1)}
    other = {"a": Likelihood(-3.0, 2), "b": Likelihood(-2.0, 1)}
    questions = [question("one", 7, prompt="p", likelihoods=observed), question("two", 3, likelihoods=other)]
    lines = judge(Weighing(), questions, [[Answer("one"), Answer("two")], [Answer("one"), Answer("two")]])
    assert [line["index"] for line in lines] == [7, 3]
    assert [[sample["scores"]["last"] for sample in line["samples"]] for line in lines] == [
        [True, False],
        [False, True],
    ]
    assert [line["scores"]["a_likelier"] for line in lines] == [1.0, 0.0]
    assert lines[0]["likelihoods"] == {"a": [-1.5, 2], "b": [-2.0, 1]}


def make_scores(tokenizer):
    return AnswerScores(tiny.records(), GenericTask(), tokenizer, max_new_tokens=5, batch_size=2)


def test_the_loss_of_a_line_is_the_mean_over_the_tokens_of_the_right_answer(tiny_tokenizer):
    model, records = tiny.make_model("llama").eval(), tiny.records()
    batches = make_scores(tiny_tokenizer).batcher(model).answer_missing(())
    for line in (line for lines in batches for line in lines):
        turn = ChatTemplate(tiny_tokenizer).turns(records[line["index"]].messages)[-1]
        prompt, whole = (
            tiny_tokenizer(text, add_special_tokens=False).input_ids for text in (turn.text[: turn.answer], turn.text)
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(whole[len(prompt) :]))
        assert line["gold_tokens"] == len(whole) - len(prompt)
        assert line["gold_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_shares_of_several_processes_add_up_to_the_whole(tiny_tokenizer):
    model = tiny.make_model("llama").eval()
    records = tiny.records()
    scores = make_scores(tiny_tokenizer)
    whole = scores(model, 0, 1)
    assert whole[COUNT] == len(records)
    # More processes than records too: the last ones have nothing and still name every score.
    for world in (2, 3, len(records) + 2):
        parts = [scores(model, rank, world) for rank in range(world)]
        assert all(list(part) == list(whole) for part in parts)
        assert {name: sum(part[name] for part in parts) for name in whole} == pytest.approx(whole)


@pytest.mark.parametrize(("size", "count", "picked"), [(10, 4, [0, 2, 5, 7]), (3, 9, [0, 1, 2]), (7, 1, [0])])
def test_records_are_taken_from_all_over_a_file(size, count, picked):
    assert spread(list(range(size)), count) == picked


@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", [False, True])
def test_training_is_not_disturbed_and_the_scores_are_logged(lora, tiny_tokenizer, tmp_path):
    weights = {}
    for answers in (False, True):
        model = tiny.make_model("llama")
        if lora:
            torch.manual_seed(0)
            model = add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer)[:2])
        base = model.get_base_model() if lora else model
        own = base.generation_config
        tokenizer = copy.deepcopy(tiny_tokenizer)
        trainer = JepaTrainer(
            model,
            TrainingArguments(
                str(tmp_path / f"answers-{answers}"),
                max_steps=3,
                eval_strategy="steps",
                eval_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                learning_rate=0.01,
            ),
            JepaConfig(mode="step-jepa", predictors=2),
            train_dataset=tiny.records(),
            eval_dataset=tiny.records(),
            processing_class=tokenizer,
            answer_scores=make_scores(tokenizer) if answers else None,
        )
        trainer.train()
        assert base.generation_config is own
        logged = [line for line in trainer.state.log_history if "eval_lm_loss" in line]
        assert len(logged) == 3
        assert all(("eval_answer_exact" in line) == answers for line in logged)
        weights[answers] = {name: value.clone() for name, value in model.state_dict().items()}
        expected = make_scores(tokenizer)(model.eval(), 0, 1)
        if answers:
            assert logged[-1]["eval_answer_contains"] == expected["contains"] / expected[COUNT]
            assert logged[-1]["eval_answer_stopped"] == expected["stopped"] / expected[COUNT]
    assert all(torch.equal(weights[False][name], value) for name, value in weights[True].items())


@pytest.fixture
def files(tmp_path):
    chats = [[("user", f"Say {word} now, please"), ("assistant", word)] for word in ("one", "two", "three", "one")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    write_jsonl(tmp_path / "data.jsonl", rows)
    return tmp_path


def train(files, *flags):
    given = ["--train_file", files / "data.jsonl", "--eval_file", files / "data.jsonl", "--model_name", "preset:tiny"]
    given += ["--output_dir", files / "run", "--regular", "--use_cpu", "--batch_size", "4", "--grad_accum", "1"]
    return main(["train", *map(str, given), *flags])


def test_a_best_checkpoint_needs_records_and_checkpoints_to_choose_from(files, capsys):
    command = ["train", "--train_file", str(files / "data.jsonl"), "--model_name", "preset:tiny"]
    command += ["--output_dir", str(files / "run"), "--load_best_model_at_end"]
    assert main(command) == 2
    assert "--load_best_model_at_end needs held-out records to choose by; set --eval_file" in capsys.readouterr().err
    for flags, evaluates, saves in (
        ([], "epoch", "steps"),
        (["--eval_steps", "2", "--save_strategy", "epoch"], "steps", "epoch"),
    ):
        assert main([*command, "--eval_file", str(files / "data.jsonl"), *flags]) == 2
        told = capsys.readouterr().err
        assert f"got --eval_strategy {evaluates} and --save_strategy {saves}; set --save_strategy {evaluates}" in told


def test_the_checkpoint_that_answers_best_is_kept(files, capsys):
    flags = ["--eval_generate", "3", "--eval_max_new_tokens", "4", "--max_steps", "6", "--learning_rate", "3e-3"]
    flags += ["--eval_steps", "2", "--save_strategy", "best", "--metric_for_best_model", "answer_prefix"]
    assert train(files, *flags, "--load_best_model_at_end", "--eval_task", "generic", "--save_steps", "2") == 0
    printed = capsys.readouterr().out
    assert "answers: to 3 records at every evaluation, task generic" in printed
    assert "prefix: " in printed
    metrics = [json.loads(line) for line in (files / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = {line["step"]: line["eval_answer_prefix"] for line in metrics if "eval_answer_prefix" in line}
    assert set(scores) == {2, 4, 6}
    best = next(step for step in (2, 4, 6) if scores[step] == max(scores.values()))
    assert {folder.name for folder in (files / "run").glob("checkpoint-*")} >= {f"checkpoint-{best}"}
    # Each evaluation is printed and logged once, and the run has that of its weights.
    assert printed.count("  eval  ") == 3 == sum("eval_lm_loss" in line for line in metrics)
    assert f"the model is the best checkpoint, of step {best}" in printed
    results = read_record(files / "run").results
    assert results.best_step == best and results.evaluation["eval_answer_prefix"] == scores[best]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval_generate", "2", "--eval_task", "generik"], "--eval_task: no task 'generik'; expected auto, "),
        (["--eval_generate", "2", "--eval_max_new_tokens", "5000"], "positions; lower --eval_max_new_tokens or remove"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, files, capsys):
    assert train(files, *flags) == 2
    *notes, error = capsys.readouterr().err.splitlines()
    assert words in error
    # Of the held-out records, which are those of the training here.
    assert all(note.startswith("note: 4 of 4 held-out records") for note in notes)
    assert not (files / "run").exists()


@pytest.mark.parametrize("trained_with", ["Say it.", None])
def test_a_training_model_is_asked_as_the_trained_one_will_be(trained_with, files, monkeypatch):
    """Under the system prompt of the training file, though the held-out one has another."""
    texts = {"train": trained_with, "held": "Please."}
    for name, system in texts.items():
        first = [{"role": "system", "content": system}] if system else []
        rest = [{"role": "user", "content": "Which word?"}, {"role": "assistant", "content": "this"}]
        write_jsonl(files / f"{name}.jsonl", [{"messages": [*first, *rest]}] * 4)
    observed = []

    class Watching(AnswerScores):
        def __init__(self, records, *args, **options):
            observed.extend(record.messages[0]["content"] for record in records)
            super().__init__(records, *args, **options)

    monkeypatch.setattr("stepjepa.running.held_out_scores.AnswerScores", Watching)
    flags = ["--train_file", str(files / "train.jsonl"), "--eval_file", str(files / "held.jsonl"), "--max_steps", "1"]
    assert train(files, *flags, "--eval_generate", "2", "--eval_max_new_tokens", "2", "--save_strategy", "no") == 0
    assert observed == [trained_with or "Which word?"] * 2
