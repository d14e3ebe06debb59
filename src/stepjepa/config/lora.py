"""Settings of an adapter. Free of torch."""

from dataclasses import dataclass
from functools import partial

from stepjepa.config.option import BELOW_ONE, FROM_ONE, check_values, documented, option

_adapter = partial(option, group="model", only_with="lora")


_NAMES = {
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "lora_targets": "targets",
    "lora_target_modules": "targets",
    "use_dora": "dora",
    "use_rslora": "rslora",
}
"""Name of PEFT, or of a flag -> the argument."""


def _renamed(name: str, value: object) -> dict[str, str]:
    """Return the argument that has another name here, as :func:`~stepjepa.config.option.documented` takes it."""
    if name not in _NAMES:
        return {}
    value = ",".join(map(str, value)) if name.endswith("modules") and isinstance(value, list | tuple | set) else value
    return {name: f"{_NAMES[name]}={value!r}"}


@documented(_renamed)
@dataclass(frozen=True)
class LoraSettings:
    """Settings of a LoRA adapter (arXiv 2106.09685) for ``RunConfig(lora=...)``.

    Flags and files have the names ``lora_rank``, ``lora_alpha``, ``lora_dropout``, ``lora_targets``, ``use_dora``
    (arXiv 2402.09353) and ``use_rslora`` (arXiv 2312.03732). An adapter with other settings of PEFT is
    ``run(config, model=peft.get_peft_model(model, peft_config))``.

    Raises:
        TypeError: there is no such argument; the message names the one that is meant.
        UserError: a value is not allowed.

    Example:
        >>> LoraSettings(rank=16, targets="q_proj,v_proj")
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
        targets: object = self.targets  # a caller without types may pass a list, as to PEFT
        if isinstance(targets, list | tuple | set):
            object.__setattr__(self, "targets", ",".join(map(str, targets)))
        check_values(self)


@dataclass
class LoraFlag:
    """The flag that asks for an adapter."""

    lora: bool = option(False, "train an adapter and the predictor rows; instead of all weights", group="model")
