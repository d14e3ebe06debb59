"""``embed`` and ``search`` behind projection heads: by the formula, in Python and shell, kept beside their file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import stepjepa
import tiny
from stepjepa import Jepa, JepaConfig
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.data.record import Record
from stepjepa.evaluation.sentence_transformer import write_sentence_transformer
from stepjepa.evaluation.stored_map import LINEAR_MAP, PROJECTION_HEADS
from stepjepa.objectives.fitted import FittedHeads
from stepjepa.objectives.projection_heads import Head, ProjectionHeads
from stepjepa.objectives.view_embeddings import ALL_LAYERS, ReadoutPlace

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
KNOWN = [(f"{first} and {second}", f"{second}!") for first in NUMBERS[:6] for second in NUMBERS[:4]]
QUERIES, ANSWERS = ["two and nine", "six and one"], ["one!", "nine!", "four!", "seven!"]


def records() -> list[Record]:
    return [tiny.make_record("Add.", question, answer) for question, answer in KNOWN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A base model, and a run with an objective; the records of ``known.jsonl`` have a system prompt."""
    path = tmp_path_factory.mktemp("served-heads")
    tiny.make_model("llama").save_pretrained(path / "base")
    trained_tokenizer.save_pretrained(path / "base")
    jepa = Jepa(tiny.make_model("llama"), copy.deepcopy(trained_tokenizer), JepaConfig(layout="branched", predictors=2))
    jepa.system_prompt = "Add."
    jepa.save(path / "objective")
    write_jsonl(path / "known.jsonl", ({"messages": list(record.messages)} for record in records()))
    write_jsonl(path / "answers.jsonl", ({"answer": text} for text in ANSWERS))
    write_jsonl(path / "queries.jsonl", ({"question": text} for text in QUERIES))
    return path


@pytest.fixture(scope="module")
def base(folder: Path) -> Jepa:
    return Jepa.from_pretrained(folder / "base", device="cpu")


@pytest.fixture(scope="module")
def fitted(base: Jepa) -> FittedHeads:
    return stepjepa.fit_projection_heads(base, records(), layer=1, pooling="mean")


def by_formula(heads: ProjectionHeads, side: str, vectors: Any) -> Any:
    """One vector after the other through the head of a side, by the formula of its docstring."""
    weights = {name: torch.tensor(values).double() for name, values in heads.arrays().items()}
    rows = []
    for vector in torch.tensor(vectors).double():
        centred = (vector - weights[f"{side}.mean"]) / weights[f"{side}.scale"]
        hidden = F.gelu(weights[f"{side}.network.0.weight"] @ centred + weights[f"{side}.network.0.bias"])
        rows.append(weights[f"{side}.network.2.weight"] @ hidden + weights[f"{side}.network.2.bias"])
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(("name", "layer"), [("base", 1), ("objective", 2)])
def test_texts_are_embedded_behind_the_heads(name: str, layer: int, folder: Path) -> None:
    jepa = Jepa.from_pretrained(folder / name, device="cpu")
    fitted = stepjepa.fit_projection_heads(jepa, records(), layer=layer)
    assert fitted.system_prompts == ("Add.",) and fitted.records < len(KNOWN)
    new = [tiny.make_record("Add.", question, ".") for question in QUERIES]
    answers = [tiny.make_record("Add.", "?", answer) for answer in ANSWERS]
    pairs = jepa.pair_embedder(layer=fitted.place.layer, pooling=fitted.place.pooling)
    expected = by_formula(fitted.heads, "source", pairs(new).source)
    assert expected.shape == (2, 128)
    np.testing.assert_allclose(jepa.embed(QUERIES, projection_heads=fitted, raw=True), expected, atol=2e-4)
    np.testing.assert_allclose(jepa.embed(new, projection_heads=fitted, raw=True), expected, atol=2e-4)
    targets = by_formula(fitted.heads, "target", pairs(answers).target)
    np.testing.assert_allclose(jepa.embed(ANSWERS, "target", projection_heads=fitted, raw=True), targets, atol=2e-4)
    lengths = np.linalg.norm(expected, axis=1, keepdims=True), np.linalg.norm(targets, axis=1, keepdims=True)
    cosines = (expected / lengths[0]) @ (targets / lengths[1]).T
    for of_query, row in zip(cosines, jepa.index(ANSWERS, projection_heads=fitted).search(QUERIES), strict=True):
        assert [hit.index for hit in row] == np.argsort(-of_query, kind="stable").tolist()
        assert [hit.score for hit in row] == pytest.approx(sorted(of_query, reverse=True), abs=1e-4)


