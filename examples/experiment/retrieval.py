"""From the run folders of retrieval.yaml to retrieval.csv: how often each model finds the expression of a sentence.

    python examples/experiment/collect.py runs/experiment/retrieval     # answers, as of every other sweep
    python examples/experiment/retrieval.py runs/experiment/retrieval   # adds what is missing to retrieval.csv
    python examples/experiment/retrieval.py --baselines                 # what costs no training: TF-IDF and the like
    python examples/experiment/retrieval.py --data turk runs/experiment/retrieval-turk   # and retrieval-turk.csv
    python examples/experiment/retrieval.py --data smollm2 --layers 0 15 30 runs/experiment/retrieval-smollm2
    python examples/experiment/retrieval.py --data smollm2-turk --layers 0 15 30 runs/experiment/retrieval-smollm2-turk
    python examples/experiment/retrieval.py --data smollm2-spider --layers 0 15 30 SWEEP  # of smollm2-spider

The candidates are the distinct answers of the test file. ``method`` says by what they are ranked. ``trained``: by the
embeddings that training reads. For models without a JEPA objective, ``best readout`` of all layers, poolings and
layouts, centred or not, and ``ridge`` and ``canonical``, the same with a linear map that is fitted on the training
records but the last 1,000 (of SmolLM2, 300), by regression of targets on sources or by canonical correlations of both.
``heads`` are two small networks that are trained by InfoNCE behind the model as it is; ``wide heads``, of synth-128 and
turk-128, are four times as wide and read all layers at once. For answers that have to be computed there is
``classifier``, too, a linear one of the answers, which are few. All are chosen by the mean reciprocal rank on those
last records. ``trained, ridge``, ``trained, canonical`` and ``trained, heads`` are the same behind the embeddings that
training reads; ``heads`` of such a model are read where they find most, of texts without predictor tokens. Runs of one
seed also have ``trained, all answers``: every training answer is a candidate, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from collect import trained, trials
from computed_baselines import behind_classifier, behind_heads, behind_wide_heads
from ranking import (
    DATA,
    LAYOUTS,
    Asked,
    Embed,
    Matrix,
    Readout,
    Sides,
    asked,
    beside_training_answers,
    reciprocal_rank,
    row,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stepjepa.base.files import atomic_write
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.sources import read_records
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.run import pair_embedder
from stepjepa.models.loading import load_for_inference, load_model
from stepjepa.objectives.fitted import sides_behind
from stepjepa.objectives.head_training import EPOCHS, fit_heads
from stepjepa.objectives.linear_map import FITS, Fit, fit_linear_maps
from stepjepa.objectives.reading import embedding_config
from stepjepa.objectives.view_embeddings import ReadoutPlace
from stepjepa.store.record import trained_objective

FILE = Path(__file__).resolve().with_suffix(".csv")
ONE_SEED = "82"
TRIED = 1000
"""Training records that the maps are fitted on while readouts are compared."""
METHODS = ("ridge", "canonical")
POOLINGS: tuple[Literal["last", "mean"], ...] = ("last", "mean")


# -- readouts of models that were trained without pairs ----------------------------------------------------------------


def embed_everywhere(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Record],
    layout: str,
    layers: Sequence[int],
) -> dict[tuple[int, str], Sides]:
    """Embed both views of records in one pass, at every layer and with both poolings.

    Returns:
        By layer and pooling, the sources and targets.
    """
    config = JepaConfig(mode="llm-jepa", predictors=0, layout=layout, pooling="mean")
    places = {(layer, pooling): ReadoutPlace(layer, pooling) for layer, pooling in product(layers, POOLINGS)}
    embedder = pair_embedder(model, tokenizer, config, 64 if model.device.type == "cpu" else 256)
    embedded = embedder.at(records, [*places.values()])
    return {name: (embedded[place].source, embedded[place].target) for name, place in places.items()}


def centre(matrix: Matrix, readout: Readout) -> Matrix:
    """Subtract the mean if the readout asks for it."""
    return matrix - matrix.mean(0) if readout.centred else matrix


def without_objective(
    about: dict[str, Any], embed: Embed, train: Sequence[Record], test: Asked
) -> list[dict[str, Any]]:
    """The rows of a model without a JEPA objective: its best readout, and its best readout with a ridge map.

    Args:
        about: the columns that name the model.
        embed: embeds records at the layers that are tried.
        train: the records that maps are fitted on and readouts are chosen by.
        test: of :func:`asked`.
    """
    fitted, chosen = train[: -test.data.chosen], asked(test.data, train[-test.data.chosen :])
    best: list[tuple[float, Readout]] = []
    mapped: list[tuple[float, Readout, Fit]] = []
    for layout in LAYOUTS:
        held_out, tried = embed(chosen.records, layout), embed(fitted[:TRIED], layout)
        for (layer, pooling), sides in held_out.items():
            for centred in (False, True):
                readout = Readout(layout, layer, pooling, centred)
                source, target = (centre(side, readout) for side in sides)
                best.append((reciprocal_rank(source, target, chosen), readout))
            readout = Readout(layout, layer, pooling, centred=False)
            for fit, linear_map in zip(FITS, fit_linear_maps(*tried[layer, pooling]), strict=True):
                mapped.append((reciprocal_rank(*sides_behind(linear_map, *sides), chosen), readout, fit))
    _, readout = max(best)
    source, target = (centre(side, readout) for side in embed(test.records, readout.layout)[readout.place])
    rows = [row({**about, "method": "best readout", "choice": readout.words}, source, target, test)]
    for method in METHODS:
        _, readout, fit = max(each for each in mapped if each[2].method == method)
        known, new = (embed(records, readout.layout)[readout.place] for records in (fitted, test.records))
        words = f"{readout.words}, penalty {fit.penalty:g}"
        (linear_map,) = fit_linear_maps(*known, [fit])
        rows.append(row({**about, "method": method, "choice": words}, *sides_behind(linear_map, *new), test))
    if test.data.computed:
        rows.append(behind_classifier(about, embed, fitted, chosen, test))
    wide = [behind_wide_heads(about, embed, fitted, chosen, test)] if test.data.wide else []
    return [*rows, behind_heads(about, embed, fitted, chosen, test), *wide]


def at_layers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int] | None) -> Embed:
    """Return the function that embeds by a model at some layers; None for the token embeddings, 0, and each layer."""
    tried = layers or range(model.config.num_hidden_layers + 1)
    return lambda records, layout: embed_everywhere(model, tokenizer, records, layout, tried)


# -- models ------------------------------------------------------------------------------------------------------------


def of_run(
    folder: Path, about: dict[str, Any], train: Sequence[Record], test: Asked, layers: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The rows of a run folder; ``layers``, by default all, are those at which maps of any readout are tried."""
    model, tokenizer = load_for_inference(folder, dtype="float32")
    if (trained_objective(folder) or {})["mode"] == "regular":
        return without_objective(about, at_layers(model, tokenizer, layers), train, test)
    config = embedding_config(trained_objective(folder))

    embed = pair_embedder(model, tokenizer, config, 64 if model.device.type == "cpu" else 256)
    views = embed(test.records)
    words = f"{config.layout}, {config.predictors} predictors"
    rows = [row({**about, "method": "trained", "choice": words}, views.source, views.target, test)]
    known = embed(train)
    parts = slice(None, -test.data.chosen), slice(-test.data.chosen, None)
    fitted, held_out = ((known.source[part], known.target[part]) for part in parts)
    chosen = asked(test.data, train[parts[1]])
    maps = [*fit_linear_maps(*fitted)]
    ranks = [reciprocal_rank(*sides_behind(linear_map, *held_out), chosen) for linear_map in maps]
    for method in METHODS:
        _, fit, linear_map = max(
            (each for each in zip(ranks, FITS, maps, strict=True) if each[1].method == method), key=itemgetter(0, 1)
        )
        sides = sides_behind(linear_map, views.source, views.target)
        words_of_map = f"{words}, penalty {fit.penalty:g}"
        rows.append(row({**about, "method": f"trained, {method}", "choice": words_of_map}, *sides, test))
    same = asked(test.data, train[parts[0]]).same
    _, heads = fit_heads(
        *fitted, same, lambda heads: reciprocal_rank(*sides_behind(heads, *held_out), chosen), epochs=EPOCHS
    )
    about_heads = {**about, "method": "trained, heads", "choice": f"{words}, {heads.epochs} epochs"}
    rows.append(row(about_heads, *sides_behind(heads, views.source, views.target), test))
    rows.append(behind_heads(about, at_layers(model, tokenizer, layers), train[parts[0]], chosen, test))
    if about["seed"] == ONE_SEED:
        more = {**about, "method": "trained, all answers", "choice": words}
        rows.append(beside_training_answers(more, views, known, test, asked(test.data, train)))
    return rows


