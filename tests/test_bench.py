"""The benchmark: its figures on made-up rounds, its arms, its file names, and one short run of an arm of ours."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from stepjepa.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench")
arms = importlib.import_module("bench_arms")
child = importlib.import_module("bench_child")
table = importlib.import_module("bench_table")

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


def test_the_table_has_a_row_for_every_arm():
    lines = table.markdown("a title", table.summarise(ROUNDS, ARMS)).splitlines()
    assert lines[0] == "### a title"
    assert len(lines) == 4 + len(ARMS)
    assert len({line.count("|") for line in lines[2:]}) == 1
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


@pytest.mark.parametrize(("batch", "small"), [(16, 4), (12, 3), (10, 2), (7, 1), (4, 1), (2, 1), (1, 1)])
def test_a_small_micro_batch_divides_the_batch(batch, small):
    assert arms.small_batch(batch) == small


@pytest.mark.parametrize("name", ["llm-jepa", "step-jepa"])
def test_a_suite_has_every_arm_once(name):
    found = arms.make_suite(name).arms(16)
    names = [arm.name for arm in found]
    assert len(set(names)) == len(names)
    assert {"regular", "trl padded 16", "trl grouped 16", "trl padded 4x4", "trl packed"} <= set(names)
    assert sum(arm.has_views for arm in found) == {"llm-jepa": 4, "step-jepa": 2}[name]
    assert all(arms.Arm(**arm.to_dict()) == arm for arm in found)


def test_other_data_have_blank_lines_between_steps():
    assert arms.make_suite("step-jepa", "elsewhere/records.jsonl").step_separator == "blank"
    assert arms.make_suite("step-jepa", "elsewhere/records.jsonl", 99, "line").max_length == 99
    assert arms.make_suite("step-jepa", "elsewhere/gsm8k_train.jsonl").step_separator == "line"


def test_examples_and_tokens_of_a_batch():
    ids = torch.tensor([[3, 4, 5], [6, 7, 0]])
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    assert child.batch_size(padded) == (2, 5)
    assert child.batch_size({"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 0]])}) == (2, 3)
    group = {"num_records": torch.tensor([7, 1]), "num_tokens": torch.tensor([11])}
    ours = {"groups": [group, {"num_records": torch.tensor([2, 1]), "num_tokens": torch.tensor([5])}]}
    assert child.batch_size(ours) == (9, 16)


def test_warm_up_that_leaves_nothing_is_an_error():
    with pytest.raises(UserError, match="0 steps leave none"):
        child.Stopwatch(warmup=2).measured()


def test_missing_trl_is_one_line_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ".[bench]" in error


def test_an_arm_of_ours_runs_in_a_process_of_its_own(tmp_path):
    shared = {"threads": 1, "max_length": 256, "batch_size": 3, "folder": str(tmp_path)}
    inputs = {**shared, "train_file": "generated", "model": "preset:tiny", "records": 12}
    data = child.make_inputs(inputs)
    assert data["records"] == 12
    arm = arms.Arm("step", {"mode": "step-jepa", "max_length": 256, "encoding": "forest"})
    result = bench.run_child({**shared, "arm": arm.to_dict(), "warmup": 1, "round": 0}, tmp_path)
    assert (result["steps"], result["examples"]) == (3, 9)
    assert result["examples_per_second"] == pytest.approx(9 / result["seconds"])
    assert result["token_ratio"] > 1
    assert result["tokens"] > result["examples"]
    assert result["peak_mib"] >= result["baseline_mib"] > 0


def test_what_a_run_complains_about_reaches_the_user(tmp_path):
    task = {"threads": 1, "max_length": 4, "train_file": "generated", "model": "preset:tiny", "records": 2}
    with pytest.raises(UserError, match="0 usable records"):
        bench.run_child(task, tmp_path)


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
