"""The settings of ``stepjepa analyze``. Free of torch."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepjepa.analysis.points import COLOURINGS, PROJECTIONS
from stepjepa.config import Dtype
from stepjepa.errors import UserError
from stepjepa.options import FROM_ONE, FROM_TWO, FROM_ZERO, option, refuse_without_effect, wrong_value

_VIEWS = "views (by default those of training)"


@dataclass(frozen=True)
class AnalysisSettings:
    """Models, test file, and how their views are read and drawn.

    Raises:
        UserError: a number is out of range, or settings contradict each other.
    """

    model_path: list[str] = option(help="run, checkpoint or adapter folders, or hub ids", group="files", metavar="PATH")
    test_file: str = option(help="JSON lines with 'messages'", group="files", metavar="FILE")
    output_dir: str = option(help="gets the numbers, the data and the pictures", group="files", metavar="DIR")
    labels: str | None = option(None, "names of the models (their folders' names)", group="files", metavar="A,B")
    overwrite: bool = option(False, "replace an earlier analysis in --output_dir", group="files")
    views: Literal["llm-jepa", "step-jepa"] | None = option(None, "which ones", group=_VIEWS)
    pairs: Literal["first", "all"] | None = option(None, "of each record; all for --t_sne_type steps", group=_VIEWS)
    step_separator: str | None = option(
        None,
        "blank (lines), line, or a literal string",
        group=_VIEWS,
        metavar="SEP",
        # Line ends and tabs are typed as two characters.
        parse=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
    )
    max_length: int | None = option(
        None, "tokens of a record beyond which it is left out", group=_VIEWS, allowed=FROM_TWO
    )
    layer: int = option(-1, "of hidden_states; 0 is the embeddings", group=_VIEWS)
    pooling: Literal["last", "mean"] = option("last", "the readout, or the view", group=_VIEWS)
    no_predictors: bool = option(False, "read Enc(Text) itself, not behind its predictor tokens", group=_VIEWS)
    use_test_prompts: bool = option(False, "the test file's own system prompt; else that of training", group=_VIEWS)
    t_sne_type: str = option(
        "in_n_out",
        "what colours the points: the view; the field 'group'; the answer; the step's number",
        group="pictures",
        choices=COLOURINGS,
    )
    projections: tuple[str, ...] = option(("pca", "tsne"), "rows of the picture", group="pictures", choices=PROJECTIONS)
    max_points: int = option(1000, "pairs drawn; numbers are of all", group="pictures", allowed=FROM_ONE)
    max_examples: int | None = option(None, "a random sample of N records (all)", group="running", allowed=FROM_ONE)
    batch_size: int = option(16, "records at a time", group="running", allowed=FROM_ONE)
    dtype: Dtype = option("auto", "of the weights", group="running")
    seed: int = option(42, "of samples and projections", group="running", allowed=FROM_ZERO)
    trust_remote_code: bool = option(False, "run code that comes with the model", group="running")

    def __post_init__(self) -> None:
        if fault := wrong_value(self):
            raise UserError(f"--{fault}")
        refuse_without_effect(vars(self), type(self))
        read_labels(self.labels, len(self.model_path))


def read_labels(labels: str | None, count: int) -> tuple[str, ...]:
    """The names of ``count`` models in ``A,B``; empty for None.

    Raises:
        UserError: they are more or fewer, or equal.
    """
    names = tuple(dict.fromkeys(name.strip() for name in labels.split(","))) if labels else ()
    if names and len(names) != count:
        raise UserError(f"--labels: expected {count} different names, got {len(names)}")
    return names
