"""The benchmark: its figures on made-up rounds, its arms, its records, its processes, and short runs of its arms."""

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from stepjepa.config import JepaConfig
from stepjepa.data.records import parse_record
from stepjepa.errors import UserError
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.models.presets import train_tokenizer
from stepjepa.objectives.objective import Objective
from stepjepa.text.predictors import add_predictor_tokens

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench")
arms = importlib.import_module("bench_arms")
data = importlib.import_module("bench_data")
process = importlib.import_module("bench_process")
published = importlib.import_module("bench_published")
table = importlib.import_module("bench_table")
training = importlib.import_module("bench_training")

ARMS = [
    arms.Arm("trl a"),
    arms.Arm("trl b", micro_batch=3),
    arms.Arm("regular", {"mode": "regular"}),
    arms.Arm("views", {"mode": "llm-jepa"}),
]


def made_up_round(trl_a, trl_b, regular, views):
    speeds = {"trl a": trl_a, "trl b": trl_b, "regular": regular, "views": views}
    results = {
        name: {
            "examples_per_second": float(speed),
            "peak_mib": 100.0 + speed,
            "baseline_mib": 70.0,
            "tokens": 300,
            "examples": 30,
        }
        for name, speed in speeds.items()
    }
    results["views"]["token_ratio"] = 1.25
    return results


ROUNDS = [made_up_round(10, 40, 50, 20), made_up_round(30, 20, 60, 40), made_up_round(8, 16, 20, 10)]


def test_speeds_are_medians_with_their_range():
    summary = table.summarise(ROUNDS, ARMS)
    assert list(summary) == ["trl a", "trl b", "regular", "views"]
    assert summary["regular"]["examples_per_second"] == (50, 20, 60)
    assert summary["trl a"]["examples_per_second"] == (10, 8, 30)
    assert summary["views"]["peak_mib"] == (120, 110, 140)
    assert summary["views"]["baseline_mib"] == (70, 70, 70)
    assert summary["views"]["tokens_per_example"] == 10


def test_ratios_are_taken_within_a_round_and_against_the_best_setting_of_trl_there():
    summary = table.summarise(ROUNDS, ARMS)
    # Rounds: 20/50, 40/60, 10/20 and, with TRL's best at 40, 30, 16: 20/40, 40/30, 10/16.
    assert summary["views"]["over_regular"] == pytest.approx((0.5, 0.4, 2 / 3))
    assert summary["views"]["over_trl"] == pytest.approx((0.625, 0.5, 4 / 3))
    assert summary["regular"]["over_regular"] == (1, 1, 1)
    assert summary["trl b"]["over_trl"] == pytest.approx((1, 2 / 3, 1))


def test_time_over_tokens_is_for_arms_with_views():
    summary = table.summarise(ROUNDS, ARMS)
    assert summary["views"]["token_ratio"] == 1.25
    assert summary["views"]["time_over_tokens"] == pytest.approx((2 / 1.25, 1.5 / 1.25, 2.5 / 1.25))
    assert all("time_over_tokens" not in summary[name] for name in ("trl a", "trl b", "regular"))


def test_loss_dropout_and_lora_are_compared_with_their_like():
    views = {"mode": "llm-jepa", "jepa_ratio": 0.25}
    more = [arms.Arm("dropped", views), arms.Arm("regular, lora", {"mode": "regular"}, lora=True)]
    more.append(arms.Arm("views, lora", {"mode": "llm-jepa"}, lora=True))
    made = made_up_round(10, 40, 50, 20)
    for name, speed in (("dropped", 40.0), ("regular, lora", 90.0), ("views, lora", 60.0)):
        made[name] = {**made["views"], "examples_per_second": speed, "token_ratio": 1.2}
    summary = table.summarise([made], [*ARMS, *more])
    assert summary["dropped"]["token_ratio"] == pytest.approx(1.05)
    assert summary["dropped"]["time_over_tokens"].median == pytest.approx(50 / 40 / 1.05)
    assert summary["views, lora"]["time_over_tokens"].median == pytest.approx(90 / 60 / 1.2)


def test_the_table_has_a_row_for_every_arm():
    lines = table.markdown(table.as_json(table.summarise(ROUNDS, ARMS))).splitlines()
    assert len(lines) == 2 + len(ARMS)
    assert len({line.count("|") for line in lines}) == 1
    cells = ["views", "20.0 [10.0, 40.0]", "0.50 [0.40, 0.67]", "0.62 [0.50, 1.33]", "10", "1.25", "1.60 [1.20, 2.00]"]
    assert lines[-1] == f"| {' | '.join([*cells, '120', '70'])} |"
    assert lines[-2].count("–") == 2


