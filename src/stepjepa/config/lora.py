"""Settings of an adapter. Free of torch."""

from dataclasses import dataclass
from functools import partial

from stepjepa.config.option import BELOW_ONE, FROM_ONE, check_values, option

_adapter = partial(option, group="model", only_with="lora")


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a LoRA adapter (arXiv 2106.09685); in flags and files with the names in brackets.

    Attributes:
        rank: rank of the adapter of each matrix (``lora_rank``).
        alpha: scale; None means twice the rank (``lora_alpha``).
        dropout: dropout on the adapter's input (``lora_dropout``).
        targets: ``all-linear``, or names of layers divided by commas (``lora_targets``).
        dora: trains the magnitude of each weight apart from its direction: DoRA, arXiv 2402.09353 (``use_dora``).
        rslora: scales by alpha / sqrt(rank): rsLoRA, arXiv 2312.03732 (``use_rslora``).

    Raises:
        UserError: a value is not allowed.
    """

    rank: int = _adapter(16, "rank of the adapter", flag="lora_rank", metavar="R", allowed=FROM_ONE)
    alpha: int | None = _adapter(
        None, "scale of the adapter (twice the rank)", flag="lora_alpha", metavar="A", allowed=FROM_ONE
    )
    dropout: float = _adapter(
        0.0, "dropout on the adapter's input", flag="lora_dropout", metavar="P", allowed=BELOW_ONE
    )
    targets: str = _adapter(
        "all-linear", "layers that get an adapter; q_proj,v_proj ...", flag="lora_targets", metavar="NAMES"
    )
    dora: bool = _adapter(False, "DoRA instead of LoRA", flag="use_dora")
    rslora: bool = _adapter(False, "rsLoRA: scale by the root of the rank", flag="use_rslora")

    def __post_init__(self) -> None:
        check_values(self)


@dataclass
class LoraFlag:
    """The flag that asks for an adapter."""

    lora: bool = option(False, "train an adapter and the predictor rows; instead of all weights", group="model")
