"""Every published command line is understood as meant, and runs on a tiny model."""

import argparse
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest

import tiny
from published_commands import TRAINING, TUBE_REFUSED, Line
from published_evaluations import EVALUATION
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.chat.special_tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.cli.commands import make_parser, parse
from stepjepa.cli.flags import trainer_flags
from stepjepa.cli.main import main, normalise
from stepjepa.cli.published import translate_evaluate, translate_train
from stepjepa.config.run import FLAT, RunConfig
from stepjepa.models.presets import train_tokenizer
from stepjepa.objectives.objective import Objective

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "published.md").read_text(encoding="utf-8")

# What the published programs have defaults for, and ours want named: a data file, a model, a place for the results.
DEFAULTS = {
    "train": {"train_file": "gsm8k_step_jepa.jsonl", "model_name": "meta-llama/Llama", "output_dir": "./checkpoints"},
    "evaluate": {"test_file": "../datasets/gsm8k_test.jsonl"},
}
# Their names for the same, and what they are called in our namespace.
RENAMED = {
    "eval_accuracy_steps": "eval_steps",
    "max_eval_samples": "eval_generate",
    "max_new_tokens_eval": "eval_max_new_tokens",
    "trainall": "train_all",
    "statswith": "startswith",
    "model_name": "model_path",
    "input_file": "test_file",
}
# Flags whose value the published meaning changes, which ``Line.expected`` says instead.
CHANGED = (
    *("train_file", "eval_accuracy", "linear", "lbd", "last_token", "predictors", "jepa_ratio"),
    *("max_new_tokens", "wandb_project"),
)


def flags_of(arguments: Iterable[str]) -> dict[str, str]:
    """Flags without dashes, and what is written behind them; nothing for switches."""
    result: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            result[name] = value
        else:
            result[name] = argument
    return result


def command_of(line: Line) -> str:
    return "evaluate" if line.script.startswith("evaluate") else "train"


def completed(line: Line) -> list[str]:
    """A line with what its program has a default for and ours has none."""
    given = flags_of(line.arguments)
    missing = {name: value for name, value in DEFAULTS[command_of(line)].items() if name not in given}
    if "input_file" in given:
        missing.pop("test_file")
    return [*line.arguments, *(f"--{name}={value}" for name, value in missing.items())]


def parsed(line: Line) -> argparse.Namespace:
    """What our parser makes of a line."""
    return parse(command_of(line), normalise(completed(line)))


