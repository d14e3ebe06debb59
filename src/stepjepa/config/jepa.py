"""The training configuration: mode, layout of the views, objective. Free of torch, so that ``--help`` is quick.

Each field is declared in one place: its flag, ``--help``, choices, range check, entry on the reference page and part
in the cache key of tokenised data all derive from that declaration.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject, parse_json
from stepjepa.base.similar_names import did_you_mean
from stepjepa.base.user_code import load
from stepjepa.config.option import (
    BELOW_ONE,
    FROM_ONE,
    FROM_ZERO,
    POSITIVE,
    SHARE_OR_ALL,
    check_effects,
    check_values,
    documented,
    option,
    options_of,
    short_repr,
)
from stepjepa.views.layouts import LAYOUTS, changes_text, layouts_of, modes_of, name_layout

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtypes of the weights; ``auto`` is the dtype of the checkpoint."""

Quantization = Literal["4bit", "8bit"]
"""Sizes of weights that bitsandbytes quantizes."""

Pooling = Literal["last", "mean"]
"""Parts of a view that its embedding is read from: one token, or the mean of all."""

DEFAULT_PREDICTORS = {"regular": 0, "llm-jepa": 1, "step-jepa": 2}

_CHOICES = "; ".join(f"{mode}: {' or '.join(layouts_of(mode))}" for mode in ("llm-jepa", "step-jepa"))

# A field affects the sequences of a record (a change needs new tokens), the packing of sequences into rows (encoding),
# or only the computation on rows (objective).
_text = partial(option, affects="sequences")
_views = partial(option, affects="sequences", views=True)
_rows = partial(option, affects="encoding")
_term = partial(option, affects="objective", group="loss")
_loss = partial(_term, views=True)


def _shortcuts(name: str, value: object) -> dict[str, str]:
    """Return flags that set a field to one of its values, as they are passed here."""
    return {"regular": "mode='regular'", "step_jepa": "mode='step-jepa'", "infonce": "jepa_loss_type='infonce'"}


