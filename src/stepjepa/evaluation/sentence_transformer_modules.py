"""The modules of sentence-transformers 6 that read an embedding, as its folders describe them: settings and weights.

All of them are its own, so that a folder loads without ``trust_remote_code``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.files import write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.objectives.fitted import VectorMap
from stepjepa.objectives.linear_map import LinearMap
from stepjepa.objectives.projection_heads import Head, ProjectionHeads

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
        vector_map: the vectors are those behind it.
    """

    dimensions: int
    layer: int | None = None
    mean: TokenWeights | None = None
    vector_map: VectorMap | None = None

    def write(self, folder: Path) -> None:
        """Write the files that ``SentenceTransformer(folder)`` reads beside the model and the tokenizer."""
        kinds = [_TRANSFORMER]
        if isinstance(self.vector_map, LinearMap):
            _write_map(folder / f"{len(kinds)}_Router", self.vector_map)
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
        if isinstance(self.vector_map, ProjectionHeads):
            _write_heads(folder / f"{len(kinds)}_Router", self.vector_map)
            kinds.append(_ROUTER)
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
        "query": [_Dense(weight.T, -source_mean @ weight)],
        "document": [_Dense(target_weight.T, -target_mean @ target_weight)],
    }
    _write_router(folder, layers, "token_embeddings")


def _write_heads(folder: Path, heads: ProjectionHeads) -> None:
    """Write a router with the head of queries and that of documents.

    They come behind the pooling, since they are not linear. A mean has float32 there, as all modules must then have.
    """
    layers = {"query": _dense_layers(heads.source), "document": _dense_layers(heads.target)}
    _write_router(folder, layers, "sentence_embedding")


class _Dense(NamedTuple):
    """A linear layer: ``matrix [out, in]`` and ``bias [out]``, and the activation behind it."""

    matrix: NDArray[np.float64]
    bias: NDArray[np.float64]
    activation: str = "torch.nn.modules.linear.Identity"


def _dense_layers(head: Head) -> list[_Dense]:
    """Return the layers of a head.

    The first one centres alone: as a part of the next one's bias, a large mean would leave nothing but rounding.
    """
    weights = {name: weight.double().numpy() for name, weight in head.state_dict().items()}
    scaled = weights["network.0.weight"] / weights["scale"]
    return [
        _Dense(np.eye(len(weights["mean"])), -weights["mean"]),
        _Dense(scaled, weights["network.0.bias"], "torch.nn.modules.activation.GELU"),
        _Dense(weights["network.2.weight"], weights["network.2.bias"]),
    ]


def _write_router(folder: Path, layers: Mapping[str, Sequence[_Dense]], key: str) -> None:
    """Write a router that applies the layers of a task to what other modules call ``key``."""
    names = {task: [f"{task}_{number}_Dense" for number in range(len(dense))] for task, dense in layers.items()}
    for task, dense in layers.items():
        for name, layer in zip(names[task], dense, strict=True):
            _write_dense(folder / name, layer, key)
    router: JsonObject = {
        "types": {name: _DENSE for of_task in names.values() for name in of_task},
        "structure": names,
        "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
    }
    write_json(folder / "router_config.json", router)


def _write_dense(folder: Path, layer: _Dense, key: str) -> None:
    from safetensors.numpy import save_file

    outputs, inputs = layer.matrix.shape
    settings: JsonObject = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": True,
        "activation_function": layer.activation,
        "module_input_name": key,
    }
    write_json(folder / "config.json", settings)
    weights = {"linear.weight": layer.matrix, "linear.bias": layer.bias}
    save_file(
        {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}, folder / "model.safetensors"
    )
