"""The names of metrics of held-out records."""

import pytest

from stepjepa.store.metric_names import HELD_OUT, UNNAMED, named_metric, set_and_metric

TRAINED = ("loss", "lm_loss", "jepa_loss", "source_rank")


@pytest.mark.parametrize("metric", TRAINED)
@pytest.mark.parametrize("of_set", [UNNAMED, "easy", "two_words"])
def test_a_column_is_split_as_it_was_named(of_set: str, metric: str) -> None:
    assert set_and_metric(HELD_OUT + named_metric(of_set, metric), TRAINED) == (of_set, metric)


def test_the_longest_metric_is_that_of_the_column() -> None:
    assert set_and_metric("eval_easy_lm_loss", TRAINED) == ("easy", "lm_loss")


def test_a_column_without_a_metric_of_training_keeps_its_whole_name() -> None:
    assert set_and_metric("eval_runtime", TRAINED) == (UNNAMED, "runtime")