@documented(_shortcuts)
@dataclass
class JepaConfig:
    """The objective, and how records become sequences; used beside ``transformers.TrainingArguments``.

    Raises:
        TypeError: there is no such argument; the message suggests a similar one.
        ValueError: a value is not allowed, or two options contradict each other; names both, and the remedy.

    Example:
        >>> JepaConfig(mode="step-jepa", jepa_loss_type="infonce", lbd=0.5)
    """

    mode: Literal["regular", "llm-jepa", "step-jepa"] = _text(
        "llm-jepa",
        "regular: no pairs; llm-jepa: user's and assistant's message; step-jepa: a step and the next one",
    )
    layout: str | None = _views(
        None,
        f"how views become sequences: {', '.join(LAYOUTS)}; {_CHOICES}; the first is the default; or a custom "
        "module:function",
        metavar="NAME",
    )
    predictors: int | None = _views(
        None,
        "predictor tokens (1 for LLM-JEPA, 2 for Step-JEPA); 0 is allowed",
        allowed=FROM_ZERO,
    )
    pairs: Literal["first", "all"] = _views("first", "the first pair of each record, or all consecutive ones")
    front_pred: bool = _views(False, "predictor tokens before the source view, which is read at its last token")
    reverse_pred: bool = _views(False, "the second view predicts the first")
    last_token: int | None = _views(
        None,
        "read embeddings at this token of the templated view, counted from its end (-1: the last of the template; a "
        "view that is read in its chat has none behind it); auto: the last predictor of the source, the last token of "
        "the target's content",
        allowed=(lambda value: value < 0, "a negative number or auto (-1 is the last token)"),
        parse=lambda text: None if text == "auto" else int(text),
    )
    pair_distance: int = _views(1, "a reasoning step predicts the step N positions later", allowed=FROM_ONE)
    pooling: Pooling = _views("last", "read an embedding at one token; or average over predictors and target content")
    step_separator: str = _views(
        "blank",
        "blank (lines), line (ends), or a literal string",
        only_with="mode step-jepa",
        # In flags and files the two characters \\n stand for a line end.
        parse=lambda text: text.replace("\\n", "\n"),
    )
    steps_from: Literal["content", "reasoning"] = _views(
        "content", "the part of the last answer that is split into steps: its content, or the reasoning in front of it"
    )
    require_pairs: bool = _views(
        False, "raise an error for a record without a pair of views; default: train its LM loss only"
    )
    labels: Literal["assistant", "all", "reference"] = _text(
        "assistant", "tokens that carry LM loss; reference: those of the published collator, all but padding's token"
    )
    plain: bool = _text(
        False, "train without a chat template: question <|perception|> answer; with `labels all` the question alone"
    )
    chat_template_kwargs: dict[str, object] | None = _text(
        None,
        "variables of the chat template; a JSON object, as '{\"enable_thinking\": false}'; they are defaults of the "
        "saved template, and a record's own go before them",
        metavar="JSON",
        parse=parse_json,
        allowed=(
            lambda value: isinstance(value, dict) and all(str(name).isidentifier() for name in value),
            "a JSON object whose keys are names of variables",
        ),
    )
    max_length: int = _text(512, "most tokens of a record's main sequence", allowed=FROM_ONE, group="data")
    over_length: Literal["error", "truncate", "skip"] = _text(
        "error",
        "records longer than `max_length`: error, cut off, or leave out; drop means skip",
        parse=lambda text: {"drop": "skip"}.get(text, text),
    )
    encoding: Literal["auto", "tree", "rows"] = _rows(
        "auto",
        "tree: rows in which a common beginning is stored once; rows: a plain row a sequence; auto tests the model",
    )
    row_length: int | None = _rows(
        None,
        "most tokens of a packed row, or of a pass by segments (by device and attention); longer sequences are alone",
        allowed=FROM_ONE,
    )
    share_prefixes: bool = _rows(True, "compute common beginnings of different records once; off: of one record alone")
    lbd: float = _loss(0.1, "weight of the alignment loss", allowed=FROM_ZERO)
    gamma: float = _term(1.0, "weight of the LM loss", allowed=FROM_ZERO)
    prompt_loss_weight: float = _term(0.0, "weight of a mean LM loss on the text of user messages", allowed=FROM_ZERO)
    jepa_loss_type: Literal["cosine", "l2", "mse", "infonce"] = _loss(
        "cosine",
        "distance between paired embeddings",
    )
    infonce_temperature: float = _loss(
        0.07, "temperature of infonce", only_with="jepa_loss_type infonce", allowed=POSITIVE
    )
    infonce_negatives: Literal["distinct", "all"] = _loss(
        "distinct",
        "distinct: pairs whose source or target has the same tokens are no negatives of each other; all: as published",
        only_with="jepa_loss_type infonce",
    )
    compare_pairs_in: Literal["micro-batch", "step"] = _loss(
        "micro-batch",
        "pairs that infonce, sigreg, variance and covariance compare: of a micro-batch, or of the optimizer step; "
        "step costs one more forward pass and no memory (GradCache)",
    )
    jepa_ratio: float = _loss(
        1.0,
        "share of optimizer steps with the alignment loss; the others run without views, at the cost of regular "
        "training (loss dropout with alpha = 1 - jepa_ratio)",
        allowed=(lambda value: 0 <= value <= 1, "a share between 0 and 1"),
        # In the published scripts a negative number means that no step is dropped.
        parse=lambda text: 1.0 if float(text) < 0 else float(text),
    )
    jepa_epochs: float | None = _loss(
        None, "epochs from the start that run views; later steps cost as regular ones (all)", allowed=FROM_ZERO
    )
    lbd_schedule: Literal["constant", "warmup", "cosine"] = _loss(
        "constant", "lbd over the run; warmup: rises from 0; cosine: falls to 0"
    )
    lbd_warmup: float = _loss(
        0.1, "share of the run in which lbd rises", only_with="lbd_schedule warmup", allowed=SHARE_OR_ALL
    )
    predictor_head: Literal["none", "linear", "mlp"] = _loss(
        "none", "a trained map on the source embedding (mlp: one hidden layer); not used at inference"
    )
    target_grad: Literal["on", "stop", "ema"] = _loss(
        "on", "train the model through the target; stop: don't; ema: encode it with a moving average of the weights"
    )
    ema_decay: float = _loss(
        0.99, "decay of the moving average per step", only_with="target_grad ema", allowed=BELOW_ONE
    )
    jepa_layer: int = _loss(
        -1, "index of hidden_states that embeddings are read from; 0: token embeddings, -1: after the final norm"
    )
    sigreg: float = _loss(0.0, "weight of SIGReg, which pulls embeddings towards N(0, I)", allowed=FROM_ZERO)
    variance: float = _loss(
        0.0,
        "weight of VICReg's variance term, which keeps the deviation of each dimension at 1 or more",
        allowed=FROM_ZERO,
    )
    covariance: float = _loss(
        0.0, "weight of VICReg's covariance term, which decorrelates dimensions", allowed=FROM_ZERO
    )
    stp: float = _term(
        0.0, "weight of Semantic Tube Prediction, in any mode; 0.02 without a number", allowed=FROM_ZERO, const=0.02
    )
    router_loss: float | None = _term(
        None,
        "weight of the load-balancing loss of a mixture of experts (the model's own coefficient); 0 for none",
        allowed=FROM_ZERO,
    )
    terms: tuple[JsonObject, ...] = _term(
        (), "custom terms beside these: {'term': 'module:Class', 'args': {...}} each; flags `term` and `term_args`"
    )

    def __post_init__(self) -> None:
        # Folders of the first edition have the old name.
        self.encoding = "tree" if str(self.encoding) == "forest" else self.encoding
        check_values(self)
        if self.layout is not None and ":" in self.layout:
            name_layout(load("layout", self.layout), self.layout)
        layouts = layouts_of(self.mode)
        if self.layout is None:
            self.layout = layouts[0]
        elif self.layout not in layouts:
            fault = f"layout '{self.layout}' does not exist for mode {self.mode}; choose {' or '.join(layouts)}"
            modes = " and ".join(modes_of(self.layout))
            remedy = f"; it is a layout of {modes}" if modes else did_you_mean(self.layout, layouts)
            raise ValueError(fault + remedy)
        if self.predictors is None:
            self.predictors = DEFAULT_PREDICTORS[self.mode]
        self.terms = tuple(map(_complete_term, self.terms))
        for contradicts, message in self._contradictions():
            if contradicts:
                raise ValueError(message)

    def __repr__(self) -> str:
        defaults = JepaConfig(mode=self.mode)
        defaults.mode = DEFAULTS["mode"]
        return short_repr(self, defaults)

    def _contradictions(self) -> tuple[tuple[object, str], ...]:
        """Return contradictory combinations of options, each with the message of its error."""
        in_text, layout = changes_text(self.layout), f"layout '{self.layout}'"
        instead = f"contradicts {layout}, where step 2 must not see what predicts it; use layout 'branched'"
        is_far, gap = self.pair_distance > 1, f"pair_distance {self.pair_distance}"
        return (
            (not self.step_separator, "step_separator: expected 'blank', 'line' or a literal string, got an empty one"),
            (
                # The file of a run would be read as another setting.
                "\\n" in self.step_separator,
                "step_separator: backslash and n stand for a line end in flags and files; write a line end itself",
            ),
            (in_text and self.front_pred, f"front_pred {instead}"),
            (in_text and self.reverse_pred, f"reverse_pred {instead}"),
            (in_text and self.last_token, f"last_token contradicts {layout}, whose views end in the row; leave it out"),
            (in_text and self.encoding == "rows", f"encoding 'rows' can't express {layout}; use encoding 'tree'"),
            (
                in_text and is_far and self.pairs == "all",
                f"pairs 'all' with {gap} overlap in {layout}; use 'first'",
            ),
            (
                is_far and self.mode != "step-jepa",
                f"{gap} counts steps, and mode {self.mode} has none; leave it out",
            ),
            (
                self.steps_from == "reasoning"
                and (self.mode != "step-jepa" or self.plain or self.labels != "assistant"),
                "steps_from 'reasoning' needs mode step-jepa, a chat template and labels 'assistant'; leave it out",
            ),
            (
                self.plain and self.chat_template_kwargs,
                "plain uses no chat template; leave chat_template_kwargs out",
            ),
            (self.pooling == "mean" and self.last_token, "last_token contradicts pooling 'mean'; leave one out"),
            (
                self.plain and self.labels == "all" and self.mode == "step-jepa",
                "plain with labels 'all' trains the user's text alone, which has no steps; use labels 'assistant'",
            ),
            (
                self.jepa_layer == 0 and self.predictors and not self.front_pred,
                "jepa_layer 0 reads the embedding of a predictor token, always the same; use layer 1 or predictors 0",
            ),
            (self.front_pred and not self.predictors, "front_pred needs predictor tokens; set predictors to 1 or more"),
        )

    @property
    def uses_views(self) -> bool:
        """Whether records have pairs of views; otherwise only the main text is run."""
        return self.mode != "regular"

    @property
    def used_predictors(self) -> int:
        """K, the number of predictor tokens; 0 in regular training, which ignores ``predictors``."""
        return (self.predictors or 0) if self.uses_views else 0

    def to_dict(self) -> JsonObject:
        """Return all fields, resolved, for the run folder."""
        return asdict(self)


