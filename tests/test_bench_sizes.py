"""Scaling and GPU measurements, at toy sizes on the CPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
bench_gpu = importlib.import_module("bench_gpu")
forests = importlib.import_module("bench_forests")
gpu = importlib.import_module("gpu")
scaling = importlib.import_module("scaling")

SHAPE = forests.Shape(length=41, steps=4, vocabulary=389)


@pytest.mark.parametrize(
    ("fields", "segments", "tokens"),
    [
        # The question is 20 tokens, the answer 21: steps of 5, 5, 5 and 6.
        ({"mode": "regular"}, 1, 41),
        ({"mode": "llm-jepa", "layout": "separate"}, 3, 41 + 20 + 1 + 21),
        ({"mode": "llm-jepa", "layout": "branched"}, 3, 41 + 1 + 21),
        ({"mode": "step-jepa"}, 3, 41 + 2 + 5),
        ({"mode": "step-jepa", "pairs": "all"}, 7, 41 + 3 * 2 + 5 + 5 + 6),
        ({"mode": "step-jepa", "layout": "inplace"}, 4, 41 + 2),
    ],
)
def test_made_up_forests_have_the_size_that_is_asked_for(fields, segments, tokens):
    made = forests.make_forests(JepaConfig(**fields), SHAPE, 3, 7)
    assert {(len(forest), len(forest.segments)) for forest in made} == {(tokens, segments)}
    assert {forest.text_length for forest in made} == {41}
    assert {int((forest.shift_labels != IGNORE).sum()) for forest in made} == {21}
    plain = forests.make_forests(JepaConfig(mode="regular"), SHAPE, 3, 7)
    for forest, other in zip(made, plain, strict=True):
        assert forest.without_views().input_ids.tolist() == other.input_ids.tolist()


def test_steps_need_room():
    with pytest.raises(ValueError, match="4 or more tokens for each of 11 steps, got 41"):
        forests.Shape(41, 11, 389)


def test_curves_of_every_kind(tmp_path):
    sizes = ["--lengths", "32", "--batches", "1", "--vocabularies", "500", "--step_counts", "2", "16"]
    sizes += ["--data_sizes", "5", "--process_counts", "1", "--length", "48", "--batch_size", "2"]
    words = [*sizes, "--arm", "step-jepa first", "--seconds", "0.01", "--threads", "1"]
    output = tmp_path / "result.json"
    assert scaling.scale(scaling.parser().parse_args([*words, "--output", str(output)])) == output
    curves = json.loads(output.read_text(encoding="utf-8"))["curves"]
    assert list(curves) == [what for _, _, what in scaling.CURVES.values()]
    # Sixteen steps of four tokens do not fit into 48.
    assert curves["steps of a record"]["points"]["step-jepa first"][1] is None
    for curve in curves.values():
        point = curve["points"]["step-jepa first"][0]
        assert point["seconds_per_record"] > 0
        assert point["peak_mib"] > 0


@pytest.mark.slow
def test_two_processes_share_the_records(tmp_path):
    words = ["--curve", "process_counts", "--process_counts", "2", "--length", "32", "--batch_size", "1"]
    words += ["--arm", "regular", "--seconds", "0.01", "--threads", "2", "--output", str(tmp_path / "result.json")]
    path = scaling.scale(scaling.parser().parse_args(words))
    curve = json.loads(path.read_text(encoding="utf-8"))["curves"]["processes (gloo)"]
    assert curve["points"]["regular"][0]["steps"] >= 1


@pytest.mark.parametrize(("lora", "checkpointing"), [(False, "off"), (True, "on"), (False, "selective")])
def test_every_gpu_arm_runs_on_the_cpu(lora, checkpointing):
    task = {"model": "qwen2.5-1.5b", "tiny": True, "lora": lora, "checkpointing": checkpointing}
    task |= {"length": 48, "steps": 4}
    chosen = [name for name in bench_gpu.ARMS if bench_gpu.FLASH not in name]
    task |= {"tokens": 96, "arms": chosen, "device": "cpu", "seconds": 0.0, "ceiling": 1e9}
    points = bench_gpu.measure_length(task)["points"]
    assert list(points) == chosen
    for name, point in points.items():
        assert not isinstance(point, str), f"{name}: {point}"
        assert (point["records"], point["steps"]) == (2, bench_gpu.FEWEST)
        assert point["mfu"] > 0
    assert points["published two rows, dense mask"]["row_length"] == 64
    assert points["llm-jepa separate, forest, sdpa dense mask"]["row_length"] == 48 + 24 + 1 + 24


def test_the_gpu_table_says_why_a_point_is_missing():
    ceiling = {"device": "cpu", "flops_per_second": 2.5e12}
    names = {"model": "llama-3.2-1b", "training": "full", "checkpointing": "on", "length": 512}
    figures = {"main_tokens_per_second": 1000.4, "tokens_per_second": 1500.0, "mfu": 0.456, "peak_mib": 789.0}
    points = [names | {"arm": "a"} | figures, names | {"arm": "b", "none": "out of memory"}]
    lines = gpu.table({"ceiling": ceiling, "points": points}).splitlines()
    assert lines[0] == "cpu: 2.5 TFLOP/s in a bfloat16 product"
    assert lines[-2] == "| llama-3.2-1b | full | on | 512 | a | 1000 | 1500 | 45.6 % | 789 |"
    assert lines[-1] == "| llama-3.2-1b | full | on | 512 | b | out of memory | – | – | – |"


def test_an_arm_that_does_not_exist_is_an_error():
    with pytest.raises(UserError, match="no arm has one of flex"):
        gpu._arms(["flex"])
