"""``stepjepa embed``: files of any size into vectors, equal to those of Python; errors name the line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from stepjepa import Jepa, JepaConfig
from stepjepa.base.errors import UserError
from stepjepa.base.files import locked, write_jsonl
from stepjepa.cli.main import main
from stepjepa.evaluation import embed_file
from tiny import make_model, records

TEXTS = ["What is 3+4+5?", "Name a colour", "And 1+1 then?", "Name a colour", "Why?", "What is 3+4+5?", "Why?", "Once"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """Runs of three kinds, and files of texts and records."""
    path = tmp_path_factory.mktemp("embed")
    for name, config in {
        "llm": JepaConfig(layout="branched", predictors=2),
        "separate": JepaConfig(predictors=2, max_length=97),
        "step": JepaConfig(mode="step-jepa", predictors=1),
        "plain": JepaConfig(mode="regular"),
    }.items():
        jepa = Jepa(make_model("llama"), copy.deepcopy(trained_tokenizer), config)
        jepa.system_prompt = "Add." if name == "llm" else None
        jepa.save(path / name)
    write_jsonl(path / "texts.jsonl", ({"question": text, "key": f"q{n}"} for n, text in enumerate(TEXTS)))
    write_jsonl(path / "chats.jsonl", ({"messages": list(record.messages)} for record in records()))
    return path


def embed(folder: Path, model: str, source: str, output: Path, *flags: object) -> int:
    command = ["embed", "--model_path", folder / model, "--input_file", folder / source, "--output_file", output]
    return int(main([*map(str, command), *map(str, flags)]))


@pytest.mark.parametrize("block", [3, 1000])
@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_a_file_of_texts_in_blocks(
    block: int, suffix: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(embed_file, "BLOCK", block)
    output = tmp_path / f"e{suffix}"
    assert embed(folder, "llm", "texts.jsonl", output, "--column", "question", "--batch_size", 2) == 0
    assert "8 texts (5 distinct) on side source" in capsys.readouterr().out
    expected = Jepa.from_pretrained(folder / "llm", device="cpu").embed(TEXTS)
    if suffix == ".npy":
        vectors = np.load(output)
    else:
        table = parquet.read_table(output)
        assert table.column_names == ["line", "step", "embedding"]
        assert table["line"].to_pylist() == [*range(1, 9)]
        vectors = np.array(table["embedding"].to_pylist(), np.float32)
    assert (vectors.dtype, vectors.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    # Equal texts have equal bits, since they are read back.
    np.testing.assert_array_equal(vectors[[1, 0, 4]], vectors[[3, 5, 6]])


def test_equal_texts_of_different_blocks_are_embedded_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_file, "BLOCK", 2)
    observed: list[str] = []
    texts = embed_file.Embedder._texts

    def counting(self: Any, values: Any) -> Any:
        observed.extend(each.text for each in values)
        return texts(self, values)

    monkeypatch.setattr(embed_file.Embedder, "_texts", counting)
    assert embed(folder, "separate", "texts.jsonl", tmp_path / "e.npy", "--column", "question") == 0
    assert observed == [*dict.fromkeys(TEXTS)]


def test_each_step_of_a_record_is_a_row(folder: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "e.parquet"
    flags = ["--side", "target", "--raw", "--json"]
    assert embed(folder, "step", "chats.jsonl", output, *flags) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["rows"], about["inputs"], about["side"]) == (7, 3, "target")
    table = parquet.read_table(output)
    assert table["line"].to_pylist() == [1, 1, 1, 1, 2, 2, 3]
    assert table["step"].to_pylist() == [1, 2, 3, 4, 1, 2, 1]
    expected = Jepa.from_pretrained(folder / "step", device="cpu").embed(records(), "target", raw=True)
    vectors = np.array(table["embedding"].to_pylist(), np.float32)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).min() > 1e-3


def test_values_of_a_column_name_the_rows(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "e.parquet"
    assert embed(folder, "llm", "texts.jsonl", output, "--column", "question", "--id_column", "key") == 0
    assert parquet.read_table(output)["id"].to_pylist() == [f"q{n}" for n in range(8)]


def test_a_row_without_an_id_is_an_error_or_skipped(folder: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"q": "a", "id": 1.50}, {"q": "b", "id": None}, {"q": "c"}, {"q": "d", "id": ""}, {"q": "e", "id": True}]
    write_jsonl(tmp_path / "in.jsonl", rows)
    command = [str(tmp_path / "in.jsonl"), tmp_path / "e.parquet", "--column", "q", "--id_column", "id"]
    assert embed(folder, "llm", *command) == 2
    assert "in.jsonl:2: column 'id' is empty; fill it in" in capsys.readouterr().err
    assert embed(folder, "llm", *command, "--bad_records", "skip") == 0
    assert "has no column 'id'; there are q" in capsys.readouterr().err
    table = parquet.read_table(tmp_path / "e.parquet")
    assert table["id"].to_pylist() == ["1.5", "", "True"] and table["line"].to_pylist() == [1, 4, 5]


def test_a_system_prompt_of_ones_own(folder: Path, tmp_path: Path) -> None:
    flags = ["--column", "question", "--system_prompt", "Count."]
    assert embed(folder, "llm", "texts.jsonl", tmp_path / "e.npy", *flags) == 0
    jepa = Jepa.from_pretrained(folder / "llm", device="cpu")
    own = jepa.embed(TEXTS)
    jepa.system_prompt = "Count."
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), jepa.embed(TEXTS), atol=1e-6)
    assert np.abs(jepa.embed(TEXTS) - own).max() > 1e-3


@pytest.mark.parametrize(
    ("model", "rows", "flags", "told"),
    [
        ("llm", [{"q": "a"}, {"q": " "}], ["--column", "q"], "in.jsonl:2: the text is empty; leave it out"),
        ("llm", [{"q": "a"}, {"r": "b"}], ["--column", "q"], "in.jsonl:2: has no column 'q'; there are r"),
        ("llm", [{"q": []}], ["--column", "q"], "in.jsonl:1: column 'q' holds '[]', no text; there are q"),
        (
            "separate",
            [{"q": "long " * 60}],
            ["--column", "q"],
            "tokens, more than max_length 97; shorten it or raise --max_length",
        ),
        ("llm", [], ["--column", "q"], "in.jsonl: holds no rows; add at least one"),
        ("step", [{"q": "a"}], ["--column", "q"], "in.jsonl:1: a source view of step-jepa is a step behind its chat"),
        ("plain", [{"q": "a"}], ["--column", "q"], "pass --pooling mean (the mean of a text's last hidden states), "),
        (
            "separate",
            [{"q": "a"}],
            ["--column", "q", "--system_prompt", "x"],
            "--system_prompt does nothing",
        ),
        ("llm", [{"q": "a"}], ["--column", "q", "--layer", "9"], "--layer: expected -3 to 2 for a model of 2 layers"),
        ("llm", [{"q": "a"}], ["--column", "q", "--id_column", "k"], "--id_column does nothing with a .npy file"),
        ("llm", [{"messages": [{"role": "user", "content": {}}]}], [], "in.jsonl:1: "),
    ],
)
def test_what_can_not_be_embedded(
    model: str, rows: Any, flags: list[str], told: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows)
    assert embed(folder, model, str(tmp_path / "in.jsonl"), tmp_path / "e.npy", *flags) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_the_readouts_that_are_advised_work(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A model without an objective is read as the error says, by the commands and in Python."""
    jepa = Jepa.from_pretrained(folder / "plain", device="cpu")
    for call in (jepa.embed, jepa.index):
        with pytest.raises(UserError, match=r"pass `pooling mean` \(.*\), `pooling last`, or a `layer`$"):
            call(TEXTS)
    corpus = ["search", "--model_path", folder / "plain", "--corpus", folder / "texts.jsonl", "--query", "Why?"]
    for words, options in (
        (["--pooling", "mean"], {"pooling": "mean"}),
        (["--pooling", "last"], {"pooling": "last"}),
        (["--layer", "-1"], {"layer": -1}),
    ):
        output = tmp_path / f"{words[1]}.npy"
        assert embed(folder, "plain", "texts.jsonl", output, "--column", "question", *words) == 0
        np.testing.assert_allclose(np.load(output), jepa.embed(TEXTS, **options), atol=1e-6)
        assert main([*map(str, corpus), "--column", "question", "--no_cache", *words]) == 0
        assert jepa.index(TEXTS, **options).search(["Why?"], k=1)[0][0].text


