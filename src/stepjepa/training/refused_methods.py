"""Methods of transformers' Trainer that have no right result for batches of trees; each says what to call instead."""

from __future__ import annotations

from typing import Any, NoReturn

ARGUMENT_REMEDIES = {
    "tokenizer": "pass processing_class=",
    "peft_config": "pass the model of peft.get_peft_model(model, peft_config)",
    "columns": "rename the two columns of train_dataset to prompt and completion",
    "data_collator": "leave it out: records become batches of trees; views= and JepaConfig(layout=...) change them",
    "formatting_func": "pass records with 'messages', or with 'prompt' and 'completion'",
    "compute_metrics": "pass answer_scores=, or evaluate the run folder with a task, since logits are not stored",
    "preprocess_logits_for_metrics": "leave it out, since logits are not stored",
    "compute_loss_func": "pass objective=Objective([LMLoss(), ...]) with a term of yours",
    "model_init": "pass the model; each trial of a search needs a trainer with an output_dir of its own",
    "quantization_config": "pass the model of from_pretrained(..., quantization_config=...)",
}
"""Argument of ``Trainer`` or of TRL's ``SFTTrainer`` that ``JepaTrainer`` does not have -> what to do instead.

``None``, the default that all of them have there, is accepted.
"""


class _UnusedAttribute:
    """An attribute of Trainer that nothing here reads: it is None, and another value is refused."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: object, owner: type | None = None) -> None:
        return None

    def __set__(self, trainer: object, value: object) -> None:
        """Raise a ``ValueError`` that says what to do instead, unless the value is None, as Trainer sets it."""
        if value is not None:
            raise ValueError(f"{self.name}: has no effect with this trainer; {ARGUMENT_REMEDIES[self.name]}")


class RefusedMethods:
    """Refuses the methods of Trainer that return logits of records, and searches that make models anew.

    A subclass that overrides one of them would see it never called, so its definition is refused, too. So are values
    of attributes that only these methods, or Trainer's own loss, would read.
    """

    compute_metrics = _UnusedAttribute()
    preprocess_logits_for_metrics = _UnusedAttribute()
    compute_loss_func = _UnusedAttribute()
    model_init = _UnusedAttribute()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise a ``TypeError`` if a subclass overrides a method that is never called."""
        super().__init_subclass__(**kwargs)
        if overridden := sorted({"predict", "prediction_step", "evaluation_loop"} & vars(cls).keys()):
            raise TypeError(
                f"{cls.__name__}.{overridden[0]} would never be called by a JepaTrainer; override evaluate, or pass "
                "answer_scores="
            )

    def predict(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ``ValueError``: Trainer would return logits of packed rows, not of records."""
        raise ValueError("predict: expected evaluate() for losses, or stepjepa.evaluate(folder, file) for answers")

    def prediction_step(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ``ValueError``, as :meth:`predict`."""
        raise ValueError("prediction_step: expected compute_loss(model, batch, return_outputs=True) for the losses")

    def evaluation_loop(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ``ValueError``, as :meth:`predict`."""
        raise ValueError("evaluation_loop: expected evaluate(records)")

    def hyperparameter_search(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ``ValueError``: a run folder holds one run, so every trial needs a trainer of its own."""
        raise ValueError(
            "hyperparameter_search: expected a trainer for each trial, with an output_dir of its own, whose "
            "evaluate() is what your study compares; `stepjepa sweep` runs a grid"
        )