def test_no_result_is_overwritten(tmp_path):
    wanted = tmp_path / "2030-01-31-cpu-2.json"
    names = []
    for _ in range(3):
        path = table.free_name(wanted)
        path.write_text("{}", encoding="utf-8")
        names.append(path.name)
    assert names == ["2030-01-31-cpu-2.json", "2030-01-31-cpu-2-2.json", "2030-01-31-cpu-2-3.json"]


# -- arms and options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "small"), [(16, 4), (12, 3), (10, 2), (7, 1), (4, 1), (2, 1), (1, 1)])
def test_a_small_micro_batch_divides_the_batch(batch, small):
    assert arms.small_batch(batch) == small


@pytest.mark.parametrize(("name", "views"), [("synth", 10), ("spider", 4), ("gsm8k", 14), ("vocabulary", 2)])
def test_a_suite_has_every_arm_once(name, views):
    found = arms.make_suite(name).arms(16)
    names = [arm.name for arm in found]
    assert len(set(names)) == len(names)
    assert {"regular", "trl padded 16", "trl grouped 16", "trl padded 4x4"} <= set(names)
    assert sum(arm.has_views for arm in found) == views
    assert all(arms.Arm(**arm.to_dict()) == arm for arm in found)
    assert {arm.reference for arm in found} <= set(names)
    assert all(JepaConfig(**arm.jepa) for arm in found if arm.jepa)


def test_other_data_have_blank_lines_between_steps():
    assert arms.make_suite("gsm8k", "elsewhere/records.jsonl").step_separator == "blank"
    assert arms.make_suite("gsm8k", "elsewhere/records.jsonl", 99, "line").max_length == 99
    assert arms.make_suite("gsm8k", "elsewhere/gsm8k_train.jsonl").step_separator == "line"
    assert arms.make_suite("gsm8k").step_separator == "line"
    assert arms.make_suite("gsm8k", "generated").step_separator == "line"


def test_quick_is_one_short_round_unless_something_else_is_said():
    settle = lambda *words: bench.settle(bench.parser().parse_args(words))  # noqa: E731
    quick, named, whole = settle("--quick"), settle("--quick", "--rounds", "2", "--suite", "gsm8k"), settle()
    assert (quick.suite, quick.rounds, quick.seconds) == (["synth"], 1, 1.0)
    assert (named.suite, named.rounds) == (["gsm8k"], 2)
    assert (whole.suite, whole.rounds, whole.seconds) == (["synth", "spider", "gsm8k", "vocabulary"], 3, 2.5)


def test_chosen_arms_keep_what_they_are_compared_with():
    args = bench.settle(bench.parser().parse_args(["--arm", "branched, lora"]))
    names = [arm.name for arm in bench.chosen_arms(arms.make_suite("synth"), args)]
    assert names == ["trl padded 16", "regular", "regular, lora", "llm-jepa branched, lora"]


def test_missing_trl_is_one_line_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ".[bench]" in error


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["synth", "spider", "gsm8k"])
def test_made_up_records_are_as_long_as_the_real_ones(name):
    records = [parse_record(value) for value in data.made_up(name, 401, 3)]
    assert records == [parse_record(value) for value in data.made_up(name, 401, 3)]
    for place, index in (("user", 0), ("assistant", 1)):
        wanted = sum(lengths[index] for lengths in data.LENGTHS[name]) / len(data.LENGTHS[name])
        texts = [message["content"] for record in records for message in record.messages if message["role"] == place]
        assert sum(map(len, texts)) / len(texts) == pytest.approx(wanted, rel=0.15)
    separator = "\n" if name == "gsm8k" else "\n\n"
    assert max(len(record.answer.split(separator)) for record in records) == (7 if name == "gsm8k" else 1)


def test_a_filled_vocabulary_gives_the_same_tokens_other_ids():
    small = train_tokenizer(["a cat sat on a mat", "a mat sat on a cat"], 290)
    large = data.fill_vocabulary(small, 1009, 5)
    assert len(large) == 1009
    text = large.apply_chat_template([{"role": "user", "content": "a cat, two mats"}], tokenize=False)
    ids = large(text)["input_ids"]
    assert large.convert_ids_to_tokens(ids) == small.convert_ids_to_tokens(small(text)["input_ids"])
    assert max(ids) > len(small)
    assert large.decode(ids) == text
    assert large.pad_token_id != small.pad_token_id
    assert add_predictor_tokens(large, 2) == [1009, 1010]


# -- the stopwatch ----------------------------------------------------------------------------------------------------


