"""Write a model folder that ``SentenceTransformer`` of sentence-transformers 6 loads, with the embeddings of ``Jepa``.

Its Transformer module renders each text with the tokenizer's chat template, and passes it the task, ``query`` or
``document``. The template written here surrounds a text as in training, up to the readout. If an embedding is the mean
of a text's tokens, the template writes copies of the tokens in front of it, and these have weight 0 in the mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, raising_user_errors, shown
from stepjepa.batch.collate import Collator
from stepjepa.config.jepa import JepaConfig
from stepjepa.evaluation.sentence_transformer_card import Card
from stepjepa.evaluation.sentence_transformer_modules import ReadoutModules
from stepjepa.evaluation.template_copies import TemplateCopies
from stepjepa.models.architecture import find_decoder, number_of_layers
from stepjepa.models.decoder_alone import DecoderAlone, loadable, with_first_layers
from stepjepa.objectives.embedding import Embedder
from stepjepa.objectives.fitted import FittedHeads
from stepjepa.objectives.inputs import EmbedOptions, Text, fitted_of
from stepjepa.objectives.view_embeddings import ALL_LAYERS
from stepjepa.views.sequences import Kind, SampledRecord, TokenSequence

if TYPE_CHECKING:
    from stepjepa.objectives.fitted import Fitted
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


class _Written(NamedTuple):
    """The text that a template puts around a text to embed."""

    before: str
    strip: str  # the string method with which the template trims the text, if any
    front: str  # predictor tokens in front of the text
    behind: str  # predictor tokens behind it


def check_readout(config: JepaConfig) -> None:
    """Raise ``UserError`` for a readout that the modules of sentence-transformers don't have."""
    with_predictors = config.pooling == "mean" and config.used_predictors > 0
    faults = (
        (config.mode == "step-jepa", "step-jepa embeds steps behind their chat, and SentenceTransformer texts alone"),
        (config.plain, "a model without a chat format (plain) has no template that SentenceTransformer renders"),
        (config.layout not in ("separate", "branched"), f"layout '{config.layout}' is a custom function"),
        (with_predictors, "with predictor tokens, its modules can't average what pooling 'mean' does"),
        (config.last_token is not None, f"last_token {config.last_token} is read inside the template"),
    )
    if reasons := [reason for fault, reason in faults if fault]:
        raise _refused(reasons[0])


def check_dtype_of_heads(dtype: str, pooling: str | None) -> None:
    """Raise ``UserError`` for a dtype in which the modules can't apply projection heads behind a pooling.

    All modules have the dtype of the model, and a mean in front of the heads is float32 whatever that is.
    """
    if dtype != "float32" and pooling == "mean":
        fault = f"no SentenceTransformer with projection heads behind means can be written in {dtype}"
        raise UserError(f"{fault}: a mean is float32 there; set `dtype` float32")


def _refused(reason: str) -> UserError:
    return UserError(f"no SentenceTransformer can be written: {reason}; use 'stepjepa embed' instead")


def write_sentence_transformer(jepa: Jepa, folder: str | Path, name: str, **options: Unpack[EmbedOptions]) -> None:
    """Write the folder: model, tokenizer, the modules' settings and weights, and a README.

    Args:
        jepa: a model; in layout ``branched`` queries are read behind its ``system_prompt``.
        folder: an existing, empty folder.
        name: the model's name in the README.
        options: those of ``Jepa.embedder``; ``layer``, ``pooling`` and the map or the heads count.

    Raises:
        UserError: its embeddings can't be read by sentence-transformers, the training had several system prompts, or
            what training wrote around a text can't be written so that it gives the same tokens; the message says which.
            Or the model was trained without a JEPA objective, and ``options`` name no readout.
    """
    path, fitted = Path(folder), fitted_of(options)
    with raising_user_errors():
        embedders = {task: jepa.embedder(side, **options) for task, side in _TASKS.items()}
    config = embedders["query"].reader.config
    check_readout(config)
    if fitted is not None and fitted.place.layer == ALL_LAYERS:
        raise _refused("its modules read one layer, and the projection heads all; train them with all_layers=False")
    if isinstance(fitted, FittedHeads):
        check_dtype_of_heads(str(jepa.model.dtype).removeprefix("torch."), config.pooling)
    try:
        loadable(jepa.model)
    except ValueError as error:
        raise _refused(str(error)) from None
    tokenizer: Any = copy.deepcopy(jepa.tokenizer)
    copies = TemplateCopies(tokenizer) if config.pooling == "mean" else None
    written = {task: _written(embedder) for task, embedder in embedders.items()}
    in_template = (
        written
        if copies is None
        else {
            task: text._replace(before=copies.before(_sequences(embedders[task])[0])) for task, text in written.items()
        }
    )
    tokenizer.chat_template = _template(in_template)
    for task, embedder in embedders.items():
        _check_tokens(tokenizer, task, embedder, copies)
    # sentence-transformers passes no position ids, which learned positions need if padding is on the left.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    decoder: Any = find_decoder(jepa.model)
    length = int(getattr(decoder.config, "max_position_embeddings", None) or tokenizer.model_max_length)
    tokenizer.model_max_length = min(length, tokenizer.model_max_length)
    last = config.jepa_layer in (-1, number_of_layers(jepa.model))
    with nullcontext() if copies is None else copies.rows_of(decoder):
        read = with_first_layers(jepa.model, config.jepa_layer)
        for embedder in embedders.values():
            _check_states(read, _sequences(embedder)[0], {} if copies is None else copies.originals)
        read.decoder.save_pretrained(path)
    tokenizer.save_pretrained(path)
    modules = ReadoutModules(
        decoder.config.hidden_size,
        None if last else read.layer,
        None if copies is None else copies.weights(),
        None if fitted is None else fitted.vector_map,
    )
    modules.write(path)
    facts = Card(
        name=name,
        model=_trained_as(jepa),
        readout=_readout(config, None if last else read, number_of_layers(jepa.model), fitted),
        query=_shown(written["query"]),
        document=_shown(written["document"]),
        length=tokenizer.model_max_length,
        copy=None if copies is None else next(iter(copies.names.values()), None),
        read_by_servers=modules.read_by_servers,
        needs_float32=isinstance(fitted, FittedHeads) and config.pooling == "mean",
    )
    (path / "README.md").write_text(facts.text(), encoding="utf-8")


