r"""Equivalence of NL-RX's expressions: what the dialect is, and decisions against slow and independent judges."""

import itertools
import random
import re
import time

import pytest
from greenery import fsm

from slow_regex import matches
from stepjepa.data.sources import read_records
from stepjepa.tasks.regex import Matcher, find_difference
from stepjepa.tasks.regex_languages import Languages
from stepjepa.tasks.regex_syntax import LONGEST, Node, RegexSyntaxError, parse

ANY = parse(".")
A, B, C = (Node("characters", text=character) for character in "abc")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a|b&c", Node("union", (A, Node("intersection", (B, C))))),
        ("ab&c|a", Node("union", (Node("intersection", (Node("concatenation", (A, B)), C)), A))),
        ("~(a*)", Node("complement", (Node("repetition", (A,), bounds=(0, None)),))),
        ("ab*", Node("concatenation", (A, Node("repetition", (B,), bounds=(0, None))))),
        (r"[^\]b]", Node("characters", text=r"[^\]b]")),
        (r"\d", Node("characters", text=r"\d")),
    ],
)
def test_the_tree_of_an_expression(text, tree):
    assert parse(text) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' where a character is needed at character 1"),
        ("a)", "a ')' that closes nothing at character 2"),
        ("(a", "no ')' at character 3"),
        ("a{", "'{' where a character is needed at character 2"),
        ("a{3,2}", "bounds in the wrong order, 3 to 2 at character 2"),
        ("[]", "'[' where a character is needed at character 1"),
        (r"[\d-a]", r"'[\d-a]' (bad character range \d-a) at character 1"),
        (r"\e", r"'\' where a character is needed at character 1"),
        ("^a", "'^' where a character is needed at character 1"),
        ("(" * 400 + "a" + ")" * 400, "brackets nested too deeply"),
        ("a" * 1001, "expected at most 1000 characters, got 1001"),
        ("a\nb", "expected one line, got several"),
    ],
)
def test_what_is_no_expression(text, message):
    with pytest.raises(RegexSyntaxError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("left", "right", "line"),
    [
        ("[A-Za-z]", "[A-Z]|[a-z]", None),
        ("(dog)&(truck)", "~(.*)", None),
        ("(dog){2,3}", "dogdog(dog)?", None),
        ("[^^]", r"[^\^]", None),
        ("[a-c]|[b-e]", "[a-e]", None),
        ("[é-ü]", "[é-û]|ü", None),
        (r"[\S\s]", ".", None),
        ("a{0}", "()", None),
        ("((a{0,3}){2}){2}", "a{0,12}", None),
        # Zero-width, so none of these moves, and next to text it asks for characters on both sides.
        (r"\b[A-Z]\b", "[A-Z]", None),
        (r"a\bb", "~(.*)", None),
        (r"(\b)&()", "~(.*)", None),
        (r"\b([AEIOUaeiou])&([a-z])\b", "[aeiou]", None),
        (r"(.*)(\b(dog){7,}\b)", r"(.*\W)?dog{1}(dog){6,}", None),
        ("dog", "truck", "dog"),
        ("(a){3,}", "(a){2,}", "aa"),
        ("([0-9])(.*)", "(.*)([0-9])", "0a"),
        # The binding of a bare | is what parts these two.
        (".*(a)|(b).*", ".*((a)|(b)).*", "aA"),
        (r".*\bdog.*", ".*dog.*", "adog"),
        (r"\b.*\b", ".*", ""),
        (r"(\b([a-z])\b)*", "[a-z]*", "aa"),
    ],
)
def test_equivalent_or_a_shortest_line_that_shows_the_difference(left, right, line):
    for sides in ((left, right), (right, left)):
        result = find_difference(*sides)
        assert line == result or len(line) == len(result)
        for shown in (result, line) if line is not None else ():
            assert matches(left, shown) != matches(right, shown)


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("a{1000000}", "dog", "dog"),
        # At the limits of depth and length.
        ("(" * 60 + "a" + "+" * 60 + ")" * 60, "a+", None),
        ("~" * (LONGEST - 2) + ".*", ".*", None),
        ("(.*)(([A-Z].*[a-z].*){7,})", "(.*)(([A-Z].*[a-z].*){7})", None),
        ("(.*dog.*)&(.*truck.*)&(.*ring.*)&(.*lake.*)", "(.*lake.*)&(.*ring.*)&(.*truck.*)&~(~(.*dog.*))", None),
        ("((dog.*)|(truck)){7,}", "((.*dog.*)|(truck)){7,}", "adogdogdogdogdogdogdog"),
    ],
)
def test_large_bounds_and_nested_anything_stay_quick(left, right, result):
    began = time.process_time()
    assert find_difference(left, right) == result
    assert time.process_time() - began < 2