def run_stopwatch(monkeypatch, warmup, seconds, step_times, tokens=(7,)):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stopwatch, control = training.Stopwatch(warmup, seconds), SimpleNamespace(should_training_stop=False)
    for number, step_time in enumerate(step_times):
        stopwatch.on_step_begin(None, None, control)
        now += step_time
        stopwatch.count(3, tokens[number % len(tokens)], 7)
        stopwatch.on_step_end(None, None, control)
        if control.should_training_stop:
            break
    return stopwatch


def test_time_is_measured_after_the_warm_up_until_it_is_up(monkeypatch):
    measured = run_stopwatch(monkeypatch, 2, 5.0, [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]).measured()
    assert (measured["steps"], measured["seconds"]) == (3, 6.0)
    assert (measured["examples"], measured["tokens"], measured["text_tokens"]) == (9, 21, 21)


def test_steps_with_views_are_weighed_by_their_share_not_by_chance(monkeypatch):
    # After the warm-up: 3 s without views, 5 s with, 3 s without; each step has 7 tokens of text.
    stopwatch = run_stopwatch(monkeypatch, 1, 10.0, [1.0, 3.0, 5.0, 3.0], tokens=(7, 7, 9, 7))
    assert stopwatch.seconds_per_text_token(0.25) == pytest.approx((0.75 * 3 + 0.25 * 5) / 7)
    assert stopwatch.seconds_per_text_token(1.0) == pytest.approx(11 / 21)


def test_slow_steps_shorten_the_warm_up(monkeypatch):
    assert run_stopwatch(monkeypatch, 4, 5.0, [6.0, 6.0, 6.0]).measured()["steps"] == 1


def test_warm_up_that_leaves_nothing_is_an_error(monkeypatch):
    with pytest.raises(UserError, match="0 steps leave none"):
        training.Stopwatch(2, 1.0).measured()
    with pytest.raises(UserError, match="2 steps leave none"):
        run_stopwatch(monkeypatch, 2, 9.0, [1.0, 1.0]).measured()


