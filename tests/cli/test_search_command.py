"""``stepjepa search``: nearest texts, and the embeddings that are kept beside a corpus."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from stepjepa import Jepa, JepaConfig
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.evaluation.corpus import SUFFIX
from tiny import make_model

ANSWERS = ["12", "Red", "12", "It is two", "So", "7+5=12"]
QUERIES = ["What is 3+4+5?", "Name a colour"]


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """Two runs of different weights, and ``answers.jsonl``."""
    for name, seed in (("run", 3), ("other", 5)):
        Jepa(make_model("llama", seed=seed), tiny_tokenizer, JepaConfig(predictors=2)).save(tmp_path / name)
    write_jsonl(tmp_path / "answers.jsonl", ({"answer": text} for text in ANSWERS))
    return tmp_path


def search(folder: Path, *flags: object, model: str = "run") -> int:
    command = ["search", "--model_path", folder / model, "--corpus", folder / "answers.jsonl", *flags]
    return int(main([*map(str, command)]))


def results(folder: Path, capsys: Any, *flags: object, model: str = "run") -> Any:
    assert search(folder, "--query", *QUERIES, "--json", *flags, model=model) == 0
    return json.loads(capsys.readouterr().out)["results"]


def test_nearest_texts_with_scores_and_lines(folder: Path, capsys: Any) -> None:
    jepa = Jepa.from_pretrained(folder / "run", device="cpu")
    cosines = jepa.embed(QUERIES) @ jepa.embed(ANSWERS, "target").T
    for query, own, result in zip(QUERIES, cosines, results(folder, capsys, "--k", 3), strict=True):
        order = [place for place in np.argsort(-own, kind="stable") if place != 2][:3]
        assert result["query"] == query
        assert [hit["line"] for hit in result["hits"]] == [place + 1 for place in order]
        assert [hit["text"] for hit in result["hits"]] == [ANSWERS[place] for place in order]
        np.testing.assert_allclose([hit["score"] for hit in result["hits"]], own[order], atol=2e-6)
    assert search(folder, "--query", "Name a colour", "--k", 2) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert printed[0] == "Name a colour" and " line " in printed[1]


def test_queries_of_a_file_of_chats(folder: Path, capsys: Any) -> None:
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "."}] for text in QUERIES]
    write_jsonl(folder / "queries.jsonl", ({"messages": chat} for chat in chats))
    flags = ["--queries", folder / "queries.jsonl", "--output_file", folder / "hits.jsonl", "--k", 2]
    assert search(folder, *flags) == 0
    written = [json.loads(line) for line in (folder / "hits.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert written == results(folder, capsys, "--k", 2)
    assert search(folder, *flags) == 2
    assert "already exists" in capsys.readouterr().err


def test_queries_need_no_answer(folder: Path, capsys: Any) -> None:
    """Chats that end in the question, under the names of ShareGPT, too; and the lists of TRL."""
    expected = results(folder, capsys, "--k", 2)
    first, second = QUERIES
    earlier = [{"from": "human", "value": "Hm"}, {"from": "gpt", "value": "So"}]
    chats = [{"messages": [{"role": "user", "content": first}]}, {"prompt": [{"role": "user", "content": second}]}]
    for rows in (chats, [{"prompt": first}, {"conversations": [*earlier, {"from": "human", "value": second}]}]):
        write_jsonl(folder / "queries.jsonl", rows)
        assert search(folder, "--queries", folder / "queries.jsonl", "--k", 2, "--json") == 0
        assert json.loads(capsys.readouterr().out)["results"] == expected


def test_answers_of_lists_of_messages_are_found(folder: Path, capsys: Any) -> None:
    expected = results(folder, capsys, "--k", 2)
    rows = [{"prompt": "q", "completion": [{"role": "assistant", "content": text}]} for text in ANSWERS]
    write_jsonl(folder / "answers.jsonl", rows)
    assert results(folder, capsys, "--k", 2) == expected


@pytest.mark.parametrize("name", ["answers.jsonl", "queries.jsonl"])
def test_the_texts_that_are_read_are_never_replaced(name: str, folder: Path, capsys: Any) -> None:
    write_jsonl(folder / "queries.jsonl", ({"query": text} for text in QUERIES))
    before = (folder / name).read_bytes()
    flags = ["--queries", folder / "queries.jsonl", "--output_file", folder / name, "--overwrite"]
    assert search(folder, *flags) == 2
    assert f"{name}: --output_file is a file of texts to be read; name another" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before


def test_the_error_of_a_query_names_the_settings_of_queries(folder: Path, tmp_path: Path, capsys: Any) -> None:
    write_jsonl(tmp_path / "q.jsonl", [{"query": 3.5, "q": " "}])
    for column, remedy in (("q", "fill it in, or leave such lines out"), ("x", "name the --query_column of the texts")):
        assert search(folder, "--queries", tmp_path / "q.jsonl", "--query_column", column) == 2
        error = capsys.readouterr().err
        assert remedy in error and "--bad_records" not in error


def test_chats_of_a_corpus_that_are_no_records_are_skipped(folder: Path, tmp_path: Path, capsys: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Geht es?"}, {"role": "assistant", "content": "Es läuft"}]}
    write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user"}]}, chat])
    command = ["--query", "Geht es?", "--corpus", tmp_path / "c.jsonl", "--json"]
    assert search(folder, *command) == 2 and "c.jsonl:1: messages[0] (user) has no content" in capsys.readouterr().err
    assert search(folder, *command, "--bad_records", "skip") == 0
    captured = capsys.readouterr()
    assert [hit["line"] for hit in json.loads(captured.out)["results"][0]["hits"]] == [2]
    assert "note: 1 bad line skipped" in captured.err


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_rows_without_a_text_are_an_error_or_skipped(form: str, folder: Path, capsys: Any) -> None:
    corpus = folder / f"replies.{form}"
    texts = ["Es läuft", "", "Nein", "Grün"]
    if form == "csv":
        corpus.write_text("id,Antwort\n" + "".join(f"{number},{text}\n" for number, text in enumerate(texts)))
    else:
        write_jsonl(corpus, ({"Antwort": text or None} for text in texts))
    command = ["--query", "Geht es?", "--corpus", corpus, "--column", "Antwort", "--json"]
    assert search(folder, *command) == 2
    line = 3 if form == "csv" else 2
    error = capsys.readouterr().err
    assert f"replies.{form}:{line}: " in error
    assert ("leave such lines out with --bad_records skip" in error) == (form == "csv")
    assert search(folder, *command, "--bad_records", "skip") == 0
    captured = capsys.readouterr()
    hits = json.loads(captured.out)["results"][0]["hits"]
    assert {hit["text"] for hit in hits} == {"Es läuft", "Nein", "Grün"}
    assert {hit["line"] for hit in hits} == {number + (2 if form == "csv" else 1) for number in (0, 2, 3)}
    assert "note: 1 bad line skipped (--bad_records skip)" in captured.err
    assert search(folder, *command, "--bad_records", "skip", "--column", "nope") == 2
    assert "holds no texts besides skipped lines" in capsys.readouterr().err


def test_answers_without_a_text_are_named_for_what_they_are_and_can_be_skipped(folder: Path, capsys: Any) -> None:
    """Both were called empty, and a thought alone ended the search with --bad_records skip, too."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
    answers = [{"content": "Red."}, {"content": "", "tool_calls": [call]}, {"content": "<think>Hm.</think>"}]
    corpus = folder / "answers_without_text.jsonl"
    ask = {"role": "user", "content": "Which?"}
    write_jsonl(corpus, ({"messages": [ask, {"role": "assistant", **answer}]} for answer in answers))
    command = ["--query", "Which?", "--corpus", corpus, "--no_cache", "--json"]
    assert search(folder, *command) == 2
    fault = "answers_without_text.jsonl:2: the last answer is a tool call without text; end the chat with an answer in"
    assert f"{fault} text, or leave such lines out with --bad_records skip\n" in capsys.readouterr().err
    assert search(folder, *command, "--bad_records", "skip") == 0
    captured = capsys.readouterr()
    assert [hit["text"] for hit in json.loads(captured.out)["results"][0]["hits"]] == ["Red."]
    assert "answers_without_text.jsonl:3: the text is a thought without an answer" in captured.err


