"""``embed`` and ``search`` behind a linear map: against scikit-learn, in Python and shell, kept beside its file."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyarrow import Table, parquet

import stepjepa
import tiny
from slow_maps import same_signs, slow_map
from stepjepa import Jepa, JepaConfig
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.data.record import Record
from stepjepa.evaluation.stored_map import LINEAR_MAP
from stepjepa.objectives.embedding import normalised
from stepjepa.objectives.inputs import options_behind
from stepjepa.objectives.linear_map import LinearMap
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings
from stepjepa.store.prompts import with_system_prompt

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
KNOWN = [(f"{first} and {second}", f"{second}!") for first in NUMBERS[:6] for second in NUMBERS[:4]]
QUERIES, ANSWERS = ["two and nine", "six and one"], ["one!", "nine!", "four!", "seven!"]


def records(system: str = "") -> list[Record]:
    return [tiny.make_record(system, question, answer) for question, answer in KNOWN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A base model and three runs; the records of ``known.jsonl`` have a system prompt."""
    path = tmp_path_factory.mktemp("served-map")
    tiny.make_model("llama").save_pretrained(path / "base")
    trained_tokenizer.save_pretrained(path / "base")
    branched = JepaConfig(layout="branched", predictors=2)
    for name, config in {"regular": JepaConfig(mode="regular"), "objective": branched, "no prompt": branched}.items():
        model = tiny.make_model("llama", seed=5 if name == "objective" else 3)
        jepa = Jepa(model, copy.deepcopy(trained_tokenizer), config)
        jepa.system_prompt = None if name == "no prompt" else "Trained."
        jepa.save(path / name)
    write_jsonl(path / "known.jsonl", ({"messages": list(record.messages)} for record in records("Add.")))
    write_jsonl(path / "answers.jsonl", ({"answer": text} for text in ANSWERS))
    write_jsonl(path / "queries.jsonl", ({"question": text} for text in QUERIES))
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["base", "regular", "objective", "no prompt"])
def test_texts_are_embedded_behind_the_map(name: str, folder: Path) -> None:
    """Against scikit-learn on pairs of records; the texts are records, too, behind the system prompt of the map."""
    jepa = Jepa.from_pretrained(folder / name, device="cpu")
    fitted = stepjepa.fit_linear_map(jepa, records("Add."))
    # A run's own prompt is put in front of its questions, and replaces that of the records.
    system = "Add." if name in ("base", "no prompt") else "Trained."
    assert fitted.system_prompts == (system,) and fitted.records == len(KNOWN)
    known, new = with_system_prompt(records("Add."), system), [tiny.make_record(system, q, ".") for q in QUERIES]
    embedder = jepa.pair_embedder() if jepa.has_objective else jepa.pair_embedder(pooling="mean")

    def pairs(given: list[Record]) -> ViewEmbeddings:
        return embedder.at(given, [fitted.place])[fitted.place]

    answers = [tiny.make_record(system, "?", answer) for answer in ANSWERS]
    expected, targets = slow_map(fitted.fit, pairs(known), pairs(new).source, pairs(answers).target)
    expected = same_signs(expected, jepa.embed(QUERIES, linear_map=fitted, raw=True))
    np.testing.assert_allclose(jepa.embed(QUERIES, linear_map=fitted, raw=True), expected, atol=2e-4)
    np.testing.assert_allclose(jepa.embed(QUERIES, linear_map=fitted), normalised(expected), atol=2e-3)
    np.testing.assert_allclose(jepa.embed(new, linear_map=fitted, raw=True), expected, atol=2e-4)
    targets = same_signs(targets, jepa.embed(ANSWERS, "target", linear_map=fitted, raw=True))
    np.testing.assert_allclose(jepa.embed(ANSWERS, "target", linear_map=fitted, raw=True), targets, atol=1e-5)
    # The index is of these vectors, in either direction.
    cosines = jepa.embed(QUERIES, linear_map=fitted) @ jepa.embed(ANSWERS, "target", linear_map=fitted).T
    for of_query, row in zip(cosines, jepa.index(ANSWERS, linear_map=fitted).search(QUERIES), strict=True):
        assert [hit.index for hit in row] == np.argsort(-of_query, kind="stable").tolist()
    for of_answer, row in zip(cosines.T, jepa.index(QUERIES, "source", linear_map=fitted).search(ANSWERS), strict=True):
        assert [hit.index for hit in row] == np.argsort(-of_answer, kind="stable").tolist()