@pytest.mark.parametrize("line", TRAINING, ids=lambda line: line.document)
def test_a_training_line_means_what_it_did(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    args = parsed(line)
    run = args.run
    settings = {**vars(args), **vars(run), **run.to_flat(), **asdict(run.jepa), "training": run.trainer}
    assert os.environ["WANDB_PROJECT"] == flags_of(line.arguments).get("wandb_project", "mine")
    for name, value in line.expected.items():
        assert settings.get(name) == value, name
    # And every number and name is passed on.
    for name, written in flags_of(line.arguments).items():
        passed_on = settings.get(FLAT[name].flag if name in FLAT else RENAMED.get(name, name))
        if written and name not in CHANGED:
            assert str(passed_on) == written or float(str(passed_on)) == float(written), name


@pytest.mark.parametrize("line", TUBE_REFUSED, ids=lambda line: line.document)
def test_what_has_no_counterpart_is_refused(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *completed(line)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert re.search(r"--(linear|linear_predictor|random_span_mask)\b", error)


CONTRADICTIONS = [
    (["train", "--linear", "random_span", "--step_jepa"], "leave --step_jepa out"),
    (["train", "--linear", "random_span", "--stp", "0.1"], "leave --stp out"),
    (["train", "--wandb", "--report_to", "tensorboard"], "another --report_to is named too; leave one out"),
    (["train", "--no_save", "--save_strategy", "epoch"], "another --save_strategy is named too; leave one out"),
]


@pytest.mark.parametrize(("arguments", "words"), CONTRADICTIONS, ids=[" ".join(given) for given, _ in CONTRADICTIONS])
def test_what_contradicts_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "train": ["--train_file", "a", "--model_name", "m", "--output_dir", "o"],
        "evaluate": ["--model_path", "m", "--test_file", "a", "--output_file", "o"],
    }
    assert main([*arguments, *files[arguments[0]]]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


PRESET = [
    ([], {"mode": "llm-jepa", "labels": "reference", "over_length": "truncate", "predictors": 0, "max_length": 512}),
    (["--regular"], {"mode": "regular", "labels": "reference", "over_length": "truncate"}),
    (["--step_jepa"], {"mode": "step-jepa", "labels": "reference", "predictors": 1, "max_length": 1024}),
    (["--config", "step.yaml"], {"mode": "step-jepa", "predictors": 1, "max_length": 700}),
    (["--plain", "--train_all"], {"labels": "all", "layout": "separate"}),
    (["--linear", "random_span"], {"mode": "regular", "labels": "reference"}),
    (["--infonce"], {"jepa_loss_type": "infonce", "infonce_negatives": "all", "infonce_temperature": 0.07}),
    (["--jepa_loss_type", "infonce", "--infonce_negatives=distinct"], {"infonce_negatives": "distinct"}),
    (["--infonce", "--regular=false", "--step_jepa"], {"mode": "step-jepa", "infonce_negatives": "all"}),
    (["--predictors", "3", "--labels", "assistant"], {"labels": "assistant", "predictors": 3, "layout": "separate"}),
]


@pytest.mark.parametrize(("flags", "expected"), PRESET, ids=[" ".join(flags) for flags, _ in PRESET])
def test_the_preset_of_the_papers_is_theirs_and_named_flags_win(
    flags: list[str], expected: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step.yaml").write_text("step_jepa: true\nmax_length: 700\n", encoding="utf-8")
    given = ["--train_file", "a", "--model_name", "m", "--output_dir", "o", "--preset", "paper", *flags]
    run = parse("train", given).run
    objective = asdict(run.jepa)
    assert {name: objective[name] for name in expected} == expected
    # What is written down repeats it.
    assert RunConfig.from_flat(run.to_flat()) == run


def test_what_is_followed_or_idle_is_said_on_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--train_file", "a", "--model_name", "m", "--output_dir", "o"]
    parse("train", [*given, "--linear=random_span", "--lbd=0.3", "--eval_accuracy", "--wandb", "--seed=7"])
    assert capsys.readouterr().err.splitlines() == [
        "note: --linear random_span --lbd 0.3 is --regular --stp 0.3",
        "note: --eval_accuracy is --data_file a --eval_split 0.2 --split_seed 7 --eval_generate 50",
    ]
    flags = ["--original_model_name", "x", "--nosplit_data", "--device_map=cuda:0", "--no_lora", "--max_new_tokens=-1"]
    args = parse("evaluate", ["--model_path", "m", "--test_file", "a", "--output_file", "o", *flags])
    assert args.max_new_tokens == 512
    assert capsys.readouterr().err.splitlines() == [
        "note: --original_model_name, --nosplit_data, --device_map, --no_lora: no effect here; see docs/published.md",
        "note: --max_new_tokens -1 is --max_new_tokens 512",
    ]


TUBE = '{"weight": 0.02, "layer": -2}'

TRANSLATED = [
    ("--lbd_warmup", "--lbd_schedule=warmup --lbd_warmup=1", "--lbd_warmup is --lbd_schedule warmup --lbd_warmup 1"),
    ("--lbd_warmup 0.3", "--lbd_warmup 0.3", ""),
    ("--lbd_warmup=False", "", ""),
    ("--min_lbd 0.0", "", ""),
    ("--constant_lr", "--lr_scheduler_type=constant", ""),
    ("--constant_lr=false", "", ""),
    ("--enable_save", "", "--enable_save: no effect here; --save_steps says how often a checkpoint is saved"),
    ("--random_span_times 1 --random_span_max_length=-1 --random_span_layer -1", "", ""),
    ("--random_span_layer 3", "", "--random_span_layer: no effect here; only --linear random_span reads it"),
    (
        "--random_span_all --random_span_e2e --random_span_uniform --random_span_draw_both",
        "",
        "--random_span_all, --random_span_e2e, --random_span_uniform, --random_span_draw_both: no effect here; "
        "--stp draws from the whole text",
    ),
    (
        "--linear random_span --random_span_layer -2 --lbd 0.02",
        f"--regular=true --term=stepjepa.objectives.text:SemanticTube --term_args={TUBE}",
        "--linear random_span --lbd 0.02 is --regular --term stepjepa.objectives.text:SemanticTube "
        f"--term_args '{TUBE}'",
    ),
    ("--same_predictor --predictors 1", "--predictors 1", ""),
    ("--avg_encoding --regular", "--regular", ""),
    ("--plain_jepa --regular", "--regular", ""),
    (
        "--unmask_assistant_special_tokens",
        "",
        "--unmask_assistant_special_tokens: no effect here; the end of turn is trained anyway",
    ),
    (
        "--use_default_data_collator",
        "",
        "--use_default_data_collator: no effect here; records have a collator of their own",
    ),
]


@pytest.mark.parametrize(("published", "ours", "said"), TRANSLATED, ids=[row[0] for row in TRANSLATED])
def test_a_flag_of_the_published_training_is_translated(published: str, ours: str, said: str) -> None:
    arguments, notes = translate_train(published.split())
    assert " ".join(arguments) == ours
    assert notes == ([said] if said else [])


def test_the_layer_of_a_span_is_that_of_the_term() -> None:
    given = ["--train_file", "a", "--model_name", "m", "--output_dir", "o"]
    args = parse("train", [*given, "--linear=random_span", "--random_span_layer=-2"])
    term = Objective.from_config(args.run.jepa).terms["stp_loss"]
    assert (term.layers, term.weight) == ((-2,), 0.1)


REFUSED = [
    *("--min_lbd 0.1", "--random_span_times 2", "--random_span_max_length 5", "--random_span_zero"),
    *("--length_adjustment cosine_like", "--random_span_mask", "--random_span_mask_recover", "--load_lp"),
    *("--curvature_sign", "--same_predictor --predictors 2", "--avg_encoding", "--plain_jepa", "--linear mean"),
]


@pytest.mark.parametrize("published", REFUSED)
def test_a_flag_of_the_published_training_without_counterpart_is_refused(published: str) -> None:
    name = published.split(maxsplit=1)[0]
    with pytest.raises(UserError, match=f"^{name}") as caught:
        translate_train(published.split())
    # It names what is nearest, or that the flag is to be left out.
    assert re.search(r"nearest|leave it out", str(caught.value))


EVALUATED = [
    ("--nosplit_data --train_file a --test_size 0.1 --split_seed 7 --process_split both", "", "--nosplit_data"),
    ("--max_length 512 --do_sample --debug 2", "", "--max_length, --do_sample, --debug"),
    ("--repetition_penalty 1.1 --num_beams 1", "", "--repetition_penalty"),
    ("--t_sne_type= --embedding_layer -1 --embedding_pooling last --start_index 1", "", ""),
    ("--test_file a --similarity", "--test_file a --similarity", ""),
]


@pytest.mark.parametrize(("published", "ours", "said"), EVALUATED, ids=[row[0] for row in EVALUATED])
def test_a_flag_of_the_published_evaluation_is_translated(published: str, ours: str, said: str) -> None:
    arguments, notes = translate_evaluate(published.split())
    assert " ".join(arguments) == ours
    assert [note.partition(":")[0] for note in notes][:1] == ([said] if said else [])


NOT_EVALUATED = [
    *("--train_file a", "--test_size 0.1", "--split_seed 7", "--process_split both", "--repetition_penalty 1.3"),
    *("--num_beams 4", "--t_sne", "--t_sne_type paraphrase", "--embedding_layer 3", "--embedding_pooling mean"),
    "--start_index 2",
]


@pytest.mark.parametrize("published", NOT_EVALUATED)
def test_a_flag_of_the_published_evaluation_without_counterpart_is_refused(published: str) -> None:
    with pytest.raises(UserError, match=f"^{published.split(maxsplit=1)[0]}"):
        translate_evaluate(published.split())


def test_published_flags_in_a_file_are_translated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("linear: random_span\nconstant_lr: true\nenable_save: true\n", encoding="utf-8")
    given = ["--train_file", "a", "--model_name", "m", "--output_dir", "o", "--config", "run.yaml", "--lbd", "0.3"]
    run = parse("train", given).run
    assert (run.jepa.mode, run.jepa.stp, run.trainer) == ("regular", 0.3, {"lr_scheduler_type": "constant"})
    assert "--enable_save: no effect" in capsys.readouterr().err


@pytest.mark.parametrize("line", EVALUATION, ids=lambda line: line.document)
def test_an_evaluation_line_means_what_it_did(line: Line) -> None:
    args = parsed(line)
    for name, value in line.expected.items():
        assert getattr(args, name) == value, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for chats and one for plain text, ten sums in three steps, and databases that nobody asks."""
    folder = tmp_path_factory.mktemp("published")
    sums = [
        {"system": "Add.", "user": f"{n}+{n}+1?", "assistant": f"{n}+{n}.\n\nPlus 1.\n\nSo\n#### {2 * n + 1}"}
        for n in range(10)
    ]
    chats = [[{"role": role, "content": text} for role, text in each.items()] for each in sums]
    write_jsonl(folder / "sums.jsonl", [{"messages": chat} for chat in chats])
    (folder / "databases").mkdir()
    text = (folder / "sums.jsonl").read_text(encoding="utf-8")
    for name in ("chat", "plain"):
        tokenizer = train_tokenizer([text], 290)
        if name == "plain":
            add_predictor_tokens(tokenizer, 4)
            add_plain_tokens(tokenizer)
        tokenizer.save_pretrained(folder / name)
        # Room for the 512 new tokens of the published evaluations.
        tiny.make_model("llama", max_position_embeddings=1021).save_pretrained(folder / name)
    return folder


# Replaced in order to run anywhere in a second: paths, the model, lengths of time, and a service on the net.
REPLACED = (
    *("train_file", "eval_file", "model_name", "output_dir", "num_epochs", "learning_rate", "batch_size", "grad_accum"),
    *("wandb", "wandb_project", "max_new_tokens_eval", "eval_accuracy_steps"),
)


def kept(line: Line) -> tuple[str, ...]:
    """The flags of a line that are not replaced, in one form."""
    given = flags_of(line.arguments)
    return tuple(f"--{name}={value}" if value else f"--{name}" for name, value in given.items() if name not in REPLACED)


def once(lines: list[Line]) -> list[Line]:
    """One line of each kind: the others differ by numbers alone, or by what is replaced."""
    first: dict[tuple[object, ...], Line] = {}
    for line in lines:
        same = re.compile(r"--(finetune_seed|lbd|gamma|lora_rank|max_length|debug|jepa_ratio=-1|last_token|no_save)\b")
        key = tuple(
            sorted(re.sub("(predictors)=[1-9]", r"\1=some", flag) for flag in kept(line) if not same.match(flag))
        )
        first.setdefault((*key, "eval_file" in flags_of(line.arguments)), line)
    return list(first.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("line", once(TRAINING), ids=lambda line: line.document)
def test_a_training_line_runs(
    line: Line, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = flags_of(line.arguments)
    flags = [*kept(line), "--train_file", str(folder / "sums.jsonl"), "--model_name", str(folder / "chat")]
    if "eval_file" in given:
        flags += ["--eval_file", str(folder / "sums.jsonl")]
    if "eval_accuracy" in given:
        flags += ["--eval_max_new_tokens", "3", "--eval_steps", "1"]
    # The number of steps of --same_flop is its own.
    flags += ["--num_epochs", "1"] if "same_flop" in given else ["--max_steps", "1", "--save_strategy", "no"]
    flags += ["--output_dir", "run", "--batch_size", "2", "--grad_accum", "1", "--use_cpu"]
    flags += ["--logging_steps", "1"]
    code = main(["train", *flags])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    run = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    assert run["status"] == "finished"
    assert run["results"]["steps"] >= 1
    if "same_flop" in given:
        # The five steps of an epoch without views cost as much as fewer with them.
        assert run["results"]["steps"] < 5
        # There is a checkpoint where the compute of a regular epoch is spent.
        assert [path.name for path in Path("run").glob("checkpoint-*")] == [f"checkpoint-{run['results']['steps']}"]
    if "track_flop" in given:
        assert "FLOP" in printed.out
    for name, value in line.expected.items():
        if name in run["jepa"]:
            assert run["jepa"][name] == value, name
    parts = ["lm_loss"]
    if run["jepa"]["mode"] != "regular" and run["jepa"]["jepa_ratio"] == 1:
        parts.append("jepa_loss")
    if run["jepa"]["stp"]:
        parts.append("stp_loss")
    lines = [json.loads(text) for text in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = {name for one in lines for name in one}
    assert set(parts) <= logged
    if "eval_accuracy" in given:
        assert run["data"]["data"]["eval_split"] == 0.2
        assert any(name.startswith("eval_answer") for name in run["results"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("line", once(EVALUATION), ids=lambda line: line.document)
def test_an_evaluation_line_runs(
    line: Line, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = flags_of(line.arguments)
    replaced = ("model_name", "model_path", "input_file", "test_file", "output_file", "spider_path")
    flags = [f"--{name}={value}" if value else f"--{name}" for name, value in given.items() if name not in replaced]
    model = folder / ("plain" if "plain" in given else "chat")
    flags += ["--model_path", str(model), "--test_file", str(folder / "sums.jsonl"), "--output_file", "eval.jsonl"]
    if "spider_path" in given:
        flags += ["--spider_path", str(folder / "databases")]
    # The published number of new tokens for one record, or three tokens for each.
    count = 1 if "max_new_tokens" in given else 10
    flags += ["--max_examples", "1"] if count == 1 else ["--max_new_tokens", "3"]
    assert main(["evaluate", *flags]) == 0, capsys.readouterr().err
    summary = json.loads(Path("eval.summary.json").read_text(encoding="utf-8"))
    assert summary["task"] == "gsm8k"
    assert len(Path("eval.jsonl").read_text(encoding="utf-8").splitlines()) == count


def rows_of(title: str) -> list[tuple[str, str]]:
    """The published cell and ours of every row of a table of the page."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(row[0], row[1]) for row in rows[1:]]


@pytest.mark.parametrize(
    ("title", "commands", "lines"),
    [
        ("Training", ("train",), [*TRAINING, *TUBE_REFUSED]),
        ("Evaluation", ("evaluate", "analyze"), EVALUATION),
    ],
    ids=["training", "evaluation"],
)
def test_the_page_names_every_published_flag_and_only_flags_of_ours_that_exist(
    title: str, commands: tuple[str, ...], lines: list[Line]
) -> None:
    known = {flag for command in commands for flag in make_parser(command)._option_string_actions}
    if title == "Training":
        known |= {*trainer_flags()}
    rows = rows_of(title)
    ours = {flag for _, cell in rows for flag in re.findall(r"--\w+", cell)}
    assert ours
    assert ours <= known, sorted(ours - known)
    published = {flag for cell, _ in rows for flag in re.findall(r"--\w+", cell)}
    named = {f"--{name}" for line in lines for name in flags_of(line.flags.split())}
    assert named <= published, sorted(named - published)
