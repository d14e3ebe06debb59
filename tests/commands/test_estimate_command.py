"""``stepjepa estimate``: the figures of a dry run, and a cluster around them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.cli import main
from stepjepa.compute.communication import Transfer
from stepjepa.compute.devices import DEVICES
from stepjepa.compute.rates import Rates
from stepjepa.compute.work import Work
from stepjepa.files import write_jsonl
from stepjepa.training.activations import Activations
from stepjepa.training.cluster_estimate import Cluster, make_cluster, time_of
from stepjepa.training.estimate import Estimate, Sample
from stepjepa.training.measured_rates import Training, calibrate

RATES = Rates("made up", "float32", 1, products=1e9, attention=1e9, moved=1e9, call=1e-6, overlaps=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": record.messages} for record in tiny.records() * 7])
    return tmp_path / "data.jsonl"


def flags_of(data: Path, *more: object) -> list[str]:
    return ["--model_name", "preset:tiny", "--train_file", str(data), "--step_jepa", *map(str, more)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main([*arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def told(capsys: pytest.CaptureFixture[str], data: Path, *more: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(capsys, "estimate", *flags_of(data, *more), "--json"))
    return found


@pytest.mark.parametrize("processes", [1, 3])
def test_it_says_what_a_dry_run_says(
    processes: int, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated = printed(capsys, "estimate", *flags_of(data, "--gpus", processes)).splitlines()
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    dry = printed(capsys, "train", *flags_of(data, "--output_dir", tmp_path / "run", "--dry_run")).splitlines()
    same = dry[1:-1]
    assert same == estimated[1 : len(same) + 1]
    assert any(line.startswith("compute") for line in same)
    assert estimated[-1] == "time       not known without a speed"
    assert not (tmp_path / "run").exists()


def test_the_parts_add_up_and_a_device_is_asked_whether_it_fits(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, data, "--device", "h200", "--mfu", 0.5, "--grad_accum", 2)
    memory = found["memory"]
    # Gradients are kept between the micro-batches of a step.
    assert memory["peak"] == sum(memory["parts"].values())
    assert {"weights", "gradients", "optimizer states", "activations", "masks"} <= set(memory["parts"])
    assert found["device"]["fits"] is True
    device = DEVICES["h200"]
    assert found["device"]["speed"] == 0.5 * device.peak
    assert found["seconds"]["computing"] == pytest.approx(found["flops"]["step"] / (0.5 * device.peak))
    assert found["seconds"]["run"] == pytest.approx([found["steps"] * s for s in found["seconds"]["step"]])
    assert found["communication"] == {}
    small = told(capsys, data, "--peak_tflops", 1, "--memory_gib", 0.001, "--grad_accum", 2)
    assert small["device"]["fits"] is False
    assert small["device"]["speed_is_bound"] is True


def test_several_processes_send(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, data, "--gpus", 8, "--device", "h100", "--mfu", 0.5, "--interconnect", 2)
    weights = found["memory"]["parts"]["weights"]
    (sent,) = found["communication"].values()
    assert sent == 2 * weights * 7 // 8
    assert found["seconds"]["sending"] == pytest.approx(sent / 2e9)
    words = printed(capsys, "estimate", *flags_of(data, "--gpus", 16, "--device", "h100", "--mfu", 0.5))
    assert "not known between machines of 8: name --interconnect" in words
    assert "sending not counted" in words
    assert "MFU 0.5, an assumption" in words
    bound = printed(capsys, "estimate", *flags_of(data, "--device", "a100"))
    assert "nothing reaches it: name --mfu" in bound
    assert "an epoch: at least" in bound


def test_a_sample_stands_for_a_data_set(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, data, "--records", 100_003, "--batch_size", 3, "--grad_accum", 5, "--num_epochs", 2)
    assert found["steps_per_epoch"] == -(-100_003 // 15)
    assert found["steps"] == 2 * found["steps_per_epoch"]
    assert found["preparation"]["records"] == 21
    assert found["preparation"]["whole"] == 100_003
    # Eight full steps of 15 records, gone through several times: more tokens than a step of the file's end has.
    assert "100,003" in printed(capsys, "estimate", *flags_of(data, "--records", 100_003))


def test_measured_rates_from_a_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RATES.save(tmp_path / "rates.json")
    found = told(capsys, data, "--rates", tmp_path / "rates.json", "--use_cpu")
    assert found["seconds"]["computing"] > 0
    assert found["device"]["speed"] == vars(RATES)
    wrong = main(["estimate", *flags_of(data, "--rates", tmp_path / "rates.json", "--dtype", "bfloat16")])
    assert wrong == 2
    assert "measured in float32, and this run computes in bfloat16" in capsys.readouterr().err


def test_rates_are_measured_and_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(dtype: str) -> Rates:
        asked.append(dtype)
        return replace(RATES, dtype=dtype)

    monkeypatch.setattr("stepjepa.training.measured_rates.measure", measure)
    printed(capsys, "estimate", *flags_of(data, "--measure", tmp_path / "new.json", "--bf16"))
    assert asked == ["bfloat16"]
    assert Rates.load(tmp_path / "new.json").dtype == "bfloat16"


WRONG = [
    (["--gpus", "0"], "--gpus: expected 1 or more"),
    (["--records", "0"], "--records: expected 1 or more"),
    (["--device", "h200", "--mfu", "1.5"], "--mfu: expected a share"),
    (["--mfu", "0.5"], "--mfu is a share of a peak"),
    (["--peak_tflops", "-1"], "--peak_tflops: expected a positive number"),
    (["--memory_gib", "nan"], "--memory_gib: expected a positive number"),
    (["--interconnect", "50"], "--interconnect does nothing with one process"),
    (["--rates", "a.json", "--measure", "b.json"], "leave one out"),
    (["--rates", "a.json", "--device", "h100"], "leave one out"),
    (["--rates", "nowhere.json"], "no such rates file"),
    (["--device", "h2000"], "invalid choice 'h2000'"),
    (["--dry_run"], "--dry_run is what this command does anyway"),
    (["--resume_from_checkpoint", "last"], "nothing to resume"),
    (["--gpu", "8"], "did you mean --gpus"),
    (["--label_smoothing_factor", "0.1"], "label_smoothing_factor: expected 0"),
    (["--fsdp", "true", "--target_grad", "ema"], "target_grad 'ema' keeps a whole second set"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_wrong_flags_are_one_line(flags: list[str], words: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *flags_of(data, *flags)]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1
    assert error.startswith("stepjepa estimate: error: ")


def test_help_is_quick() -> None:
    code = "import sys; from stepjepa.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "estimate", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--interconnect" in done.stdout


# -- by hand -----------------------------------------------------------------------------------------------------------


def an_estimate(**fields: Any) -> Estimate:
    """With those fields alone that time depends on."""
    base: dict[str, Any] = dict.fromkeys(Estimate.__dataclass_fields__)
    return Estimate(**{**base, "processes": 2, "transfers": [], "samples": [], "optimizer": (0, 0), **fields})


def test_all_wait_for_the_longest_rows_of_each_round() -> None:
    # Two processes, two rounds in the first step, one in the second.
    found = an_estimate(micro_flops=[[3.0, 5.0, 7.0, 2.0], [11.0, 1.0]], transfers=[Transfer("x", 60, "")])
    timing = time_of(found, Cluster(2.0, "", link=20.0))
    assert timing is not None
    assert timing.computing == pytest.approx(((5 + 7) + 11) / 2 / 2)
    assert timing.waiting == pytest.approx(((5 + 7) + 11) / ((4 + 4.5) + 6))
    assert timing.sending == 3
    assert (timing.least, timing.most) == (pytest.approx(5.75), pytest.approx(8.75))
    assert time_of(found, Cluster(None, "")) is None


def test_time_from_rates_goes_between_the_samples() -> None:
    def sample(flops: float, products: float) -> Sample:
        return Sample(flops, Activations(0, {}, 0, Work(products=products)))

    rates = replace(RATES, products=1.0, step=0.5)
    found = an_estimate(
        processes=1, micro_flops=[[15.0]], samples=[sample(20.0, 8.0), sample(10.0, 4.0)], optimizer=(0, 0)
    )
    timing = time_of(found, Cluster(rates, ""))
    assert timing is not None
    assert timing.computing == pytest.approx(6.5)


def test_a_line_through_two_trainings() -> None:
    def training(products: float, seconds: float, told: int, held: int | None) -> Training:
        return Training(Work(products=products), (0, 0), seconds, told, held)

    found = calibrate(RATES, [training(1e9, 3.0, 100, 250), training(3e9, 7.0, 300, 550)])
    assert (found.factor, found.step) == (pytest.approx(2), pytest.approx(1))
    assert (found.held, found.held_beside) == (pytest.approx(1.5), pytest.approx(100))
    # A small training that seems to cost nothing is noise.
    noisy = calibrate(RATES, [training(1e9, 0.1, 100, None), training(3e9, 6.0, 300, None)])
    assert (noisy.factor, noisy.step, noisy.held) == (pytest.approx(2), 0, 1)


def test_devices_and_flags_make_a_cluster() -> None:
    def cluster(**flags: Any) -> Cluster:
        base: dict[str, Any] = dict.fromkeys(("device", "peak_tflops", "mfu", "memory_gib", "interconnect"))
        return make_cluster(argparse.Namespace(**{**base, "gpus": 8, **flags}))

    found = cluster(device="h100", peak_tflops=700.0, mfu=0.5, memory_gib=11.0)
    assert found.speed == 350e12
    assert found.memory == 11 * 2**30
    assert found.link == DEVICES["h100"].interconnect
    assert cluster(device="l40s").link is None
    assert cluster(peak_tflops=3.0).memory is None
    assert cluster().speed is None