def test_embeddings_are_kept_beside_the_corpus_and_renewed(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = folder / f"answers.jsonl{SUFFIX}"
    first = results(folder, capsys)
    embedded: list[int] = []
    index = Jepa.index

    def counting(self: Jepa, texts: Any, *args: Any, **options: Any) -> Any:
        embedded.append(len(texts))
        return index(self, texts, *args, **options)

    monkeypatch.setattr(Jepa, "index", counting)
    before = remaining.read_bytes()
    assert results(folder, capsys) == first
    assert not embedded and remaining.read_bytes() == before
    # Another model, another reading, another corpus: embedded anew, and never mixed.
    other = results(folder, capsys, model="other")
    assert len(embedded) == 1 and other != first
    assert results(folder, capsys, "--layer", 1) != first and len(embedded) == 2
    write_jsonl(folder / "answers.jsonl", ({"answer": text} for text in ["Blue", *ANSWERS]))
    again = results(folder, capsys)
    assert embedded == [6, 6, 7]
    assert {hit["text"] for hit in again[0]["hits"]} == {"Blue", *ANSWERS}
    monkeypatch.undo()
    remaining.unlink()
    assert results(folder, capsys) == again
    remaining.unlink()
    assert results(folder, capsys, "--no_cache") == again
    assert not remaining.exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_takes_no_embeddings_is_searched_all_the_same(
    number: int, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(folder, capsys, "--no_cache")

    def full(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number), "answers.jsonl")

    monkeypatch.setattr("stepjepa.evaluation.stored_arrays.atomic_write", full)
    assert search(folder, "--query", *QUERIES, "--json") == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["results"] == expected
    assert f"can't be written ({os.strerror(number)}), so that the corpus is embedded again each time" in written.err


@pytest.mark.parametrize("content", [b"mine", b""])
def test_a_file_of_another_program_is_never_replaced(content: bytes, folder: Path, capsys: Any) -> None:
    remaining = folder / f"answers.jsonl{SUFFIX}"
    remaining.write_bytes(content)
    assert search(folder, "--query", "Why?") == 2
    assert "but stepjepa did not write it; move it away, or pass --no_cache" in capsys.readouterr().err
    assert remaining.read_bytes() == content
    assert search(folder, "--query", "Why?", "--no_cache") == 0


def test_weights_of_another_program_are_not_taken_for_embeddings(folder: Path, capsys: Any) -> None:
    remaining = folder / f"answers.jsonl{SUFFIX}"
    weights = (folder / "run" / "model.safetensors").read_bytes()
    remaining.write_bytes(weights)
    assert search(folder, "--query", "Why?") == 2
    assert remaining.read_bytes() == weights


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "expected queries; pass either --query or --queries"),
        (["--query", "a", "--queries", "b.jsonl"], "expected queries; pass either --query or --queries"),
        (["--query", "a", "--column", "nope"], "answers.jsonl:1: has no text in the column 'nope'; name the --column"),
        (["--query", "a", "--query_column", "x"], "--query_column does nothing without --queries"),
        (["--query", " "], "--query:1: the text is empty"),
        (["--query", "a", "--k", "0"], "--k: expected 1 or more, got 0"),
        (["--query", "a", "--output_file", "hits.txt"], "end its name in .jsonl"),
        (["--query", "a", "--side", "source"], "answers.jsonl:1: has no question; name the --column of the texts"),
    ],
)
def test_what_can_not_be_searched(flags: list[str], told: str, folder: Path, capsys: Any) -> None:
    assert search(folder, *flags) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_a_model_of_step_jepa_is_refused_before_the_corpus_is_embedded(
    folder: Path, tiny_tokenizer: Any, capsys: Any
) -> None:
    Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(mode="step-jepa")).save(folder / "steps")
    assert search(folder, "--query", "What is 3?", model="steps") == 2
    told = capsys.readouterr().err
    assert "by steps behind their chat, not by bare texts; in Python jepa.index(texts).search(records) does" in told
    assert not (folder / f"answers.jsonl{SUFFIX}").exists()
