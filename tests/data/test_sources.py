"""Raw rows from files of every format and from data sets, and what is said about those that can't be read."""

import csv
import json
import os
import shlex
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepjepa.base.errors import UserError
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.formats import FORMATS
from stepjepa.data.sources import check_source, each_record_of_source, read_records, read_rows

ROWS = [
    {"question": "How\nmany?", "answer": 'He said "7", then\t8.'},
    {"question": "Où, 何処?", "answer": " spaces, commas "},
    {"question": '"quoted"', "answer": ""},
]


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def table(path, delimiter, rows=ROWS, encoding="utf-8", **options):
    with path.open("w", encoding=encoding, newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter, **options)
        writer.writeheader()
        writer.writerows(rows)
    return path


def json_lines(path, rows=ROWS):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def parquet(path, rows=ROWS):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def arrow(path, new_writer, rows=ROWS):
    batch = pyarrow.Table.from_pylist(rows)
    with new_writer(str(path), batch.schema) as writer:
        writer.write_table(batch, max_chunksize=2)
    return path


WRITERS = {
    "rows.jsonl": json_lines,
    "rows.NDJSON": json_lines,
    "bom.json": lambda path: write(path, json.dumps(ROWS), "utf-8-sig"),
    "lines.json": json_lines,
    "rows.csv": lambda path: table(path, ","),
    "bom.csv": lambda path: table(path, ",", encoding="utf-8-sig"),
    "rows.parquet": parquet,
    "rows.arrow": lambda path: arrow(path, pyarrow.ipc.new_stream),
    "rows.feather": lambda path: arrow(path, pyarrow.ipc.new_file),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert [row for _, row in read_rows(path)] == ROWS
    assert {f".{name.lower().rpartition('.')[2]}" for name in WRITERS} == set(FORMATS) - {".tsv"}


def test_rows_know_their_lines(tmp_path):
    lines = write(tmp_path / "a.jsonl", '\n{"a": 1}\n\n{"a": 2}\n')
    assert list(read_rows(lines)) == [(2, {"a": 1}), (4, {"a": 2})]
    long = "x" * 300_000
    quoted = write(tmp_path / "a.csv", f'a,b\n"one\ntwo",1\n\n{long},2\n')
    assert list(read_rows(quoted)) == [(2, {"a": "one\ntwo", "b": "1"}), (5, {"a": long, "b": "2"})]
    assert [number for number, _ in read_rows(parquet(tmp_path / "a.parquet"))] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        # A plain file, as many published ones are: quotation marks are text, however they stand.
        ('a\tb\n"Yes\tno\nand" so\ton\n', [{"a": '"Yes', "b": "no"}, {"a": 'and" so', "b": "on"}]),
        ('a\tb\n"Yes," he said, "no"\tx\n', [{"a": '"Yes," he said, "no"', "b": "x"}]),
        ("a\tb\r\n1\t\r\n", [{"a": "1", "b": ""}]),
        # Quoted as CSV is.
        ('"a"\tb\n"say ""no"""\t"x"\n', [{"a": 'say "no"', "b": "x"}]),
        ("only\none\ntwo\n", [{"only": "one"}, {"only": "two"}]),
        # As pandas writes a text with tabs and line ends: read by lines it is other records, without any error.
        (
            'a\tb\nList.\t"Here:\nx\t1\ny\t""2"""\nc\td\n',
            [{"a": "List.", "b": 'Here:\nx\t1\ny\t"2"'}, {"a": "c", "b": "d"}],
        ),
    ],
)
def test_a_line_of_tsv_is_a_row(tmp_path, text, rows):
    assert [row for _, row in read_rows(write(tmp_path / "a.tsv", text))] == rows


