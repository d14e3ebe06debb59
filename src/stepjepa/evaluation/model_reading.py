"""Settings for loading a saved model and reading its embeddings: of ``embed``, ``search`` and ``export``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, raising_user_errors
from stepjepa.base.files import existing_file
from stepjepa.config.batch_sizes import EMBEDDED
from stepjepa.config.jepa import Dtype, JepaConfig, Pooling
from stepjepa.config.option import FROM_ONE, check_effects, option
from stepjepa.models.names import check_trained
from stepjepa.store.record import trained_objective

if TYPE_CHECKING:
    from stepjepa.objectives.embedding import Embedder
    from stepjepa.objectives.inputs import EmbedOptions
    from stepjepa.objectives.jepa import Jepa
    from stepjepa.views.sequences import Kind

LAYER = "index of hidden_states to read; -1: the last one (that of training)"
POOLING = "read one token or the mean of several (that of training)"
LINEAR_MAP = "embed behind a linear map that is fitted on the pairs of this file; the model is not trained"
PROJECTION_HEADS = "embed behind projection heads; two small networks that are trained on the pairs of `linear_map`"
"""Help texts of options that several commands have."""


@dataclass
class ReadingSettings:
    """The readout of embeddings, and the loading of the model."""

    batch_size: int = option(EMBEDDED, "texts at a time", allowed=FROM_ONE)
    dtype: Dtype = option("auto", "dtype of the weights")
    layer: int | None = option(None, LAYER)
    pooling: Pooling | None = option(None, POOLING)
    linear_map: str | None = option(None, LINEAR_MAP, metavar="FILE", path=True)
    projection_heads: bool = option(False, PROJECTION_HEADS, only_with="linear_map")
    max_length: int | None = option(None, "most tokens of a text (that of training)", allowed=FROM_ONE)
    system_prompt: str | None = option(
        None,
        "system prompt before the questions of a model of layout branched; '' for none (that of training)",
        metavar="TEXT",
    )
    trust_remote_code: bool = option(False, "run code that comes with the model")

    @property
    def options(self) -> EmbedOptions:
        """The options of ``Jepa.embedder``."""
        return {
            "batch_size": self.batch_size,
            "layer": self.layer,
            "pooling": self.pooling,
            "max_length": self.max_length,
        }

    def check(self, model_path: str) -> JepaConfig:
        """Return the settings for reading a model's views, before weights and texts are loaded.

        Raises:
            UserError: these settings can't read the model, or there is no file of the linear map.
        """
        from stepjepa.objectives.reading import embedding_config, has_objective

        check_effects(vars(self), ReadingSettings)
        check_trained(model_path)
        trained, layer, pooling = trained_objective(model_path), self.layer, self.pooling
        if self.linear_map is not None:
            existing_file(self.linear_map, "file of records")
            if layer is None and pooling is None and not has_objective(trained):
                pooling = "mean"  # fitting the map tries every layer and both
        with raising_user_errors():
            return embedding_config(trained, layer=layer, pooling=pooling, path=model_path)

    def load(self, model_path: str, device: str | None = None) -> Jepa:
        """Load a model with its system prompt.

        Args:
            model_path: run folder, checkpoint folder or hub id.
            device: where to put the model; None for the accelerator if there is one, else the CPU.

        Raises:
            UserError: no model can be loaded, or a system prompt is set that the model would not read.
        """
        from stepjepa.objectives.jepa import Jepa

        with raising_user_errors():
            jepa = Jepa.from_pretrained(
                model_path, dtype=self.dtype, trust_remote_code=self.trust_remote_code, device=device
            )
        if self.system_prompt is not None:
            if not jepa.reads_system_prompt:
                fault = "`system_prompt` does nothing: the model reads each question alone, without a system prompt"
                raise UserError(f"{fault}; leave it out")
            jepa.system_prompt = self.system_prompt
        return jepa


def make_embedder(jepa: Jepa, side: Kind, options: EmbedOptions) -> Embedder:
    """Make the embedder of one side.

    Raises:
        UserError: the model can't be read with these options.
    """
    with raising_user_errors():
        return jepa.embedder(side, **options)
