"""Write a model folder that ``SentenceTransformer`` of sentence-transformers 6 loads, with the embeddings of ``Jepa``.

Its Transformer module renders each text with the tokenizer's chat template, and passes it the task, ``query`` or
``document``. The template written here surrounds a text as in training, up to the readout.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.collate import Collator
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.architecture import find_decoder, number_of_layers
from stepjepa.objectives.embedding import Embedder
from stepjepa.objectives.inputs import Text
from stepjepa.store.environment import versions
from stepjepa.views.sequences import Kind, SampledRecord

if TYPE_CHECKING:
    from stepjepa.objectives.jepa import Jepa

_PROBE = "probe"
# Ways in which templates trim a text: method in Jinja -> function.
_STRIPS: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    ".strip()": str.strip,
    ".lstrip()": str.lstrip,
    ".rstrip()": str.rstrip,
    ".strip('\\n')": lambda text: text.strip("\n"),
    ".lstrip('\\n')": lambda text: text.lstrip("\n"),
    ".rstrip('\\n')": lambda text: text.rstrip("\n"),
}
_TASKS: dict[str, Kind] = {"query": "source", "document": "target"}
# Texts whose first or last characters a tokenizer may join with the text around them.
_ENDS = ("What is 3+4?", "So it is.", "a:", "x", " padded ", "two\n\nlines\n", "(a)", "1", "it's", "日本", "\tq;")

README = """\
---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---

# {name}

Embeddings of a model trained with a joint-embedding predictive loss ({mode}, layout {layout}, {predictors}),
exported by stepjepa {version}. A query and its document are near each other.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["{query}"])
documents = model.encode_document(["{document}"])
print(model.similarity(queries, documents))
```

- Without a task a text is a *document*. Set the task where a library calls `encode` for queries, too: in LangChain
  `HuggingFaceEmbeddings(model_name=..., query_encode_kwargs={{"task": "query"}})`. In `mteb` wrap the model:
  `SentenceTransformerEncoderWrapper(SentenceTransformer(...))`.
- A query is {query_is}; a document is {document_is}.
- sentence-transformers cuts texts off at {length} tokens; special tokens that a text spells count as such, and a
  thought in think tags in front of a document is embedded with it: remove it first, as training did.
- The chat template of this folder is for embeddings; to answer with the model, export it without `--embeddings`.
"""


class _Written(NamedTuple):
    """The text that a template puts around a text to embed."""

    before: str
    strip: str  # the string method with which the template trims the text, if any
    front: str  # predictor tokens in front of the text
    behind: str  # predictor tokens behind it


def check_readout(config: JepaConfig, layers: int) -> None:
    """Raise ``UserError`` for a readout that the modules of sentence-transformers don't have."""
    faults = (
        (config.mode == "step-jepa", "step-jepa embeds steps behind their chat, and SentenceTransformer texts alone"),
        (config.mode == "regular", "the model was trained without a JEPA objective"),
        (config.plain, "a model without a chat format (plain) has no template that SentenceTransformer renders"),
        (config.layout not in ("separate", "branched"), f"layout '{config.layout}' is a custom function"),
        (config.pooling == "mean", "pooling 'mean' averages over a part of the tokens, which no module of it does"),
        (config.last_token is not None, f"last_token {config.last_token} is read inside the template"),
        (
            config.jepa_layer not in (-1, layers),
            f"it is read at layer {config.jepa_layer}, not at the last one",
        ),
    )
    if reasons := [reason for fault, reason in faults if fault]:
        readout = " --pooling mean" if config.mode == "regular" else ""
        raise UserError(f"no SentenceTransformer can be written: {reasons[0]}; use 'stepjepa embed{readout}' instead")


def write_sentence_transformer(jepa: Jepa, folder: str | Path, name: str) -> None:
    """Write the folder: model, tokenizer, the modules' settings and a README.

    Args:
        jepa: a trained model; in layout ``branched`` queries are read behind its ``system_prompt``.
        folder: an existing, empty folder.
        name: the model's name in the README.

    Raises:
        UserError: its embeddings can't be read by sentence-transformers, the training had several system prompts, or
            the chat template can't be rewritten so that it gives the tokens of training; the message says which.
    """
    path, layers = Path(folder), number_of_layers(jepa.model)
    check_readout(jepa.config, layers)
    embedders = {task: jepa.embedder(side) for task, side in _TASKS.items()}
    written = {task: _written(embedder) for task, embedder in embedders.items()}
    tokenizer: Any = copy.deepcopy(jepa.tokenizer)
    tokenizer.chat_template = _template(written)
    for task, embedder in embedders.items():
        _check_tokens(tokenizer, task, embedder)
    # sentence-transformers passes no position ids, which learned positions need if padding is on the left.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    decoder: Any = find_decoder(jepa.model)
    length = int(getattr(decoder.config, "max_position_embeddings", None) or tokenizer.model_max_length)
    tokenizer.model_max_length = min(length, tokenizer.model_max_length)
    decoder.save_pretrained(path)
    tokenizer.save_pretrained(path)
    for file, value in _settings(decoder.config.hidden_size).items():
        write_json(path / file, value)
    config = jepa.config
    facts = {
        "name": name,
        "mode": config.mode,
        "layout": config.layout,
        "predictors": counted(config.used_predictors, "predictor token"),
        "version": versions()["stepjepa"],
        "length": tokenizer.model_max_length,
        "query": "How many singers do we have?",
        "document": "SELECT count(*) FROM singer",
        "query_is": f"`{_shown(written['query'])}`",
        "document_is": f"`{_shown(written['document'])}`",
    }
    (path / "README.md").write_text(README.format(**facts), encoding="utf-8")


def _shown(written: _Written) -> str:
    text = f"{written.before}{written.front}TEXT{written.behind}"
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("`", "'")