def test_a_model_without_an_objective_is_read_where_held_out_pairs_are_found(folder: Path) -> None:
    base, trained = (Jepa.from_pretrained(folder / name, device="cpu") for name in ("base", "objective"))
    assert not base.has_objective and trained.has_objective
    assert stepjepa.fit_linear_map(base, records(), layer=1, pooling="last").place == (1, "last", True)
    assert stepjepa.fit_linear_map(trained, records(), layer=1, pooling="last").place == (1, "last", True)
    place = stepjepa.fit_linear_map(base, records()).place
    assert place.layer in range(3) and place.pooling in ("last", "mean")


def test_what_can_not_be_fitted_or_read(folder: Path) -> None:
    jepa = Jepa.from_pretrained(folder / "base", device="cpu")
    with pytest.raises(
        UserError, match=r"memory.jsonl: has 19 records; linear maps and projection heads are fitted on at least 20"
    ):
        stepjepa.fit_linear_map(jepa, records()[:19])
    with pytest.raises(ValueError, match="layer: expected -3 to 2 for a model of 2 layers, got 5"):
        stepjepa.fit_linear_map(jepa, records(), layer=5)
    with pytest.raises(TypeError, match="layer: expected a whole number, got '1'"):
        stepjepa.fit_linear_map(jepa, records(), layer="1")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has 0 records with a pair within max_length 3"):
        stepjepa.fit_linear_map(jepa, records(), max_length=3)
    fitted = stepjepa.fit_linear_map(jepa, records(), layer=1)
    with pytest.raises(ValueError, match=r"vectors: expected \[N, 5\] as the linear map is fitted on, got \[2, \d+\]"):
        jepa.embed(QUERIES, linear_map=replace(fitted, linear_map=LinearMap(np.eye(5), np.ones(5), np.ones(5))))
    with pytest.raises(ValueError, match="embeddings are read where it was fitted, got layer 2; name it there"):
        jepa.embed(QUERIES, linear_map=fitted, layer=2)
    jepa = Jepa.from_pretrained(folder / "no prompt", device="cpu")
    several = stepjepa.fit_linear_map(jepa, [*records("Add."), *records("Sum.")])
    with pytest.raises(UserError, match=r"fitted on questions behind several system prompts \('Add.', 'Sum.'\)"):
        jepa.embed(QUERIES, linear_map=several)
    jepa.system_prompt = "Sum."
    assert len(jepa.embed(QUERIES, linear_map=several)) == 2


def run(folder: Path, command: str, model: str, *flags: object) -> int:
    known = ["--linear_map", folder / "known.jsonl"]
    return int(main([*map(str, [command, "--model_path", folder / model, *known, *flags])]))


def search(folder: Path, capsys: Any, *flags: object, model: str = "base") -> Any:
    corpus = ["--corpus", folder / "answers.jsonl", "--query", *QUERIES, "--json"]
    assert run(folder, "search", model, *corpus, *flags) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out)["results"], captured.err


def test_the_command_searches_and_embeds_as_python_does(folder: Path, tmp_path: Path, capsys: Any) -> None:
    jepa = Jepa.from_pretrained(folder / "base", device="cpu")
    fitted = stepjepa.fit_linear_map(jepa, stepjepa.read_records(folder / "known.jsonl"))
    found, notes = search(folder, capsys, "--no_cache")
    place, (method, penalty) = fitted.place, fitted.fit
    readout = f"layer {place.layer}, pooling {place.pooling}, {method} fit, penalty {penalty:g}"
    assert f"note: the linear map is fitted on 24 records of {folder}/known.jsonl: {readout}\n" in notes
    assert not (folder / f"known.jsonl{LINEAR_MAP.suffix}").exists()
    for result, row in zip(found, jepa.index(ANSWERS, linear_map=fitted).search(QUERIES), strict=True):
        assert [hit["text"] for hit in result["hits"]] == [hit.text for hit in row]
        assert [hit["score"] for hit in result["hits"]] == pytest.approx([hit.score for hit in row], abs=2e-6)
    flags = ["--input_file", folder / "queries.jsonl", "--column", "question", "--output_file", tmp_path / "q.npy"]
    assert run(folder, "embed", "base", *flags) == 0
    np.testing.assert_allclose(np.load(tmp_path / "q.npy"), jepa.embed(QUERIES, linear_map=fitted), atol=2e-6)
    assert run(folder, "embed", "base", *flags, "--overwrite", "--raw") == 0
    raw = jepa.embed(QUERIES, linear_map=fitted, raw=True)
    np.testing.assert_allclose(np.load(tmp_path / "q.npy"), raw, atol=1e-5)


