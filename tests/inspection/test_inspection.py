"""The description of a record against its forest, read the slow way; and what is said about files and records."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, parse_record, read_records
from stepjepa.errors import UserError
from stepjepa.forests.segments import ForestBuilder
from stepjepa.inspection.palette import EDGE, Look, hues, visible_text
from stepjepa.inspection.picture import write_png
from stepjepa.inspection.record import inspect_record, token_text, visible_matrix
from stepjepa.inspection.view import show, title
from stepjepa.models.presets import train_tokenizer
from stepjepa.text.predictors import add_predictor_tokens

MODES = [
    ("regular", "separate"),
    ("llm-jepa", "separate"),
    ("llm-jepa", "branched"),
    ("step-jepa", "branched"),
    ("step-jepa", "inplace"),
]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _record(answer: str, line: int, question: str = "What is $3+4+5$?") -> Record:
    turns = [("system", "Add."), ("user", question), ("assistant", answer)]
    return parse_record({"messages": [{"role": role, "content": text} for role, text in turns]}, "sums.jsonl", line)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [
        _record("3+4=7.\n\n7+5=12\n\nSo it is\n\n12", 1),
        _record("Red\n\nBlue [bold]", 2, "Two\tcolours 日本"),
        _record("One", 4),
    ]


@pytest.fixture(scope="module")
def tokenizer(records: list[Record]) -> Any:
    made = train_tokenizer([m["content"] for record in records for m in record.messages], 300)
    add_predictor_tokens(made, 5)
    return made


def _config(mode: Any, layout: Any, **options: Any) -> JepaConfig:
    return JepaConfig(mode=mode, layout=layout, **options)


def _sees(segments: list[dict[str, Any]], query: int, key: int) -> bool:
    """The definition: in one's own segment causally, in those it hangs on up to where it is attached."""
    walker = next(s for s in segments if s["start"] <= query < s["end"])
    if walker["start"] <= key < walker["end"]:
        return key <= query
    if walker["isolated"]:
        return False
    while walker["parent"] is not None:
        parent = segments[walker["parent"]]
        if parent["start"] <= key < parent["end"]:
            return key - parent["start"] < walker["attachment"]
        walker = parent
    return False


@pytest.mark.parametrize(("mode", "layout"), MODES)
@pytest.mark.parametrize("pairs", ["first", "all"])
def test_visible_keys_are_those_of_a_walk_up_the_segments(
    records: list[Record], tokenizer: Any, mode: str, layout: str, pairs: str
) -> None:
    found = inspect_record(records, 0, tokenizer, _config(mode, layout, pairs=pairs))
    value = json.loads(json.dumps(found.to_dict()))
    matrix = visible_matrix(found)
    for query, token in enumerate(value["tokens"]):
        seen = {key for start, end in token["sees"] for key in range(start, end)}
        expected = {key for key in range(len(value["tokens"])) if _sees(value["segments"], query, key)}
        assert seen == expected
        assert set(matrix[query].nonzero()[0].tolist()) == expected


@pytest.mark.parametrize(("mode", "layout"), MODES)
def test_tokens_are_those_of_the_forest(records: list[Record], tokenizer: Any, mode: str, layout: str) -> None:
    config = _config(mode, layout, pairs="all")
    forest = ForestBuilder(tokenizer, config).build(records[:1])[0]
    found = inspect_record(records, 0, tokenizer, config)
    assert [token.id for token in found.tokens] == forest.input_ids.tolist()
    assert [token.position for token in found.tokens] == forest.position_ids.tolist()
    assert [-100 if token.label is None else token.label for token in found.tokens] == forest.shift_labels.tolist()
    assert [[pair.source, pair.target] for pair in found.pairs] == forest.pairs.tolist()
    assert [pair.pair for pair in found.pairs] == list(range(1, len(forest.pairs) + 1))
    for segment in found.segments:
        assert {token.segment for token in found.tokens[segment.start : segment.end]} == {segment.index}
        assert found.tokens[segment.start].position == segment.first_position
    for pair in found.pairs:
        assert f"source {pair.pair}" in found.tokens[pair.source].readouts
        assert f"target {pair.pair}" in found.tokens[pair.target].readouts
    assert sum(len(token.readouts) for token in found.tokens) == 2 * len(found.pairs)
    assert found.record.main_tokens == len(forest.without_views())


