"""A run's description: four spellings of one thing, values checked by their types, contradictions refused."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stepjepa import JepaConfig, LoraSettings, RunConfig, UserError
from stepjepa.cli.parser import as_arguments
from stepjepa.config.flat_file import read_flat
from stepjepa.config.option import USUAL_NAMES, options_of
from stepjepa.config.run import FLAT, OPTIONS, WRITTEN
from stepjepa.config.trainer import trainer_options
from stepjepa.inspection.analysis import AnalysisSettings
from stepjepa.models.sampling import Sampling
from stepjepa.tasks.stepmath import Difficulty

DATA = {"model_name": "org/model", "train_file": "train.jsonl", "output_dir": "runs/a"}

CONFIGS = [
    RunConfig(**DATA),
    RunConfig(**DATA, jepa=JepaConfig(mode="regular", stp=0.3, gamma=0.5)),
    RunConfig(
        **DATA,
        eval_file="test.jsonl",
        eval_generate=7,
        eval_task="nl-rx",
        lora=LoraSettings(rank=8, alpha=3, targets="q_proj", dora=True),
        load_in_4bit=True,
        jepa=JepaConfig(
            mode="step-jepa",
            step_separator="\n---\n",
            jepa_loss_type="infonce",
            infonce_temperature=0.2,
            last_token=-2,
            target_grad="ema",
            ema_decay=0.5,
            terms=({"term": "a:B", "args": {"weight": 0.1}}, {"term": "c:D", "args": {}}),
        ),
        learning_rate=1e-5,
        trainer={"max_steps": 11, "save_strategy": "no", "lr_scheduler_kwargs": {"power": 2}, "report_to": ["none"]},
    ),
    RunConfig(model_name="m", dataset=["a:b:train", "c"], dataset_weights=[1.5, 2], columns=["q", "a"], output_dir="o"),
    RunConfig(**DATA, resume_from_checkpoint="last", allow_changes=True),
    RunConfig(output_dir="o", objects={"model": {"object": "GPT2LMHeadModel", "sha256": "0a"}}),
]


@pytest.mark.parametrize("settings", [JepaConfig, RunConfig])
def test_help_lists_every_option_with_its_text(settings: Any) -> None:
    text = " ".join(inspect.getdoc(settings).split())
    for each in options_of(settings):
        assert f" {each.name}: {' '.join(each.about['help'].split())}" in text
    assert "Example:" in text and "weight of the alignment loss" in inspect.getdoc(JepaConfig)


@pytest.mark.parametrize(
    ("settings", "wrong", "remedy"),
    [
        (JepaConfig, {"lbdd": 0.5}, "JepaConfig has no argument 'lbdd'; did you mean lbd?"),
        (JepaConfig, {"loss": "l2"}, "'loss'; did you mean jepa_loss_type?"),
        (JepaConfig, {"weight": 1.0}, "'weight'; did you mean prompt_loss_weight?"),
        (RunConfig, {"lr": 1e-3}, "'lr'; did you mean learning_rate?"),
        (JepaConfig, {"step_jepa": True}, "'step_jepa'; pass mode='step-jepa'"),
        (JepaConfig, {"qqq": 1}, "'qqq'; help(JepaConfig) lists all"),
        (
            RunConfig,
            {"peft_config": object()},
            "RunConfig has no argument 'peft_config'; pass lora=LoraSettings(rank=...), or run(config, "
            "model=peft.get_peft_model(model, peft_config))",
        ),
        (RunConfig, {"model": "preset:tiny"}, "RunConfig has no argument 'model'; did you mean model_name?"),
        (RunConfig, {"max_steps": 3}, "'max_steps'; pass trainer={'max_steps': 3}"),
        (RunConfig, {"max_stepps": 3}, "'max_stepps'; did you mean trainer={'max_steps': 3}?"),
        (RunConfig, {"lbd": 0.5}, "'lbd'; pass jepa=JepaConfig(lbd=0.5)"),
        (RunConfig, {"lora_rank": 8}, "'lora_rank'; pass lora=LoraSettings(rank=8)"),
        (RunConfig, {"seed": 8}, "'seed'; pass finetune_seed=8"),
    ],
)
def test_an_unknown_argument_is_answered_by_the_right_one(settings: Any, wrong: dict[str, Any], remedy: str) -> None:
    with pytest.raises(TypeError) as error:
        settings(**wrong)
    assert str(error.value).endswith(remedy)


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_file_is_read_as_the_configuration_that_it_was_written_of(config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml(launch=True), encoding="utf-8")
    assert RunConfig.read(file) == config
    assert RunConfig.from_flat(config.to_flat()) == replace(config, resume_from_checkpoint=None, allow_changes=False)
    # As texts, as flags and YAML's 1e-5 are.
    texts = {name: str(value) if isinstance(value, float | int) else value for name, value in config.to_flat().items()}
    assert RunConfig.from_flat(texts) == RunConfig.from_flat(config.to_flat())


def test_every_field_is_written_under_one_name() -> None:
    nested = {"jepa", "lora", "trainer", "objects"}
    assert {each.name for each in fields(RunConfig)} - nested == {each.name for each in OPTIONS}
    names = [name for each in WRITTEN for name in each.spellings]
    assert len(names) == len({*names})


def test_shortcuts_are_read_and_never_written() -> None:
    config = RunConfig.from_flat({"step_jepa": True, "train_all": "true", "infonce": True})
    assert (config.jepa.mode, config.jepa.labels, config.jepa.jepa_loss_type) == ("step-jepa", "all", "infonce")
    flat = config.to_flat()
    assert (flat["mode"], flat["labels"], flat["jepa_loss_type"]) == ("step-jepa", "all", "infonce")
    assert not flat.keys() & {"step_jepa", "train_all", "infonce"}


def test_a_setting_without_effect_in_published_baselines_is_noted() -> None:
    notes: list[str] = []
    config = RunConfig.from_flat({"regular": True, "predictors": 3, "lbd": 2}, notes.append)
    assert config.jepa == JepaConfig(mode="regular")
    assert notes == ["`regular` has no views, so `predictors`, `lbd` have no effect"]
    notes.clear()
    assert RunConfig.from_flat({"step_separator": "line"}, notes.append) == RunConfig()
    assert notes == ["`step_separator` has no effect without `step_jepa`: the views of llm-jepa are messages"]


def test_numbers_of_yaml_are_read_by_the_type_of_their_field(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lbd: 1e-5\nweight-decay: 1e-2\nlora: 'true'\nlora_rank: '3'\nseed: 5\ntrain_file: 12\n")
    config = RunConfig.read(file)
    assert (config.jepa.lbd, config.trainer, config.finetune_seed) == (1e-5, {"weight_decay": 1e-2}, 5)
    assert (config.lora, config.train_file) == (LoraSettings(rank=3), "12")
    # A name stays as it is written.
    file.write_text("output_dir: 1.10\nrun_name: 2.50\nlbd: 0.50\nweight_decay: 1.0e-1\nmax_grad_norm: .inf\n")
    config = RunConfig.read(file)
    assert (config.output_dir, config.trainer["run_name"], config.jepa.lbd) == ("1.10", "2.50", 0.5)
    assert (config.trainer["weight_decay"], config.trainer["max_grad_norm"]) == (0.1, math.inf)
    file.write_text(config.to_yaml(launch=True))
    assert RunConfig.read(file) == config


@pytest.mark.parametrize(
    "text",
    [
        "007",
        "010",
        "1_000",
        "0x10",
        "0b11",
        "+5",
        "1.10",
        "1e5",
        ".inf",
        "-.INF",
        "2026-11-27",
        "12:30",
        "true",
        "false",
        "yes",
        "No",
        "on",
        "null_",
        "1__0",
    ],
)
def test_a_text_setting_is_the_text_in_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {text}\nrun_name: {text}\ncolumns: [{text}, '{text}']\n")
    config = RunConfig.read(file)
    assert (config.output_dir, config.trainer["run_name"], config.columns) == (text, text, [text, text])
    assert [*as_arguments(read_flat(file))] == [f"--output_dir={text}", f"--run_name={text}", "--columns", text, text]
    file.write_text(config.to_yaml(launch=True))
    assert RunConfig.read(file) == config


def test_a_number_of_a_file_is_that_of_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "batch_size: 010\nseed: 0x10\nmax_length: 1_000\nlbd: 1_0.5\ngamma: 0x10\n"
        "lr_scheduler_kwargs: {a: 007, b: 1.10}"
    )
    config = RunConfig.read(file)
    assert (config.batch_size, config.finetune_seed, config.jepa.max_length, config.jepa.lbd) == (10, 16, 1000, 10.5)
    assert config.jepa.gamma == 16
    assert json.dumps(config.trainer) == '{"lr_scheduler_kwargs": {"a": 7, "b": 1.1}}'
    groups = [(f"{name}: {{a: 1}}", f"'{name}' is a group of Python alone") for name in ("jepa", "lora", "trainer")]
    values = [("batch_size: 12:30", "a whole number, got '12:30'"), ("columns: [a, null]", "is empty .null.")]
    for line, told in (*groups, *values):
        file.write_text(line)
        with pytest.raises(UserError, match=rf"run.yaml:1: .*{told}"):
            RunConfig.read(file)


BAD_FLAT: list[tuple[dict[str, Any], str]] = [
    ({"lora_rank": 3}, "`lora_rank` does nothing without `lora`; add it or leave it out"),
    ({"max_stps": 3}, "unknown setting 'max_stps'; did you mean max_steps?"),
    # Names of Axolotl, LLaMA-Factory, Lightning and TRL.
    ({"base_model": "m"}, "unknown setting 'base_model'; did you mean model_name?"),
    ({"cutoff_len": 9}, "unknown setting 'cutoff_len'; did you mean max_length?"),
    ({"lora_target_modules": ["q"]}, "unknown setting 'lora_target_modules'; did you mean lora_targets?"),
    ({"adapter": "lora"}, "unknown setting 'adapter'; did you mean lora?"),
    ({"layot": "branched"}, "unknown setting 'layot'; did you mean layout?"),
    ({"lbd": "x"}, "lbd: expected a number, got 'x'"),
    ({"lbd": [1]}, "lbd: expected one value, got the list '[1]'"),
    ({"seed": 1, "finetune_seed": 1}, "finetune_seed: is set twice, as `finetune_seed`, too"),
    ({"train_file": "a", "dataset": ["b"]}, "`train_file` and `dataset` exclude each other"),
    ({"infonce": True, "jepa_loss_type": "l2"}, "more than one alignment loss is named (infonce, l2)"),
    ({"regular": True, "mode": "step-jepa"}, "more than one mode is named (regular, step-jepa)"),
    ({"regular": True, "variance": 1}, "`regular` has no views, so `variance` does nothing with it"),
    ({"regular": True, "jepa_loss_type": "cosine"}, "so the alignment loss 'cosine' does nothing"),
    ({"do_train": True}, "do_train: it has no effect here"),
    ({"hub_token": "secret"}, "hub_token: set HF_TOKEN"),
    ({"term": ["a:B"], "term_args": []}, "term_args: expected a JSON object for each `term`"),
    ({"lr_scheduler_kwargs": {"a": {1}}}, "lr_scheduler_kwargs: "),
    ({"save_strategy": "never"}, "save_strategy: expected one of no, steps, epoch, best, got 'never'"),
]


@pytest.mark.parametrize("other", [{"sigreg": 0.1}, {"variance": 1.0}, {"terms": ({"term": "a:B"},)}])
def test_other_losses_of_pairs_have_a_head_and_averages_without_the_alignment_loss(other: dict[str, Any]) -> None:
    config = RunConfig(jepa=JepaConfig(lbd=0.0, predictor_head="mlp", target_grad="ema", **other))
    assert RunConfig.from_flat(config.to_flat()) == config


@pytest.mark.parametrize(("values", "words"), BAD_FLAT, ids=[str(values) for values, _ in BAD_FLAT])
def test_wrong_settings_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        RunConfig.from_flat(values)
    assert words in str(error.value)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"trainer": {"per_device_train_batch_size": 2}}, "'per_device_train_batch_size' is set by `batch_size`"),
    ({"trainer": {"lbd": 2}}, "trainer: 'lbd' is set by `lbd`"),
    ({"trainer": {"max_steps": 1.5}}, "max_steps: expected a whole number, got '1.5'"),
    ({"batch_size": "4"}, "batch_size: expected a whole number, got '4'"),
    ({"batch_size": True}, "batch_size: expected a whole number, got 'True'"),
    ({"columns": "question"}, "columns: expected a list, got 'question'"),
    ({"jepa": JepaConfig(mode="regular", lbd=3.0)}, "mode 'regular' has no views, so `lbd` does nothing"),
    ({"jepa": JepaConfig(ema_decay=0.5)}, "`ema_decay` does nothing without `target_grad ema`"),
    ({"jepa": JepaConfig(step_separator="line")}, "`step_separator` does nothing without `mode step-jepa`"),
    ({"jepa": JepaConfig(lbd=0.0, lbd_schedule="warmup")}, "`lbd 0` trains no alignment loss, so `lbd_schedule` does"),
    ({"jepa": JepaConfig(lbd=0.0, target_grad="ema")}, "`lbd 0` trains no alignment loss, so `target_grad` does"),
    ({"jepa": JepaConfig(lbd=0.0, sigreg=0.1, target_grad="stop")}, "`lbd 0` trains no alignment loss, so `target_g"),
    ({"jepa": JepaConfig(lbd=0.0, predictor_head="mlp")}, "`lbd 0` trains no alignment loss, so `predictor_head` does"),
    ({"jepa": JepaConfig(jepa_ratio=0.0, lbd_schedule="cosine")}, "`jepa_ratio 0` trains no alignment loss, so `lbd_"),
    ({"jepa": JepaConfig(jepa_epochs=0, sigreg=1.0, predictor_head="mlp")}, "`jepa_epochs 0` trains no alignment loss"),
    ({"lora": LoraSettings(), "pretrain": True}, "`lora` needs trained weights"),
    ({"same_flop": True, "trainer": {"max_steps": 5}}, "`same_flop` works out the number of steps"),
    ({"trainer": {"bf16": True, "fp16": True}}, "`bf16` and `fp16` exclude each other"),
    ({"jepa": JepaConfig(plain=True), "chat_template": "x"}, "`plain` and `chat_template` exclude each other"),
    (
        {"train_file": [{}]},
        "train_file: expected a name, got an object (list); pass it as run(config, train_dataset=...)",
    ),
    ({"dataset": [{}]}, "dataset: expected a name, got an object (list); pass it as run(config, train_dataset=...)"),
    ({"eval_file": {}}, "eval_file: expected a name, got an object (dict); pass it as run(config, eval_dataset=...)"),
    ({"eval_file": 0.1}, "eval_file: expected a name, got 0.1; a share is `data_file` and `eval_split`"),
    ({"model_name": 3}, "model_name: expected a name, got an object (int); pass it as run(config, model=...)"),
    ({"output_dir": 3}, "output_dir: expected a text, got '3'"),
    ({"jepa": {"mode": "regular"}}, "jepa: expected JepaConfig(...), got"),
    ({"lora": True}, "lora: expected LoraSettings(...), got 'True'"),
    ({"trainer": 3}, "trainer: expected dict(...), got '3'"),
]


@pytest.mark.parametrize(("values", "words"), BAD_FIELDS, ids=[str(values) for values, _ in BAD_FIELDS])
def test_wrong_fields_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        RunConfig(**values)
    assert words in str(error.value)


def test_a_wrong_line_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lbd: 1\n\nbatch-size: x\n")
    with pytest.raises(UserError, match=r"run\.yaml:3: batch_size: expected a whole number, got 'x'"):
        RunConfig.read(file)
    file.write_text("batch-size: 1\nbatch_size: 1\n")
    with pytest.raises(UserError, match=r"run\.yaml: the key 'batch_size' occurs twice"):
        RunConfig.read(file)


def test_a_run_without_what_it_needs_is_refused_before_it_begins() -> None:
    for values, passed, words in (
        ({}, (), "output_dir: expected a run folder"),
        ({"output_dir": "o"}, (), "model_name: expected"),
        ({"output_dir": "o"}, ("model",), "name the data with one of"),
        ({"output_dir": "o", "eval_steps": 5}, ("train_dataset",), "`eval_steps` does nothing without `eval_file`"),
        ({"output_dir": "o", "objects": {"model": {"object": "X"}}}, (), "pass model= to stepjepa.run again"),
    ):
        with pytest.raises(UserError, match=words):
            RunConfig(**values).check_required(passed)
    RunConfig(output_dir="o", eval_steps=5).check_required(("model", "train_dataset", "eval_dataset"))
    RunConfig(**DATA).check_required()


def test_paths_may_be_path_objects() -> None:
    config = RunConfig(model_name="m", train_file=Path("a") / "b", output_dir=Path("o"))  # type: ignore[arg-type]
    assert (config.train_file, config.output_dir) == ("a/b", "o")
    assert RunConfig(dataset=[Path("a") / "b", "c"]).dataset == ["a/b", "c"]  # type: ignore[list-item]


def test_other_names_of_a_setting_mean_the_same() -> None:
    assert FLAT["per_device_train_batch_size"] is FLAT["batch_size"]
    assert RunConfig.from_flat({"per_device_train_batch_size": 3}).batch_size == 3


def test_messages_of_the_library_name_fields() -> None:
    for make, message in (
        (lambda: LoraSettings(rank=0), "rank: expected 1 or more, got 0"),
        (lambda: Sampling(max_new_tokens=0), "max_new_tokens: expected 1 or more, got 0"),
        (lambda: AnalysisSettings(["a"], "b", "c", batch_size=0), "batch_size: expected 1 or more, got 0"),
        (lambda: Difficulty(min_steps=1), "min_steps: expected 2 or more, got 1"),
    ):
        with pytest.raises(UserError) as caught:
            make()
        assert str(caught.value).startswith(message)


def test_every_usual_name_of_another_tool_leads_to_a_setting() -> None:
    settings = {*FLAT, *trainer_options()}
    assert USUAL_NAMES.keys().isdisjoint(settings) and settings.issuperset(USUAL_NAMES.values())
