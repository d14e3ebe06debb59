"""Records to forests: which tokens are a step, what is taught, where views hang and where they are read."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chat_templates
import tiny
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, read_records
from stepjepa.errors import UserError
from stepjepa.forests.forest import IGNORE, Forest, Segment
from stepjepa.forests.preparation import prepare
from stepjepa.forests.segments import ForestBuilder
from stepjepa.text.predictors import predictor_ids
from stepjepa.text.template import ChatTemplate

REAL = ["qwen2.5", "olmo2", "minimind"]
LIKE = ["gemma-like", "llama-like"]
each_real = pytest.mark.parametrize("name", REAL)
each_template = pytest.mark.parametrize("name", [*REAL, *LIKE])


@pytest.fixture(scope="module")
def tokenizers(real_tokenizer: Callable[[str], Any]) -> Callable[[str], Any]:
    """Real tokenizers by name, and Qwen's with templates of other kinds."""
    made: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name in REAL:
            return real_tokenizer(name)
        if name not in made:
            tokenizer = copy.deepcopy(real_tokenizer("qwen2.5"))
            gemma = name == "gemma-like"
            tokens = chat_templates.GEMMA_TOKENS if gemma else chat_templates.LLAMA_TOKENS
            tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
            tokenizer.chat_template = chat_templates.GEMMA_LIKE if gemma else chat_templates.LLAMA_LIKE
            made[name] = tokenizer
        return made[name]

    return load


@pytest.fixture(scope="module")
def traces(shared_data: Path) -> list[Record]:
    """200 answers written by a model, steps parted by blank lines."""
    text = (shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8")
    found = [trace for trace in json.loads(text) if trace["full_response"].strip()][:200]
    return [
        tiny.make_record("Answer the question.", trace["question"], trace["full_response"], line=index)
        for index, trace in enumerate(found, start=1)
    ]


@pytest.fixture(scope="module")
def solutions(shared_data: Path) -> list[Record]:
    """200 solutions of GSM8K, steps parted by line ends."""
    return read_records(shared_data / "llm_jepa" / "gsm8k_train.jsonl")[:200]


def make(tokenizer: Any, records: list[Record], **options: Any) -> list[Forest]:
    return ForestBuilder(tokenizer, JepaConfig(**{"max_length": 4096, **options})).build(records)


def decode(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))


def tokens_of(forest: Forest, segment: Segment) -> list[int]:
    return forest.input_ids[segment.start : segment.end].tolist()


def taught_runs(forest: Forest) -> list[list[int]]:
    """The taught tokens, one list per unbroken run."""
    runs: list[list[int]] = []
    for taught, group in itertools.groupby(forest.shift_labels.tolist(), key=lambda label: label != IGNORE):
        if taught:
            runs.append(list(group))
    return runs


# -- steps -------------------------------------------------------------------------------------------------------------


def split_steps(text: str, blank: bool) -> list[str]:
    """Steps by lines, without regular expressions: a step ends behind an empty line (or behind any line)."""
    steps: list[str] = []
    closed = True
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if closed and line.strip():
            steps.append("")
            closed = False
        if not steps:
            steps.append("")
        steps[-1] += line + ("\n" if number < len(lines) - 1 else "")
        if steps[-1].strip() and (not blank or not line.strip()):
            closed = True
    return steps


def steps_with_prefix(rendered: str, content: str, blank: bool) -> Iterator[tuple[str, str]]:
    """Each step as text, with the whole text in front of it."""
    start = rendered.rindex(content)
    for step in split_steps(content, blank):
        yield rendered[:start], step
        start += len(step)


