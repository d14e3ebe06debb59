"""The benchmark of preparation: the other arm finds the labels that ours sets, and a short run of the whole."""

import importlib
import json
import sys
from pathlib import Path

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.forest import IGNORE
from stepjepa.forests.segments import ForestBuilder

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
preparation = importlib.import_module("bench_preparation")


def test_the_search_finds_the_answer_that_our_labels_teach(tiny_tokenizer):
    records = tiny.records()
    forests = ForestBuilder(tiny_tokenizer, JepaConfig(mode="regular")).build(records)
    for labels, forest in zip(preparation.search(records, tiny_tokenizer, 97), forests, strict=True):
        assert len(labels) == 97
        found = [label for label in labels if label != -100]
        ours = [label for label in forest.shift_labels.tolist() if label != IGNORE]
        # Ours teach the end of the turn too, and what stands behind it does not count.
        assert ours == [*found, tiny_tokenizer.eos_token_id]


def test_a_short_run(tmp_path, capsys):
    output = tmp_path / "result.json"
    args = preparation.parser().parse_args(["--records", "30", "--rounds", "2", "--output", str(output)])
    assert preparation.bench(args) == output
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["records"] == 30
    assert list(result["arms"]) == [preparation.SEARCH, preparation.FIRST, preparation.WRITING, preparation.READING]
    assert result["arms"][preparation.SEARCH]["over_search"]["median"] == 1.0
    # So far apart that no mood of the machine turns it round.
    assert result["arms"][preparation.READING]["over_search"]["low"] > 1
    assert "| ours, second start |" in capsys.readouterr().out
