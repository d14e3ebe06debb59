"""Where the time of a step goes: the sorting, the table, and one real run."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from stepjepa.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
bench_profile = importlib.import_module("bench_profile")
profile_step = importlib.import_module("profile_step")


def test_operations_are_sorted_by_kind():
    operations = [
        ("aten::mm", 3.0, 7),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", 2.0, 5),
        ("aten::mul", 1.0, 11),
        ("aten::_fused_adamw_", 0.5, 2),
        ("Optimizer.step#AdamW.step", 0.25, 2),
        ("MulBackward0", 0.125, 3),
    ]
    kinds = bench_profile.sort_by_kind(operations, 10.0)
    assert kinds == {
        "matrix products": 3.0,
        "attention": 2.0,
        "optimizer": 0.75,
        "element by element": 1.0,
        bench_profile.REST: 3.25,
    }
    assert bench_profile.sort_by_kind(operations, 5.0)[bench_profile.REST] == 0


def test_shares_are_taken_within_a_round():
    def run(seconds):
        return {"seconds": seconds, "kinds": {"matrix products": seconds / 4}}

    suites = {"synth": {"regular": [run(2.0), run(4.0), run(1.0)], "other": [run(3.0), run(4.0), run(2.0)]}}
    lines = profile_step.markdown(suites).splitlines()
    # 150, 100 and 200 hundredths.
    assert lines[2:] == ["| synth | regular | 25 | 100 |", "| synth | other | 38 | 150 |"]


def test_only_what_stands_between_the_markers_is_replaced():
    begin = profile_step.BEGIN.format(file="old.json")
    page = f"before\n{begin}\nold\n{profile_step.END}\nbehind\n"
    assert profile_step.replace_between(page, "new") == "before\nnew\nbehind\n"
    with pytest.raises(UserError, match="has no two markers"):
        profile_step.replace_between("nothing", "new")


def test_the_page_is_what_the_results_give():
    page = profile_step.PAGE.read_text(encoding="utf-8")
    file = re.search(profile_step.BEGIN.replace("{file}", r"(\S+)"), page)[1]
    results = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
    assert profile_step.generated(results, file) in page


def test_a_profile_from_data_to_table(tmp_path, capsys, monkeypatch):
    output = tmp_path / "profile.json"
    words = ["--suite", "gsm8k", "--arm", "step-jepa first, forest", "--train_file", "generated", "--records", "24"]
    words += ["--batch_size", "3", "--warmup", "1", "--steps", "2", "--rounds", "1", "--threads", "1"]
    # TRL need not be there.
    chosen = profile_step.chosen_arms
    monkeypatch.setattr(profile_step, "chosen_arms", lambda *args: [arm for arm in chosen(*args) if not arm.is_trl])
    assert profile_step.main([*words, "--output", str(output)]) == 0
    rounds = json.loads(output.read_text(encoding="utf-8"))["suites"]["gsm8k"]
    assert set(rounds) == {"regular", "step-jepa first, forest"}
    for (run,) in rounds.values():
        assert run["seconds"] == pytest.approx(sum(run["kinds"].values()))
        assert all(run["kinds"][kind] > 0 for kind in ("matrix products", "attention", "element by element"))
        assert run["operations"][0]["share"] >= run["operations"][-1]["share"] > 0
    assert "| gsm8k | regular |" in capsys.readouterr().out