def _complete_term(entry: JsonObject) -> JsonObject:
    """Return an entry of ``terms`` with empty ``args`` where it has none; ``ValueError`` if it is no such entry."""
    is_entry = isinstance(entry, dict) and isinstance(entry.get("term"), str) and entry.keys() <= {"term", "args"}
    if not is_entry or not isinstance(entry.get("args", {}), dict):
        raise ValueError(f"terms: expected {{'term': 'module:Class', 'args': {{...}}}} for each, got {shown(entry)}")
    return {"term": entry["term"], "args": entry.get("args", {})}


def affecting(config: JepaConfig, what: str) -> JsonObject:
    """Return the fields that affect a stage, with their values.

    Args:
        config: the configuration.
        what: the stage: ``sequences``, ``encoding`` or ``objective``.
    """
    return {name: getattr(config, name) for name, about in SETTINGS.items() if about["affects"] == what}


_OPTIONS = tuple(options_of(JepaConfig))

SETTINGS = {setting.name: setting.about for setting in _OPTIONS}
"""Metadata of each field, as given to :func:`option`."""

DEFAULTS: JsonObject = {setting.name: setting.default for setting in _OPTIONS}

CHOICES = {setting.name: setting.choices for setting in _OPTIONS if setting.choices}

NEEDS_VIEWS = tuple(name for name, about in SETTINGS.items() if about.get("views"))
"""Fields without effect in regular training."""