def _trained_as(jepa: Jepa) -> str:
    config = jepa.config
    if not jepa.has_objective:
        return "a causal language model that was trained without a joint-embedding loss"
    predictors = counted(config.used_predictors, "predictor token")
    return (
        f"a model trained with a joint-embedding predictive loss ({config.mode}, layout {config.layout}, {predictors})"
    )


def _readout(config: JepaConfig, read: DecoderAlone | None, layers: int, fitted: Fitted | None) -> str:
    tokens = "mean of a text's tokens" if config.pooling == "mean" else "last token"
    behind = "" if fitted is None else f", behind {fitted.kind} fitted on {counted(fitted.records, 'record')}"
    if read is None:
        return f"the {tokens} at the last layer{behind}"
    here = number_of_layers(read.decoder)
    enough = "" if here == layers else f" (this folder has the {here} layers of {layers} that it needs)"
    return f"the {tokens} at layer {read.layer}{enough}{behind}"


def _shown(written: _Written) -> str:
    return f"{written.before}{written.front}TEXT{written.behind}"


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


def _sequences(embedder: Embedder) -> list[TokenSequence]:
    """Return the sequences that training reads for the texts of ``_ENDS``, each up to the end of its readout."""
    collator = Collator.of(embedder.reader.config, embedder.reader.predictors)
    records = embedder.tokenizer.texts([Text(text) for text in _ENDS])
    sequences = []
    for record in records:
        (sequence,) = (
            sequence
            for sequence in collator.sequences(SampledRecord(record))
            if any(readout.kind == embedder.side for readout in sequence.readouts)
        )
        sequences.append(sequence)
    return sequences


def _check_tokens(tokenizer: Any, task: str, embedder: Embedder, copies: TemplateCopies | None) -> None:
    """Raise ``UserError`` if the template gives other tokens than training for a text of some kind."""
    originals = {} if copies is None else copies.originals
    for text, sequence in zip(_ENDS, _sequences(embedder), strict=True):
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, task=task, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        same = [originals.get(token, token) for token in ids] == sequence.ids.tolist()
        left_out = sum(token in originals for token in ids)
        if not same or (copies is not None and left_out != sequence.readouts[0].start):
            beside = f"an end of a text such as {shown(text)} with what is beside it"
            raise _refused(f"the chat template and the tokenizer join {beside}")


def _check_states(read: DecoderAlone, sequence: TokenSequence, originals: Mapping[int, int]) -> None:
    """Raise ``UserError`` if sentence-transformers would not read the hidden states that are read here.

    Some models have several states for a token below the last layer, or embed tokens in each layer by their ids.

    Args:
        read: the decoder that is saved, with rows for copies.
        sequence: a text behind its template.
        originals: id of a copy -> id of its token.
    """
    ids, start = sequence.ids.tolist(), sequence.readouts[0].start
    copies = {token: copy for copy, token in originals.items()}
    in_folder = [copies.get(token, token) for token in ids[:start]] + ids[start:]
    if not read.reads_alike(ids, in_folder):
        copied = " of copies of the template's tokens" if copies else ""
        fault = f"sentence-transformers reads other hidden states{copied} from a {type(read.decoder).__name__}"
        raise _refused(f"{fault} at layer {read.layer}; layer -1 with pooling last may do")
