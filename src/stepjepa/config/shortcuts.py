"""The flat spelling of the objective: shortcuts such as ``regular``, and custom terms. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass

from stepjepa.base.errors import UserError, raising_user_errors
from stepjepa.base.json_object import JsonObject, parse_json
from stepjepa.config.jepa import DEFAULTS, NEEDS_VIEWS, JepaConfig
from stepjepa.config.option import option, options_of

USED_BY_PUBLISHED_BASELINES = ("predictors", "last_token", "lbd", "step_separator")
"""Settings of views that published scripts also pass to their baseline: noted in regular training, not refused."""


@dataclass
class TermFlags:
    """The flat spelling of ``JepaConfig.terms``."""

    term: list[str] | None = option(None, "custom terms (docs/design.md)", metavar="module:Class", group="loss")
    term_args: list[object] | None = option(
        None,
        "settings of each `term`, in their order: '{\"weight\": 0.1}'",
        metavar="JSON",
        group="loss",
        parse=lambda text: {**parse_json(text)},
        expected="a JSON object in braces",
    )


@dataclass
class Shortcuts:
    """Short spellings of settings of the objective: read from flags and files, never written."""

    regular: bool = option(False, "plain fine-tuning: the LM loss alone; short for `mode regular`")
    step_jepa: bool = option(False, "each reasoning step predicts the next; short for `mode step-jepa`")
    train_all: bool = option(False, "short for `labels all`", names=("trainall",))
    additive_mask: bool = option(False, "no effect; all views run in one pass without it")
    jepa_l2: bool = option(False, "short for `jepa_loss_type l2`", group="loss")
    jepa_mse: bool = option(False, "short for `jepa_loss_type mse`", group="loss")
    infonce: bool = option(False, "short for `jepa_loss_type infonce`", group="loss")


JEPA = tuple(setting for setting in options_of(JepaConfig) if setting.name != "terms")
SHORTCUTS = tuple(options_of(Shortcuts))
TERMS = tuple(options_of(TermFlags))


def read_objective(named: JsonObject, note: Callable[[str], None]) -> JepaConfig:
    """Take the settings of the objective and their shortcuts out of ``named``, a mapping by the names of flags.

    Args:
        named: the settings; those that are read are removed.
        note: is called with one line about a setting that has no effect, but is common in published commands.

    Raises:
        UserError: a value is not allowed, or settings contradict each other.
    """
    short = {setting.flag: named.pop(setting.flag, False) for setting in SHORTCUTS}
    objective = {setting.name: named.pop(setting.flag) for setting in JEPA if setting.flag in named}
    modes = {name for name, on in (("regular", short["regular"]), ("step-jepa", short["step_jepa"])) if on}
    if len(modes) > 1:
        raise UserError("`regular` and `step_jepa` exclude each other; leave one out")
    _take(objective, "mode", modes, "mode")
    losses = {name for name in ("l2", "mse") if short[f"jepa_{name}"]} | ({"infonce"} if short["infonce"] else set())
    _take(objective, "jepa_loss_type", losses, "alignment loss")
    if short["train_all"] and objective.get("labels", "all") != "all":
        raise UserError(
            f"`train_all` means `labels all`, and `labels {objective['labels']}` is named too; leave one out"
        )
    objective |= {"labels": "all"} if short["train_all"] else {}
    names, settings = named.pop("term", []), named.pop("term_args", None)
    settings = [{} for _ in names] if settings is None else settings
    if len(settings) != len(names):
        raise UserError(f"term_args: expected a JSON object for each `term` ({{}} for none), got {len(settings)}")
    objective["terms"] = tuple(
        {"term": name, "args": arguments} for name, arguments in zip(names, settings, strict=True)
    )
    mode = objective.get("mode", "llm-jepa")
    if mode == "regular":
        objective = _without_views(objective, note)
    elif mode == "step-jepa" and objective.get("last_token") not in (None, -1):
        note(
            f"`last_token {objective['last_token']}` is followed here; the published Step-JEPA script leaves it unused"
        )
    elif mode == "llm-jepa" and objective.get("step_separator", "blank") != "blank":
        note("`step_separator` has no effect without `step_jepa`: the views of llm-jepa are messages")
        del objective["step_separator"]
    if short["additive_mask"]:
        note("`additive_mask` changes nothing: all views are run in one pass anyway")
    with raising_user_errors():
        return JepaConfig(**objective)


def flat_objective(recorded: JsonObject) -> JsonObject:
    """Return the ``JepaConfig`` that a ``run.json`` of any version records, by the names of flags; not checked yet."""
    regular, terms = recorded.get("mode") == "regular", recorded.get("terms") or []
    flat = {
        name: value for name, value in recorded.items() if name != "terms" and not (regular and name in NEEDS_VIEWS)
    }
    if terms:
        flat |= {"term": [term["term"] for term in terms], "term_args": [term.get("args", {}) for term in terms]}
    return flat


def _take(objective: JsonObject, name: str, candidates: set[str], what: str) -> None:
    """Set a setting that shortcuts may mean; ``UserError`` if they or the setting itself name another value."""
    candidates |= {objective[name]} if name in objective else set()
    if len(candidates) > 1:
        raise UserError(f"more than one {what} is named ({', '.join(sorted(candidates))}); leave one")
    objective |= {name: candidates.pop()} if candidates else {}


def _without_views(objective: JsonObject, note: Callable[[str], None]) -> JsonObject:
    """Return the settings of regular training; of views only those that published baselines name, with a note."""
    views_settings = [
        name for name in NEEDS_VIEWS if name in objective and objective[name] not in (None, DEFAULTS[name])
    ]
    if loss := objective.get("jepa_loss_type"):
        raise UserError(f"`regular` has no views, so the alignment loss '{loss}' does nothing with it; leave one out")
    if unused := [name for name in views_settings if name not in USED_BY_PUBLISHED_BASELINES]:
        raise UserError(f"`regular` has no views, so `{unused[0]}` does nothing with it; leave one out")
    if views_settings:
        note(f"`regular` has no views, so {', '.join(f'`{name}`' for name in views_settings)} have no effect")
    return {name: value for name, value in objective.items() if name not in views_settings}