def _written(embedder: Embedder) -> _Written:
    """Determine the text that the tokenizer of views puts around a text, and how the template trims it."""
    tokenizer = embedder.tokenizer
    predictors = tokenizer.renderer.predictor_text if embedder.side == "source" else ""
    front, behind = (predictors, "") if tokenizer.config.front_pred else ("", predictors)
    before, _ = tokenizer.render_text(_PROBE, embedder.side)
    padded = f"\n {_PROBE} \n"
    for strip, trimmed in _STRIPS.items():
        text = f"{front}{trimmed(padded)}{behind}"
        if tokenizer.render_text(padded, embedder.side) == (before, text):
            return _Written(before, strip, front, behind)
    raise UserError("the chat template changes white space inside a text, so that it can't be written for embeddings")


def _template(written: dict[str, _Written]) -> str:
    """Make a chat template that renders one text, for the task in its variable ``task``."""
    parts = {
        task: f"{{{{- {text.before + text.front!a} + messages[0]['content']{text.strip} + {text.behind!a} }}}}"
        for task, text in written.items()
    }
    error = "this model embeds a text alone; pass no prompt, and no chat"
    return (
        f"{{%- if messages | length != 1 %}}{{{{- raise_exception({error!a}) }}}}{{%- endif %}}\n"
        f"{{%- if task is defined and task == 'query' %}}{parts['query']}\n"
        f"{{%- else %}}{parts['document']}{{%- endif -%}}\n"
    )


def _check_tokens(tokenizer: Any, task: str, embedder: Embedder) -> None:
    """Raise ``UserError`` if the template gives other tokens than training for a text of some kind."""
    config = embedder.reader.config
    collator = Collator.of(config, embedder.reader.predictors)
    records = embedder.tokenizer.texts([Text(text) for text in _ENDS])
    for text, record in zip(_ENDS, records, strict=True):
        (ids,) = (
            sequence.ids.tolist()
            for sequence in collator.sequences(SampledRecord(record))
            if any(readout.kind == embedder.side for readout in sequence.readouts)
        )
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, task=task, tokenize=False)
        if tokenizer(rendered, add_special_tokens=False)["input_ids"] != ids:
            fault = (
                f"the chat template and the tokenizer join the end of a text such as {shown(text)} with what follows"
            )
            raise UserError(f"no SentenceTransformer can be written: {fault}; use 'stepjepa embed' instead")


def _settings(dimensions: int) -> JsonObject:
    """Return the contents of the files that sentence-transformers 6 reads, by name."""
    modules = "sentence_transformers"
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    types = {
        "": f"{modules}.base.modules.transformer.Transformer",
        "1_Pooling": f"{modules}.sentence_transformer.modules.pooling.Pooling",
        "2_Normalize": f"{modules}.base.modules.normalize.Normalize",
    }
    module_list: list[JsonObject] = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(types.items())
    ]
    return {
        "modules.json": module_list,
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": forward, "message": {**forward, "format": "flat"}},
            "module_output_name": "token_embeddings",
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "embedding_dimension": dimensions,
            "pooling_mode": "lasttoken",
            "include_prompt": True,
        },
        "2_Normalize/config.json": {},
    }
