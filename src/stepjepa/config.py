"""What is trained: the mode, the layout of the views, the objective. Free of torch, so that ``--help`` is quick."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["regular", "llm-jepa", "step-jepa"]
Layout = Literal["separate", "branched", "inplace"]
Encoding = Literal["auto", "forest", "rows"]
Labels = Literal["assistant", "all", "reference"]
Alignment = Literal["cosine", "l2", "mse", "infonce"]

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("regular", "llm-jepa", "step-jepa"),
    "layout": ("separate", "branched", "inplace"),
    "encoding": ("auto", "forest", "rows"),
    "labels": ("assistant", "all", "reference"),
    "jepa_loss_type": ("cosine", "l2", "mse", "infonce"),
    "pairs": ("first", "all"),
    "over_length": ("error", "truncate", "skip"),
}

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Names of the dtypes of weights; ``auto`` is the checkpoint's own."""

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    # The first one is the default of its mode.
    "regular": ("separate",),
    "llm-jepa": ("separate", "branched"),
    "step-jepa": ("branched", "inplace"),
}

DEFAULT_PREDICTORS = {"regular": 0, "llm-jepa": 1, "step-jepa": 2}


@dataclass
class JepaConfig:
    """The objective and how records become forests; stands beside ``transformers.TrainingArguments``.

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
    jepa_loss_type: Alignment = "cosine"
    """Distance between the paired embeddings."""
    infonce_temperature: float = 0.07
    """Temperature of ``infonce``."""
    lbd: float = 0.1
    """Weight of the alignment loss."""
    gamma: float = 1.0
    """Weight of the LM loss."""
    jepa_ratio: float = 1.0
    """Share of optimizer steps that carry the alignment loss; the rest run without views, at the cost of ``regular``
    (loss dropout with alpha = 1 - jepa_ratio)."""
    encoding: Encoding = "auto"
    """``forest`` runs one row per record with a mask; ``rows`` gives every view a plain row of its own; ``auto`` picks
    by architecture."""
    labels: Labels = "assistant"
    """Tokens that carry LM loss: the assistant's content and end of turn; ``all`` tokens; or those of the published
    collator (``reference``: all but every end of turn)."""
    step_separator: str = "blank"
    """What separates steps: ``blank`` lines, ``line`` ends, or a literal string."""
    max_length: int = 512
    """Most tokens of a record's main text."""
    over_length: Literal["error", "truncate", "skip"] = "error"
    """What happens to a longer record."""
    require_pairs: bool = False
    """Make a record without a usable pair an error; otherwise it trains the LM loss and is counted."""

    def __post_init__(self) -> None:
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
        assert self.predictors is not None
        if self.predictors < 0:
            raise ValueError(f"predictors: expected 0 or more, got {self.predictors}")
        if self.last_token is not None and self.last_token >= 0:
            raise ValueError(f"last_token: expected a negative number (-1 is the last token), got {self.last_token}")
        for name in ("lbd", "gamma"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if not 0 <= self.jepa_ratio <= 1:
            raise ValueError(f"jepa_ratio: expected a share between 0 and 1, got {self.jepa_ratio}")
        if not self.infonce_temperature > 0:
            raise ValueError(f"infonce_temperature: expected more than 0, got {self.infonce_temperature}")
        if self.max_length < 2:
            raise ValueError(f"max_length: expected 2 or more, got {self.max_length}")
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
                    "use layout 'branched' or encoding 'forest'"
                )
            if self.last_token is not None:
                raise ValueError("last_token contradicts layout 'inplace', whose views end inside the row")
        if self.front_pred and not self.predictors:
            raise ValueError("front_pred needs predictor tokens, got predictors 0; set predictors to 1 or more")

    @property
    def uses_views(self) -> bool:
        """Whether there is anything beside the LM loss."""
        return self.mode != "regular"

    def to_dict(self) -> dict[str, Any]:
        """All fields, resolved, for the run folder."""
        return asdict(self)