def test_main_text_reads_as_the_chat(records: list[Record], tokenizer: Any) -> None:
    found = inspect_record(records, 0, tokenizer, _config("step-jepa", "branched"))
    main = found.segments[0]
    text = "".join(token.text for token in found.tokens[: main.end])
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat is $3+4+5$?<|im_end|>\n"
        "<|im_start|>assistant\n3+4=7.\n\n7+5=12\n\nSo it is\n\n12<|im_end|>"
    )
    labelled = "".join(token.label_text for token in found.tokens if token.label_text is not None)
    assert labelled == "3+4=7.\n\n7+5=12\n\nSo it is\n\n12<|im_end|>"


@pytest.mark.parametrize("layout", ["branched", "inplace"])
def test_messages_and_steps_stand_at_the_rows_named(records: list[Record], tokenizer: Any, layout: str) -> None:
    found = inspect_record(records, 0, tokenizer, _config("step-jepa", layout, pairs="all", predictors=2))
    steps = found.record.steps
    assert [part.text for part in steps] == ["3+4=7.\n\n", "7+5=12\n\n", "So it is\n\n", "12"]
    for part in steps:
        rows = found.tokens[part.start : part.end]
        assert "".join(token.text for token in rows) == part.text
    assert [part.name for part in found.record.messages] == ["system", "user", "assistant"]
    system, user, assistant = found.record.messages
    assert "".join(token.text for token in found.tokens[user.start : user.end]) == user.text
    assert "".join(token.text for token in found.tokens[system.start : system.end]) == system.text
    assert (assistant.start, assistant.end) == (steps[0].start, steps[-1].end)


@pytest.mark.parametrize(("mode", "layout"), MODES[1:])
def test_every_predictor_makes_the_row_one_token_longer(
    records: list[Record], tokenizer: Any, mode: str, layout: str
) -> None:
    rows = [
        inspect_record(records, 0, tokenizer, _config(mode, layout, predictors=count)).tokens for count in (0, 1, 2, 3)
    ]
    assert [len(row) - len(rows[0]) for row in rows] == [0, 1, 2, 3]
    texts = [token.text for token in rows[3] if token.text.startswith("<|predictor_")]
    assert texts == ["<|predictor_1|>", "<|predictor_2|>", "<|predictor_3|>"]


def test_counts_are_of_the_whole_file(records: list[Record], tokenizer: Any) -> None:
    config = _config("step-jepa", "branched")
    found = inspect_record(records, 1, tokenizer, config)
    forests = ForestBuilder(tokenizer, config).build(records)
    assert (found.path, found.index, found.line) == ("sums.jsonl", 1, 2)
    assert found.file.lines == 3
    assert (found.file.counts["records"], found.file.counts["pairs"]) == (3, 2)
    assert found.file.counts["without a pair"] == 1
    assert found.file.tokens == sum(map(len, forests))
    assert found.file.main_tokens == sum(len(forest.without_views()) for forest in forests)
    assert found.file.over_regular == found.file.tokens / found.file.main_tokens
    assert found.file.notes == ()
    assert found.template["system role"] == "yes"


def test_a_record_too_long_is_shown_truncated_and_the_note_says_so(records: list[Record], tokenizer: Any) -> None:
    config = _config("step-jepa", "branched")
    full = inspect_record(records, 0, tokenizer, config).record
    assert full.full_tokens == full.main_tokens
    cut = inspect_record(records, 0, tokenizer, replace(config, max_length=full.main_tokens - 4))
    assert cut.config.over_length == "error"
    assert cut.record.over_length
    assert (cut.record.full_tokens, cut.record.main_tokens) == (full.main_tokens, full.main_tokens - 4)
    assert cut.record.steps[-1].cut
    assert "over_length is 'error'" in cut.file.notes[0]
    assert cut.file.counts["over length"] == cut.file.counts["truncated"] > 0


def test_records_that_training_leaves_out_are_errors_with_a_remedy(records: list[Record], tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"sums.jsonl:1: .* max_length 11, and --over_length skip leaves it out"):
        inspect_record(records, 0, tokenizer, _config("regular", "separate", max_length=11, over_length="skip"))
    with pytest.raises(UserError, match=r"sums.jsonl:1: .* no answer to learn; raise --max_length"):
        inspect_record(records, 0, tokenizer, _config("regular", "separate", max_length=5))