def check_objective_effects(config: JepaConfig, *, own_terms: bool = False) -> None:
    """Raise ``UserError`` for a setting of the objective that does nothing beside the others.

    A configuration may hold such settings: folders of runs by earlier versions do.

    Args:
        config: the configuration of a training.
        own_terms: whether terms are passed that may read the pairs, too.
    """
    check_effects(vars(config), JepaConfig)
    if not config.uses_views:
        defaults = vars(JepaConfig(mode="regular"))
        # Not `layout`: JepaConfig refuses one that is not for regular training, and the others may label other tokens.
        idle = [name for name in NEEDS_VIEWS if name != "layout" and getattr(config, name) != defaults[name]]
        if idle:
            raise UserError(f"mode 'regular' has no views, so `{idle[0]}` does nothing with it; leave one out")
        return
    cause = next((name for name in ("lbd", "jepa_ratio", "jepa_epochs") if getattr(config, name) == 0), None)
    # Losses on all embeddings, and a user's own, read the source behind the head, and the target that is averaged.
    others = cause == "lbd" and (own_terms or config.sigreg or config.variance or config.covariance or config.terms)
    shaping = ["lbd_schedule"]
    shaping += ["target_grad"] if config.target_grad == "stop" or not others else []
    shaping += [] if others else ["predictor_head"]
    idle = [name for name in shaping if getattr(config, name) != DEFAULTS[name]]
    if cause is not None and idle:
        raise UserError(f"`{cause} 0` trains no alignment loss, so `{idle[0]}` does nothing with it; leave one out")