def without_model(train: Sequence[Record], test: Asked) -> list[dict[str, Any]]:
    """The rows of what needs no model."""
    questions = [[record.messages[-2]["content"] for record in part] for part in (train, test.records)]
    answers = [[record.answer for record in part] for part in (train, test.records)]
    about = {"seed": "", "choice": ""}
    rows = []
    for method, analyzer, sizes in (("TF-IDF, characters", "char", (2, 5)), ("TF-IDF, words", "word", (1, 2))):
        word = {"token_pattern": test.data.word} if analyzer == "word" else {}
        tfidf = TfidfVectorizer(analyzer=analyzer, ngram_range=sizes, **word)
        tfidf = tfidf.fit([*questions[0], *answers[0]])
        source, target = (tfidf.transform(part[1]).toarray().astype(np.float32) for part in (questions, answers))
        rows.append(row({**about, "arm": "none", "method": method}, source, target, test))
    # The answer of the nearest known question, and then the candidates by their likeness to it.
    tfidf = TfidfVectorizer(analyzer="char", ngram_range=(2, 5)).fit(questions[0])
    known, new = (tfidf.transform(part) for part in questions)
    nearest = [answers[0][place] for place in np.asarray((new @ known.T).argmax(1)).ravel()]
    likeness = TfidfVectorizer(analyzer="char", ngram_range=(1, 4), lowercase=False).fit(answers[0])
    source, target = (likeness.transform(part).toarray().astype(np.float32) for part in (nearest, answers[1]))
    answered = [replace_answer(*each) for each in zip(test.records, nearest, strict=True)]
    names: list[str | None] = [record.answer for record in (*test.records, *answered)]
    if test.data.task is not None:
        names = test.data.task.answer_names([*test.records, *answered])
    right = np.mean([names[place] == names[len(nearest) + place] for place in range(len(nearest))])
    named = {**about, "arm": "none", "method": "nearest known question", "right": 100 * right}
    return [*rows, row(named, source, target, test)]