def test_files_that_stop_training_are_noted(records: list[Record], tokenizer: Any) -> None:
    lone = inspect_record(records[2:], 0, tokenizer, _config("step-jepa", "branched", require_pairs=True))
    assert [note.split(":")[0] for note in lone.file.notes] == [
        "require_pairs is on",
        "no record has a pair of views",
    ]
    assert lone.record.pairs == 0


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_names_the_number_of_records(records: list[Record], tokenizer: Any, index: int) -> None:
    with pytest.raises(UserError, match=rf"sums.jsonl: --index {index}: the file has 3 records; choose 0 to 2"):
        inspect_record(records, index, tokenizer, JepaConfig())


def test_white_space_is_made_visible_and_control_characters_are_escaped() -> None:
    assert visible_text(" a\tb\r\n") == "·a⇥b␍⏎"
    assert visible_text("\x1b[31m\u200b日") == "\\x1b[31m\\u200b日"


def test_token_text_keeps_the_blank_of_sentence_pieces() -> None:
    class Pieces:
        def decode(self, ids: list[int], **options: bool) -> str:
            return {0: "word", 1: ""}[ids[0]]

        def convert_ids_to_tokens(self, index: int) -> str:
            return {0: "\u2581word", 1: "<odd>"}[index]

    pieces: Any = Pieces()
    assert token_text(pieces, 0) == " word"
    assert token_text(pieces, 1) == "<odd>"


def _shown(inspection: Any, width: int, max_tokens: int = 96, color: Any = None, no_color: bool | None = None) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, height=23, color_system=color, no_color=no_color, force_terminal=color is not None
    )
    show(inspection, console, max_tokens=max_tokens)
    return stream.getvalue()


def _without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def _drawn(text: str, size: int) -> tuple[list[list[bool]], dict[int, str]]:
    """The matrix as it is drawn, read back from one stripe or several; and the marks, by the row that begins a line."""
    lines = _without_styles(text).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("attention"))
    matrix = [[False] * size for _ in range(size + 1)]
    marks: dict[int, str] = {}
    first = keys = left = 0
    for number, line in enumerate(lines[start + 1 :], start=start + 1):
        if line.startswith(("this record", "◂ read")):
            break
        if re.fullmatch(r" {5} *\d[ \d]*", line):
            # The strip below it names a segment over each of its keys.
            first += keys
            strip = lines[number + 1]
            left = len(strip) - len(strip.lstrip())
            keys = len(strip.strip().replace("│", ""))
        elif match := re.match(r" *(\d+) ", line[:5]):
            row = int(match[1])
            cells, _, mark = line[left:].partition(" ◂")
            if "◂" in line:
                marks[row] = marks.get(row, "") + mark.strip()
            for offset, cell in enumerate(cells.replace("│", "")[:keys]):
                matrix[row][first + offset] = cell in "▀█"
                matrix[row + 1][first + offset] = cell in "▄█"
    assert first + keys == size
    return matrix[:size], marks