LINES = ["".join(line) for length in range(5) for line in itertools.product("aA-", repeat=length)]


def random_expression(draw, depth):
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(["a", "A", "-", ".", "[aA]", "[^a]", "[A-Z]", r"\b", r"\b", "()"])

    def part():
        return random_expression(draw, depth - 1)

    bounds = draw.choice(["*", "+", "?", "{2}", "{2,}", "{1,3}", "{0,2}", "{3,}"])
    return draw.choice(
        [
            lambda: part() + part(),
            lambda: f"{part()}.*{part()}",
            lambda: f"({part()})|({part()})",
            lambda: f"({part()})&({part()})",
            lambda: f"~({part()})",
            lambda: f"({part()}){bounds}",
            lambda: f"({part()})",
        ]
    )()


def test_random_expressions_against_all_short_lines():
    draw = random.Random(1)
    same = 0
    for number in range(36):
        left = random_expression(draw, 4)
        right = f"~(~({left}))|(({left})&.*)" if number % 3 else random_expression(draw, 3)
        line = find_difference(left, right)
        same += line is None
        # Equivalent ones agree on all lines, others on those that are shorter than the one shown.
        for other in LINES:
            if line is None or len(other) < len(line):
                assert matches(left, other) == matches(right, other), (left, right, other)
        assert line is None or matches(left, line) != matches(right, line), (left, right, line)
    assert 20 < same < 36


ASCII = [chr(code) for code in range(128)]


def greenery_of(node):
    """The automaton that greenery makes of a tree without word boundaries."""
    parts = [greenery_of(part) for part in node.parts]
    match node.kind:
        case "characters":
            inside = {ord(character) for character in ASCII if node.holds(character) != node.holds("é")}
            plain = fsm.Charclass(tuple((chr(code), chr(code)) for code in sorted(inside)))
            return fsm.from_charclass(~plain if node.holds("é") else plain)
        case "concatenation":
            return fsm.Fsm.concatenate(fsm.EPSILON, *parts)
        case "union":
            return fsm.Fsm.union(*parts)
        case "intersection":
            return fsm.Fsm.intersection(*parts)
        case "complement":
            return greenery_of(ANY).star() - parts[0]
    least, most = node.bounds
    further = [parts[0].star()] if most is None else [parts[0] | fsm.EPSILON] * (most - least)
    return fsm.Fsm.concatenate(fsm.EPSILON, *parts * least, *further)


@pytest.mark.slow
def test_published_expressions_against_greenery(shared_data):
    draw = random.Random(6)
    same = 0
    published = [record.answer for record in read_records(shared_data / "llm_jepa" / "synth_test.jsonl")]
    # It has no word boundaries, and takes minutes for some of the high bounds.
    expressions = [expression for expression in published[::40] if not re.search(r"\\b|[4-7],", expression)]
    for expression in expressions:
        for other in (f"~(~({expression}))", draw.choice(expressions)):
            verdict = find_difference(expression, other) is None
            assert greenery_of(parse(expression)).equivalent(greenery_of(parse(other))) == verdict, (expression, other)
            same += verdict
    assert len(expressions) <= same < 2 * len(expressions)


def test_a_matcher_is_the_slow_one():
    expressions = [r".*\bdog.*", "(a|b){2,3}&~(ab)", "[^a-c]+", r"\b[A-Z]\b", "~(.*dog.*)", r"\d+(\W)?", "()"]
    lines = ["", "a", "ab", "ba", "bab", "dog", "a dog", "adog", "é", "Z", "12", "1!", "12 ", "~", "dogs 3"]
    result = {(text, line): Matcher(text)(line) for text in expressions for line in lines}
    assert result == {(text, line): matches(text, line) for text, line in result}
    assert 0 < sum(result.values()) < len(result)


def test_languages_are_those_of_all_comparisons():
    generator = random.Random(3)
    pieces = ["a", "b", ".", "(a|b)", "(b|a)", "a*", "(ab){2}", "abab", "~(a)", ".*", "(.*)*", "~(~(b))"]
    texts = ["".join(generator.choices(pieces, k=generator.randint(1, 2))) for _ in range(61)]
    languages = Languages()
    firsts = [next(other for other in texts if find_difference(other, text) is None) for text in texts]
    assert [languages.of(text) for text in texts] == firsts
    assert len(set(firsts)) < len(set(texts))
    # Where nothing can be compared, every text is its own language.
    limited = Languages(most_states=0)
    assert [limited.of(text) for text in ("ab*c", "ab*cc", "ab*ccc")] == ["ab*c", "ab*cc", "ab*ccc"]
