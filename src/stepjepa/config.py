"""The training configuration: mode, layout of the views, objective. Free of torch, so that ``--help`` is quick.

Each field is declared in one place: its flag, ``--help``, choices, range check, entry on the reference page and part
in the cache key of tokenised data all derive from that declaration.
"""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from stepjepa.options import FROM_ONE, FROM_TWO, FROM_ZERO, option, options_of, wrong_value

Mode = Literal["regular", "llm-jepa", "step-jepa"]
Encoding = Literal["auto", "tree", "rows"]
Labels = Literal["assistant", "all", "reference"]
Alignment = Literal["cosine", "l2", "mse", "infonce"]
Pooling = Literal["last", "mean"]
PredictorHead = Literal["none", "linear", "mlp"]
TargetGrad = Literal["on", "stop", "ema"]
LbdSchedule = Literal["constant", "warmup", "cosine"]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtypes of the weights; ``auto`` is the dtype of the checkpoint."""

DTYPES: tuple[str, ...] = get_args(Dtype)

MOST_PREDICTORS = 1000
"""Limit of predictor tokens: each takes a row of the embedding matrix and a position in every source."""

DEFAULT_PREDICTORS = {"regular": 0, "llm-jepa": 1, "step-jepa": 2}

Affects = Literal["sequences", "encoding", "objective"]
"""What a field changes: the sequences of a record (so that it must be tokenised again), how sequences are packed into
rows, or only what is computed from the rows."""


@dataclass
class JepaConfig:
    """The objective, and how records become sequences; used beside ``transformers.TrainingArguments``.

    Raises:
        ValueError: a value is not allowed, or two options contradict each other; then the message names both options
            and the remedy.
    """

    mode: Mode = option(
        "llm-jepa",
        "regular is plain fine-tuning; llm-jepa pairs the user's message with the assistant's; step-jepa pairs "
        "consecutive reasoning steps",
        affects="sequences",
    )
    layout: str | None = option(
        None,
        "which sequences the views become; LLM-JEPA: separate (default) or branched; Step-JEPA: branched (default) or "
        "inplace; or module:function of your own",
        affects="sequences",
        metavar="NAME",
        views=True,
    )
    predictors: int | None = option(
        None,
        "predictor tokens (1 for LLM-JEPA, 2 for Step-JEPA); 0 is allowed",
        affects="sequences",
        views=True,
        allowed=(lambda value: 0 <= value <= MOST_PREDICTORS, f"0 to {MOST_PREDICTORS}"),
    )
    pairs: Literal["first", "all"] = option(
        "first", "the first pair of each record, or all consecutive ones", affects="sequences", views=True
    )
    front_pred: bool = option(
        False,
        "predictor tokens before the source view, which is read at its last token",
        affects="sequences",
        views=True,
    )
    reverse_pred: bool = option(False, "the second view predicts the first", affects="sequences", views=True)
    last_token: int | None = option(
        None,
        "read embeddings at this token of the templated view, counted from its end (-1 is the last, the "
        "template's tail included); auto: the last predictor of the source, the last token of the target's "
        "content",
        affects="sequences",
        views=True,
        allowed=(lambda value: value < 0, "a negative number or auto (-1 is the last token)"),
        parse=lambda text: None if text == "auto" else int(text),
    )
    pair_distance: int = option(
        1, "a reasoning step predicts the step N positions later", affects="sequences", views=True, allowed=FROM_ONE
    )
    pooling: Pooling = option(
        "last",
        "read an embedding at one token, or average over the source's predictor tokens and the target's content",
        affects="sequences",
        views=True,
    )
    step_separator: str = option(
        "blank", "blank (lines), line (ends), or a literal string", affects="sequences", views=True
    )
    require_pairs: bool = option(
        False,
        "a record without a usable pair is an error; otherwise it trains the LM loss and is counted",
        affects="sequences",
        views=True,
    )
    labels: Labels = option(
        "assistant",
        "tokens that carry LM loss: the assistant's content and end of turn; all; or those of the published "
        "collator (reference: all but what equals the padding token)",
        affects="sequences",
    )
    plain: bool = option(
        False, "no chat format: question <|perception|> answer; with labels all the question alone", affects="sequences"
    )
    max_length: int = option(512, "most tokens of a record's main sequence", affects="sequences", allowed=FROM_TWO)
    over_length: Literal["error", "truncate", "skip"] = option(
        "error",
        "what to do with a longer record; drop means skip",
        affects="sequences",
        parse=lambda text: "skip" if text == "drop" else text,
    )
    encoding: Encoding = option(
        "auto",
        "tree packs the sequences of a micro-batch into rows in which every common beginning stands once; rows "
        "gives each sequence a plain row; auto tries the model out and picks",
        affects="encoding",
        # The old name.
        parse=lambda text: "tree" if text == "forest" else text,
    )
    row_length: int | None = option(
        None,
        "most tokens of a row of trees (by device and attention); a longer sequence makes rows as long as itself",
        affects="encoding",
        allowed=FROM_TWO,
    )
    share_prefixes: bool = option(
        True,
        "compute common beginnings of different records of a micro-batch once; off shares within each record alone",
        affects="encoding",
    )
    lbd: float = option(0.1, "weight of the alignment loss", affects="objective", views=True, allowed=FROM_ZERO)
    gamma: float = option(1.0, "weight of the LM loss", affects="objective", allowed=FROM_ZERO)
    prompt_loss_weight: float = option(
        0.0,
        "weight of the LM loss on the tokens of user messages, a mean of its own; system prompt and template do "
        "not count",
        affects="objective",
        allowed=FROM_ZERO,
    )
    jepa_loss_type: Alignment = option("cosine", "distance between paired embeddings", affects="objective", views=True)
    infonce_temperature: float = option(
        0.07,
        "temperature of infonce",
        affects="objective",
        views=True,
        only_with="jepa_loss_type infonce",
        allowed=(lambda value: 0 < value < math.inf, "more than 0"),
    )
    jepa_ratio: float = option(
        1.0,
        "share of optimizer steps with the alignment loss; the others run without views, at the cost of regular "
        "training (loss dropout with alpha = 1 - jepa_ratio)",
        affects="objective",
        views=True,
        allowed=(lambda value: 0 <= value <= 1, "a share between 0 and 1"),
        # In the published scripts a negative number means that no step is dropped.
        parse=lambda text: 1.0 if float(text) < 0 else float(text),
    )
    lbd_schedule: LbdSchedule = option(
        "constant",
        "schedule of lbd over the run; warmup rises from 0, cosine falls to 0 along half a cosine",
        affects="objective",
        views=True,
    )
    lbd_warmup: float = option(
        0.1,
        "share of the run in which lbd rises",
        affects="objective",
        views=True,
        only_with="lbd_schedule warmup",
        allowed=(lambda value: 0 < value <= 1, "a share of the run above 0 and up to 1"),
    )
    predictor_head: PredictorHead = option(
        "none",
        "a trained map on the source embedding (mlp: one hidden layer), saved beside the model; inference never "
        "needs it",
        affects="objective",
        views=True,
    )
    target_grad: TargetGrad = option(
        "on",
        "train the model through the target, not (stop), or encode it with an exponential moving average of the "
        "weights (ema)",
        affects="objective",
        views=True,
    )
    ema_decay: float = option(
        0.99,
        "decay of the moving average per step",
        affects="objective",
        views=True,
        only_with="target_grad ema",
        allowed=(lambda value: 0 <= value < 1, "0 or more and less than 1"),
    )
    jepa_layer: int = option(
        -1,
        "hidden state that embeddings are read from, as transformers counts hidden_states: 0 are the token "
        "embeddings, -1 the last one, after the final norm",
        affects="objective",
        views=True,
    )
    sigreg: float = option(
        0.0,
        "weight of SIGReg, which makes the embeddings of a batch look like draws of a standard normal distribution",
        affects="objective",
        views=True,
        allowed=FROM_ZERO,
    )
    variance: float = option(
        0.0,
        "weight of VICReg's variance term, which keeps the standard deviation of every dimension at 1 or more",
        affects="objective",
        views=True,
        allowed=FROM_ZERO,
    )
    covariance: float = option(
        0.0,
        "weight of VICReg's covariance term, which keeps dimensions from repeating each other",
        affects="objective",
        views=True,
        allowed=FROM_ZERO,
    )
    stp: float = option(
        0.0,
        "weight of Semantic Tube Prediction, which needs no views: any mode takes it, and loss dropout leaves it; "
        "0.02 where no number is named",
        affects="objective",
        allowed=FROM_ZERO,
        const=0.02,
    )
    terms: tuple[dict[str, Any], ...] = option(
        (),
        "terms of your own beside these: {'term': 'module:Class', 'args': {...}} each; on the command line --term "
        "and --term_args",
        affects="objective",
    )

    def __post_init__(self) -> None:
        if str(self.encoding) == "forest":
            # The old name.
            self.encoding = "tree"
        if fault := wrong_value(self):
            raise ValueError(fault)
        if self.layout is not None and ":" in self.layout:
            from stepjepa.batch.layouts import load_layout

            load_layout(self.layout)
        known = layouts_of(self.mode)
        if self.layout is None:
            self.layout = known[0]
        elif self.layout not in known:
            raise ValueError(f"layout '{self.layout}' does not exist for mode {self.mode}; choose {' or '.join(known)}")
        if self.predictors is None:
            self.predictors = DEFAULT_PREDICTORS[self.mode]
        if not self.step_separator:
            raise ValueError("step_separator: expected 'blank', 'line' or a literal string, got an empty one")
        # JSON holds a list.
        self.terms = tuple(self.terms)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if changes_text(self.layout):
            for name in ("front_pred", "reverse_pred"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} contradicts layout '{self.layout}', where step 2 must not see what predicts it; "
                        "use layout 'branched'"
                    )
            if self.encoding == "rows":
                raise ValueError(
                    f"encoding 'rows' can't express layout '{self.layout}', where later steps see an isolated one; "
                    "use layout 'branched' or encoding 'tree'"
                )
            if self.last_token is not None:
                raise ValueError(f"last_token contradicts layout '{self.layout}', whose views end inside the row")
            if self.pairs == "all" and self.pair_distance > 1:
                raise ValueError(
                    f"pairs 'all' with pair_distance {self.pair_distance} contradicts layout '{self.layout}', where "
                    "pairs would overlap; use layout 'branched' or pairs 'first'"
                )
        if self.pair_distance > 1 and self.mode != "step-jepa":
            raise ValueError(f"pair_distance {self.pair_distance} counts steps, and mode {self.mode} has none")
        if self.pooling == "mean" and self.last_token is not None:
            raise ValueError("last_token names one token, and pooling 'mean' averages over several; leave one out")
        if self.plain and self.labels == "all" and self.mode == "step-jepa":
            raise ValueError(
                "plain with labels 'all' trains the user's text alone, which has no steps; use labels 'assistant'"
            )
        if self.jepa_layer == 0 and self.predictors and not self.front_pred:
            raise ValueError(
                "jepa_layer 0 holds the embeddings of tokens, so the source would be that of a predictor token, always "
                "the same; use predictors 0, or a layer from 1 on"
            )
        if self.front_pred and not self.predictors:
            raise ValueError("front_pred needs predictor tokens, got predictors 0; set predictors to 1 or more")

    @property
    def uses_views(self) -> bool:
        """Whether records have pairs of views; otherwise only the main text is run."""
        return self.mode != "regular"

    def to_dict(self) -> dict[str, Any]:
        """All fields, resolved, for the run folder."""
        return asdict(self)


def layouts_of(*modes: str) -> tuple[str, ...]:
    """The layouts registered for at least one of these modes; the first layout of a mode is its default."""
    from stepjepa.batch.layouts import LAYOUTS

    return tuple(name for name, each in LAYOUTS.items() if {*modes} & {*each.modes})


def changes_text(layout: str | None) -> bool:
    """Whether a layout puts tokens into the main sequence."""
    from stepjepa.batch.layouts import LAYOUTS

    return layout in LAYOUTS and LAYOUTS[layout].changes_text


def affecting(config: JepaConfig, what: Affects) -> dict[str, Any]:
    """The fields of a configuration that change a given stage (see ``Affects``), with their values.

    The tokens of a record depend on the fields of ``affecting(config, "sequences")``.
    """
    return {name: getattr(config, name) for name, about in SETTINGS.items() if about["affects"] == what}


SETTINGS = {each.name: each.metadata for each, _ in options_of(JepaConfig)}
"""Metadata of each field, as given to :func:`option`."""

DEFAULTS: dict[str, Any] = {each.name: each.default for each, _ in options_of(JepaConfig)}

CHOICES = {each.name: kind.choices for each, kind in options_of(JepaConfig) if kind.choices}

NEEDS_VIEWS = tuple(name for name, about in SETTINGS.items() if about.get("views"))
"""Fields without effect in regular training."""