ONE = {"question": "a", "answer": "b"}
OTHER_FORMS = {
    "wrapped.json": json.dumps({"version": 1, "data": [ONE, ONE]}, indent=1),
    "wrapped on a line.jsonl": json.dumps({"train": [ONE, ONE]}),
    "pretty.jsonl": json.dumps(ONE, indent=2) + "\n" + json.dumps(ONE, indent=2),
    "pretty.json": "\ufeff\n" + json.dumps(ONE, indent=2) * 2,
    "list.jsonl": json.dumps([ONE, ONE]),
    "columns.json": json.dumps({"question": ["a", "a"], "answer": ["b", "b"]}),
    "semicolons.csv": 'question;answer\na;b\n"a";b\n',
    "tabs.csv": "question\tanswer\na\tb\na\tb\n",
    "marks.json": "\ufeff" + json.dumps(ONE, indent=1) + "\n\ufeff" + json.dumps(ONE),
    "bars.csv": "question|answer\na|b\na|b\n",
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_files_as_other_programs_write_them(tmp_path, name):
    assert [row for _, row in read_rows(write(tmp_path / name, OTHER_FORMS[name]))] == [ONE, ONE]


def test_an_object_over_several_lines_knows_its_first(tmp_path):
    path = write(tmp_path / "a.jsonl", '\n{"a":\n1}\n{"a":\n2}\n')
    assert list(read_rows(path)) == [(2, {"a": 1}), (4, {"a": 2})]


def test_a_row_with_a_list_is_a_row(tmp_path):
    rows = [{"question": "a", "data": [{"x": 1}]}, {"question": "b", "data": [{"x": 2}]}]
    for name in ("a.jsonl", "a.json"):
        for part in (rows, rows[:1]):
            assert [row for _, row in read_rows(json_lines(tmp_path / name, part))] == part


def test_a_line_that_is_no_json_is_skipped_wherever_it_stands(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a"\n{"a": 1}\n')
    bad = BadRecords("skip")
    assert list(read_rows(path, bad=bad)) == [(2, {"a": 1})] and bad.count == 1


WRONG = [
    ("a.json", '{"train": [{"a": 1}], "test": [{"a": 2}]}', r"a\.json: an object with lists under train, test; write"),
    (
        "a.json",
        '{"system": "s", "data": [{"a": 1}]}',
        r"a\.json: 'system' is beside the list of records, where it is not read; write it",
    ),
    ("a.json", '{"a": {"0": 1}, "b": {"0": 2}}', r"a\.json: a table as pandas writes it; write it with to_json"),
    ("a.json", '{"columns": ["a"], "index": [0], "data": [[1]]}', r"a\.json: a table as pandas writes it"),
    ("a.jsonl", '{"a": 1}\n{"a"\n', r"a\.jsonl:2: not valid JSON"),
    ("a.json", '[{"a": 1},\n {"a" 2}]', r"a\.json:2: not valid JSON \(Expecting ':' delimiter: line 2 column 7"),
    ("a.json", '[{"a": 1}, 3]', r"a\.json: element 2 is '3'; expected an object with the fields of a record"),
    (
        "a.jsonl",
        '[{"role": "user"}]\n[{"role": "user"}]',
        r"a\.jsonl:1: is .*, so write a chat as \{'messages': \[\.\.\.\]\}",
    ),
    ("a.json", "3", r"a\.json:1: a JSON int where an object is needed"),
    ("a.json", r'[{"a": 1}, {"a": "\ud83d"}]', r"a\.json: element 2 holds half of a character"),
    ("a.json", "[" * 100_000, r"a\.json: not valid JSON \(maximum recursion depth"),
    ("a.json", '{"a": 1}\n{"a"\n', r"a\.json:2: not valid JSON"),
    ("a.csv", "a,b\n1,2\n\n1,2,3\n", r"a\.csv:4: 3 fields where the header has 2; quote"),
    ("a.csv", "a,b\n1\n", r"a\.csv:2: 1 field where the header has 2"),
    ("a.csv", 'a,b\n1,2\n"x"y,2\n', r"a\.csv:3: not valid CSV"),
    ("a.csv", 'a,b\n1,2\n"x,2\n1,2\n', r"a\.csv:3: not valid CSV \(unexpected end of data\)"),
    ("a.tsv", 'a\tb\n"one\ntwo" x\ty\n', r"a\.tsv:2: 1 field where the header has 2; quote a field .*, and double"),
    ("a.jsonl", '{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', r"a\.jsonl:2: has the key 'a' twice in one object; keep one"),
    ("a.jsonl", '{"a": [{"b": {"c": 1, "c": 2}}]}\n', r"a\.jsonl:1: has the key 'c' twice"),
    ("a.json", '[{"a": 1}, {"a": 1, "a": 2}]', r"a\.json: element 2 has the key 'a' twice in one object; keep one"),
    ("a.json", '[{"a": 1}, {"a": [{"b": 1, "b": 2}]}]', r"a\.json: element 2 has the key 'b' twice"),
    ("a.json", '{"data": [{"a": 1}],\n "data": []}', r"a\.json: element 1 has the key 'data' twice"),
    ("a.json", '{"data": [{"a": 1}, {"b": 1, "b": 2}]}', r"a\.json: element 2 has the key 'b' twice"),
    ("a.json", '{"a":\n1}\n{"a":\n2, "a":3}', r"a\.json:3: has the key 'a' twice"),
    ("a.csv", "a,a\n1,2\n", r"a\.csv:1: the first line must name the columns, each once"),
    ("a.parquet", "PAR1PAR1", r"a\.parquet: no readable Parquet file"),
    ("a.arrow", "ARROW1", r"a\.arrow: no readable Arrow file"),
    ("a.xlsx", "x", r"a\.xlsx: expected a name that ends in \.jsonl, .*; convert the file"),
    ("a.txt", "x", r"a\.txt: expected .*; make a table of its lines with: \(echo text; cat a\.txt\) > a\.tsv$"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG)
def test_wrong_files_are_named_with_their_line(tmp_path, name, text, message):
    path = write(tmp_path / name, text)
    with pytest.raises(UserError, match=message):
        list(read_rows(path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.xlsx", "a.yaml"])
def test_a_file_of_another_format_is_told_which_are_read(tmp_path, name):
    for text in ("PK\x03", "question: q\nanswer: a\n"):
        with pytest.raises(
            UserError, match=r"holds no JSON, and its name ends in none of \.jsonl, .*; unpack or convert"
        ):
            read_records(write(tmp_path / name, text))
    row = {"question": "q", "answer": "a"}
    assert len(read_records(json_lines(tmp_path / name, [row, row]))) == 2
    with pytest.raises(UserError, match=r"holds no records; add at least one"):
        read_records(write(tmp_path / name, "\n"))


@pytest.mark.parametrize("read", [read_records, read_rows, check_source])
def test_a_pipe_which_can_not_be_read_twice_is_refused(tmp_path, read):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"a.jsonl: is a pipe or a device, which can't be read twice; write it into a"):
        read(tmp_path / "a.jsonl")


def test_of_an_array_only_elements_with_a_repeated_key_are_skipped(tmp_path):
    path = write(tmp_path / "a.json", '[{"a": 1}, {"a": {"b": 1, "b": 2}}, {"a": 3}]')
    bad = BadRecords("skip")
    assert [row for _, row in read_rows(path, bad=bad)] == [{"a": 1}, {"a": 3}] and bad.count == 1


def test_a_column_that_stands_twice_is_named(tmp_path):
    """``to_pylist`` of pyarrow would return the last of the two alone."""
    plain = pyarrow.table([["q"], ["a"], ["b"]], ["question", "answer", "answer"])
    pair = pyarrow.StructArray.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["content", "content"])
    nested = pyarrow.table([pyarrow.ListArray.from_arrays([0, 1], pair)], ["messages"])
    for table_of, name in ((plain, "answer"), (nested, "content")):
        pyarrow.parquet.write_table(table_of, tmp_path / "a.parquet")
        with pytest.raises(UserError, match=rf"a\.parquet: has the column '{name}' twice; keep one of the two"):
            list(read_rows(tmp_path / "a.parquet"))


def test_the_line_in_which_excel_names_its_delimiter(tmp_path):
    path = write(tmp_path / "a.csv", 'sep=;\r\na;b,c\r\n"1;2";3\r\n')
    assert list(read_rows(path)) == [(3, {"a": "1;2", "b,c": "3"})]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_the_line_in_another_encoding_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"a\n" * 5000 + "né\n".encode("latin-1") + b"a\n" * 5000)
    with pytest.raises(UserError, match=r":5001: not UTF-8"):
        list(read_rows(path))


@pytest.mark.parametrize("name", ["no.jsonl", "./no", "/no/where", "~/no", "a/b/c", "..\\no"])
def test_what_looks_like_a_path_is_never_asked_for_at_the_hub(name, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=r"no such raw file; check the path"):
        read_rows(name)
    with pytest.raises(UserError, match=r"`split` does nothing with a file"):
        read_rows(name, split="train")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data set of two splits as a folder, which ``datasets`` loads without the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    json_lines(tmp_path / "set" / "train.jsonl")
    json_lines(tmp_path / "set" / "test.jsonl", ROWS[:1])
    return tmp_path / "set"


def test_a_folder_is_loaded_by_datasets(folder):
    assert list(read_rows(folder, split="train")) == list(enumerate(ROWS, start=1))
    for options, message in [
        ({}, r"set: name a split; there are train, test"),
        ({"split": "trian"}, r"set: has no split 'trian'; there are train, test"),
        ({"split": "train", "subset": "main"}, r"set: can't be loaded: .*'main' not found.*; check name, subset"),
    ]:
        with pytest.raises(UserError, match=message):
            list(read_rows(folder, **options))
    (folder / "test.jsonl").unlink()
    assert [row for _, row in read_rows(folder)] == ROWS


def test_files_of_a_folder_are_read_as_files_are(tmp_path, monkeypatch):
    """``datasets`` guesses types: a column of 007 and an empty cell becomes 7.0 and a gap."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    texts = ["007", "1.10", "NA", "2020-01-01"]
    write(tmp_path / "set" / "train-1.csv", "question,answer\n" + "".join(f"q,{text}\n" for text in texts[:2]))
    write(tmp_path / "set" / "train-2.csv", "question,answer\n" + "".join(f"q,{text}\n" for text in texts[2:]))
    records = list(each_record_of_source(tmp_path / "set"))
    assert [record.answer for record in records] == texts
    assert [record.path.rpartition("/")[2] for record in records] == ["train-1.csv"] * 2 + ["train-2.csv"] * 2
    assert list(read_rows(tmp_path / "set")) == [
        (n, {"question": "q", "answer": a}) for n, a in enumerate(texts, start=1)
    ]
    write(tmp_path / "set" / "train-2.csv", "question,answer\nq,\n")
    with pytest.raises(UserError, match=r"train-2\.csv:2: column 'answer' is ''"):
        list(each_record_of_source(tmp_path / "set"))
    # A card may say how the files are to be read.
    write(tmp_path / "set" / "README.md", "---\nlicense: mit\n---\n")
    write(tmp_path / "set" / "train-2.csv", "question,answer\nq,8\n")
    assert [record.answer for record in each_record_of_source(tmp_path / "set")] == ["7.0", "1.1", "8.0"]


def test_a_folder_of_save_to_disk_is_loaded(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    assert [row for _, row in read_rows(tmp_path / "one")] == ROWS
    assert [row for _, row in read_rows(tmp_path / "two", split="test")] == ROWS[1:2]
    for name, there in [("one", "train"), ("two", "train, test")]:
        with pytest.raises(UserError, match=f"{name}: has no split 'dev'; there are {there}"):
            list(read_rows(tmp_path / name, split="dev"))
    split = f"{tmp_path / 'two'}::train"
    with pytest.raises(UserError, match=f"name a split; there are train, test, so write {split} or another$"):
        list(each_record_of_source(tmp_path / "two"))
    with pytest.raises(UserError, match=r"'answer' is ''"):  # that of the third row: the split is read
        list(each_record_of_source(split))
    (file,) = (tmp_path / "one").glob("*.arrow")
    assert [row for _, row in read_rows(file)] == ROWS


def test_a_table_in_memory_is_no_file():
    with pytest.raises(TypeError, match=r"expected the path of a file, got Table; pass what is in memory as it is"):
        read_records(pyarrow.Table.from_pylist(ROWS))


def test_the_hub_is_asked_for_name_and_subset(monkeypatch):
    asked = []

    def load(*arguments):
        asked.append(arguments)
        return {"test": ROWS}

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [row for _, row in read_rows("openai/gsm8k", subset="main")] == ROWS
    assert [row for _, row in read_rows("rotten_tomatoes")] == ROWS
    assert asked == [("openai/gsm8k", "main"), ("rotten_tomatoes", None)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ValueError("Config name is missing.\nPick one."),
            r"can't be loaded: Config name is missing; check name, subset",
        ),
        (KeyError(), r"can't be loaded: KeyError"),
    ],
)
def test_whatever_the_hub_says_becomes_one_line(monkeypatch, error, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=message):
        list(read_rows("a/b"))


@pytest.mark.parametrize("name", ["rows.csv", "rows.json"])
def test_tables_are_records_with_columns_of_any_name(name, tmp_path):
    path = tmp_path / name
    rows = [{"Frage": "how many?", "Antwort": 7, "id": "a"}]
    path.write_text(
        json.dumps(rows) if name.endswith("json") else "Frage,Antwort,id\nhow many?,7,a\n", encoding="utf-8"
    )
    (record,) = read_records(path, columns=("Frage", "Antwort"))
    assert ([message["content"] for message in record.messages], record.extra) == (["how many?", "7"], {"id": "a"})
    with pytest.raises(UserError, match=r"none of the columns prompt.*\(there is Frage, Antwort, id\).*`columns USER"):
        read_records(path)


def test_the_command_for_a_nested_field_makes_a_column_of_it(tmp_path):
    path, flat = tmp_path / "rows.jsonl", tmp_path / "flat.jsonl"
    json_lines(path, [{"q": {"it's": {"text": "how many?"}}, "a": "7"}, {"q": {"it's": {"text": "and"}}, "a": "8"}])
    columns = ("q.it's.text", "a")
    with pytest.raises(UserError, match=r"rows.jsonl:1: 'q.it's.text' is a field inside of 'q', no column; make") as e:
        read_records(path, columns=columns)
    command = str(e.value).partition("for JSON lines with: ")[2].replace("FILE", str(path), 1)
    command = command.replace("python", shlex.quote(sys.executable), 1).replace("flat.jsonl", str(flat))
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert [record.messages[0]["content"] for record in read_records(flat, columns=columns)] == ["how many?", "and"]
    # A column may have such a name itself, and a name with a dot may be wrong.
    with pytest.raises(UserError, match=r"no column 'q.text' \(there is q, a\); name the two"):
        read_records(path, columns=("q.text", "a"))


def test_records_come_from_a_file_a_folder_and_the_hub_by_one_door(tmp_path, monkeypatch):
    line = {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}
    json_lines(tmp_path / "set.jsonl", [line])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: {"train": [line]})
    (tmp_path / "folder").mkdir()
    json_lines(tmp_path / "folder" / "set.jsonl", [line])
    with pytest.raises(
        UserError, match="folder: is a folder; name a file in it, train on the folder as `dataset`, or make a file"
    ):
        read_records(tmp_path / "folder")
    for source in (tmp_path / "set.jsonl", tmp_path / "folder", "some/name"):
        assert [record.answer for record in each_record_of_source(source)] == ["5"]
    with pytest.raises(UserError, match="expected NAME:SUBSET:SPLIT, got 4 parts"):
        list(each_record_of_source("some/name:subset:split:more"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: {"train": []})
    with pytest.raises(UserError, match="some/name: holds no records"):
        list(each_record_of_source("some/name"))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.binary(max_size=211))
def test_any_bytes_are_rows_or_an_error_that_names_the_file(tmp_path, data):
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    try:
        assert all(isinstance(row, dict) for _, row in read_rows(path))
    except UserError as error:
        assert str(error).startswith(f"{path}:")
    bad = BadRecords("skip")
    try:
        rows = list(read_rows(path, bad=bad))
    except UserError as error:
        assert " is " in str(error), "only what is no text at all is an error now"
    else:
        assert len(rows) + bad.count <= data.count(b"\n") + 1


def test_remedies_name_the_settings_that_the_reader_has(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"messages": []}\n')
    with pytest.raises(UserError, match=r"d.jsonl:1: 'messages' is '\[\]'; fill it in, or leave such rows out$"):
        read_records(path)
    of_command = BadRecords(settings=("bad_records",))
    with pytest.raises(UserError, match=r"d.jsonl:1: .*, or leave such rows out with `bad_records skip`$"):
        read_records(path, bad=of_command)
    path.write_text('{"Frage": "a", "Antwort": "b"}\n')
    with pytest.raises(UserError, match=r"\(there is Frage, Antwort\); name the two with `columns USER ASSISTANT`$"):
        read_records(path)
    with pytest.raises(UserError, match=r"\(there is Frage, Antwort\); rename the two to prompt and completion$"):
        read_records(path, bad=of_command)


def test_skipped_lines_are_described_without_remedies(tmp_path):
    path, bad = tmp_path / "d.jsonl", BadRecords("skip", settings=("bad_records", "columns"))
    path.write_text('{"messages": []}\n{"Frage": "a", "Antwort": "b"}\n{"prompt": "q", "completion": "a"}\n')
    assert len(read_records(path, bad=bad)) == 1
    assert [line for line, _ in bad.first] == [1, 2] and not any(";" in reason for _, reason in bad.first)