def test_heads_of_all_layers_embed_behind_the_means_of_each(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python and shell, kept beside their file; heads of one layer are exported, as sentence-transformers reads."""
    asked: list[bool] = []

    def places(own: ReadoutPlace, layers: int | None, *, has_objective: bool, all_layers: bool) -> list[ReadoutPlace]:
        asked.append(all_layers)
        return [ReadoutPlace(ALL_LAYERS if all_layers else 1, "mean", not has_objective)]

    monkeypatch.setattr("stepjepa.evaluation.model_maps.places_to_try", places)
    known = ["--linear_map", folder / "known.jsonl", "--projection_heads"]
    corpus = ["--corpus", folder / "answers.jsonl", "--query", *QUERIES, "--json"]
    for name in ("base", "objective"):
        jepa = Jepa.from_pretrained(folder / name, device="cpu")
        fitted = stepjepa.fit_projection_heads(jepa, records())
        assert fitted.heads.dimensions == 3 * 33 and repr(fitted).startswith("FittedHeads(22 records, all layers, ")
        pairs = jepa.pair_embedder(pooling="mean")
        new = [tiny.make_record("Add.", question, ".") for question in QUERIES]
        each = [ReadoutPlace(layer, "mean", name == "base") for layer in range(3)]
        of_layers = [pairs.at(new, [place])[place].source for place in each]
        expected = by_formula(fitted.heads, "source", np.hstack(of_layers))
        np.testing.assert_allclose(jepa.embed(new, projection_heads=fitted, raw=True), expected, atol=2e-4)
        np.testing.assert_allclose(jepa.embed(QUERIES, projection_heads=fitted, raw=True), expected, atol=2e-4)
        assert "layer all, pooling mean" in repr(jepa.embedder(projection_heads=fitted))
        asked.clear()
        for _ in range(2):
            assert main([*map(str, ["search", "--model_path", folder / name, *known, *corpus])]) == 0
            captured = capsys.readouterr()
            results = json.loads(captured.out)["results"]
            for result, row in zip(results, jepa.index(ANSWERS, projection_heads=fitted).search(QUERIES), strict=True):
                assert [hit["score"] for hit in result["hits"]] == pytest.approx([hit.score for hit in row], abs=2e-6)
            assert "known.jsonl: all layers, pooling mean" in captured.err
        assert asked == [True]
        with pytest.raises(UserError, match="modules read one layer, and the projection heads all"):
            write_sentence_transformer(jepa, tmp_path, name, projection_heads=fitted)
    exported = [
        "export",
        "--embeddings",
        "--model_path",
        folder / "base",
        "--output_dir",
        tmp_path / "exported",
        *known,
    ]
    assert main([*map(str, exported)]) == 0 and asked == [True, False]
    assert "known.jsonl: layer 1, pooling mean" in capsys.readouterr().err


def test_heads_of_their_arrays_are_the_same(fitted: FittedHeads) -> None:
    again = FittedHeads.of_arrays(
        fitted.heads.arrays(), fitted.facts(), fitted.place, fitted.records, fitted.system_prompts
    )
    vectors = np.random.default_rng(3).normal(size=(7, fitted.heads.dimensions)).astype(np.float32)
    for side in ("source", "target"):
        np.testing.assert_array_equal(again(vectors, side), fitted(vectors, side))  # type: ignore[arg-type]
    assert (again.fingerprint, repr(again)) == (fitted.fingerprint, repr(fitted))
    other = {**fitted.heads.arrays(), "target.network.2.bias": np.zeros(128, np.float32)}
    changed = FittedHeads.of_arrays(other, fitted.facts(), fitted.place, fitted.records, fitted.system_prompts)
    assert changed.fingerprint != fitted.fingerprint


def test_what_can_not_be_embedded(base: Jepa, fitted: FittedHeads) -> None:
    linear = stepjepa.fit_linear_map(base, records(), layer=1, pooling="mean")
    assert repr(fitted).startswith("FittedHeads(") and "behind projection heads" in repr(
        base.embedder(projection_heads=fitted)
    )
    for error, message, options in (
        (ValueError, "linear_map and projection_heads: expected one of them, got both", {"linear_map": linear}),
        (ValueError, "projection_heads: embeddings are read where it was fitted, got layer 2", {"layer": 2}),
    ):
        with pytest.raises(error, match=message):
            base.embed(QUERIES, projection_heads=fitted, **options)
    with pytest.raises(TypeError, match=r"projection_heads: expected the result of stepjepa.fit_projection_heads\("):
        base.embed(QUERIES, projection_heads=linear)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"linear_map: expected the result of stepjepa.fit_linear_map\("):
        base.embed(QUERIES, linear_map=fitted)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"vectors: expected \[N, 33\] as the projection heads are trained on, got \[2, 5\]"
    ):
        fitted(np.zeros((2, 5), np.float32), "source")


def run(folder: Path, command: str, *flags: object) -> int:
    known = ["--linear_map", folder / "known.jsonl", "--projection_heads", "--layer", 1, "--pooling", "mean"]
    return int(main([*map(str, [command, "--model_path", folder / "base", *known, *flags])]))


def test_the_commands_do_as_python_does_and_keep_the_heads(
    folder: Path, base: Jepa, fitted: FittedHeads, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = folder / f"known.jsonl{PROJECTION_HEADS.suffix}"
    corpus = ["--corpus", folder / "answers.jsonl", "--query", *QUERIES, "--json"]
    assert run(folder, "search", *corpus) == 0
    captured = capsys.readouterr()
    epochs = f"{fitted.heads.epochs:,} epochs"
    words = (
        f"the projection heads are trained on {fitted.records} records of {folder}/known.jsonl: layer 1, pooling mean"
    )
    assert f"note: {words}, {epochs}\n" in captured.err
    found = json.loads(captured.out)["results"]
    for result, row in zip(found, base.index(ANSWERS, projection_heads=fitted).search(QUERIES), strict=True):
        assert [hit["text"] for hit in result["hits"]] == [hit.text for hit in row]
        assert [hit["score"] for hit in result["hits"]] == pytest.approx([hit.score for hit in row], abs=2e-6)
    # They are not trained again, and a linear map of the same file is kept beside them.
    before = stored.read_bytes()
    flags = ["--input_file", folder / "queries.jsonl", "--column", "question", "--output_file", tmp_path / "q.npy"]
    with monkeypatch.context() as patched:
        patched.setattr("stepjepa.evaluation.model_maps.train_heads", None)
        assert run(folder, "embed", *flags) == 0
    np.testing.assert_allclose(np.load(tmp_path / "q.npy"), base.embed(QUERIES, projection_heads=fitted), atol=2e-6)
    capsys.readouterr()
    linear = ["search", "--model_path", folder / "base", "--linear_map", folder / "known.jsonl"]
    assert main([*map(str, [*linear, *corpus])]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"] != found
    # The corpus is not that of the heads.
    assert "answers.jsonl.embeddings.safetensors belongs to another model, corpus, readout or map" in captured.err
    assert (folder / f"known.jsonl{LINEAR_MAP.suffix}").is_file() and stored.read_bytes() == before


@pytest.mark.parametrize("command", ["search", "embed", "export"])
def test_heads_need_the_records_that_they_are_trained_on(
    command: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    texts = ["--input_file", folder / "queries.jsonl", "--column", "question", "--output_file", tmp_path / "q.npy"]
    flags = {
        "search": ["--corpus", folder / "answers.jsonl", "--query", "?"],
        "embed": texts,
        "export": ["--embeddings", "--output_dir", tmp_path / "st"],
    }[command]
    assert main([*map(str, [command, "--model_path", folder / "objective", "--projection_heads", *flags])]) == 2
    assert "--projection_heads does nothing without --linear_map; add it or leave it out" in capsys.readouterr().err


def test_a_choice_by_few_held_out_records_is_noted(base: Jepa, capsys: Any) -> None:
    few = "where embeddings are read is chosen by 2 held-out records, which leaves much to chance; "
    few += "of 100 records 10 are held out"
    stepjepa.fit_linear_map(base, records(), layer=1, pooling="mean")
    assert capsys.readouterr().err.count(f"note: {few}\n") == 1
    questions = [
        tiny.make_record("Add.", f"{first} and {second}", f"{second}!") for first in NUMBERS for second in NUMBERS
    ]
    more = [*questions, *(tiny.make_record("Add.", f"{first} with {first}", "two!") for first in NUMBERS * 3)]
    assert len(more) >= 100
    stepjepa.fit_linear_map(base, more, layer=1, pooling="mean")
    assert "held-out" not in capsys.readouterr().err


def test_the_corpus_is_that_of_the_heads(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Its stored embeddings are behind the heads of one file; those of another file have others."""
    other = tmp_path / "other.jsonl"
    write_jsonl(other, ({"messages": list(record.messages)} for record in [*records()[4:], *records()[:3]]))
    corpus = ["--corpus", folder / "answers.jsonl", "--query", *QUERIES, "--json"]

    def scores(known: Path, *flags: object) -> list[float]:
        heads = ["--linear_map", known, "--projection_heads", "--layer", 1, "--pooling", "mean"]
        assert main([*map(str, ["search", "--model_path", folder / "base", *heads, *corpus, *flags])]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        return [hit["score"] for result in results for hit in result["hits"]]

    first, second = (scores(known) for known in (folder / "known.jsonl", other))
    assert first != second
    assert first == pytest.approx(scores(folder / "known.jsonl", "--no_cache"), abs=2e-6)
    assert second == pytest.approx(scores(other, "--no_cache"), abs=2e-6)


def test_heads_of_another_training_are_trained_again(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--input_file", folder / "queries.jsonl", "--column", "question", "--overwrite"]
    flags += ["--output_file", folder / "q.npy"]
    for settings, again in ((PROJECTION_HEADS.settings, False), ({"training": {"epochs": 7}}, True)):
        assert run(folder, "embed", *flags) == 0
        capsys.readouterr()
        monkeypatch.setattr(
            "stepjepa.evaluation.stored_map.PROJECTION_HEADS", replace(PROJECTION_HEADS, settings=settings)
        )
        assert run(folder, "embed", *flags) == 0
        assert ("projection_heads.safetensors belongs to another" in capsys.readouterr().err) == again


def test_the_fingerprint_has_everything_that_vectors_depend_on(fitted: FittedHeads) -> None:
    place = fitted.place
    others = [
        replace(fitted, place=place._replace(layer=2)),
        replace(fitted, place=place._replace(pooling="last")),
        replace(fitted, place=place._replace(predictors=False)),
        replace(fitted, system_prompts=("Sum.",)),
    ]
    assert len({fitted.fingerprint, *(each.fingerprint for each in others)}) == 5


def test_records_without_a_pair_are_noted(base: Jepa, capsys: Any) -> None:
    empty = replace(records()[0], views=())
    fitted = stepjepa.fit_projection_heads(base, [*records(), empty], layer=1, pooling="mean")
    assert fitted.records < len(KNOWN)
    assert "note: not used for the projection heads: 1 of " in capsys.readouterr().err


def test_a_constant_dimension_has_no_weight(base: Jepa) -> None:
    """Divided by 1e-6, its rounding was what one saw of it."""
    generator = np.random.default_rng(3)
    known = generator.normal(size=(31, 5)).astype(np.float32)
    known[:, 2] = 1000
    head = Head.of(torch.tensor(known))
    new = torch.tensor(known[:3])
    moved = new.clone()
    moved[:, 2] += 1e-4 * 1000
    assert torch.allclose(head.scale, torch.tensor(known).std(0) + 1e-6) is False
    assert head.scale[2] == 1 and (head(moved) - head(new)).abs().max() < 0.1


def test_loaded_heads_move_no_generator_and_are_used_anywhere(base: Jepa, fitted: FittedHeads) -> None:
    state = torch.random.get_rng_state()
    again = ProjectionHeads.of_arrays(fitted.heads.arrays(), 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    vectors = np.ones((2, 33))
    vectors.flags.writeable = False
    np.testing.assert_allclose(fitted(vectors, "source"), again(vectors.astype(np.float32), "source"))
    with pytest.raises(ValueError, match="side: expected 'source' or 'target', got 'sources'"):
        fitted(vectors, "sources")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected \[N, 33\] as the projection heads are trained on, got \[33\]"):
        fitted(vectors[0], "source")
    with torch.inference_mode():
        inside = stepjepa.fit_projection_heads(base, records(), layer=1, pooling="mean")
    np.testing.assert_array_equal(inside(vectors, "source"), fitted(vectors, "source"))