def untrained(
    train: Sequence[Record], test: Asked, seed: str, layers: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The rows of a model before training; ``seed`` draws the weights of a preset."""
    texts = (message["content"] for record in train for message in record.messages)
    model, tokenizer = load_model(test.data.model, texts=texts, predictors=0, seed=int(seed))
    return without_objective({"seed": seed, "arm": "untrained"}, at_layers(model, tokenizer, layers), train, test)


def replace_answer(record: Record, answer: str) -> Record:
    """The record with another answer."""
    return replace(record, messages=(*record.messages[:-1], {"role": "assistant", "content": answer}))


def read(file: Path | None = None) -> pd.DataFrame:
    """The rows that are there already, by default of retrieval.csv; figures in per cent."""
    return pd.read_csv(file or FILE, dtype={"seed": str}, keep_default_na=True).fillna({"seed": "", "choice": ""})


def main(argv: list[str] | None = None) -> int:
    """Add rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="?", metavar="SWEEP", help="folder of the sweep")
    parser.add_argument("--baselines", action="store_true", help="rank by what needs no training")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers to try, instead of all")
    parser.add_argument("--data", choices=list(DATA), default="synth", help="what the sweep trains on (synth)")
    parser.add_argument("--file", type=Path, help="(retrieval.csv; of other data retrieval-DATA.csv)")
    args = parser.parse_args(argv)
    data, of_data = DATA[args.data], FILE if args.data == "synth" else FILE.with_stem(f"{FILE.stem}-{args.data}")
    args.file = args.file or of_data
    rows = read(args.file).to_dict("records") if args.file.exists() else []
    train, test = read_records(data.train), asked(data, read_records(data.test)[: data.queries], equal=True)
    if args.baselines:
        rows = [each for each in rows if each["arm"] not in ("none", "untrained")]
        # A model before training for each seed of the others; a pretrained one is the same for all.
        seeds = {each["seed"] for each in rows} if data.model.startswith("preset:") else set()
        rows += without_model(train, test)
        for seed in sorted(seeds) or [ONE_SEED]:
            rows += untrained(train, test, seed, args.layers)
            write(rows, args.file)
            print(f"{args.file}: untrained, seed {seed}")
    for name, arm, seed in trials(args.sweep) if args.sweep else ():
        known = any((each["arm"], each["seed"]) == (arm, seed) for each in rows)
        if not known and trained(args.sweep / name):
            rows += of_run(args.sweep / name, {"arm": arm, "seed": seed}, train, test, args.layers)
            write(rows, args.file)
            print(f"{args.file}: {arm}, seed {seed}")
    return 0


def write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the file, sorted by arm, seed and method."""
    columns = ["arm", "seed", "method", "choice", "queries", "candidates", *RETRIEVAL_METRICS, "hits_at_1_of_text"]
    columns += ["hits_at_1_language_seen", "hits_at_1_language_new", "right"]
    table = pd.DataFrame(rows).reindex(columns=columns).sort_values(["arm", "seed", "method"])
    with atomic_write(file) as stream:
        table.to_csv(stream, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    raise SystemExit(main())