ASKED = {"role": "user", "content": "What is 3+4+5?"}


def test_a_question_needs_no_answer_with_text(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """The answer is a thought alone: the question is embedded as where the chat ends with it."""
    thought = {"role": "assistant", "content": "<think>Twelve.</think>"}
    write_jsonl(tmp_path / "in.jsonl", [{"messages": [ASKED, thought]}, {"messages": [ASKED]}])
    for model in ("separate", "llm"):
        assert embed(folder, model, str(tmp_path / "in.jsonl"), tmp_path / f"{model}.npy") == 0
        first, second = np.load(tmp_path / f"{model}.npy")
        np.testing.assert_allclose(first, second, atol=1e-6)
    assert "2 records on side source in " in capsys.readouterr().out
    write_jsonl(tmp_path / "in.jsonl", [{"messages": [ASKED, thought]}])
    assert embed(folder, "llm", str(tmp_path / "in.jsonl"), tmp_path / "one.npy") == 0
    assert "1 record on side source in " in capsys.readouterr().out
    # The other side is the answer, which has no text.
    assert embed(folder, "separate", str(tmp_path / "in.jsonl"), tmp_path / "e.npy", "--side", "target") == 2
    error = capsys.readouterr().err
    assert "in.jsonl:1: the record has no pair" in error and "or pass --bad_records skip" in error
    # In Python nothing is skipped.
    jepa = Jepa.from_pretrained(folder / "separate", device="cpu")
    with pytest.raises(UserError, match=r"the record has no pair .*; leave it out$"):
        jepa.embed([{"messages": [ASKED, thought]}], "target")
    with pytest.raises(UserError, match=r"in.jsonl:1: the record has no pair .*; leave it out$"):
        embed_file.embed_file(jepa.embedder("target"), str(tmp_path / "in.jsonl"), str(tmp_path / "e.npy"))
    write_jsonl(tmp_path / "in.jsonl", [{"messages": []}])
    with pytest.raises(UserError, match=r"in.jsonl:1: .*; fill it in, or leave such rows out$"):
        embed_file.embed_file(jepa.embedder("target"), str(tmp_path / "in.jsonl"), str(tmp_path / "e.npy"))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
TOLD = {"role": "assistant", "content": "12"}
AGAIN = {"role": "user", "content": "And 6?"}
THOUGHT = {"role": "assistant", "reasoning_content": "Twelve.", "content": "12"}


@pytest.mark.parametrize(
    ("behind", "read_as"),
    [
        ([CALL], []),
        ([CALL, {"role": "tool", "content": "12"}, TOLD], []),
        ([THOUGHT], []),
        ([TOLD, AGAIN, CALL], [TOLD]),
    ],
)
def test_a_question_needs_no_answer_that_the_template_can_write(
    behind: list[Any], read_as: list[Any], folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """The template of the runs writes neither tool calls nor 'reasoning_content'."""
    write_jsonl(tmp_path / "in.jsonl", [{"messages": [ASKED, *behind]}, {"messages": [ASKED, *read_as]}])
    for model in ("separate", "llm"):
        assert embed(folder, model, str(tmp_path / "in.jsonl"), tmp_path / f"{model}.npy") == 0
        first, second = np.load(tmp_path / f"{model}.npy")
        np.testing.assert_allclose(first, second, atol=1e-6)
    # The other side is the answer.
    if not read_as:
        write_jsonl(tmp_path / "in.jsonl", [{"messages": [ASKED, *behind]}])
        assert embed(folder, "separate", str(tmp_path / "in.jsonl"), tmp_path / "e.npy", "--side", "target") == 2
        assert "in.jsonl:1: the chat template " in capsys.readouterr().err


def test_a_later_question_needs_the_answers_before_it(folder: Path, capsys: Any) -> None:
    jepa = Jepa.from_pretrained(folder / "llm", device="cpu")
    with pytest.raises(UserError, match="writes no 'tool_calls'"):
        jepa.embed([{"messages": [ASKED, CALL, {"role": "tool", "content": "12"}, TOLD, AGAIN, TOLD]}])
    with pytest.raises(UserError, match="writes no 'tool_calls'"):
        jepa.embed([{"messages": [ASKED, CALL], "views": [["Why?", "Because."]]}])


def test_a_question_needs_no_answer_in_any_form(folder: Path, capsys: Any) -> None:
    import pandas
    import pyarrow

    jepa, question = Jepa.from_pretrained(folder / "separate", device="cpu"), ASKED["content"]
    (expected,) = jepa.embed([question])
    rows: list[Any] = [
        {"messages": [ASKED]},
        {"messages": json.dumps([ASKED])},
        {"conversations": [{"from": "human", "value": question}]},
        {"prompt": [ASKED]},
        {"question": question, "id": 7},
        {"question": question, "answer": None},
    ]
    for row in rows:
        np.testing.assert_allclose(jepa.embed([row])[0], expected, atol=1e-6)
    frame = pandas.DataFrame(rows[:1])
    for table in (frame, pyarrow.Table.from_pandas(frame)):
        np.testing.assert_allclose(jepa.embed(table)[0], expected, atol=1e-6)
    # The answers are embedded on the other side, which needs them.
    for row in rows:
        with pytest.raises(UserError):
            jepa.embed([row], "target")


def test_a_column_without_a_usual_name_is_renamed(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """``embed`` has no flag for the two columns of a record."""
    write_jsonl(tmp_path / "in.jsonl", [{"Frage": "a", "Antwort": "b"}])
    assert embed(folder, "separate", str(tmp_path / "in.jsonl"), tmp_path / "e.npy") == 2
    assert (
        "(there is Frage, Antwort); name the --column of bare texts, or rename the two to prompt and completion"
        in capsys.readouterr().err
    )
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "completion": "b"}])
    assert embed(folder, "separate", str(tmp_path / "in.jsonl"), tmp_path / "e.npy") == 0