def assert_steps(tokenizer: Any, records: list[Record], *, blank: bool) -> tuple[int, int]:
    template = ChatTemplate(tokenizer)
    options = {"mode": "step-jepa", "pairs": "all", "predictors": 2, "step_separator": "blank" if blank else "line"}
    forests = make(tokenizer, records, **options)
    exact = pairs = 0
    for record, forest in zip(records, forests, strict=True):
        rendered = template.render(record.messages).text
        content = record.answer if record.answer in rendered else record.answer.strip()
        steps = list(steps_with_prefix(rendered, content, blank))
        main, *others = forest.segments
        main_ids = tokens_of(forest, main)
        assert len(others) == 2 * (len(steps) - 1), record.line
        assert len(forest.pairs) == len(steps) - 1
        for index, (prefix, step) in enumerate(steps[1:]):
            branch, root = others[2 * index], others[2 * index + 1]
            assert (branch.kind, branch.parent, root.kind, root.parent) == ("source", 0, "target", -1)
            assert tokens_of(forest, branch) == predictor_ids(tokenizer, 2)
            wanted = tokens_of(forest, root)
            # The branch hangs right in front of the tokens it predicts, which are those of the main text.
            assert main_ids[branch.attachment : branch.attachment + len(root)] == wanted
            assert forest.pairs[index].tolist() == [branch.end - 1, root.end - 1]
            assert forest.position_ids[branch.start : branch.end].tolist() == [branch.attachment, branch.attachment + 1]
            assert forest.position_ids[root.start : root.end].tolist() == list(range(len(root)))
            pairs += 1
            if decode(tokenizer, wanted) == step and decode(tokenizer, main_ids[: branch.attachment]) == prefix:
                exact += 1
            else:  # a token reaches over the boundary: it belongs to the step in which it begins
                assert decode(tokenizer, main_ids[: branch.attachment]).startswith(prefix)
    return exact, pairs


@each_template
def test_steps_of_real_traces(name: str, tokenizers: Callable[[str], Any], traces: list[Record]) -> None:
    exact, pairs = assert_steps(tokenizers(name), traces, blank=True)
    assert pairs > 300
    assert exact / pairs > 0.99


@each_template
def test_steps_of_real_solutions(name: str, tokenizers: Callable[[str], Any], solutions: list[Record]) -> None:
    exact, pairs = assert_steps(tokenizers(name), solutions, blank=False)
    assert pairs > 500
    assert exact == pairs


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("qwen2.5", ["A", ".ĊĊ"], ["B", "ĊĊ"]),
        ("olmo2", ["A", ".ĊĊ"], ["B", "ĊĊ"]),
        ("minimind", ["A", ".", "Ċ", "Ċ"], ["B", "Ċ", "Ċ"]),
    ],
)
def test_the_blank_line_closes_its_step(
    name: str, first: list[str], second: list[str], tokenizers: Callable[[str], Any]
) -> None:
    """A full stop fused with the blank line, a blank line alone, and a vocabulary that has none."""
    tokenizer = tokenizers(name)
    record = tiny.make_record("S", "q", "A.\n\nB\n\nC")
    (forest,) = make(tokenizer, [record], mode="step-jepa", pairs="all", predictors=1)
    main, branch, root, *_ = forest.segments
    assert tokenizer.convert_ids_to_tokens(tokens_of(forest, root)) == second
    front = tokenizer.convert_ids_to_tokens(tokens_of(forest, main)[: branch.attachment])
    assert front[-len(first) :] == first
    assert forest.shift_labels[branch.attachment - 1] == tokens_of(forest, root)[0]


def test_a_token_that_reaches_over_the_boundary_stays_with_its_step(trained_tokenizer: Any) -> None:
    """By hand, with a separator in the middle of a token."""
    tokenizer = trained_tokenizer
    word = next(t for t in ("So", "is", "it", "7", "Red") if len(tokenizer(t)["input_ids"]) == 1 and len(t) == 2)
    record = tiny.make_record("S", "q", f"x{word}y")
    (forest,) = make(tokenizer, [record], mode="step-jepa", predictors=1, step_separator=word[0])
    main, branch, root = forest.segments
    assert decode(tokenizer, tokens_of(forest, main)[: branch.attachment]).endswith(f"x{word}")
    assert decode(tokenizer, tokens_of(forest, root)) == "y"


