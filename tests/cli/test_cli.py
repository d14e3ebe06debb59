"""The command line: quick, one-line errors with exit code 2, nothing written or lost."""

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepjepa
import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import load, make_parser
from stepjepa.cli.main import COMMANDS, main, normalise
from stepjepa.objectives.term import TERMS, Term, term
from stepjepa.running import run as running
from stepjepa.running.metrics_plot import draw_metrics

GOOD = {"messages": [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "One.\n\nTwo."}]}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "good.jsonl", [GOOD] * 5)
    return tmp_path / "good.jsonl"


@pytest.fixture
def base(tmp_path: Path, trained_tokenizer: Any) -> Path:
    tiny.make_model("llama").save_pretrained(tmp_path / "base")
    trained_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail as bad input does; returns its one line of error."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 2, captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("stepjepa")
    assert "error: " in lines[0]
    return lines[0]


LONG = {"messages": [{"role": "user", "content": "word " * 999}, GOOD["messages"][1]]}
BAD_LINES = [
    ("{'a': 1}", "not valid JSON"),
    ('{"text": "x"}', "no 'messages', and none of the columns completion"),
    (json.dumps(LONG), "--over_length truncate or skip"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=[words for _, words in BAD_LINES])
def test_bad_records_name_file_line_and_remedy(line: str, words: str, base: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(GOOD) + "\n\n" + line + "\n", encoding="utf-8")
    run = tmp_path / "run"
    error = error_of(capsys, "train", "--train_file", data, "--model_name", base, "--output_dir", run, "--use_cpu")
    assert f"{data}:3: " in error
    assert words in error
    assert not run.exists()


BAD_FLAGS = [
    (["--predictors", "1.5"], "--predictors: expected a whole number, got '1.5'"),
    (["--num_epochs", "nan"], "--num_epochs: expected a number, got 'nan'"),
    (["--eval_steps", "5"], "does nothing without --eval_file"),
    (["--learning_rate", "-1"], "--learning_rate: expected 0 or more, got -1.0"),
    (["--do_train", "True"], "--do_train: it has no effect here"),
    (["--prediction_loss_only", "True"], "prediction_loss_only: has no effect with this trainer"),
    (["--report_to", "wandb"], "requires wandb"),
    (["--deepspeed", "nowhere.json"], "deepspeed"),
    (["--attn_implementation", "flex_attention"], "FlexAttention has no backward pass on a CPU"),
    (["--label_smoothing_factor", "0.1"], "label_smoothing_factor: not with this trainer, got 0.1; leave it at 0"),
    (["--step_jepa", "--step_separator", "§"], "has a pair"),
    (["--max_length", "7"], "raise --max_length"),
    (["--chat_template", "nowhere.jinja"], "nowhere.jinja: no such chat template"),
    (["--mode", "stepjepa"], "regular, llm-jepa, step-jepa, got 'stepjepa'; did you mean step-jepa?"),
    (["--jepa_loss_type", "InfoNCE"], "got 'InfoNCE'; did you mean infonce?"),
    (["--resume_from_checkpoint", "last"], "no complete checkpoint"),
    (["--train_file", "nowhere.jsonl"], "nowhere.jsonl: no such data file"),
    (["--model_name", "nowhere/at-all"], "can't load a tokenizer from 'nowhere/at-all'"),
    (["--model_name", "preset:huge"], "no preset 'huge'; choose one of preset:tiny"),
    (["--hub_token", "secret"], "set HF_TOKEN in the environment"),
]


@pytest.mark.parametrize(("flags", "words"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_bad_flags_are_answered_with_a_remedy(
    flags: list[str], words: str, base: Path, good: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    given = ["--train_file", good, "--model_name", base, "--output_dir", run, "--use_cpu", *flags]
    assert words in error_of(capsys, "train", *given)
    assert not run.exists()


def test_a_missing_template_is_said_before_the_records_are_read(base: Path, tmp_path: Path, capsys: Any) -> None:
    data, run = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text("no record\n", encoding="utf-8")
    flags = ["--train_file", data, "--model_name", base, "--output_dir", run, "--chat_template", "nowhere.jinja"]
    assert "nowhere.jinja: no such chat template" in error_of(capsys, "train", *flags)


def test_a_folder_that_holds_something_is_left_alone(base: Path, good: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("three years of work")
    error = error_of(capsys, "train", "--train_file", good, "--model_name", base, "--output_dir", run)
    assert f"{run}: is not empty; name another --output_dir, or empty it" in error
    assert [path.name for path in run.iterdir()] == ["thesis.txt"]


def test_the_command_line_wins_over_a_configuration_file(base: Path, good: Path, tmp_path: Path) -> None:
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    flags = "step-jepa: true, predictors: 1, lbd: 0.3, max_steps: 2, learning_rate: 1e-3, save_strategy: no"
    config.write_text(f"{flags}, target_grad: on".replace(", ", "\n"))
    given = ["train", "--train_file", good, "--model_name", base, "--use_cpu", "--config", config, "--output_dir", run]
    assert main([*map(str, given), "--lbd", "0.4", "--max-steps", "1"]) == 0
    record = json.loads((run / "run.json").read_text())
    assert [record["jepa"][name] for name in ("mode", "predictors", "lbd")] == ["step-jepa", 1, 0.4]
    assert (record["results"]["steps"], record["training"]["learning_rate"]) == (1, 1e-3)


def test_what_a_run_leaves(base: Path, good: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(running, "draw_metrics", draw_metrics)
    run = tmp_path / "run"
    arguments = ["train", "--data_file", good, "--eval_split", "0.4", "--model_name", base, "--output_dir", run]
    arguments += ["--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--eval_steps", "1"]
    assert main(list(map(str, arguments))) == 0
    out = capsys.readouterr().out
    assert "LM loss: " in out and ", alignment loss: " in out and ", Total: " in out
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished"
    assert (run / "trained_prompts.json").is_file()
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert record["data"]["data"]["records"] == 5
    assert len(record["data"]["data"]["sha256"]) == 64
    assert record["counts"]["records"] == 3 == record["counts"]["pairs"]
    assert record["versions"]["stepjepa"]
    assert record["results"]["eval_lm_loss"] > 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if "loss" in line)
    assert {"lm_loss", "jepa_loss", "matched_similarity", "shuffled_similarity", "source_rank", "target_rank"} <= set(
        step
    )
    assert {"tokens_per_second", "pairs_per_second", "without_pair_share"} <= set(step)
    # A term of the user's own can take none of the other columns.
    for name in set(step) - set(TERMS):
        with pytest.raises(ValueError, match="expected another name for a term"):
            term(name)(type("Own", (Term,), {}))
    assert not list(run.glob(".*")), "nothing half-written is left"


def test_dashes_and_underscores_are_one() -> None:
    given = ["--batch-size", "4", "--step-separator=a-b", "-x-y", "--- a-b"]
    assert normalise(given) == ["--batch_size", "4", "--step_separator=a-b", "-x-y", "--- a-b"]


def test_a_path_may_begin_with_a_dash() -> None:
    given = ["--output-dir", "-x", "--lbd", "-1", "--terms", "-.5", "-2", "--regular", "-h"]
    assert normalise(given) == ["--output_dir=-x", *given[2:]]


# One process asks for all of them: it would load torch at the first one that needs it.
WITHOUT_TORCH = """
import json, sys, stepjepa
assert "torch" not in sys.modules, "import stepjepa"
from stepjepa.cli.main import main
for arguments in json.loads(sys.argv[1]):
    print(arguments)
    code = main(arguments)
    assert code == 0 and "torch" not in sys.modules, (arguments, code)
"""


def test_import_and_help_need_no_torch() -> None:
    lines = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("\n[")
    assert len(printed) == len(lines)
    assert all("stepjepa" in text.partition("]")[2] for text in printed)


def test_every_name_is_there() -> None:
    assert not [name for name in stepjepa.__all__ if not hasattr(stepjepa, name)]


def test_type_checkers_see_every_name_where_it_is_loaded_from() -> None:
    """``import a as a`` alone is public for ``mypy --strict`` and Pyright, since ``__all__`` is computed."""
    tree = ast.parse(Path(stepjepa.__file__).read_text(encoding="utf-8"))
    statements = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    imported = {each.asname: f"{statement.module}.{each.name}" for statement in statements for each in statement.names}
    assert {name: imported.get(name) for name in stepjepa._HOME} == {
        name: f"stepjepa.{module}.{name}" for name, module in stepjepa._HOME.items()
    }


def test_classes_that_the_python_api_returns_are_part_of_it() -> None:
    """A caller can annotate a variable with the type of a result."""
    public = [getattr(stepjepa, name) for name in stepjepa.__all__]
    functions = [each for each in public if inspect.isfunction(each)]
    for owner in (stepjepa.Jepa, stepjepa.Run, stepjepa.TextIndex):
        members = [each for name, each in vars(owner).items() if name[0] != "_"]
        functions += [each for each in members if inspect.isfunction(each)]
        functions += [each.fget for each in members if isinstance(each, property)]
        functions += [each.func for each in members if isinstance(each, functools.cached_property)]
    returned = {name for each in functions for name in re.findall(r"\w+", str(each.__annotations__["return"]))}
    assert {"RecordCollator", "Comparison", "Losses"} <= returned
    modules = [module for name, module in sys.modules.items() if name.startswith("stepjepa.")]
    values = [item for module in modules for item in vars(module).items()]
    ours = {name for name, each in values if isinstance(each, type) and each.__module__.startswith("stepjepa.")}
    assert (returned & ours).difference(stepjepa.__all__) == set()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_help_is_one_screen_and_help_all_has_every_flag(name: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 50
    common = {f"--{flag}" for flag in load(name).common.split()}
    assert common <= set(text.split())
    if common:
        assert main([name, "--help_all"]) == 0
        text = capsys.readouterr().out
        assert {*make_parser(name)._option_string_actions} <= set(re.findall(r"--?[a-z]\w*", text))
        assert ("--torch_empty_cache_steps" in text) == (name in ("train", "estimate"))


@pytest.mark.parametrize(("columns", "widest"), [(60, 60), (90, 90), (200, 100)])
def test_a_help_text_is_as_wide_as_the_terminal_up_to_100(columns, widest, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["evaluate", "--help_all"]) == 0
    flags = capsys.readouterr().out.partition("example:")[0].splitlines()[1:]
    assert widest - 12 <= max(map(len, flags)) <= widest


def test_help_all_of_a_narrow_terminal_has_the_fields_of_training_arguments(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["train", "--help_all"]) == 0
    text = capsys.readouterr().out
    assert "--torch_empty_cache_steps" in text
    assert (text.count("--offline"), text.count("usage: ")) == (1, 1)


TRAIN = ["train", "--train_file", "t", "--model_name", "preset:tiny", "--output_dir", "run"]

ERRORS = [
    (["xyz"], "unknown command 'xyz'; choose one of prepare, "),
    (["trian"], "unknown command 'trian'; did you mean train?"),
    (["prepare", "stepmaths"], "unknown KIND 'stepmaths'; did you mean stepmath?"),
    (["prepare", "xyz"], "unknown KIND 'xyz'; choose one of "),
    (["train"], "are required: --model_name, --output_dir"),
    (
        ["train", "--overwrite"],
        "unknown argument '--overwrite'; a run folder is never overwritten; name another --output",
    ),
    (["train", "--modle_name", "x"], "unknown argument '--modle_name'; did you mean --model_name?"),
    ([*TRAIN, "--loss=l2"], "unknown argument '--loss=l2'; did you mean --jepa_loss_type?"),
    ([*TRAIN, "--model", "x"], "unknown argument '--model'; did you mean --model_name?"),
    ([*TRAIN, "--test_file", "x"], "'--test_file'; 'stepjepa evaluate --test_file FILE' scores answers of the trained"),
    ([*TRAIN, "--packing"], "'--packing'; leave it out: rows are packed without contamination anyway, see --row_len"),
    ([*TRAIN, "--assistant_only_loss"], "leave it out: the assistant's tokens alone are trained anyway, see --labels"),
    ([*TRAIN, "--xyzzy"], "unknown argument '--xyzzy'; stepjepa train --help_all names all"),
    ([*TRAIN, "--lr", "1e-3"], "unknown argument '--lr'; did you mean --learning_rate?"),
    ([*TRAIN, "--warmup", "5"], "unknown argument '--warmup'; did you mean --warmup_steps "),
    ([*TRAIN, "--LBD", "1"], "unknown argument '--LBD'; did you mean --lbd?"),
    (["help", "trian"], "unknown command 'trian'; did you mean train?"),
    ([*TRAIN, "stray"], "unknown argument 'stray'; "),
    ([*TRAIN, "--pooling", "meam"], "argument --pooling: expected one of last, mean, got 'meam'"),
    (
        [*TRAIN, "--per_device_train_batch_size", "1.5"],
        "argument --batch_size: expected a whole number, got '1.5'",
    ),
    ([*TRAIN, "--save_steps", "x"], "argument --save_steps: expected a number, got 'x'"),
    ([*TRAIN, "--lora", "maybe"], "argument --lora: expected true or false, got 'maybe'"),
    ([*TRAIN, "--term_args", "[]"], "argument --term_args: expected a JSON object in braces, got '[]'"),
    (["prepare"], "are required: KIND"),
    (["prepare", "nl-rx", "--sized", "4", "--output_file", "x"], "unknown argument '--sized'; did you mean --size?"),
    (["evaluate"], "are required: --test_file, --output_file"),
    (
        ["evaluate", "--test_file", "x", "--output_file", "y.jsonl"],
        "name the run to evaluate, or a --server that answers",
    ),
]


def test_help_of_a_command_is_that_of_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in (["help", "search"], ["search", "--help"]):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "--corpus" in texts[0]


@pytest.mark.parametrize(("given", "words"), ERRORS, ids=[" ".join(given) for given, _ in ERRORS])
def test_errors_tell_the_remedy(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(capsys, *given)