@pytest.mark.parametrize("width", [37, 61, 300])
@pytest.mark.parametrize("color", [None, "standard", "truecolor"])
@pytest.mark.parametrize(("mode", "layout"), MODES)
def test_the_attention_picture_is_the_matrix(
    records: list[Record], tokenizer: Any, mode: str, layout: str, color: Any, width: int
) -> None:
    found = inspect_record(records, 1, tokenizer, _config(mode, layout, pairs="all"))
    text = _shown(found, width, 400, color)
    drawn, marks = _drawn(text, len(found.tokens))
    assert drawn == visible_matrix(found).tolist()
    read = {token.row // 2 * 2: token for token in found.tokens if token.readouts}
    assert set(marks) == set(read)
    if width == 300:
        assert all(token.readouts[0] in marks[row] for row, token in read.items())
    elif read:
        told = " ".join(_without_styles(text).split())
        assert all(f"row {token.row} {token.readouts[0]}" in told for token in read.values())


@pytest.mark.parametrize("width", [37, 61, 80])
@pytest.mark.parametrize("color", [None, "standard", "truecolor"])
def test_nothing_is_wider_than_the_terminal(records: list[Record], tokenizer: Any, color: Any, width: int) -> None:
    for index in (0, 1):
        found = inspect_record(records, index, tokenizer, _config("step-jepa", "branched", pairs="all"))
        lines = _without_styles(_shown(found, width, color=color)).splitlines()
        assert max(map(cell_len, lines)) <= width
        words = " ".join(" ".join(lines).split())
        assert "source 1" in words and "step 2" in words and "begin of text" in words


def test_segments_are_told_apart_without_colour(records: list[Record], tokenizer: Any) -> None:
    found = inspect_record(records, 0, tokenizer, _config("step-jepa", "branched"))
    text = _shown(found, 120, color="truecolor", no_color=True)
    assert not re.search(r"\x1b\[(?:[\d;]*;)?[34]8;|\x1b\[[34]\d", text), "NO_COLOR leaves bold and underlined"
    lines = _without_styles(text).splitlines()
    assert lines == _shown(found, 120).splitlines()
    assert next(line for line in lines if line.startswith("1 source")) == (
        f"1 source  <|predictor_1|>{EDGE}<|predictor_2|>◂"
    )
    strip = lines[next(n for n, line in enumerate(lines) if line.startswith("attention")) + 2]
    assert strip.count(EDGE) == len(found.segments) - 1


def test_sixteen_colours_tell_all_kinds_apart(records: list[Record], tokenizer: Any) -> None:
    found = inspect_record(records, 0, tokenizer, _config("step-jepa", "branched", pairs="all"))
    look = Look(Console(color_system="standard", force_terminal=True, no_color=False), found.segments)
    styles = {Style.parse(look.token(segment)).bgcolor for segment in found.segments}
    downgraded = {color.downgrade(ColorSystem.STANDARD).number for color in styles if color}
    kinds = {(segment.kind, number) for segment, number in zip(found.segments, hues(found.segments), strict=True)}
    assert len(downgraded) == len(kinds) == 5


def test_rows_that_are_too_long_are_left_out_with_a_remedy(records: list[Record], tokenizer: Any) -> None:
    found = inspect_record(records, 0, tokenizer, _config("step-jepa", "branched"))
    assert "are more than --max_tokens 5; raise it, or draw a picture with --png FILE" in _shown(found, 120, 5)


def test_the_terminal_shows_labels_readouts_and_text_as_it_is(records: list[Record], tokenizer: Any) -> None:
    found = inspect_record(records, 1, tokenizer, _config("step-jepa", "branched"))
    text = _shown(found, 120)
    assert "\x1b[" not in text
    assert "bold]" in "".join(line.replace("│", "") for line in text.splitlines())
    assert "⇥" in text
    assert "source 1" in text
    assert "tokens over regular" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b[" in _shown(found, 120, color="truecolor")


@pytest.mark.parametrize("layout", ["branched", "inplace"])
def test_the_picture_is_a_png(records: list[Record], tokenizer: Any, tmp_path: Path, layout: str) -> None:
    # Dollar signs would be mathematics, and the font has no glyph for every script: both must pass without a warning.
    for index in (0, 1):
        found = inspect_record(records, index, tokenizer, _config("step-jepa", layout, pairs="all", predictors=1))
        write_png(found, tmp_path / "record.png", title(found))
        content = (tmp_path / "record.png").read_bytes()
        assert content.startswith(PNG_SIGNATURE)
        assert len(content) > 10_000


def test_every_way_of_reading_is_shown(records: list[Record], tokenizer: Any) -> None:
    front = inspect_record(records, 0, tokenizer, _config("llm-jepa", "branched", front_pred=True))
    assert front.tokens[front.segments[1].start].text == "<|predictor_1|>"
    back = inspect_record(records, 0, tokenizer, _config("step-jepa", "branched", reverse_pred=True))
    assert back.segments[back.tokens[back.pairs[0].target].segment].kind == "main"


def test_real_records(shared_data: Path) -> None:
    from stepjepa.models.loading import load_tokenizer

    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "qwen2.5"))
    add_predictor_tokens(tokenizer, 2)
    records = read_records(shared_data / "llm_jepa" / "gsm8k_test.jsonl")[:40]
    found = inspect_record(records, 7, tokenizer, _config("step-jepa", "branched", step_separator="line"))
    assert "".join(token.text for token in found.tokens[found.segments[2].start :]) == found.record.steps[1].text
    assert found.file.counts["pairs"] + found.file.counts["without a pair"] == 40