@pytest.mark.parametrize("content", ["\n\n  ab\n\ncd\n\nef ", "  ab\n\ncd\n\nef", "ab\n\ncd\n\nef\n\n"])
@each_template
def test_steps_where_the_template_trims(name: str, content: str, tokenizers: Callable[[str], Any]) -> None:
    """The steps are those of the content although its characters stand elsewhere in the text."""
    tokenizer = tokenizers(name)
    (forest,) = make(tokenizer, [tiny.make_record("S", "q", content)], mode="step-jepa", pairs="all", predictors=1)
    main, first, second, third, last = forest.segments
    assert decode(tokenizer, tokens_of(forest, second)) == "cd\n\n"
    assert decode(tokenizer, tokens_of(forest, last)).strip() == "ef"
    assert decode(tokenizer, tokens_of(forest, main)[: first.attachment]).endswith("ab\n\n")
    assert decode(tokenizer, tokens_of(forest, main)[: third.attachment]).endswith("ab\n\ncd\n\n")


def test_blank_lines_of_the_template_are_no_steps(tokenizers: Callable[[str], Any]) -> None:
    for name in ("minimind", "llama-like"):
        builder = ForestBuilder(tokenizers(name), JepaConfig(mode="step-jepa"))
        (forest,) = builder.build([tiny.make_record("S\n\nT", "q\n\nr", "one step only")])
        assert len(forest.segments) == 1
        assert builder.counts["without a pair"] == 1


# -- labels ------------------------------------------------------------------------------------------------------------


CHATS = [
    tiny.make_record("Be brief.", "Who are you?", "I am I."),
    tiny.make_record("Be brief.", "Who?\n\nYou.", "Me.\n\nI.", "And 3+4?", "12 – ä 😀 漢字"),
    tiny.make_record("", "No system.", "Fine", "a", "a", "user", "assistant"),
]


@each_template
def test_labels_are_contents_and_ends_of_turn(name: str, tokenizers: Callable[[str], Any]) -> None:
    tokenizer = tokenizers(name)
    end = ChatTemplate(tokenizer).end_of_turn
    for forest, record in zip(make(tokenizer, CHATS, mode="regular"), CHATS, strict=True):
        answers = [m["content"] + end for m in record.messages if m["role"] == "assistant"]
        assert [decode(tokenizer, run) for run in taught_runs(forest)] == answers
        # Each label is the token that comes next, and the last one closes the row.
        for place, label in enumerate(forest.shift_labels[:-1]):
            assert label in (IGNORE, forest.input_ids[place + 1])
        assert forest.shift_labels[-1] == IGNORE
        assert decode(tokenizer, forest.input_ids).endswith(answers[-1])
        assert forest.position_ids.tolist() == list(range(len(forest)))


@each_template
def test_labels_of_real_records(
    name: str, tokenizers: Callable[[str], Any], traces: list[Record], solutions: list[Record]
) -> None:
    tokenizer = tokenizers(name)
    end = ChatTemplate(tokenizer).end_of_turn
    records = traces[:100] + solutions[:100]
    for forest, record in zip(make(tokenizer, records, mode="step-jepa", pairs="all"), records, strict=True):
        (run,) = taught_runs(forest)
        # Templates may trim, and a header's line end may be one token with a line end that begins the content.
        text = decode(tokenizer, run)
        assert text.endswith(end)
        assert text.removesuffix(end).strip() == record.answer.strip()
        assert (forest.shift_labels[forest.segments[0].end :] == IGNORE).all()


