"""``stepjepa train --dry_run``: nothing is loaded or written, and what it says is what a run then does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, PretrainedConfig

import tiny
from forked import Commands
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import parse
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.sources import read_records
from stepjepa.models import probe
from stepjepa.models.loading import load_model
from stepjepa.running.estimate_text import _scaled, describe
from stepjepa.running.training_arguments import training_arguments
from stepjepa.store.record import read_run
from stepjepa.training import flop_counts
from stepjepa.training.trainer import JepaTrainer

EXAMPLES = Path(__file__).parents[2] / "examples"

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

CONFIGS = sorted(path.name for path in EXAMPLES.glob("*.yaml") if "train_file" in yaml.safe_load(path.read_text()))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": record.messages} for record in tiny.records() * 7])
    return tmp_path / "data.jsonl"


def model_folder(folder: Path, tokenizer: Any, shape: dict[str, Any]) -> Path:
    """A configuration and a tokenizer, and no weights."""
    shape = dict(shape)
    config: PretrainedConfig = AutoConfig.for_model(shape.pop("model_type"), **shape)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_shape(**changes: Any) -> dict[str, Any]:
    family, shape = tiny.ARCHITECTURES["llama"]
    return {"model_type": family, "vocab_size": tiny.VOCABULARY, "tie_word_embeddings": True, **shape, **changes}


def told(capsys: pytest.CaptureFixture[str], *flags: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(printed(capsys, *flags, "--json"))
    return result


def printed(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    code = main(["train", *(str(flag) for flag in flags), "--dry_run"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", [["--regular"], ["--step_jepa", "--pairs", "all"], ["--jepa_ratio", "0.5"]])
def test_it_says_what_a_run_then_does(
    mode: list[str], data: Path, plain_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    tiny.make_model("llama").save_pretrained(base)
    plain_tokenizer.save_pretrained(base)
    flags = ["--train_file", data, "--model_name", base, "--output_dir", tmp_path / "run", "--use_cpu"]
    flags += ["--num_epochs", 1.5, "--batch_size", 3, "--grad_accum", 2, "--save_strategy", "no", *mode]
    cached = ["--cache_dir", tmp_path / "cache"]
    result = told(capsys, *flags)
    assert not (tmp_path / "cache").exists()
    assert told(capsys, *flags, *cached)["step"] == result["step"]
    assert not (tmp_path / "run").exists()
    assert main(["train", *map(str, [*flags, *cached])]) == 0
    # A named cache is prepared for the run.
    assert f"training data as prepared before, from {tmp_path}/cache" in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    assert run["results"]["steps"] == result["steps"] == 6
    assert result["steps_per_epoch"] == 4
    assert run["counts"].items() <= result["data"].items()
    assert f"{run['parameters']['total']:,} parameters, {run['parameters']['trained']:,} trained" in result["model"]
    assert run["encoding"]["used"] == result["encoding"].split()[0]
    assert result["step"]["records"] == "6 records (3 x 2 accumulated x 1 process)"
    assert (result["flops"]["step"] == result["flops"]["regular_step"]) == (mode == ["--regular"])
    assert result["checkpoint"]["kept"] == 0
    capsys.readouterr()
    assert len(printed(capsys, *flags[:4], "--output_dir", tmp_path / "other").strip().splitlines()) <= 20


REENTRANT = ["--gradient_checkpointing", "--gradient_checkpointing_kwargs", '{"use_reentrant": true}']


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], REENTRANT], ids=["", "reentrant"])
def test_its_tokens_are_those_that_the_trainer_runs(
    more: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train_file", data, "--model_name", "preset:tiny", "--output_dir", tmp_path / "run", "--use_cpu"]
    flags += ["--batch_size", 3, "--grad_accum", 2, "--step_jepa", *more]
    result = told(capsys, *flags)
    run = parse("train", [str(flag) for flag in flags]).run
    records = read_records(str(data))
    texts = [message["content"] for record in records for message in record.messages]
    model, tokenizer = load_model("preset:tiny", texts=texts, predictors=2)
    training = training_arguments(run, False)
    trainer = JepaTrainer(model, training, run.jepa, train_dataset=records, processing_class=tokenizer)
    batches = list(trainer.get_train_dataloader())
    tokens = [sum(each.input_ids.numel() for each in batch.passes) for batch in batches]
    steps = [sum(tokens[start : start + 2]) for start in range(0, len(tokens), 2)]
    assert (result["step"]["tokens"], result["step"]["most_tokens"]) == (sum(steps) / len(steps), max(steps))
    # Plain training computes what records have in common once, as this run does.
    plain = JepaTrainer(model, training, JepaConfig(mode="regular"), train_dataset=records, processing_class=tokenizer)
    of_plain = [sum(each.input_ids.numel() for each in batch.passes) for batch in plain.get_train_dataloader()]
    assert result["step"]["plain_tokens"] == sum(of_plain) / len(steps)
    assert result["step"]["text_share"] == sum(batch.num_tokens for batch in batches) / sum(tokens)
    assert result["flops"]["step"] == sum(map(trainer.floating_point_ops, batches)) / len(steps)
    pairs = [sum(batch.pairs for batch in batches[start : start + 2]) for start in range(0, len(batches), 2)]
    counted = {"mean": sum(pairs) / len(pairs), "least": min(pairs), "most": max(pairs)}
    assert {name: count for name, count in result["pairs"].items() if name != "missing"} == counted


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("more", "files"),
    [
        ([], {"model", "optimizer"}),
        (["--target_grad", "ema"], {"model", "optimizer", "ema"}),
        (["--target_grad", "ema", "--save_only_model"], {"model"}),
    ],
)
def test_a_checkpoint_is_as_large_as_it_says(
    more: list[str], files: set[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train_file", data, "--model_name", "preset:tiny", "--output_dir", tmp_path / "run", "--use_cpu"]
    flags += ["--max_steps", 1, "--save_strategy", "steps", "--save_steps", 1, *more]
    estimated = told(capsys, *flags)["checkpoint"]
    assert main(["train", *map(str, flags)]) == 0
    sizes = {file.stem: file.stat().st_size for file in (tmp_path / "run" / "checkpoint-1").iterdir()}
    assert sizes.keys() & {"model", "optimizer", "ema"} == files
    assert estimated["bytes"] == pytest.approx(sum(sizes[name] for name in files), rel=0.01)
    assert estimated["kept"] == 1


@pytest.mark.slow
def test_pairs_of_a_step_are_counted(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train_file", data, "--model_name", "preset:tiny", "--output_dir", tmp_path / "run", "--use_cpu"]
    flags += ["--batch_size", 3, "--grad_accum", 1]
    # Two steps without views of five, and three records a step.
    result = told(capsys, *flags, "--jepa_ratio", 0.5)
    assert result["pairs"]["least"] == 0 < result["pairs"]["most"] == 3
    text = dict(describe(result))["pairs"]
    assert text == f"{result['pairs']['mean']:.3g} a step on average, 0 at least, 3 at most"
    described = describe({**result, "pairs": {**result["pairs"], "missing": "2 of 9 records: no answer"}})
    assert dict(described)["pairs"] == f"{text}; 2 of 9 records: no answer"
    regular = told(capsys, *flags, "--regular")
    assert regular["pairs"] is None and "pairs" not in dict(describe(regular))


def test_figures_are_shown_with_units_and_three_digits(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train_file", data, "--model_name", "preset:tiny", "--output_dir", tmp_path / "run", "--use_cpu"]
    estimated = told(capsys, *flags)
    rows = dict(describe(estimated))
    assert re.fullmatch(r"step [\d.]+ [MG]FLOP, regular step [\d.]+ [MG]FLOP", rows["FLOPs"])
    assert re.search(r", sum [\d.]+ MiB$", rows["memory of a process"])
    assert re.fullmatch(r"[\d.]+ MiB each, \d+ kept, [\d.]+ [GT]iB free", rows["checkpoints"])
    assert f"{100 * estimated['step']['text_share']:.1f}% of them are text, the rest padding" in rows["step"]
    # Counters that are zero are left out; JSON has them.
    assert estimated["data"]["over length"] == 0 and "over length" not in rows["data"]
    assert not re.search(r"\d\.\d{4}|e[+-]\d", "".join(rows.values()))


@pytest.mark.parametrize(
    ("value", "base", "prefixes", "shown"),
    [
        (14.26e9, 1000, ("", "k", "M", "G"), "14.3 G"),
        (999_600, 1000, ("", "k", "M"), "1.00 M"),
        (17, 1024, ("B", "KiB"), "17 B"),
        (5 * 2**20, 1024, ("B", "KiB", "MiB"), "5.00 MiB"),
        (123_456, 1000, ("µ", "m", ""), "123 m"),
        (1e9, 1000, ("", "k"), "1000000 k"),
    ],
)
def test_numbers_are_scaled(value: float, base: int, prefixes: tuple[str, ...], shown: str) -> None:
    assert _scaled(value, base, prefixes) == shown


# The product over experts has shapes in bfloat16 alone, and needs widths of whole 16 bytes.
MOE = {"hidden_size": 40, "moe_intermediate_size": 56}


@pytest.mark.slow
def test_a_model_that_has_no_shapes_alone_is_still_described(
    trained_tokenizer: Any,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, shape = tiny.ARCHITECTURES["qwen3_moe"]
    shape = {"model_type": family, "vocab_size": tiny.VOCABULARY, **shape, **MOE}
    folder = model_folder(tmp_path / "base", trained_tokenizer, shape)
    flags = ["--train_file", data, "--model_name", folder, "--output_dir", tmp_path / "run"]
    # A small one is run on zeros.
    assert "FLOPs: step not known, " not in printed(capsys, *flags)
    monkeypatch.setattr(flop_counts, "_SMALL", 0)
    message = printed(capsys, *flags)
    assert "FLOPs: step not known, " in message
    assert "activations not known, " in message
    assert "FLOPs: step not known" not in printed(capsys, *flags, "--dtype", "bfloat16")


@pytest.mark.slow
def test_nothing_of_an_8b_model_is_made(trained_tokenizer: Any, data: Path, tmp_path: Path, commands: Commands) -> None:
    folder = model_folder(tmp_path / "8b", trained_tokenizer, LLAMA_8B)
    flags = ["train", "--train_file", data, "--model_name", folder, "--output_dir", tmp_path / "run"]
    flags += ["--dtype", "bfloat16", "--bf16", "--step_jepa", "--dry_run"]
    log = tmp_path / "log"
    code, output = commands.run(flags, log, folder=tmp_path), log.read_text(encoding="utf-8")
    assert code == 0, output[-3000:]
    # The published model's own count: its vocabulary has room for the predictor tokens here.
    assert "8,030,261,248 parameters, 8,030,261,248 trained, torch.bfloat16" in output
    result = re.search(r"^changes 0, peak (\d+) KiB, seconds ([\d.]+)$", output, re.MULTILINE)
    assert result is not None
    assert int(result[1]) < 3 * 2**20, "kilobytes"
    assert float(result[2]) < 60
    assert not (tmp_path / "run").exists()
    assert len(list(folder.iterdir())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_example_configurations(
    name: str,
    plain_tokenizer: Any,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(probe, "_findings", {})  # what an earlier test found
    folder = model_folder(tmp_path / "base", plain_tokenizer, tiny_shape())
    processes = 8 if "8xh200" in name else 1
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    flags = ["--config", EXAMPLES / name, "--train_file", data, "--eval_file", data, "--model_name", folder]
    message = printed(capsys, *flags, "--output_dir", tmp_path / "run")
    assert "error" not in message
    assert "not known" not in message
    assert f"x {processes} process" in message
    # An adapter is added while the model is built on the meta device, where the architecture could not be probed.
    assert "encoding: tree" in message
    assert f"--config examples/{name}" in (EXAMPLES / name).read_text(), "the command is told in the file"


WRONG = [
    (["--layout", "inplace", "--step_jepa", "--max_length", "7"], "--max_length"),
    (["--label_smoothing_factor", "0.1"], "label_smoothing_factor: not with this trainer, got 0.1; leave it at 0"),
    (["--deepspeed", "[1]"], "--deepspeed: can't be read"),
    (["--deepspeed", '{"zero_optimization": {"stage": 3}}', "--target_grad", "ema"], "which can't be sharded"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_a_run_would_refuse(
    flags: list[str], words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--train_file", data, "--model_name", "preset:tiny", "--output_dir", tmp_path / "run", *flags]
    assert main(["train", *map(str, named), "--dry_run"]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1


def test_deepspeed_is_read_without_its_package(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    flags = ["--train_file", data, "--model_name", "preset:tiny", "--output_dir", tmp_path / "run"]
    plain, zero = told(capsys, *flags), told(capsys, *flags, "--deepspeed", tmp_path / "zero.json")
    for name, share in (("weights", 1), ("optimizer states", 4)):
        assert zero["memory"]["parts"][name] == round(plain["memory"]["parts"][name] / share)
