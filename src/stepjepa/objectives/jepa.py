"""``JepaLoss``: the objective in a training loop of one's own, of plain PyTorch, Accelerate, TRL or Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.sequences import SampledRecord
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import Record, as_records
from stepjepa.models.architecture import attach_heads, base_model, without_heads
from stepjepa.objectives.objective import Counts, Losses, Objective, jepa_loss
from stepjepa.objectives.setup import make_collator, set_up
from stepjepa.objectives.term import Context, gather_rows, no_gather

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class JepaLoss:
    """Prepares a model for an objective, makes batches of records, and gives their loss.

    Make it before the optimizer, and before the model is wrapped (DDP, FSDP, ``accelerator.prepare``, ``compile``).

    Args:
        model: a causal language model, or a PEFT wrapper of one; it gets predictor tokens and the attention of trees.
        tokenizer: with a chat template; gets predictor tokens where it lacks them.
        config: mode, layout and objective; the defaults are those of LLM-JEPA.
        objective: terms instead of those that ``config`` describes; mode, layout and readouts are still its.
        seed: of new embedding rows, and of what terms draw.

    Raises:
        ValueError: the model can't run this objective, or it asks for what only ``JepaTrainer`` does.

    Example:
        >>> jepa = JepaLoss(model, tokenizer, JepaConfig(jepa_loss_type="infonce"))
        >>> for batch in DataLoader(records, batch_size=8, shuffle=True, collate_fn=jepa.collate):
        ...     out = jepa(model, batch.to(model.device))
        ...     out.loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: JepaConfig | None = None,
        *,
        objective: Objective | None = None,
        seed: int = 42,
    ) -> None:
        config = config or JepaConfig()
        for name, every in (("jepa_ratio", 1.0), ("jepa_epochs", None)):
            if config.uses_views and getattr(config, name) != every:
                raise ValueError(f"{name}: use {every}, and 'collate(records, views=False)' in the steps without views")
        if config.target_grad == "ema":
            raise ValueError("target_grad 'ema' needs JepaTrainer; use 'stop' or 'on'")
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self._calls = 0
        self.objective = objective or Objective.from_config(config, model)
        self.encoding, _ = set_up(model, tokenizer, config, seed)
        base = base_model(model)
        attach_heads(model, self.objective.heads(base.config.get_text_config(), seed))
        self._tokenize = RecordTokenizer(tokenizer, config).tokenize_each
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # A model that is still on the CPU moves to the accelerator later, where there is one.
        device = base.device if accelerator is None else accelerator
        how: dict[str, Any] = {"encoding": self.encoding, "device": device.type, "processes": processes}
        self._collator = make_collator(model, tokenizer, config, self.objective, **how)

    def collate(self, records: Iterable[Record | dict[str, Any]], *, views: bool = True) -> Batch:
        """The batch of some records, or dicts with ``messages``; fit for ``DataLoader(..., collate_fn=...)``.

        ``views=False`` leaves out all that is run for pairs of views, as in regular training.

        Raises:
            UserError: a record is wrong, or too long for ``config.over_length``.
        """
        found = self._tokenize([*as_records(records)])
        items = [None if one is None else SampledRecord(one, views, (0, index)) for index, one in enumerate(found)]
        return self._collator(items)

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """What the means of an optimizer step of several batches (accumulation) are over, for ``counts`` of a call.

        Every process must call it for its own batches: what all count is added up, and divided by the number of
        processes, since DDP and FSDP average gradients.
        """
        found = self.objective.counts(batches)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            values = torch.tensor([*found.values()], dtype=torch.float64, device=batches[0].input_ids.device)
            dist.all_reduce(values)
            found = dict(zip(found, (values / dist.get_world_size()).tolist(), strict=True))
        return found

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        counts: Counts | None = None,
        *,
        step: int | None = None,
        progress: float | None = None,
    ) -> Losses:
        """Run the model on a batch.

        Args:
            model: that of the constructor, wrapped or not.
            batch: of :meth:`collate`, on the model's device.
            counts: of the whole optimizer step, see :meth:`counts`; None where the step has this batch alone.
            step: number of the optimizer step, on which depends what SIGReg and STP draw; None counts the calls from 0.
            progress: share of the run that is over, for ``lbd_schedule``; None for the weight itself.

        Returns:
            ``loss`` to call ``backward()`` on, ``parts``, the mean of each term, and ``monitors``.
        """
        counts = self.counts([batch]) if counts is None else counts
        step = self._calls if step is None else step
        self._calls += 1
        records = replace(batch.records, rng_keys=tuple((step, index) for _, index in batch.records.rng_keys))
        batch = Batch(batch | {"records": records})
        gather = gather_rows if self.objective.compares_pairs else no_gather
        return jepa_loss(model, batch, self.objective, counts, Context(step, self.seed, progress, gather))

    def save(self, model: nn.Module, folder: str | Path) -> None:
        """Write the model, not wrapped but for PEFT, and its tokenizer, for ``from_pretrained`` to load."""
        with without_heads(model):
            model.save_pretrained(folder)  # type: ignore[operator]  # a method of every model of transformers and PEFT
        self.tokenizer.save_pretrained(folder)
