"""What trackers receive: TensorBoard by default, others where they are installed and asked for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.cli import main
from stepjepa.files import write_jsonl
from stepjepa.training import inputs
from stepjepa.training import tensorboard as ours

CURVES = ("loss", "lm_loss", "jepa_loss", "matched_similarity", "shuffled_similarity", "source_rank", "target_rank")


def train(tmp_path: Path, run: Path, *flags: str) -> int:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    data = ["--train_file", str(tmp_path / "data.jsonl"), "--eval_file", str(tmp_path / "data.jsonl")]
    fixed = ["--model_name", "preset:tiny", "--use_cpu", "--step_jepa", "--logging_steps", "1", "--eval_steps", "2"]
    return main(["train", *data, *fixed, "--output_dir", str(run), *flags])


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag to step to value, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    shown: dict[str, dict[int, float]] = {}
    for tag in found.Tags()["scalars"]:
        events = found.Scalars(tag)
        once = len({event.step for event in events}) == len(events)
        assert once or tag.partition("/")[2] not in CURVES, f"{tag} has a step twice"
        shown[tag] = {event.step: event.value for event in events}
    return shown


def logged(run: Path) -> dict[str, dict[int, float]]:
    """The same of ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            where, _, rest = name.partition("_")
            tag = f"eval/{rest}" if where == "eval" else f"train/{name}"
            found.setdefault(tag, {})[line["step"]] = value
    return found


def test_a_run_and_its_resumption_are_one_curve(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(tmp_path, run, "--max_steps", "4", "--save_steps", "2") == 0
    whole = scalars(run / ours.FOLDER)
    for name in CURVES:
        for where, steps in (("train", [1, 2, 3, 4]), ("eval", [2, 4])):
            values = whole[f"{where}/{name}"]
            assert sorted(values) == steps, name
            assert values == pytest.approx({step: logged(run)[f"{where}/{name}"][step] for step in steps}, rel=1e-6)
    # As a run that was killed after step 3 leaves it.
    (run / "run.json").write_text(
        json.dumps({**json.loads((run / "run.json").read_text()), "status": "running"}), encoding="utf-8"
    )
    for file in (run / "checkpoint-4").iterdir():
        file.unlink()
    assert train(tmp_path, run, "--max_steps", "4", "--save_steps", "2", "--resume_from_checkpoint", "last") == 0
    assert len(list((run / ours.FOLDER).iterdir())) == 2
    again = scalars(run / ours.FOLDER)
    for name in CURVES:
        assert again[f"train/{name}"] == pytest.approx(whole[f"train/{name}"]), name
        assert sorted(again[f"eval/{name}"]) == [2, 4]


def test_without_its_package_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "has_tensorboard", lambda: False)
    run = tmp_path / "run"
    assert train(tmp_path, run, "--max_steps", "1", "--save_strategy", "no") == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "TensorBoard" in line]
    assert told == [
        "note: no TensorBoard files, since it is not installed (pip install tensorboard); metrics.jsonl has all "
        "curves; --report_to none leaves this line out"
    ]
    assert not (run / ours.FOLDER).exists()


def test_none_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(tmp_path, run, "--max_steps", "1", "--save_strategy", "no", "--report_to", "none") == 0
    assert "TensorBoard" not in capsys.readouterr().err
    assert not (run / ours.FOLDER).exists()


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    assert train(tmp_path, tmp_path / "run", "--max_steps", "1", "--report_to", name) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == (
        f"stepjepa train: error: --report_to {name} requires {name}, which is not installed: pip install {name}"
    )
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, tmp_path / "run", "--max_steps", "1", "--report_to", "paper") == 2
    assert "--report_to paper is unknown; known: " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_mlflow_receives_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    assert (
        train(tmp_path, run, "--max_steps", "2", "--save_strategy", "no", "--report_to", "mlflow", "tensorboard") == 0
    )
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs(["0"])
    for name in CURVES:
        history = {entry.step: entry.value for entry in client.get_metric_history(found.info.run_id, name)}
        assert history == pytest.approx(logged(run)[f"train/{name}"]), name
    assert (run / ours.FOLDER).is_dir()