def test_the_map_is_kept_beside_its_file_and_renewed(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = folder / f"known.jsonl{LINEAR_MAP.suffix}"
    stored.unlink(missing_ok=True)
    first, _ = search(folder, capsys)
    before = stored.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("stepjepa.evaluation.model_maps.fit_map", None)
        assert search(folder, capsys)[0] == first
    assert stored.read_bytes() == before
    # Another model, another readout, other records: fitted anew, and the corpus is embedded behind the new map.
    for flags, model in (((), "objective"), (("--layer", 0), "base")):
        other, notes = search(folder, capsys, *flags, model=model)
        assert (
            other != first
            and f"{stored} belongs to another model, other records or another readout; it is written again" in notes
        )
        assert "answers.jsonl.embeddings.safetensors belongs to another model, corpus, readout or map" in notes
    assert search(folder, capsys)[0] == first
    # Another length: the stored map is none of its records.
    assert run(folder, "search", "base", "--corpus", folder / "answers.jsonl", "--query", "?", "--max_length", 12) == 2
    assert "has 0 records with a pair within max_length 12, of 24" in capsys.readouterr().err
    text = (folder / "known.jsonl").read_text()
    (folder / "known.jsonl").write_text("".join(text.splitlines(keepends=True)[:21]))
    try:
        assert search(folder, capsys)[0] != first
    finally:
        (folder / "known.jsonl").write_text(text)
    stored.write_bytes(b"mine")
    assert run(folder, "search", "base", "--corpus", folder / "answers.jsonl", "--query", "?") == 2
    assert "has the name of a linear map, but stepjepa did not write it; move it away, or" in capsys.readouterr().err
    assert stored.read_bytes() == b"mine"
    stored.unlink()


def test_what_the_commands_refuse(folder: Path, tmp_path: Path, capsys: Any) -> None:
    corpus = ["--corpus", folder / "answers.jsonl", "--query", "?", "--no_cache"]
    few = tmp_path / "few.jsonl"
    few.write_text("".join((folder / "known.jsonl").read_text().splitlines(keepends=True)[:3]) + "no record\n")
    texts = ["--input_file", folder / "queries.jsonl", "--column", "question", "--output_file", tmp_path / "q.npy"]
    for command, flags, fault in (
        ("search", [*corpus, "--linear_map", folder / "none.jsonl"], "none.jsonl: no such file of records"),
        ("search", [*corpus, "--linear_map", few], "few.jsonl:4: "),
        (
            "search",
            [*corpus, "--linear_map", few, "--bad_records", "skip"],
            "few.jsonl: has 3 records; linear maps and",
        ),
        ("search", [*corpus, "--max_length", 3], "known.jsonl: has 0 records with a pair within max_length 3"),
        ("search", [*corpus, "--layer", 7], "--layer: expected -3 to 2 for a model of 2 layers, got 7"),
    ):
        assert run(folder, command, "base", *flags) == 2
        assert fault in capsys.readouterr().err
    ranked = ["--test_file", folder / "known.jsonl", "--output_file", tmp_path / "a.jsonl", "--retrieval", "--layer", 0]
    assert main([*map(str, ["evaluate", "--model_path", folder / "objective", *ranked])]) == 2
    assert (
        "error: --layer: expected -1, or 1 or more, got 0; that is the embedding of a predictor"
        in capsys.readouterr().err
    )
    assert main([*map(str, ["embed", "--model_path", folder / "objective", *texts, "--no_cache"])]) == 2
    assert "--no_cache does nothing without --linear_map" in capsys.readouterr().err


def test_the_records_of_a_map_are_never_replaced(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """With --overwrite the output took the place of the records."""
    known = tmp_path / "known.jsonl"
    known.write_bytes((folder / "known.jsonl").read_bytes())
    table = tmp_path / "known.parquet"
    parquet.write_table(Table.from_pylist([{"question": q, "answer": a} for q, a in KNOWN]), table)
    texts = ["--input_file", folder / "queries.jsonl", "--column", "question"]
    for command, flags, records_file in (
        ("search", ["--corpus", folder / "answers.jsonl", "--query", "?"], known),
        ("evaluate", ["--test_file", folder / "queries.jsonl", "--retrieval"], known),
        ("embed", texts, table),
    ):
        before = records_file.read_bytes()
        outputs = ["--linear_map", records_file, "--output_file", records_file, "--overwrite"]
        assert run(folder, command, "base", *flags, *outputs) == 2
        assert "name another" in capsys.readouterr().err
        assert records_file.read_bytes() == before


def test_a_corpus_of_a_model_of_the_other_direction(folder: Path, trained_tokenizer: Any, capsys: Any) -> None:
    """With reverse_pred answers are sources: the corpus of side target has questions, whatever else its lines have."""
    config = JepaConfig(layout="separate", predictors=2, reverse_pred=True)
    jepa = Jepa(tiny.make_model("llama"), copy.deepcopy(trained_tokenizer), config)
    jepa.save(folder / "reverse")
    write_jsonl(folder / "both.jsonl", ({"question": q, "answer": a} for q, a in zip(QUERIES, ANSWERS, strict=False)))
    for side, texts, others in (("target", QUERIES, ANSWERS[:2]), ("source", ANSWERS[:2], QUERIES)):
        command = ["search", "--model_path", folder / "reverse", "--corpus", folder / "both.jsonl", "--side", side]
        assert main([*map(str, [*command, "--queries", folder / "both.jsonl", "--no_cache", "--json"])]) == 0
        found = json.loads(capsys.readouterr().out)["results"]
        assert [result["query"] for result in found] == others
        assert {hit["text"] for hit in found[0]["hits"]} == {*texts}
        expected = jepa.index(texts, side).search(others)
        assert [[hit["text"] for hit in result["hits"]] for result in found] == [
            [h.text for h in row] for row in expected
        ]


@pytest.mark.parametrize("fit", [stepjepa.fit_linear_map, stepjepa.fit_projection_heads])
def test_a_map_is_tried_in_the_same_places_whatever_a_model_was_trained_with(
    fit: Any, trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with an objective was tried in its own place alone; plain training had a choice that it lacked."""
    monkeypatch.setattr("stepjepa.objectives.head_training.FEWEST_STEPS", 20)
    monkeypatch.setattr("stepjepa.evaluation.map_fitting.STEPS_TRIED", 20)
    plain, trained = (
        Jepa(tiny.make_model("llama"), copy.deepcopy(trained_tokenizer), config)
        for config in (JepaConfig(mode="regular"), JepaConfig(layout="branched", predictors=2))
    )
    # Where it was trained to be read nothing is found.
    monkeypatch.setattr(
        "stepjepa.evaluation.map_fitting.rank_targets",
        lambda pairs, names, config: SimpleNamespace(means=lambda: {"mrr": ranks[len(names)].pop(0)}),
    )
    ranks: Any = defaultdict(lambda: [0.25] * 100)
    own = fit(trained, records("Add."))
    assert own.place == ReadoutPlace(-1, "last")  # of equal ones the first
    ranks = defaultdict(lambda: [0.0] * 8 + [0.25] * 100)
    fitted = fit(trained, records("Add."))
    assert fitted.place in [ReadoutPlace(layer, how, False) for layer in range(3) for how in ("mean", "last")]
    # The same weights give the same vectors behind the same map, by texts and by records.
    monkeypatch.undo()
    option = options_behind(fitted)
    bare = replace(fitted, place=fitted.place._replace(predictors=True))
    for given in (QUERIES, [tiny.make_record("Add.", question, ".") for question in QUERIES]):
        expected = plain.embed(given, **options_behind(bare))
        np.testing.assert_allclose(trained.embed(given, **option), expected, atol=1e-5)
