"""How much disk checkpoints take: said by ``--dry_run``, and refused before the first step where it is too much."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from stepjepa.compute.memory import kept_bytes
from stepjepa.errors import UserError

GIB = 2**30


def checkpoint_bytes(parts: dict[str, int], *, adapter: bool) -> int:
    """The size of a checkpoint: what is trained of the weights (all of a whole model) and the optimizer's states.

    Args:
        parts: of ``memory.kept_bytes``, not sharded.
        adapter: the adapter alone is saved.
    """
    return parts["gradients" if adapter else "weights"] + parts.get("optimizer states", 0)


def checkpoint_space(args: TrainingArguments, size: int, steps: int, epoch: int) -> dict[str, int]:
    """What the checkpoints of a run need.

    Args:
        args: when it saves, and how many it keeps.
        size: bytes of one.
        steps: of the run.
        epoch: steps of an epoch.

    Returns:
        ``bytes`` of a checkpoint, how many are ``kept`` in the end, and the ``free`` bytes of the disk.
    """
    every = args.save_steps if args.save_steps >= 1 else max(math.ceil(steps * args.save_steps), 1)
    made = {SaveStrategy.NO: 0, SaveStrategy.EPOCH: math.ceil(steps / epoch)}.get(
        SaveStrategy(args.save_strategy), steps // int(every)
    )
    folder = Path(str(args.output_dir)).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    return {
        "bytes": size,
        "kept": min(made, args.save_total_limit or made),
        "free": shutil.disk_usage(existing).free,
    }


class SpaceCallback(TrainerCallback):
    """Refuses a run whose checkpoints do not fit on the disk; those of a run that is resumed are there in part."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare before the first step.

        Raises:
            UserError: there is too little room.
        """
        if state.global_step or not state.is_world_process_zero:
            return
        parts = kept_bytes(model, str(getattr(args.optim, "value", args.optim)))
        size = checkpoint_bytes(parts, adapter=hasattr(model, "peft_config"))
        space = checkpoint_space(args, size, state.max_steps, math.ceil(state.max_steps / state.num_train_epochs))
        needed, free = space["bytes"] * space["kept"], space["free"]
        if needed > free:
            raise UserError(
                f"{space['kept']} checkpoints of {size / GIB:.2f} GiB need {needed / GIB:.2f} GiB, and "
                f"{free / GIB:.2f} GiB are free; keep fewer (--save_total_limit N), save less often (--save_steps), "
                "or free some",
                path=args.output_dir,
            )
