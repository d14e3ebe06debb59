"""The records of a ``JepaTrainer`` as tokens: those that it trains, and held-out ones in one set or in several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Trainer

from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import note
from stepjepa.batch.dataset import Prepared, TokenizedDataset
from stepjepa.batch.prepare import prepare
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.reading_notes import UnusedParts
from stepjepa.data.record import Data, Views
from stepjepa.objectives.objective import Objective
from stepjepa.store.metric_names import UNNAMED
from stepjepa.training.held_out_sets import EvalData, named_sets
from stepjepa.training.metric_checks import check_set_names
from stepjepa.training.passed_names import PassedNames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DataTrainer(Trainer):
    """Tokenises records in the forms that users have them in, and keeps them under Trainer's names.

    A subclass sets the attributes, and prepares its data before it calls the constructor of Trainer.

    Attributes:
        jepa: mode and layout that records are tokenised for.
        objective: the terms of the loss.
        passed: the names that data were passed by.
        prepared: the training records as tokens; None without.
        held_out: the held-out records as tokens, by the names of their sets.
        source: the name of the training records' file, for errors.
    """

    jepa: JepaConfig
    objective: Objective
    passed: PassedNames
    prepared: Prepared | None
    held_out: dict[str, Prepared]
    source: str

    _views: Views | None = None  # gives the pairs of views of a record, instead of the mode
    _held_out_datasets: TokenizedDataset | dict[str, TokenizedDataset] | None = None

    def _check_records(self, *prepared: Prepared) -> None:
        """Raise an error for records that the model can't take, or of which a term has nothing; a subclass does."""

    def _prepare_data(
        self, train_data: Data | Prepared | None, eval_data: EvalData | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Tokenise training and held-out records, and check their lengths and the layout."""
        self.prepared, self.held_out = None, {}
        if train_data is not None:
            self.prepared = self._prepare(train_data, tokenizer, "training data")
            self._check_records(self.prepared)
        self.source = self.prepared.source if self.prepared else "<memory>"
        self._hold_out(self._prepare_held_out(eval_data, tokenizer))

    def _prepare(self, data: Any, tokenizer: PreTrainedTokenizerBase, what: str) -> Prepared:
        if isinstance(data, Prepared):
            return data
        for own in filter(None, (self.prepared, *self.held_out.values())):
            if own.dataset is data:
                return own
        # A function of the user's that gives the views may read any field.
        unused = UnusedParts(extra=self._views is None)
        prepared = prepare(data, tokenizer, self.jepa, what=what, views=self._views, cache_dir=False, unused=unused)
        if is_main_process():
            for line in unused.describe():
                note(line)
        return prepared

    def _prepare_held_out(self, data: EvalData | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Prepared]:
        """Tokenise held-out records, and return them by the names of their sets."""
        sets = named_sets(data)
        check_set_names(sets, self.objective.metrics)
        return {
            name: self._prepare(records, tokenizer, f"evaluation data {name}".rstrip())
            for name, records in sets.items()
        }

    def _hold_out(self, sets: dict[str, Prepared]) -> None:
        """Keep sets of held-out records for every evaluation from now on."""
        self._check_records(*sets.values())
        self.held_out = sets
        datasets = {name: prepared.dataset for name, prepared in sets.items()}
        self._held_out_datasets = datasets.get(UNNAMED, datasets or None)

    def _sets_of(self, data: Any) -> dict[str, Prepared]:
        """Return the sets that an evaluation was passed, by name; :attr:`held_out` for None and for the own data.

        ``data`` may also be the name of one of several sets, or one of the data sets that this trainer has as tokens.
        """
        if data is None or data is self.eval_dataset:
            return self.held_out
        if isinstance(data, str) and data in self.held_out:
            return {UNNAMED: self.held_out[data]}
        return self._prepare_held_out(data, self.processing_class)

    # Trainer's own attributes, so that data which are assigned are not ignored.

    @property
    def train_dataset(self) -> TokenizedDataset | None:
        """The training records as tokens, None without; a ``ValueError`` refuses others."""
        return self.prepared.dataset if self.prepared else None

    @train_dataset.setter
    def train_dataset(self, data: object) -> None:
        if data is not self.train_dataset:
            raise ValueError(
                "train_dataset: a run trains the records that its JepaTrainer was made with; make another JepaTrainer, "
                "with another output_dir"
            )

    @property
    def eval_dataset(self) -> Any:
        """The held-out records as tokens, by name if there are several sets, None without.

        Records in any form that the constructor takes can be assigned. They are measured from then on.
        """
        return self._held_out_datasets

    @eval_dataset.setter
    def eval_dataset(self, data: Any) -> None:
        if data is not self.eval_dataset:
            is_own = isinstance(data, str) and data in self.held_out
            self._hold_out({} if data is None else self._sets_of(data))
            self.passed = self.passed.with_held_out(None if is_own else data)
