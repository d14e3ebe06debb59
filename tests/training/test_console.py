"""What a run prints: the first screen, losses and time while it trains, and a last command that works."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import parse
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.run import RunConfig
from stepjepa.running.finished import SHARED_WITH_EVALUATION, finished_json, last_lines, next_command
from stepjepa.running.first_screen import adapter_rate, first_screen, random_weights_rate
from stepjepa.running.metrics_plot import draw_metrics
from stepjepa.store.record import Results, RunRecord
from stepjepa.training.callbacks import LogCallback, console_line
from stepjepa.training.trainer import JepaTrainer


def trainer(tokenizer: Any, folder: Path, jepa: JepaConfig, **arguments: Any) -> JepaTrainer:
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **arguments}
    return JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(folder, **given),
        jepa,
        train_dataset=tiny.records() * 7,
        eval_dataset=tiny.records() if "eval_strategy" in arguments else None,
        processing_class=tokenizer,
    )


def arguments(folder: Path | str, *flags: str) -> RunConfig:
    run: RunConfig = parse(
        "train", ["--train_file", "t.jsonl", "--model_name", "m", "--output_dir", str(folder), *flags]
    ).run
    return run


def test_rows_say_what_was_chosen_and_why(tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(
        tiny_tokenizer, tmp_path, JepaConfig(mode="step-jepa", predictors=3, stp=0.02), eval_strategy="epoch"
    )
    checkpoint = str(tmp_path / "checkpoint-6")
    rows = dict(first_screen(arguments(tmp_path / "run"), made, None, {"resumed from": checkpoint}))
    assert rows["model"].startswith("m (LlamaForCausalLM, float32 on cpu), ")
    message = "mode step-jepa, layout branched, predictors 3, pairs first, stp 0.02, jepa_loss_type cosine, lbd 0.1"
    assert sorted(rows["objective"].split(", ")) == sorted(message.split(", "))
    assert rows["encoding"] == f"tree ({made.encoding_reason})"
    assert rows["data"].endswith(": records 21, turns 21, pairs 14, without a pair 7")
    assert rows["held out"] == "records 3, turns 3, pairs 2, without a pair 1"
    assert rows["each step"].startswith("6 records (2 a batch x 3 accumulated x 1 process), learning rate ")
    assert rows["steps"] == "3, 0.75 epochs of 4 steps"
    assert (rows["output"], rows["resumed from"]) == (str(tmp_path / "run"), checkpoint)
    assert "LM head" not in rows
    regular = trainer(tiny_tokenizer, tmp_path, JepaConfig(mode="regular"))
    assert not {"encoding", "held out"} & set(dict(first_screen(arguments(tmp_path), regular, None, {})))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lora"], "2e-05 is the rate of full fine-tuning; adapters mostly want `learning_rate 2e-4`"),
        (["--lora", "--learning_rate", "2e-4"], None),
        ([], None),
    ],
)
def test_an_adapter_at_the_rate_of_full_fine_tuning_is_noted(flags: list[str], told: str | None) -> None:
    assert adapter_rate(arguments("runs/a", *flags)) == told


@pytest.mark.parametrize("flags", [["--model_name", "preset:tiny"], ["--model_name", "M", "--pretrain"]], ids=str)
def test_random_weights_at_the_rate_of_trained_ones_are_noted(flags: list[str]) -> None:
    told = "2e-05 is the rate of trained weights; random ones mostly want `learning_rate 2e-3`"
    assert random_weights_rate(arguments("runs/a", *flags)) == told
    assert random_weights_rate(arguments("runs/a", *flags, "--learning_rate", "2e-3")) is None
    assert random_weights_rate(arguments("runs/a", "--model_name", "M")) is None


@pytest.mark.parametrize(("name", "kind"), [("minicpm3", "MiniCPM3ForCausalLM"), ("bert", "BertLMHeadModel")])
def test_a_head_that_is_not_given_the_decoders_states_is_said(
    name: str, kind: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    made = JepaTrainer(
        tiny.make_model(name),
        tiny.arguments(tmp_path),
        JepaConfig(mode="regular"),
        train_dataset=tiny.records(),
        processing_class=tiny_tokenizer,
    )
    row = dict(first_screen(arguments(tmp_path / "run"), made, None, {}))["LM head"]
    assert row == (
        f"{kind} changes the decoder's states before its LM head reads them; its own code does so in the LM loss"
    )


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_process_prints(first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = SimpleNamespace(global_step=2, max_steps=9, epoch=1.0, is_world_process_zero=first)
    callback = LogCallback(SimpleNamespace(steps_before=0, began_metrics=False))
    callback.on_log(SimpleNamespace(output_dir=tmp_path), state, None, logs={"lm_loss": 3.0, "loss": 3.5})
    assert capsys.readouterr().out == ("step 2/9  LM loss: 3.0000, Total: 3.5000\n" if first else "")
    assert len(list(tmp_path.iterdir())) == first


def test_logs_that_are_no_losses_have_no_line() -> None:
    assert console_line({"train_runtime": 3.0}) is None
    logs = {"eval_lm_loss": 2.0, "eval_loss": 2.5, "eval_answer_exact": 0.25}
    assert console_line(logs) == "eval  LM loss: 2.0000, Total: 2.5000, exact: 0.250"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"test_file": "TEST.jsonl", "output_file": "runs/a b/test.jsonl", "task": "auto", "max_new_tokens": 256}),
        (
            [
                *("--eval_file", "e", "--eval_generate", "7", "--eval_task", "spider", "--spider_path", "d"),
                *("--missing_databases", "skip", "--eval_max_new_tokens", "11", "--lora", "--load_in_4bit"),
            ],
            {
                "test_file": "e",
                "output_file": "runs/a b/held-out.jsonl",
                "task": "spider",
                "spider_path": "d",
                "max_new_tokens": 11,
                "load_in_4bit": True,
            },
        ),
    ],
)
def test_the_next_command_is_one_that_evaluate_takes(flags: list[str], expected: dict[str, Any]) -> None:
    command = next_command(arguments("runs/a b", *flags))
    assert command[:2] == ["stepjepa", "evaluate"]
    parsed = vars(parse("evaluate", command[2:]))
    assert parsed["model_path"] == "runs/a b"
    assert {name: parsed[name] for name in expected} == expected


def test_a_setting_that_a_run_shares_with_its_evaluation_has_one_default() -> None:
    parsed = vars(parse("evaluate", ["--model_path", "a", "--test_file", "b", "--output_file", "c.jsonl"]))
    assert {name: parsed[name] for name in SHARED_WITH_EVALUATION} == {
        name: getattr(RunConfig(), own) for name, own in SHARED_WITH_EVALUATION.items()
    }


def test_the_last_lines_say_where_everything_is(tmp_path: Path) -> None:
    log, held_out = {"lm_loss": 1.25}, {"eval_lm_loss": 2}
    results = Results(steps=1, tokens=4321.0, train_seconds=187.0, last_log=log, evaluation=held_out)
    record = RunRecord(status="finished", results=results)
    assert last_lines(tmp_path, results)[1] == ("run folder", f"{tmp_path} (the model, run.json, metrics.jsonl)")
    (tmp_path / "metrics.png").touch()
    assert last_lines(tmp_path, results) == [
        ("done", "1 step, 4,321 tokens in 3 min 07 s; LM loss 1.2500; held-out LM loss 2.0000"),
        ("run folder", f"{tmp_path} (the model, run.json, metrics.jsonl, metrics.png)"),
    ]
    result = finished_json(arguments("runs/a b"), record)
    assert result["run_folder"] == "runs/a b"
    assert {"steps": 1, "tokens": 4321.0, "eval_lm_loss": 2}.items() <= result["results"].items()
    assert result["next"][:4] == ["stepjepa", "evaluate", "--model_path", "runs/a b"]


def test_the_plot_of_a_run_has_what_was_logged(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "metrics.jsonl", [{"step": 5, "lm_loss": 4.0, "jepa_loss": None}, {"step": 5, "eval_lm_loss": 3.0}]
    )
    draw_metrics(tmp_path)
    # One panel of four: 3.6 by 3 inches at 120 dots an inch.
    assert matplotlib.image.imread(tmp_path / "metrics.png").shape[:2] == (360, 432)


def test_a_damaged_line_of_metrics_is_not_drawn_and_costs_no_model(tmp_path: Path, capsys: Any) -> None:
    """The model is saved behind the picture."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "lm_loss": 4.0}\n{"step"\n')
    draw_metrics(tmp_path)
    assert (tmp_path / "metrics.png").is_file()
    assert f"note: {tmp_path}/metrics.jsonl:2: not valid JSON" in capsys.readouterr().err


