"""lm-evaluation-harness on an exported model, with the task of docs/ecosystem.md and without a network."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.cli import main
from stepjepa.files import write_jsonl
from stepjepa.models.token_rows import give_predictors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ecosystem.md"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed (pip install lm_eval)"
)
def test_it_runs_the_task_of_the_page(plain_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.make_model("llama", vocab_size=len(plain_tokenizer))
    tokenizer = copy.deepcopy(plain_tokenizer)
    give_predictors(model, tokenizer, 2)
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    export = ["export", "--model_path", str(tmp_path / "run"), "--output_dir", str(tmp_path / "plain")]
    assert main([*export, "--strip_predictors"]) == 0
    task = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "sums.yaml").write_text(task, encoding="utf-8")
    sums = [{"question": f"What is 1+{i}?", "choices": [f" {i + 1}", " 0"], "label": 0} for i in range(1, 8)]
    write_jsonl(tmp_path / "sums.jsonl", sums)
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", "pretrained=plain"]
    command += ["--include_path", ".", "--tasks", "sums", "--device", "cpu", "--output_path", "out"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]["sums"]
    assert results["acc,none"] * 7 == pytest.approx(round(results["acc,none"] * 7))
    assert 0 <= results["acc,none"] <= 1
