"""What a configuration takes, fills in and refuses."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import yaml

from stepjepa.config.jepa import CHOICES, JepaConfig, affecting
from stepjepa.config.lora import LoraSettings
from stepjepa.config.run import RunConfig
from stepjepa.views.layouts import LAYOUTS, Layout


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
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_a_mode(mode: Any, name: str) -> None:
    if mode in LAYOUTS[name].modes:
        assert JepaConfig(mode=mode, layout=name).layout == name
    else:
        with pytest.raises(ValueError, match=rf"layout '{name}' does not exist for mode {mode}; choose "):
            JepaConfig(mode=mode, layout=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "jepa"},
            "mode: expected one of regular, llm-jepa, step-jepa, got 'jepa'; did you mean llm-jepa or step-jepa?",
        ),
        ({"mode": "llm_jepa"}, "got 'llm_jepa'; did you mean llm-jepa?"),
        ({"layout": "inplace"}, "for mode llm-jepa; choose separate or branched; it is a layout of step-jepa"),
        ({"layout": "seperate"}, "choose separate or branched; did you mean separate?"),
        ({"layout": "side"}, "layout 'side' does not exist for mode llm-jepa; choose separate or branched"),
        ({"predictors": -1}, "predictors: expected 0 or more, got -1"),
        ({"last_token": 0}, "last_token: expected a negative number"),
        ({"lbd": float("nan")}, "lbd: expected 0 or more, got nan"),
        ({"jepa_ratio": 1.1}, "jepa_ratio: expected a share between 0 and 1"),
        ({"step_separator": ""}, "step_separator: expected"),
        ({"step_separator": "\\newline"}, "step_separator: backslash and n stand for a line end in flags and files"),
        ({"front_pred": True, "predictors": 0}, "front_pred needs predictor tokens; set predictors to 1 or more"),
        ({"terms": ("a:B",)}, "terms: expected {'term': 'module:Class', 'args': {...}} for each, got 'a:B'"),
        ({"terms": ({"args": {}},)}, "terms: expected {'term': 'module:Class', 'args': {...}} for each, got"),
        ({"terms": ({"term": "a:B", "weight": 0.1},)}, "for each, got '{'term': 'a:B', 'weight': 0.1}'"),
        ({"terms": ({"term": "a:B", "args": [0.1]},)}, "for each, got '{'term': 'a:B', 'args': [0.1]}'"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        JepaConfig(**options)


def test_a_term_needs_no_arguments() -> None:
    assert JepaConfig(terms=({"term": "a:B"},)) == JepaConfig(terms=({"term": "a:B", "args": {}},))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"front_pred": True}, "front_pred contradicts layout 'inplace'.*use layout 'branched'"),
        ({"reverse_pred": True}, "reverse_pred contradicts layout 'inplace'"),
        ({"encoding": "rows"}, "encoding 'rows' can't express layout 'inplace'; use encoding 'tree'"),
        ({"last_token": -2}, "last_token contradicts layout 'inplace'"),
    ],
)
def test_contradictions_name_both_and_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JepaConfig(mode="step-jepa", layout="inplace", **options)
    JepaConfig(mode="step-jepa", layout="branched", **options)


def test_a_layout_of_a_user_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "two_answers", Layout("two_answers", ("llm-jepa",), place=LAYOUTS["separate"].place))
    own = Layout("into_the_text", ("step-jepa",), changes_text=True, place=LAYOUTS["inplace"].place)
    monkeypatch.setitem(LAYOUTS, own.name, own)
    assert JepaConfig(layout="two_answers").layout == "two_answers"
    assert JepaConfig().layout == "separate"
    with pytest.raises(ValueError, match="layout 'two_answers' does not exist for mode step-jepa"):
        JepaConfig(mode="step-jepa", layout="two_answers")
    with pytest.raises(ValueError, match="encoding 'rows' can't express layout 'into_the_text'"):
        JepaConfig(mode="step-jepa", layout="into_the_text", encoding="rows")


def test_the_old_word_for_trees_is_understood() -> None:
    assert JepaConfig(encoding="forest").encoding == "tree"  # type: ignore[arg-type]


def test_what_a_field_affects() -> None:
    config = JepaConfig(lbd=0.7, encoding="rows", layout="branched")
    parts = {name: affecting(config, name) for name in ("sequences", "encoding", "objective")}
    assert parts["sequences"]["layout"] == "branched"
    assert parts["encoding"] == {"encoding": "rows", "row_length": None, "share_prefixes": True}
    assert parts["objective"]["lbd"] == 0.7
    assert parts["sequences"] | parts["encoding"] | parts["objective"] == config.to_dict()
    assert sum(map(len, parts.values())) == len(config.to_dict())


def test_none_is_refused_where_a_value_is_needed() -> None:
    """It was taken, and failed somewhere inside or later."""
    for values, message in [
        ({"mode": None}, "mode: expected one of regular, llm-jepa, step-jepa, got None"),
        ({"lbd": None}, "lbd: expected a number, got None"),
        ({"max_length": None}, "max_length: expected a whole number, got None"),
        ({"terms": None}, "terms: expected a list, got None"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}$"):
            JepaConfig(**values)  # type: ignore[arg-type]
    assert JepaConfig(predictors=None, jepa_epochs=None).predictors == 1


def test_numbers_of_numpy_become_those_of_python() -> None:
    """They could not be written to the file of a run."""
    config = JepaConfig(predictors=np.int64(3), lbd=np.float32(0.3), jepa_ratio=np.float64(0.5))  # type: ignore[arg-type]
    assert [type(value) for value in (config.predictors, config.lbd, config.jepa_ratio)] == [int, float, float]
    assert config == JepaConfig(predictors=3, lbd=0.3, jepa_ratio=0.5)
    run = RunConfig(batch_size=np.int64(7), learning_rate=np.float64(1e-3), jepa=config)  # type: ignore[arg-type]
    assert RunConfig.from_flat(yaml.safe_load(run.to_yaml())) == run


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("r", 8, "pass rank=8"),
        ("lora_alpha", 16, "pass alpha=16"),
        ("target_modules", ["q_proj", "v_proj"], "pass targets='q_proj,v_proj'"),
        ("use_dora", True, "pass dora=True"),
        ("rnak", 8, r"did you mean rank\?"),
    ],
)
def test_names_of_peft_are_answered_by_ours(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"^LoraSettings has no argument '{name}'; {remedy}$"):
        LoraSettings(**{name: value})


def test_layers_of_an_adapter_may_be_a_list() -> None:
    assert LoraSettings(targets=["q_proj", "v_proj"]) == LoraSettings(targets="q_proj,v_proj")  # type: ignore[arg-type]


def test_settings_that_are_nested_in_a_flat_file_are_named() -> None:
    with pytest.raises(ValueError, match=r"^jepa: its settings stand beside the others here; name them without it$"):
        RunConfig.from_flat({"jepa": {"mode": "regular"}})
    with pytest.raises(TypeError, match=r"^values: expected a dict of settings, got list$"):
        RunConfig.from_flat([])  # type: ignore[arg-type]