def test_examples_and_tokens_of_a_batch():
    ids = torch.tensor([[3, 4, 5], [6, 7, 0]])
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    assert training.batch_size(padded) == (2, 5)
    assert training.batch_size({"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 0]])}) == (2, 3)
    group = {"num_records": torch.tensor([7, 1]), "num_tokens": torch.tensor([11])}
    ours = {"groups": [group, {"num_records": torch.tensor([2, 1]), "num_tokens": torch.tensor([5])}]}
    assert training.batch_size(ours) == (9, 16)
    assert training.batch_size({"num_records": torch.tensor(3), "num_tokens": torch.tensor(13)}) == (3, 13)


# -- the published way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_to", [0, 211])
@pytest.mark.parametrize("rows", ["three rows", "two rows"])
def test_the_published_way_is_layout_separate_with_the_labels_of_the_reference(
    rows, pad_to, tiny_model, trained_tokenizer
):
    records, lbd = tiny.records(), 0.7
    plain, model = tiny_model("llama"), tiny_model("llama")
    texts = published.tokenize(records, trained_tokenizer, 2)
    batch = published.PublishedCollator(trained_tokenizer, rows, pad_to)(texts)
    longest = max(len(text.chat) for text in texts)
    if rows == "two rows":
        longest = max(longest, *(len(text.source) + len(text.target) for text in texts))
    assert batch["input_ids"].shape == (len(records) * (3 if rows == "three rows" else 2), pad_to or longest)
    expected = published.published_loss(plain, batch, lbd)

    config = JepaConfig(labels="reference", predictors=2, last_token=published.LAST_TOKEN, lbd=lbd)
    ours = ForestCollator(0)(ForestBuilder(trained_tokenizer, config).build(records))
    enable_forest(model)
    sums = Objective.from_config(config).sums(forward(model, ours))
    counts = torch.tensor([ours["label_ids"].numel(), ours["source_index"].numel(), 0])
    found = Objective.from_config(config).parts(sums, counts)
    for name, value in zip(("lm_loss", "jepa_loss", "loss"), expected, strict=True):
        assert float(found[name].detach()) == pytest.approx(float(value.detach()), abs=1e-4)
    assert float(expected[1].detach()) > 0.05
    tiny.assert_same_gradients(tiny.gradients(model, found["loss"]), tiny.gradients(plain, expected[2]))


def test_two_rows_do_not_see_each_other():
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    texts = [published.Texts([5, 6, 2, 7], [8, 9, 2, 7], [3, 2, 7])]
    batch = published.PublishedCollator(tokenizer, "two rows", 0)(texts)
    assert batch["input_ids"].tolist() == [[5, 6, 2, 7, 0, 0, 0], [8, 9, 2, 7, 3, 2, 7]]
    assert batch["labels"].tolist() == [[5, 6, -100, 7, -100, -100, -100], [-100] * 7]
    assert (batch["source"].tolist(), batch["target"].tolist()) == ([9], [12])
    assert int(batch["num_tokens"]) == 11
    seen = (batch["attention_mask"][:, 0] == 0).int()
    assert seen[1].tolist()[3] == [1, 1, 1, 1, 0, 0, 0]
    assert seen[1].tolist()[5] == [0, 0, 0, 0, 1, 1, 0]
    assert seen[0].tolist()[2] == [1, 1, 1, 0, 0, 0, 0]
    # A query that sees nothing would be a softmax of nothing.
    assert seen[0].tolist()[6] == [0, 0, 0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match="got 'one row'"):
        published.PublishedCollator(tokenizer, "one row", 0)


# -- processes --------------------------------------------------------------------------------------------------------


def test_arms_run_in_processes_of_their_own():
    inputs = {"suite": "gsm8k", "train_file": "generated", "model": "preset:tiny", "records": 12, "vocabulary": 1500}
    shared = {"max_length": 512, "batch_size": 3, "warmup": 1, "seconds": 0.01, "round": 0}
    step = arms.Arm("step", {"mode": "step-jepa", "step_separator": "line"})
    views = {"mode": "llm-jepa", "layout": "branched"}
    chosen = [step, arms.Arm("lora", views, lora=True), arms.Arm("two rows", published="two rows")]
    with process.Children(1) as children:
        with pytest.raises(UserError, match="0 usable records"):
            children.run({**shared, **inputs, "run": "bench_training:make_inputs", "max_length": 4})
        with pytest.raises(UserError, match="no_such_function"):
            children.run({"run": "bench_training:no_such_function"})
        made = children.run({**shared, **inputs, "run": "bench_training:make_inputs"})
        assert made["records"] == 12
        assert made["parameters"] > 1500 * 128
        for arm in chosen:
            result = children.run({**shared, "run": "bench_training:measure", "arm": arm.to_dict()})
            assert result["examples"] == 3 * result["steps"] > 0
            # The records that were measured are not as long as all are on average, but nearly.
            assert result["examples_per_second"] == pytest.approx(result["examples"] / result["seconds"], rel=0.7)
            assert result["tokens"] > result["text_tokens"] > result["examples"]
            assert result["peak_mib"] >= result["baseline_mib"] > 0
            assert ("token_ratio" in result) == (arm.jepa is not None)
        folder = children.folder
    assert not folder.exists()


def test_a_run_from_end_to_end_with_one_arm(tmp_path, monkeypatch, capsys):
    # Without TRL there is nothing to compare with; here an arm of ours stands in for it.
    monkeypatch.setattr(bench, "check_trl", lambda: None)
    monkeypatch.setattr(bench.importlib.metadata, "version", lambda name: "0")
    plain = arms.Arm("regular", {"mode": "regular"})
    stand_in = {"examples_per_second": 1.0, "peak_mib": 9.0, "baseline_mib": 8.0, "tokens": 5, "examples": 1}
    monkeypatch.setattr(bench, "chosen_arms", lambda suite, args: [arms.Arm("trl padded 16"), plain])
    run = process.Children.run

    def run_ours(self, task, modules=process.OURS):
        return stand_in if modules == process.TRL else run(self, task, modules)

    monkeypatch.setattr(process.Children, "run", run_ours)
    words = ["--quick", "--records", "16", "--seconds", "0.01", "--warmup", "1", "--threads", "1"]
    output = tmp_path / "result.json"
    assert bench.bench(bench.parser().parse_args([*words, "--output", str(output)])) == output
    results = json.loads(output.read_text(encoding="utf-8"))
    assert list(results["suites"]) == ["synth"]
    assert set(results["suites"]["synth"]["summary"]) == {"trl padded 16", "regular"}
    assert "| regular |" in capsys.readouterr().out


def test_evaluation_in_batches_gives_the_answers_of_a_plain_loop(tmp_path, capsys):
    evaluation = importlib.import_module("bench_evaluation")
    output = tmp_path / "result.json"
    settings = ["--steps", "2", "--examples", "5", "--max_new_tokens", "7", "--batch_sizes", "2", "--rounds", "1"]
    args = evaluation.parser().parse_args([*settings, "--threads", "1", "--output", str(output)])
    assert evaluation.bench(args) == output
    arms = json.loads(output.read_text(encoding="utf-8"))["arms"]
    assert list(arms) == ["plain loop", "batch 2, generation alone", "batch 2"]
    assert all(arm["answers_unlike_plain"] == 0 for arm in arms.values())
    assert arms["plain loop"]["over_plain"]["median"] == 1.0
    assert "| batch 2 |" in capsys.readouterr().out
