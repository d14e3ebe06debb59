"""What is trained: the mode, the layout of the views, the objective. Free of torch, so that ``--help`` is quick."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["regular", "llm-jepa", "step-jepa"]
Layout = Literal["separate", "branched", "inplace"]
Encoding = Literal["auto", "tree", "rows"]
Labels = Literal["assistant", "all", "reference"]
Alignment = Literal["cosine", "l2", "mse", "infonce"]
Pooling = Literal["last", "mean"]
PredictorHead = Literal["none", "linear", "mlp"]
TargetGrad = Literal["on", "stop", "ema"]
LbdSchedule = Literal["constant", "warmup", "cosine"]

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("regular", "llm-jepa", "step-jepa"),
    "layout": ("separate", "branched", "inplace"),
    "encoding": ("auto", "tree", "rows"),
    "labels": ("assistant", "all", "reference"),
    "jepa_loss_type": ("cosine", "l2", "mse", "infonce"),
    "pairs": ("first", "all"),
    "over_length": ("error", "truncate", "skip"),
    "pooling": ("last", "mean"),
    "predictor_head": ("none", "linear", "mlp"),
    "target_grad": ("on", "stop", "ema"),
    "lbd_schedule": ("constant", "warmup", "cosine"),
}

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Names of the dtypes of weights; ``auto`` is the checkpoint's own."""

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    # The first one is the default of its mode.
    "regular": ("separate",),
    "llm-jepa": ("separate", "branched"),
    "step-jepa": ("branched", "inplace"),
}

_FROM_ZERO: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < math.inf, "0 or more")

RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Field -> whether a value is one, and how that is said. Comparisons are such that NaN is none.
    **dict.fromkeys(("predictors", "lbd", "gamma", "sigreg", "variance", "covariance", "stp", "prompt_loss_weight"), _FROM_ZERO),
    "last_token": (lambda value: value < 0, "a negative number (-1 is the last token)"),
    "pair_distance": (lambda value: value >= 1, "1 or more"),
    "jepa_ratio": (lambda value: 0 <= value <= 1, "a share between 0 and 1"),
    "ema_decay": (lambda value: 0 <= value < 1, "0 or more and less than 1"),
    "lbd_warmup": (lambda value: 0 < value <= 1, "a share of the run above 0 and up to 1"),
    "infonce_temperature": (lambda value: 0 < value < math.inf, "more than 0"),
    "max_length": (lambda value: value >= 2, "2 or more"),
    "row_length": (lambda value: value >= 2, "2 or more"),
}

DEFAULT_PREDICTORS = {"regular": 0, "llm-jepa": 1, "step-jepa": 2}


