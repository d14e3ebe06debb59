"""The modules of sentence-transformers 6 that read an embedding, as its folders describe them: settings and weights.

All of them are its own, so that a folder loads without ``trust_remote_code``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.files import write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.objectives.linear_map import LinearMap

_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
_WORD_WEIGHTS = "sentence_transformers.sentence_transformer.modules.word_weights.WordWeights"
_POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
_ROUTER = "sentence_transformers.base.modules.router.Router"
_DENSE = "sentence_transformers.base.modules.dense.Dense"
_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"


class TokenWeights(NamedTuple):
    """The weights of tokens in the mean of a text."""

    vocabulary: list[str]  # by id
    exceptions: dict[str, float]  # all others have weight 1


@dataclass(frozen=True)
class ReadoutModules:
    """How the modules of a folder make one vector of a text.

    Attributes:
        dimensions: D, of a hidden state.
        layer: index in transformers' ``hidden_states``; None for the last one.
        mean: the vector is the mean of the tokens with these weights; None if it is that of the last token.
        linear_map: the vectors are those behind it.
    """

    dimensions: int
    layer: int | None = None
    mean: TokenWeights | None = None
    linear_map: LinearMap | None = None

    def write(self, folder: Path) -> None:
        """Write the files that ``SentenceTransformer(folder)`` reads beside the model and the tokenizer."""
        kinds = [_TRANSFORMER]
        if self.linear_map is not None:
            _write_map(folder / f"{len(kinds)}_Router", self.linear_map)
            kinds.append(_ROUTER)
        if self.mean is not None:
            of_tokens: JsonObject = {
                "vocab": self.mean.vocabulary,
                "word_weights": self.mean.exceptions,
                "unknown_word_weight": 1,
            }
            write_json(folder / f"{len(kinds)}_WordWeights" / "config.json", of_tokens)
            kinds.append(_WORD_WEIGHTS)
        pooling: JsonObject = {
            "embedding_dimension": self.dimensions,
            "pooling_mode": "lasttoken" if self.mean is None else "mean",
            "include_prompt": True,
        }
        write_json(folder / f"{len(kinds)}_Pooling" / "config.json", pooling)
        kinds.append(_POOLING)
        write_json(folder / f"{len(kinds)}_Normalize" / "config.json", {})
        kinds.append(_NORMALIZE)
        modules: list[JsonObject] = [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{kind.rpartition('.')[2]}" if number else "",
                "type": kind,
            }
            for number, kind in enumerate(kinds)
        ]
        write_json(folder / "modules.json", modules)
        write_json(folder / "sentence_bert_config.json", self._transformer)
        about: JsonObject = {
            "model_type": "SentenceTransformer",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        }
        write_json(folder / "config_sentence_transformers.json", about)

    @property
    def read_by_servers(self) -> bool:
        """Whether a vector is the last token of the last layer, which servers read whatever the modules are."""
        return self == ReadoutModules(self.dimensions)

    @property
    def _transformer(self) -> JsonObject:
        output = "last_hidden_state" if self.layer is None else ["hidden_states", self.layer]
        text: JsonObject = {"method": "forward", "method_output_name": output}
        return {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": text, "message": {**text, "format": "flat"}},
            "module_output_name": "token_embeddings",
        }


def _write_map(folder: Path, linear_map: LinearMap) -> None:
    """Write a router that maps the tokens of queries, and those of documents.

    The mean of mapped tokens is the mapped mean, and all modules before the pooling have the dtype of the model.
    """
    weight, source_mean, target_mean = linear_map.weight, linear_map.source_mean, linear_map.target_mean
    target_weight = np.eye(len(target_mean)) if linear_map.target_weight is None else linear_map.target_weight
    layers = {
        "query": (weight.T, -source_mean @ weight),
        "document": (target_weight.T, -target_mean @ target_weight),
    }
    for task, (matrix, bias) in layers.items():
        _write_dense(folder / _name(task), matrix, bias)
    router: JsonObject = {
        "types": {_name(task): _DENSE for task in layers},
        "structure": {task: [_name(task)] for task in layers},
        "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
    }
    write_json(folder / "router_config.json", router)


def _name(task: str) -> str:
    return f"{task}_0_Dense"


def _write_dense(folder: Path, matrix: NDArray[np.float64], bias: NDArray[np.float64]) -> None:
    """Write a linear layer: ``matrix [out, in]`` and ``bias [out]``."""
    from safetensors.numpy import save_file

    outputs, inputs = matrix.shape
    settings: JsonObject = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
        "module_input_name": "token_embeddings",
    }
    write_json(folder / "config.json", settings)
    weights = {"linear.weight": matrix, "linear.bias": bias}
    save_file(
        {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}, folder / "model.safetensors"
    )
