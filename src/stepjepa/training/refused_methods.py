"""Methods of transformers' Trainer that have no right result for batches of trees; each says what to call instead."""

from __future__ import annotations

from typing import Any, NoReturn


class RefusedMethods:
    """Refuses the methods of Trainer that return logits of records, and searches that make models anew.

    A subclass that overrides one of them would see it never called, so its definition is refused, too.
    """

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