@dataclass
class JepaConfig:
    """The objective and how records become sequences; stands beside ``transformers.TrainingArguments``.

    Raises:
        ValueError: a value is outside what its field says, or two options contradict each other; the message names
            both and the remedy.
    """

    mode: Mode = "llm-jepa"
    """``regular`` is plain fine-tuning; ``llm-jepa`` pairs the user's message with the assistant's;
    ``step-jepa`` pairs consecutive reasoning steps."""
    layout: Layout | None = None
    """How the views are placed; None takes the mode's default: ``separate`` for LLM-JEPA, ``branched`` for
    Step-JEPA."""
    predictors: int | None = None
    """K, the number of predictor tokens; None takes 1 for LLM-JEPA and 2 for Step-JEPA. With 0 the source is read at
    the end of its own view."""
    pairs: Literal["first", "all"] = "first"
    """The first pair of each record, or all consecutive ones."""
    front_pred: bool = False
    """Put the predictor tokens before the source view instead of after it, and read its last token."""
    reverse_pred: bool = False
    """Let the second view predict the first."""
    last_token: int | None = None
    """Where embeddings are read, counted from the end of the templated view (-1 is its last token, template's tail
    included). None reads the last predictor of the source and the last token of the target's content; a step's content
    ends with the separator that closes it, which most tokenizers fuse with its full stop."""
    pair_distance: int = 1
    """How many steps ahead a step predicts: with 2, step i predicts step i + 2."""
    pooling: Pooling = "last"
    """``last`` reads an embedding at one token; ``mean`` averages the source over the K predictor tokens (over its
    view's content where K is 0 or ``front_pred`` is set) and the target over its view's content."""
    jepa_layer: int = -1
    """Hidden state that embeddings are read from, counted as transformers counts ``hidden_states``: 0 are the token
    embeddings, -1 is the last one, after the final norm."""
    predictor_head: PredictorHead = "none"
    """A trained map on the source embedding: ``linear``, or ``mlp`` with one hidden layer. Saved beside the model;
    inference never needs it."""
    target_grad: TargetGrad = "on"
    """``on`` trains the model through the target too; ``stop`` does not; ``ema`` encodes the target with an exponential
    moving average of the weights."""
    ema_decay: float = 0.99
    """What the average keeps of itself at every step, for ``target_grad='ema'``."""
    jepa_loss_type: Alignment = "cosine"
    """Distance between the paired embeddings."""
    infonce_temperature: float = 0.07
    """Temperature of ``infonce``."""
    lbd: float = 0.1
    """Weight of the alignment loss."""
    lbd_schedule: LbdSchedule = "constant"
    """``warmup`` lets ``lbd`` rise from 0 over the first ``lbd_warmup`` of the run; ``cosine`` lets it fall to 0 along
    half a cosine."""
    lbd_warmup: float = 0.1
    """Share of the run over which ``lbd`` rises, for ``lbd_schedule='warmup'``."""
    sigreg: float = 0.0
    """Weight of SIGReg, which makes the embeddings of a batch look like draws of a standard normal distribution."""
    variance: float = 0.0
    """Weight of VICReg's variance term, which keeps every dimension's standard deviation at 1 or more."""
    covariance: float = 0.0
    """Weight of VICReg's covariance term, which keeps dimensions from repeating each other."""
    stp: float = 0.0
    """Weight of Semantic Tube Prediction, which needs no views and no tokens of its own: any mode takes it, and loss
    dropout leaves it."""
    gamma: float = 1.0
    """Weight of the LM loss."""
    prompt_loss_weight: float = 0.0
    """Weight of the LM loss on the tokens of user messages, a mean of its own; system prompt and template do not
    count."""
    jepa_ratio: float = 1.0
    """Share of optimizer steps that carry the alignment loss; the rest run without views, at the cost of ``regular``
    (loss dropout with alpha = 1 - jepa_ratio)."""
    encoding: Encoding = "auto"
    """``tree`` packs all sequences of a micro-batch into rows in which every common beginning stands once; ``rows``
    gives every sequence a plain row of its own; ``auto`` tries the model out and picks."""
    row_length: int | None = None
    """Most tokens of a row of trees; None picks by device and attention. A longer sequence makes rows as long as
    itself."""
    share_prefixes: bool = True
    """Compute what records of a micro-batch begin with alike once; off shares within each record alone."""
    plain: bool = False
    """No chat format: the user's text, ``<|perception|>``, the answer; with ``labels='all'`` the user's text alone."""
    labels: Labels = "assistant"
    """Tokens that carry LM loss: the assistant's content and end of turn; ``all`` tokens; or those of the published
    collator (``reference``: all but what equals the padding token)."""
    step_separator: str = "blank"
    """What separates steps: ``blank`` lines, ``line`` ends, or a literal string."""
    max_length: int = 512
    """Most tokens of a record's main text."""
    over_length: Literal["error", "truncate", "skip"] = "error"
    """What happens to a longer record."""
    require_pairs: bool = False
    """Make a record without a usable pair an error; otherwise it trains the LM loss and is counted."""

    def __post_init__(self) -> None:
        if str(self.encoding) == "forest":
            # The word of the first edition.
            self.encoding = "tree"
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "layout" and value is None):
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got '{value}'")
        if self.layout is None:
            self.layout = LAYOUTS[self.mode][0]
        elif self.layout not in LAYOUTS[self.mode]:
            raise ValueError(
                f"layout '{self.layout}' does not exist for mode {self.mode}; choose {' or '.join(LAYOUTS[self.mode])}"
            )
        if self.predictors is None:
            self.predictors = DEFAULT_PREDICTORS[self.mode]
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        for name, (allowed, words) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not allowed(value):
                raise ValueError(f"{name}: expected {words}, got {value}")
        if not self.step_separator:
            raise ValueError("step_separator: expected 'blank', 'line' or a literal string, got an empty one")

    def _check_combinations(self) -> None:
        if self.layout == "inplace":
            for name in ("front_pred", "reverse_pred"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} contradicts layout 'inplace', where step 2 must not see what predicts it; "
                        "use layout 'branched'"
                    )
            if self.encoding == "rows":
                raise ValueError(
                    "encoding 'rows' can't express layout 'inplace', where later steps see an isolated one; "
                    "use layout 'branched' or encoding 'tree'"
                )
            if self.last_token is not None:
                raise ValueError("last_token contradicts layout 'inplace', whose views end inside the row")
            if self.pairs == "all" and self.pair_distance > 1:
                raise ValueError(
                    f"pairs 'all' with pair_distance {self.pair_distance} contradicts layout 'inplace', where pairs "
                    "would overlap; use layout 'branched' or pairs 'first'"
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
        """Whether records have pairs of views; if not, the main text is all that is run."""
        return self.mode != "regular"

    @property
    def compares_pairs(self) -> bool:
        """Whether a term of the objective depends on which pairs share a batch."""
        return self.uses_views and (
            self.jepa_loss_type == "infonce" or self.sigreg > 0 or self.variance > 0 or self.covariance > 0
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, resolved, for the run folder."""
        return asdict(self)
