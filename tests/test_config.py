"""What a configuration takes, fills in and refuses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from stepjepa.config import CHOICES, LAYOUTS, JepaConfig


@pytest.mark.parametrize(
    ("mode", "layout", "predictors"),
    [("regular", "separate", 0), ("llm-jepa", "separate", 1), ("step-jepa", "branched", 2)],
)
def test_defaults_of_a_mode(mode: Any, layout: str, predictors: int) -> None:
    config = JepaConfig(mode=mode)
    assert (config.layout, config.predictors) == (layout, predictors)
    assert config.uses_views == (mode != "regular")
    assert JepaConfig(**config.to_dict()) == config
    assert set(config.to_dict()) == {field.name for field in fields(JepaConfig)}


@pytest.mark.parametrize("mode", CHOICES["mode"])
@pytest.mark.parametrize("layout", CHOICES["layout"])
def test_layouts_of_a_mode(mode: Any, layout: Any) -> None:
    if layout in LAYOUTS[mode]:
        assert JepaConfig(mode=mode, layout=layout).layout == layout
    else:
        with pytest.raises(ValueError, match=rf"layout '{layout}' does not exist for mode {mode}; choose "):
            JepaConfig(mode=mode, layout=layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "jepa"}, "mode: expected one of regular, llm-jepa, step-jepa, got 'jepa'"),
        ({"layout": "side"}, "layout: expected one of separate, branched, inplace"),
        ({"encoding": "packed"}, "encoding: expected one of auto, forest, rows"),
        ({"labels": "none"}, "labels: expected one of"),
        ({"pairs": "last"}, "pairs: expected one of"),
        ({"over_length": "cut"}, "over_length: expected one of error, truncate, skip"),
        ({"jepa_loss_type": "cos"}, "jepa_loss_type: expected one of cosine, l2, mse, infonce"),
        ({"predictors": -1}, "predictors: expected 0 or more, got -1"),
        ({"last_token": 0}, "last_token: expected a negative number"),
        ({"lbd": -0.1}, "lbd: expected 0 or more, got -0.1"),
        ({"lbd": float("nan")}, "lbd: expected 0 or more, got nan"),
        ({"gamma": -1}, "gamma: expected 0 or more"),
        ({"jepa_ratio": 1.1}, "jepa_ratio: expected a share between 0 and 1"),
        ({"jepa_ratio": float("nan")}, "jepa_ratio: expected a share"),
        ({"infonce_temperature": 0}, "infonce_temperature: expected more than 0"),
        ({"max_length": 1}, "max_length: expected 2 or more"),
        ({"step_separator": ""}, "step_separator: expected"),
        ({"front_pred": True, "predictors": 0}, "front_pred needs predictor tokens.*set predictors to 1 or more"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JepaConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"front_pred": True}, "front_pred contradicts layout 'inplace'.*use layout 'branched'"),
        ({"reverse_pred": True}, "reverse_pred contradicts layout 'inplace'"),
        ({"encoding": "rows"}, "encoding 'rows' can't express layout 'inplace'.*use layout 'branched' or encoding"),
        ({"last_token": -2}, "last_token contradicts layout 'inplace'"),
    ],
)
def test_contradictions_name_both_and_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JepaConfig(mode="step-jepa", layout="inplace", **options)
    JepaConfig(mode="step-jepa", layout="branched", **options)
