"""Scaling and GPU measurements, at toy sizes on the CPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
bench_gpu = importlib.import_module("bench_gpu")
communication = importlib.import_module("bench_communication")
forests = importlib.import_module("bench_forests")
gpu = importlib.import_module("gpu")
gpu_check = importlib.import_module("bench_gpu_check")
points = importlib.import_module("bench_points")
scaling = importlib.import_module("scaling")
scaling_table = importlib.import_module("bench_scaling_table")
Progress = importlib.import_module("bench_process").Progress

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
    sizes += ["--data_sizes", "5", "--length", "48", "--batch_size", "2"]
    alone = [name for name in scaling.CURVES if name not in scaling.PARALLEL]
    words = [*sizes, "--curve", *alone, "--arm", "step-jepa first", "--seconds", "0.01", "--threads", "1"]
    output = tmp_path / "result.json"
    assert scaling.scale(scaling.parser().parse_args([*words, "--output", str(output)])) == (output, [])
    curves = json.loads(output.read_text(encoding="utf-8"))["curves"]
    assert list(curves) == [scaling.CURVES[name][2] for name in alone]
    # Sixteen steps of four tokens do not fit into 48.
    assert curves["steps of a record"]["points"]["step-jepa first"][1] is None
    for curve in curves.values():
        point = curve["points"]["step-jepa first"][0]
        assert point["seconds_per_record"] > 0
        assert point["peak_mib"] > 0


def test_a_failed_point_costs_no_other(tmp_path, monkeypatch, capsys):
    def measured(task, processes, threads):
        if "infonce" in str(task["jepa"]) and processes == 2 and task["run"] == "bench_points:measure_point":
            raise UserError("a run ended with code -6")
        return {"seconds_per_record": 1.0, "peak_mib": 1.0, "communication": {}, "trained_bytes": 1}

    monkeypatch.setattr(scaling.Children, "run_parallel", lambda _, *given: measured(*given))
    monkeypatch.setattr("sys.argv", ["scaling.py", "--curve", "weak", "--output", str(tmp_path / "result.json")])
    assert scaling.main() == 1
    said = capsys.readouterr().err
    assert "failed: a run ended with code -6" in said
    assert "error: 1 points failed: processes, weak scaling 2, llm-jepa branched infonce, ddp" in said
    results = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    (curve,) = results["curves"].values()
    assert [arm for arm, found in curve["points"].items() if None in found] == ["llm-jepa branched infonce, ddp"]
    table = scaling_table.markdown(results)
    assert "llm-jepa branched infonce, fsdp2" in table
    assert "llm-jepa branched infonce, ddp" not in table


def test_processes_must_divide_the_most(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scaling.py", "--curve", "weak", "--weak", "2", "3"])
    assert scaling.main() == 2
    assert "--weak: expected numbers that divide the largest, 3, got 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("curve", "batch"), [("strong", 2), ("weak", 3)])
def test_two_processes_send_what_they_must(tmp_path, curve, batch):
    """Calls and bytes of a step against what follows from the sizes."""
    words = ["--curve", curve, f"--{curve}", "2", "--length", "32", "--batch_size", str(batch), "--vocabulary", "500"]
    words += ["--seconds", "0.01", "--threads", "2", "--output", str(tmp_path / "result.json")]
    path, failed = scaling.scale(scaling.parser().parse_args(words))
    assert not failed
    (measured,) = json.loads(path.read_text(encoding="utf-8"))["curves"].values()
    model, _ = points.make_model({"preset": "preset:tiny", "length": 32, "vocabulary": 500})
    size = sum(parameter.nbytes for parameter in model.parameters())
    blocks = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    # Every record has a pair, and both processes hold as many records.
    rows = 2 * batch * model.config.hidden_size * 4
    for arm, (_, held) in scaling.PARALLEL_ARMS.items():
        (point,) = measured["points"][arm]
        assert point["steps"] >= 1
        assert point["trained_bytes"] == size
        sent = {name: entry["bytes"] for name, entry in point["communication"].items()}
        calls = {name: entry["calls"] for name, entry in point["communication"].items()}
        assert sent.pop("counts, all_reduce") == 3 * 8
        sent.pop("buffers, broadcast", None)
        if "infonce" in arm:
            # How many rows each process has, then the rows; their gradients come back.
            assert sent.pop("embeddings, all_gather") == 2 * 8 + rows
            assert sent.pop("embeddings, all_reduce") == rows
            assert (calls["embeddings, all_gather"], calls["embeddings, all_reduce"]) == (2, 1)
        if held == "ddp":
            assert sent == {"gradients, all_reduce": size}
        else:
            # A block's weights are gathered for each pass; the others' stay.
            assert sent == {"weights, all_gather": size + blocks, "gradients, reduce_scatter": size}
            count = len(model.model.layers)
            assert (calls["weights, all_gather"], calls["gradients, reduce_scatter"]) == (2 * count + 1, count + 1)


def test_collectives_are_counted_by_kind(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with communication.CollectiveCounter() as counter:
            dist.all_reduce(torch.zeros(5))
            dist.all_reduce(torch.zeros(7, dtype=torch.float64))
            dist.all_gather([torch.zeros(3)], torch.zeros(3))
            dist.broadcast(torch.zeros(2), 0)
            torch.zeros(11).sum()
        dist.all_reduce(torch.zeros(13))
    finally:
        dist.destroy_process_group()
    assert counter.found == {
        "gradients, all_reduce": {"calls": 2, "bytes": 5 * 4 + 7 * 8},
        "weights, all_gather": {"calls": 1, "bytes": 3 * 4},
        "buffers, broadcast": {"calls": 1, "bytes": 2 * 4},
    }


@pytest.mark.parametrize(("lora", "checkpointing"), [(False, "off"), (True, "on"), (False, "selective")])
def test_every_gpu_arm_runs_on_the_cpu(lora, checkpointing):
    task = {"model": "qwen2.5-1.5b", "tiny": True, "lora": lora, "checkpointing": checkpointing}
    task |= {"length": 48, "steps": 4}
    chosen = [name for name in bench_gpu.ARMS if bench_gpu.FLASH not in name]
    task |= {"tokens": 96, "arms": chosen, "device": "cpu", "seconds": 0.0, "ceiling": 1e9}
    measured = bench_gpu.measure_length(task)["points"]
    assert list(measured) == chosen
    for name, point in measured.items():
        assert not isinstance(point, str), f"{name}: {point}"
        assert (point["records"], point["steps"]) == (2, bench_gpu.FEWEST)
        assert point["forward_only"] == name.endswith("flex block mask")
        assert point["mfu"] > 0
    assert measured["published two rows, dense mask"]["row_length"] == 64
    assert measured["llm-jepa separate, forest, sdpa dense mask"]["row_length"] == 48 + 24 + 1 + 24


def test_forests_are_checked_before_they_are_timed(monkeypatch):
    checks = gpu_check.check({"device": "cpu"})["checks"]
    assert len(checks) == 3 * 2 * 2
    assert all(one["passed"] for one in checks)
    assert [one["what"] for one in checks if one["gradient"] is None] == [
        one["what"] for one in checks if "flex" in one["what"]
    ]
    # A forest that is not shown who may see whom fails.
    monkeypatch.setattr(gpu_check, "enable_forest", lambda _: None)
    monkeypatch.setattr(gpu_check, "ATTENTIONS", {"sdpa dense mask": "sdpa"})
    assert not any(one["passed"] for one in gpu_check.check({"device": "cpu"})["checks"])


def test_an_arm_that_does_not_exist_is_an_error():
    with pytest.raises(UserError, match="no arm has one of paged"):
        gpu._arms(["paged"])