def test_lines_that_can_not_be_embedded_are_skipped_where_told(folder: Path, tmp_path: Path, capsys: Any) -> None:
    thought = {"role": "assistant", "content": "<think>Twelve.</think>"}
    told = {"role": "assistant", "content": "12"}
    rows = [{"messages": [ASKED, told]}, {"messages": [ASKED, thought]}, {"messages": 3}, {"messages": [ASKED, told]}]
    write_jsonl(tmp_path / "in.jsonl", rows)
    flags = ["--side", "target", "--bad_records", "skip", "--json"]
    assert embed(folder, "separate", str(tmp_path / "in.jsonl"), tmp_path / "e.parquet", *flags) == 0
    printed = capsys.readouterr()
    assert parquet.read_table(tmp_path / "e.parquet")["line"].to_pylist() == [1, 4]
    about = json.loads(printed.out)
    assert (about["rows"], about["inputs"], about["distinct"]) == (2, 2, 2)
    assert about["bad_records"] == {"left_out": 2, "first_lines": [3, 2]}
    assert (
        "2 bad lines skipped (--bad_records skip): " in printed.err and "in.jsonl:2: the record has no" in printed.err
    )
    write_jsonl(tmp_path / "texts.jsonl", [{"q": "a"}, {"q": " "}, {"q": None}, {"q": "long " * 60}, {"q": "b"}])
    flags = ["--column", "q", "--bad_records", "skip"]
    assert embed(folder, "separate", str(tmp_path / "texts.jsonl"), tmp_path / "t.npy", *flags) == 0
    printed = capsys.readouterr()
    assert len(np.load(tmp_path / "t.npy")) == 2 and "3 bad lines skipped" in printed.err
    assert printed.out.startswith("2 texts on side source in ")  # skipped ones are not texts that stand there twice
    write_jsonl(tmp_path / "bad.jsonl", [{"q": " "}])
    assert embed(folder, "separate", str(tmp_path / "bad.jsonl"), tmp_path / "b.npy", *flags) == 2
    assert "holds no rows; 1 bad line skipped" in capsys.readouterr().err and not (tmp_path / "b.npy").exists()