@each_template
def test_main_text_is_the_templates_own_tokens(name: str, tokenizers: Callable[[str], Any]) -> None:
    """No second begin-of-text; nothing but the template's tail is cut off."""
    tokenizer = tokenizers(name)
    for record in CHATS[1:]:
        rendered = ChatTemplate(tokenizer).render(record.messages).text
        expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        (forest,) = make(tokenizer, [record], mode="regular")
        assert forest.input_ids.tolist() == expected[: len(forest)]
        assert decode(tokenizer, expected[len(forest) :]).strip() == ""
        (forest,) = make(tokenizer, [record], mode="regular", labels="all")
        assert forest.input_ids.tolist() == expected
        assert forest.shift_labels.tolist() == [*expected[1:], IGNORE]
        (forest,) = make(tokenizer, [record], mode="regular", labels="reference")
        ends = ChatTemplate(tokenizer).end_of_turn_ids
        wanted = [IGNORE if token in ends else token for token in expected[1:]]
        assert forest.shift_labels.tolist() == [*wanted, IGNORE]
        assert forest.input_ids.tolist() == expected


def test_the_end_of_turn_is_taught_where_it_is_the_padding_token_too(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    (forest,) = make(tiny_tokenizer, [tiny.records()[0]], mode="regular")
    assert taught_runs(forest)[-1][-1] == tiny_tokenizer.eos_token_id


# -- LLM-JEPA ----------------------------------------------------------------------------------------------------------


def text_of(tokenizer: Any, role: str, content: str, added: int = 0, *, front: bool = False) -> str:
    """The view as the published code writes it: predictors inside the message, the message alone in the template."""
    predictors = "".join(f"<|predictor_{number}|>" for number in range(1, added + 1))
    content = predictors + content if front else content + predictors
    return ChatTemplate(tokenizer).render_alone(role, content).text


@pytest.mark.parametrize("predictors", [0, 1, 2, 3])
@each_template
def test_separate_views(name: str, predictors: int, tokenizers: Callable[[str], Any]) -> None:
    tokenizer = tokenizers(name)
    (forest,) = make(tokenizer, CHATS[:1], mode="llm-jepa", predictors=predictors)
    _, source, target = forest.segments
    assert (source.kind, source.parent, target.kind, target.parent) == ("source", -1, "target", -1)
    text = text_of(tokenizer, "user", "Who are you?", predictors)
    assert text.startswith(decode(tokenizer, tokens_of(forest, source)))
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert wanted[: len(source)] == tokens_of(forest, source)
    # OLMo-2 has one token for the question mark and the template's line end.
    last = f"<|predictor_{predictors}|>" if predictors else "you?\n" if name == "olmo2" else "you?"
    assert decode(tokenizer, tokens_of(forest, source)).endswith(last)
    assert decode(tokenizer, tokens_of(forest, target)).endswith("I am I.")
    assert text_of(tokenizer, "assistant", "I am I.").startswith(decode(tokenizer, tokens_of(forest, target)))
    assert forest.pairs.tolist() == [[source.end - 1, target.end - 1]]


@pytest.mark.parametrize("last_token", [-1, -2, -3])
@pytest.mark.parametrize("front", [False, True])
@each_template
def test_last_token_counts_from_the_end_of_the_templated_view(
    name: str, front: bool, last_token: int, tokenizers: Callable[[str], Any]
) -> None:
    """As the published code reads its views: an index into the whole templated text, its tail included."""
    tokenizer = tokenizers(name)
    (forest,) = make(
        tokenizer, CHATS[:1], mode="llm-jepa", predictors=2, last_token=last_token, front_pred=front, max_length=999
    )
    _, source, target = forest.segments
    for segment, text in [
        (source, text_of(tokenizer, "user", "Who are you?", 2, front=front)),
        (target, text_of(tokenizer, "assistant", "I am I.")),
    ]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokens_of(forest, segment) == ids[: len(ids) + last_token + 1]
    assert forest.pairs.tolist() == [[source.end - 1, target.end - 1]]


def test_last_token_out_of_reach_is_refused(trained_tokenizer: Any) -> None:
    for options in ({"mode": "llm-jepa"}, {"mode": "llm-jepa", "layout": "branched"}, {"mode": "step-jepa"}):
        with pytest.raises(UserError, match=r"--last_token -99 reaches before the start.*nearer to -1"):
            make(trained_tokenizer, CHATS[:1] + tiny.records(), last_token=-99, **options)


@pytest.mark.parametrize("predictors", [1, 2, 3])
def test_branched_question(predictors: int, trained_tokenizer: Any) -> None:
    tokenizer = trained_tokenizer
    (forest,) = make(tokenizer, CHATS[:1], mode="llm-jepa", layout="branched", predictors=predictors)
    main, source, _ = forest.segments
    assert decode(tokenizer, tokens_of(forest, main)[: source.attachment]).endswith("user\nWho are you?")
    assert tokens_of(forest, source) == predictor_ids(tokenizer, predictors)
    assert source.parent == 0
    assert forest.pairs[0, 0] == source.end - 1


def test_every_turn_is_a_pair(trained_tokenizer: Any) -> None:
    tokenizer = trained_tokenizer
    for layout in ("separate", "branched"):
        (forest,) = make(tokenizer, CHATS[1:2], mode="llm-jepa", layout=layout, predictors=1, pairs="all")
        assert len(forest.pairs) == 2
        assert len(forest.segments) == 5
        texts = [decode(tokenizer, tokens_of(forest, s)) for s in forest.segments if s.kind == "target"]
        assert [text.rpartition("assistant\n")[2] for text in texts] == ["Me.\n\nI.", "12 – ä 😀 漢字"]


def test_explicit_views(shared_data: Path, trained_tokenizer: Any) -> None:
    records = read_records(shared_data / "llm_jepa" / "hellaswag_test.jsonl")[:20]
    for layout in ("separate", "branched"):
        forests = make(trained_tokenizer, records, mode="llm-jepa", layout=layout, predictors=1)
        for record, forest in zip(records, forests, strict=True):
            main, source, target = forest.segments
            assert source.parent == target.parent == -1, "an explicit view does not stand in the chat"
            texts = [decode(trained_tokenizer, tokens_of(forest, segment)) for segment in (source, target)]
            assert texts == [
                f"<|im_start|>user\n{record.text}<|predictor_1|>",
                f"<|im_start|>assistant\n{record.code}",
            ]
            assert decode(trained_tokenizer, tokens_of(forest, main)).endswith(f"assistant\n{record.answer}<|im_end|>")


# -- front_pred, reverse_pred, K = 0 -----------------------------------------------------------------------------------


STEPS = tiny.make_record("S", "q", "one.\n\ntwo.\n\nthree.")


def shown(tokenizer: Any, forest: Forest) -> list[tuple[str, str, str]]:
    """Kind, what it sees of the main text (its last five characters), and the text of every segment but the first."""
    main = tokens_of(forest, forest.segments[0])
    return [
        (s.kind, decode(tokenizer, main[: s.attachment])[-5:], decode(tokenizer, tokens_of(forest, s)))
        for s in forest.segments[1:]
    ]


def test_step_options_by_hand(trained_tokenizer: Any) -> None:
    tokenizer = trained_tokenizer
    one, two = "<|predictor_1|>", "<|predictor_1|><|predictor_2|>"

    def forest(**options: Any) -> Forest:
        return make(tokenizer, [STEPS], mode="step-jepa", **options)[0]

    plain = forest(predictors=2)
    assert shown(tokenizer, plain) == [("source", "ne.\n\n", two), ("target", "", "two.\n\n")]
    front = forest(predictors=1, front_pred=True)
    assert shown(tokenizer, front) == [("source", "tant\n", one + "one.\n\n"), ("target", "", "two.\n\n")]
    assert front.pairs.tolist() == [[front.segments[1].end - 1, front.segments[2].end - 1]]
    reverse = forest(predictors=1, reverse_pred=True)
    assert shown(tokenizer, reverse) == [("source", "", "two.\n\n" + one)]
    branch = plain.segments[1]
    assert reverse.pairs.tolist() == [[reverse.segments[1].end - 1, branch.attachment - 1]]
    both = forest(predictors=1, reverse_pred=True, front_pred=True)
    assert shown(tokenizer, both) == [("source", "", one + "two.\n\n")]
    none = forest(predictors=0)
    assert shown(tokenizer, none) == [("target", "", "two.\n\n")]
    assert none.pairs.tolist() == [[branch.attachment - 1, none.segments[1].end - 1]]
    every = forest(predictors=1, pairs="all")
    assert [text for _, _, text in shown(tokenizer, every)] == [one, "two.\n\n", one, "three."]
    assert [seen for _, seen, _ in shown(tokenizer, every)] == ["ne.\n\n", "", "wo.\n\n", ""]


def test_positions_of_a_front_branch(trained_tokenizer: Any) -> None:
    (forest,) = make(trained_tokenizer, [STEPS], mode="step-jepa", predictors=2, front_pred=True)
    _, source, _ = forest.segments
    first = source.attachment
    assert forest.position_ids[source.start : source.end].tolist() == list(range(first, first + len(source)))


def test_last_token_of_a_branch(trained_tokenizer: Any) -> None:
    """Counted back from the last predictor, into the main text where the branch is shorter."""
    for back, place in [(-1, 1), (-2, 0)]:
        (forest,) = make(trained_tokenizer, [STEPS], mode="step-jepa", predictors=2, last_token=back)
        assert forest.pairs[0, 0] == forest.segments[1].start + place
    (forest,) = make(trained_tokenizer, [STEPS], mode="step-jepa", predictors=2, last_token=-4)
    assert forest.pairs[0, 0] == forest.segments[1].attachment - 2
    _, _, target = forest.segments
    assert forest.pairs[0, 1] == target.end - 1


def test_reverse_of_llm_views(trained_tokenizer: Any) -> None:
    tokenizer = trained_tokenizer
    (forest,) = make(tokenizer, CHATS[:1], mode="llm-jepa", predictors=1, reverse_pred=True)
    assert [text for _, _, text in shown(tokenizer, forest)] == [
        "<|im_start|>assistant\nI am I.<|predictor_1|>",
        "<|im_start|>user\nWho are you?",
    ]
    assert [s.kind for s in forest.segments] == ["main", "source", "target"]
    assert forest.pairs.tolist() == [[forest.segments[1].end - 1, forest.segments[2].end - 1]]


# -- inplace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", ["first", "all"])
@pytest.mark.parametrize("predictors", [0, 1, 2, 3])
@each_template
def test_inplace(name: str, predictors: int, pairs: str, tokenizers: Callable[[str], Any]) -> None:
    tokenizer = tokenizers(name)
    options = {"mode": "step-jepa", "predictors": predictors, "pairs": pairs}
    (forest,) = make(tokenizer, [STEPS], layout="inplace", **options)
    (regular,) = make(tokenizer, [STEPS], mode="regular")
    (branched,) = make(tokenizer, [STEPS], **options)
    ids = predictor_ids(tokenizer, predictors)
    inside = np.isin(forest.input_ids, ids)
    count = len(branched.pairs)
    assert inside.sum() == predictors * count
    # The row without its predictors is the regular row, labels and all; predictors teach nothing.
    assert forest.input_ids[~inside].tolist() == regular.input_ids.tolist()
    assert forest.shift_labels[~inside].tolist() == regular.shift_labels.tolist()
    assert (forest.shift_labels[inside] == IGNORE).all()
    assert forest.position_ids.tolist() == list(range(len(forest)))
    # Everything hangs on what stands before it, as a whole; the targets see only themselves.
    for index, segment in enumerate(forest.segments):
        assert segment.parent == index - 1
        assert segment.attachment == (len(forest.segments[index - 1]) if index else 0)
        assert segment.isolated == (segment.kind == "target")
    targets = [segment for segment in forest.segments if segment.kind == "target"]
    wanted = [tokens_of(branched, segment) for segment in branched.segments if segment.kind == "target"]
    assert [tokens_of(forest, segment) for segment in targets] == wanted
    for (source, target), segment in zip(forest.pairs, targets, strict=True):
        assert target == segment.end - 1
        assert source == segment.start - 1
        if predictors:
            assert forest.input_ids[source - predictors + 1 : source + 1].tolist() == ids


def test_inplace_without_a_pair_is_regular(trained_tokenizer: Any) -> None:
    record = tiny.records()[2]
    (forest,) = make(trained_tokenizer, [record], mode="step-jepa", layout="inplace")
    tiny.assert_same_forest(forest, make(trained_tokenizer, [record], mode="regular")[0])


# -- without views -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", ["first", "all"])
@pytest.mark.parametrize("labels", ["assistant", "all", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "regular"},
        {"mode": "llm-jepa", "layout": "separate", "predictors": 2},
        {"mode": "llm-jepa", "layout": "branched", "predictors": 1, "front_pred": True},
        {"mode": "llm-jepa", "reverse_pred": True},
        {"mode": "step-jepa", "predictors": 0},
        {"mode": "step-jepa", "predictors": 2, "reverse_pred": True},
        {"mode": "step-jepa", "layout": "inplace", "predictors": 0},
        {"mode": "step-jepa", "layout": "inplace", "predictors": 2},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_without_views_is_regular(options: dict[str, Any], labels: str, pairs: str, trained_tokenizer: Any) -> None:
    records = [*tiny.records(), STEPS, *CHATS]
    for limit in (4096, 50):
        common = {"labels": labels, "max_length": limit, "over_length": "truncate"}
        regular = make(trained_tokenizer, records, mode="regular", **common)
        forests = make(trained_tokenizer, records, pairs=pairs, **options, **common)
        for forest, expected in zip(forests, regular, strict=True):
            tiny.assert_same_forest(forest.without_views(), expected)


# -- lengths and counts ------------------------------------------------------------------------------------------------


def test_too_long_is_an_error_by_default(trained_tokenizer: Any) -> None:
    (whole,) = make(trained_tokenizer, [STEPS], mode="regular")
    size = len(whole)
    (same,) = make(trained_tokenizer, [STEPS], mode="regular", max_length=size)
    tiny.assert_same_forest(same, whole)
    with pytest.raises(UserError, match=rf"memory.jsonl:1: the record has {size} tokens, more than"):
        make(trained_tokenizer, [STEPS], mode="regular", max_length=size - 1)


def test_skipping(trained_tokenizer: Any) -> None:
    sizes = [len(forest) for forest in make(trained_tokenizer, tiny.records(), mode="regular")]
    config = JepaConfig(mode="regular", max_length=sorted(sizes)[1], over_length="skip")
    builder = ForestBuilder(trained_tokenizer, config)
    forests = builder.build(tiny.records())
    assert [forest.line for forest in forests] == [i + 1 for i, size in enumerate(sizes) if size <= sorted(sizes)[1]]
    assert builder.counts == Counter({"records": 2, "over length": 1, "skipped": 1, "pairs": 0})


@pytest.mark.parametrize("layout", ["branched", "inplace"])
def test_truncation_cuts_pairs(layout: str, trained_tokenizer: Any) -> None:
    options = {"mode": "step-jepa", "pairs": "all", "over_length": "truncate", "predictors": 1, "layout": layout}
    (whole,) = make(trained_tokenizer, [STEPS], mode="step-jepa", pairs="all", predictors=1)
    second = whole.segments[3].attachment  # one past the second step
    for limit, usable in [(second + 1, 1), (second, 1), (second - 1, 0)]:
        builder = ForestBuilder(trained_tokenizer, JepaConfig(max_length=limit, **options))  # type: ignore[arg-type]
        (forest,) = builder.build([STEPS])
        assert len(forest.pairs) == usable
        assert len(forest.without_views()) == limit
        assert builder.counts == Counter(
            {
                "records": 1,
                "over length": 1,
                "truncated": 1,
                "pairs": usable,
                "pairs cut by truncation": 2 - usable,
            }
            | ({} if usable else {"without a pair": 1})
        )


def test_truncation_that_leaves_nothing_to_learn(trained_tokenizer: Any) -> None:
    config = JepaConfig(mode="regular", max_length=5, over_length="truncate")
    builder = ForestBuilder(trained_tokenizer, config)
    assert builder.build([STEPS]) == []
    assert builder.counts["skipped"] == 1
    with pytest.raises(UserError, match="none of the 1 records can be trained on; check --max_length"):
        prepare([STEPS], trained_tokenizer, config)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_separate_view_longer_than_the_limit_is_no_pair(reverse: bool, trained_tokenizer: Any) -> None:
    """Counted without predictors, which are not part of the text."""
    record = tiny.make_record(
        "S", "q", "a", text="c" if reverse else "long " * 50, code="long " * 50 if reverse else "c"
    )
    options: dict[str, Any] = {"mode": "llm-jepa", "reverse_pred": reverse, "predictors": 2}
    (whole,) = make(trained_tokenizer, [record], **options)
    size = len(whole.segments[1]) - 2
    for limit, pairs in [(size, 1), (size - 1, 0)]:
        builder = ForestBuilder(trained_tokenizer, JepaConfig(max_length=limit, **options))
        (forest,) = builder.build([record])
        assert len(forest.pairs) == builder.counts["pairs"] == pairs
        assert len(forest.segments) == 1 + 2 * pairs
        assert builder.counts["pairs cut by truncation"] == builder.counts["without a pair"] == 1 - pairs


def test_required_pairs(trained_tokenizer: Any) -> None:
    builder = ForestBuilder(trained_tokenizer, JepaConfig(mode="step-jepa", require_pairs=True))
    with pytest.raises(UserError, match=r"memory.jsonl:3: the record has no usable pair.*--require_pairs"):
        builder.build(tiny.records())
    builder = ForestBuilder(trained_tokenizer, JepaConfig(mode="step-jepa"))
    assert len(builder.build(tiny.records())) == 3
    assert builder.counts == Counter({"records": 3, "pairs": 2, "without a pair": 1})


def test_prepare_counts_and_refuses_a_mode_without_pairs(trained_tokenizer: Any) -> None:
    prepared = prepare(tiny.records(), trained_tokenizer, JepaConfig(mode="step-jepa", pairs="all"))
    assert prepared.counts["records"] == 3
    assert prepared.counts["pairs"] == 4
    assert prepared.counts["without a pair"] == 1
    regular = make(trained_tokenizer, tiny.records(), mode="regular")
    assert prepared.tokens["main"] == sum(len(forest) for forest in regular)
    assert prepared.tokens["all"] == sum(prepared.dataset.lengths) > prepared.tokens["main"]
    assert "4 pairs" in prepared.describe()
    with pytest.raises(UserError, match=r"none of the 1 records has a pair.*; check --step_separator"):
        prepare(tiny.records()[2:], trained_tokenizer, JepaConfig(mode="step-jepa"))


def test_missing_predictors_are_named(real_tokenizer: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"<\|predictor_5\|>; call add_predictor_tokens\(tokenizer, 5\)"):
        ForestBuilder(real_tokenizer("minimind"), JepaConfig(predictors=5))
    ForestBuilder(real_tokenizer("minimind"), JepaConfig(mode="regular", predictors=5))


def test_a_block_equals_single_records(trained_tokenizer: Any) -> None:
    """Records are tokenised together; none may get another's tokens, explicit views and repeats included."""
    records = [*tiny.records(), *CHATS, tiny.make_record("S", "q", "a", text="q", code="a"), CHATS[0]]
    for options in ({"mode": "llm-jepa", "pairs": "all"}, {"mode": "step-jepa"}):
        together = make(trained_tokenizer, records, **options)
        for forest, record in zip(together, records, strict=True):
            tiny.assert_same_forest(forest, make(trained_tokenizer, [record], **options)[0])
