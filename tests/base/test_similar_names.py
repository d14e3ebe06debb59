"""Which known names a mistyped one may mean."""

import pytest

from stepjepa.base.similar_names import did_you_mean, similar_names

NAMES = ("batch_size", "eval_batch_size", "lbd", "lbd_schedule", "lbd_warmup", "llm-jepa", "step-jepa", "temperature")


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("LBD", ["lbd"]),
        ("llm_jepa", ["llm-jepa"]),
        ("batch", ["batch_size"]),
        ("jepa", ["llm-jepa", "step-jepa"]),
        ("temp", ["temperature"]),
        ("lbdd", ["lbd"]),
        ("stepjepa", ["step-jepa"]),
        ("size", ["batch_size", "eval_batch_size"]),
        ("", []),
        ("-", []),
        ("zzz", []),
    ],
)
def test_what_may_be_meant(typed: str, near: list[str]) -> None:
    assert similar_names(typed, NAMES) == near
    assert did_you_mean(typed, NAMES) == (f"; did you mean {' or '.join(near)}?" if near else "")


def test_of_many_names_three_are_shown() -> None:
    assert similar_names("a", [f"a_{number}" for number in range(7)]) == ["a_0", "a_1", "a_2"]