def test_an_output_is_never_replaced_unasked(folder: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "e.npy"
    output.write_text("mine")
    assert embed(folder, "llm", "texts.jsonl", output, "--column", "question") == 2
    assert "already exists; name another file or pass --overwrite" in capsys.readouterr().err
    with locked(tmp_path / "e.npy"):
        assert embed(folder, "llm", "texts.jsonl", tmp_path / "e.npy", "--column", "question", "--overwrite") == 2
    assert "e.npy: is in use by process" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert embed(folder, "llm", "texts.jsonl", tmp_path / "e.csv", "--column", "question") == 2
    assert "end its name in .npy or .parquet" in capsys.readouterr().err
    assert embed(folder, "llm", "texts.jsonl", output, "--column", "question", "--overwrite") == 0
    assert np.load(output).shape[0] == 8


def test_a_plain_model_is_read_where_it_is_told(folder: Path, tmp_path: Path) -> None:
    flags = ["--column", "question", "--layer", 1, "--pooling", "mean"]
    assert embed(folder, "plain", "texts.jsonl", tmp_path / "e.npy", *flags) == 0
    jepa = Jepa.from_pretrained(folder / "plain", device="cpu")
    expected = jepa.embed(TEXTS, layer=1, pooling="mean")
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), expected, atol=1e-6)
    assert np.abs(expected - jepa.embed(TEXTS, layer=-1)).max() > 1e-3


def test_distinct_texts_are_counted_at_most_where_not_all_are_remembered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of 5 distinct texts 2 are remembered; a block has each text once."""
    monkeypatch.setattr(embed_file, "BLOCK", 4)
    monkeypatch.setattr(embed_file, "REMEMBERED", 2)
    flags = ["--column", "question", "--json"]
    write_jsonl(tmp_path / "texts.jsonl", ({"question": text} for text in "abcc cdda".replace(" ", "")))
    assert embed(folder, "llm", str(tmp_path / "texts.jsonl"), tmp_path / "e.npy", *flags) == 0
    printed = capsys.readouterr()
    about = json.loads(printed.out)
    # a, b, c; then c and d anew, and a is known.
    assert (about["distinct"], about["distinct_is_upper_bound"], about["inputs"]) == (5, True, 8)
    assert "8 texts (at most 5 distinct)" in printed.err
    expected = Jepa.from_pretrained(folder / "llm", device="cpu").embed([*"abcccdda"])
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), expected, atol=1e-5)
    monkeypatch.setattr(embed_file, "REMEMBERED", 4)
    assert embed(folder, "llm", str(tmp_path / "texts.jsonl"), tmp_path / "f.npy", *flags) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["distinct"] == 4 and "distinct_is_upper_bound" not in about
