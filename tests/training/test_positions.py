"""Records that are too long for the model are refused before the first step, whatever makes them long."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from stepjepa.batch.prepare import prepare
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.training.checks import check_positions

LONG = " ".join(str(number) for number in range(97))


def long_views(record: Record) -> list[tuple[str, str]]:
    """A view far longer than its record, for one record only."""
    return [(LONG if record.line == 2 else "What", "that")]


def many_steps() -> list[Record]:
    """Steps so short that predictor tokens more than double their text."""
    steps = "\n\n".join("a" * 97)
    return [tiny.make_record("", "Spell.", "one\n\ntwo", line=1), tiny.make_record("", "Spell.", steps, line=2)]


@pytest.mark.parametrize("made_by", ["views", "predictors"])
def test_long_records_are_refused_before_the_first_step(made_by: str, trained_tokenizer: Any) -> None:
    """Only the lengths of main texts were looked at, so that the run failed at the step with the record."""
    if made_by == "views":
        config = JepaConfig(max_length=10**4)
        prepared = prepare(tiny.records(), trained_tokenizer, config, views=long_views)
    else:
        config = JepaConfig(mode="step-jepa", layout="inplace", pairs="all", predictors=4, max_length=10**4)
        prepared = prepare(many_steps(), trained_tokenizer, config)
    lengths = prepared.dataset.lengths
    samples = [prepared.dataset[number] for number in range(len(lengths))]
    longest = max(
        len(sequence)
        for sample in samples
        for sequence in tiny.collator(trained_tokenizer, config).sequences(sample)  # type: ignore[arg-type]
    )
    # The bound of earlier versions.
    assert longest > 2 * lengths.max() + len(predictor_ids(trained_tokenizer, config.used_predictors))
    check_positions(tiny.collator(trained_tokenizer, config, positions=longest), prepared, None)
    with pytest.raises(ValueError, match=rf"at most {longest - 1} tokens .*, got {longest} in line 2"):
        check_positions(tiny.collator(trained_tokenizer, config, positions=longest - 1), prepared)