def test_the_plot_of_a_run_has_its_named_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lm_loss", "eval_easy_lm_loss", "eval_$hard$_lm_loss", "eval_easy_loss")
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 5, name: 3.0} for name in names])
    labels = []
    plot = Axes.plot

    def noting(axes: Axes, *args: Any, **more: Any) -> Any:
        labels.append(more["label"])
        return plot(axes, *args, **more)

    monkeypatch.setattr(Axes, "plot", noting)
    draw_metrics(tmp_path)
    assert labels == ["training", "held out: easy", r"held out: \$hard\$"]
    assert matplotlib.image.imread(tmp_path / "metrics.png").shape[:2] == (360, 432)


def test_no_legend_of_the_plot_hides_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cosines = [{"step": n, "matched_similarity": 0.1 * n, "shuffled_similarity": 0.0} for n in (1, 2, 3)]
    write_jsonl(tmp_path / "metrics.jsonl", [line | {"lm_loss": line["step"], "eval_lm_loss": 2.0} for line in cosines])
    drawn = []
    save = Figure.savefig

    def noting(figure: Figure, *args: Any, **more: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", noting)
    draw_metrics(tmp_path)
    (figure,) = drawn
    for axes in figure.axes:
        highest = max(axes.transData.transform(line.get_xydata())[:, 1].max() for line in axes.lines)
        assert axes.get_legend().get_window_extent().y0 > highest
