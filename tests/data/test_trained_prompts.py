"""An evaluation knows which of its prompts were trained on."""

from __future__ import annotations

from pathlib import Path

from stepjepa.data.records import Record
from stepjepa.data.trained_prompts import share_trained_on, write_trained_prompts


def record(question: str, system: str = "") -> Record:
    before = [{"role": "system", "content": system}] if system else []
    return Record([*before, {"role": "user", "content": question}, {"role": "assistant", "content": "7"}], 1)


def test_the_share_is_of_prompts_alone(tmp_path: Path) -> None:
    write_trained_prompts(tmp_path, [record("What is 3 + 4?"), record("What is 2 + 5?", system="Answer.")])
    test = [record("What is 3 + 4?", system="Other."), record("what is  2 + 5?"), record("What is 3 + 5?")]
    expected = {"exact": 1 / 3, "normalised": 2 / 3}
    assert share_trained_on(str(tmp_path), test) == expected
    assert share_trained_on(str(tmp_path / "checkpoint-5"), test) == expected
    assert share_trained_on(str(tmp_path / "other"), test) is None
