r"""Equivalence of NL-RX's expressions: what the dialect is, and decisions against slow and independent judges."""

import itertools
import random
import re
import time

import pytest
from greenery import fsm

from regex_rewriting import twin, write
from slow_regex import matches
from stepjepa.data.sources import read_records
from stepjepa.tasks.regex.equivalence import equivalent, find_difference
from stepjepa.tasks.regex.syntax import (
    ANY,
    DEEPEST,
    LONGEST,
    Characters,
    Complement,
    Concatenation,
    Intersection,
    RegexSyntaxError,
    Repetition,
    Union,
    parse,
)


def letter(character):
    return Characters(((ord(character), ord(character)),))


A, B, C = map(letter, "abc")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a", A),
        ("(a)", A),
        ("a|b&c", Union((A, Intersection((B, C))))),
        ("ab&c|a", Union((Intersection((Concatenation((A, B)), C)), A))),
        ("~(a*)", Complement(Repetition(A, 0, None))),
        ("ab*", Concatenation((A, Repetition(B, 0, None)))),
        ("a?", Repetition(A, 0, 1)),
        ("a{3,}", Repetition(A, 3, None)),
        (".", ANY),
        ("[a]", A),
        ("[a-cb-e]", Characters(((97, 101),))),
        ("[a-]", Characters(((45, 45), (97, 97)))),
        ("[^b]", Characters(((0, 97), (99, 0x10FFFF)))),
        (r"\n", letter("\n")),
        ("é", letter("é")),
    ],
)
def test_the_tree_of_an_expression(text, tree):
    assert parse(text) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing where an expression is needed at character 1"),
        ("a)", "a ')' that closes nothing at character 2"),
        ("(|a)", "nothing where an expression is needed at character 2"),
        ("(+)", "'+' where a character is needed at character 2"),
        ("a{", "'{' without {n}, {n,} or {n,m} at character 2"),
        ("a{,2}", "'{' without {n}, {n,} or {n,m} at character 2"),
        ("a{3,2}", "bounds in the wrong order, 3 to 2 at character 2"),
        ("a}", "'}' where a character is needed at character 2"),
        ("[", "no ']' at character 2"),
        ("[]", "'[]' without characters at character 3"),
        (r"[\d-a]", "a range that ends in a class of characters at character 6"),
        (r"\1", r"'\1', which means nothing, at character 2"),
        ("^a", "'^' where a character is needed at character 1"),
        ("(" * 61 + "a" + ")" * 61, "brackets nested deeper than 60 at character 62"),
        ("a" * 1001, "expected at most 1000 characters, got 1001"),
    ],
)
def test_what_is_no_expression(text, message):
    with pytest.raises(RegexSyntaxError) as caught:
        parse(text)
    assert str(caught.value) == message
    for sides in ((text, "a"), ("a", text)):
        with pytest.raises(RegexSyntaxError):
            equivalent(*sides)


def test_the_limits_of_an_expression_are_allowed():
    assert equivalent("(" * DEEPEST + "a" + ")" * DEEPEST, "a")
    assert equivalent("a" + "+" * DEEPEST, "a+")
    assert equivalent("a" * LONGEST, f"a{{{LONGEST}}}")
    assert equivalent("~" * (LONGEST - 2) + ".*", ".*")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("(a)|(b)", "(b)|(a)"),
        ("[A-Za-z]", "[A-Z]|[a-z]"),
        ("(dog)&(truck)", "~(.*)"),
        ("~(~(dog))", "dog"),
        (".*dog.*", "~(~(.*dog.*))"),
        ("((dog)+)*", "(dog)*"),
        ("(dog){2,3}", "dogdog(dog)?"),
        ("(.*)(.*)", ".*"),
        ("(.*)([0-9].*[a-z].*)", ".*[0-9].*[a-z].*"),
        ("[^^]", r"[^\^]"),
        ("~(.*a.*)", "[^a]*"),
        ("a{0}", "()"),
        ("((a{0,3}){2}){2}", "a{0,12}"),
        # Zero-width, so none of these moves, and next to text it asks for characters on both sides.
        (r"\b\b", r"\b"),
        (r"\b[A-Z]\b", "[A-Z]"),
        (r"a\bb", "~(.*)"),
        (r"\b-", "~(.*)"),
        (r"~(\b)", ".*"),
        (r"(\b)&()", "~(.*)"),
        (r"(~(\b))-", ".*-"),
        (r"\b([AEIOUaeiou])&([a-z])\b", "[aeiou]"),
        (r"\bdog.*", "dog.*"),
        (r"(.*)(\b(dog){7,}\b)", r"(.*\W)?dog{1}(dog){6,}"),
    ],
)
def test_equivalent(left, right):
    assert find_difference(left, right) is None
    assert equivalent(right, left) is True


@pytest.mark.parametrize(
    ("left", "right", "line"),
    [
        ("dog", "truck", "dog"),
        ("(a)|(b)", "(a)&(b)", "a"),
        ("~(dog)", "dog", ""),
        ("(a){3,}", "(a){2,}", "aa"),
        (".*dog.*", "dog", "adog"),
        ("([0-9])(.*)", "(.*)([0-9])", "0a"),
        ("[a-z]", "[A-Za-z0-9_]", "A"),
        # The binding of a bare | is what parts these two.
        (".*(a)|(b).*", ".*((a)|(b)).*", "aA"),
        (r".*\bdog.*", ".*dog.*", "adog"),
        (r"\b.*\b", ".*", ""),
        (r"a\b.", "a.", "aa"),
        (r"(\b([a-z])\b)*", "[a-z]*", "aa"),
    ],
)
def test_different_with_a_shortest_line_to_show_it(left, right, line):
    for sides in ((left, right), (right, left)):
        found = find_difference(*sides)
        assert len(found) == len(line)
        for shown in (found, line):
            assert matches(left, shown) != matches(right, shown)
        assert equivalent(*sides) is False


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("a{1000000}", "dog", "dog"),
        ("(a{1000}){1000}", "a", "a"),
        ("(((a{7}){7}){7}){7}", "a{2401}", None),
        ("(.*)(([A-Z].*[a-z].*){7,})", "(.*)(([A-Z].*[a-z].*){7})", None),
        ("(.*dog.*)&(.*truck.*)&(.*ring.*)&(.*lake.*)", "(.*lake.*)&(.*ring.*)&(.*truck.*)&~(~(.*dog.*))", None),
        ("~((.*[0-9].*){7,})", "~((.*[0-9].*){7})", None),
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
            lambda: part() + part(),
            lambda: f"{part()}.*{part()}",
            lambda: f"({part()})|({part()})",
            lambda: f"({part()})&({part()})",
            lambda: f"~({part()})",
            lambda: f"({part()}){bounds}",
            lambda: f"({part()})",
        ]
    )()


def short_twin(expression, draw):
    """Rewriting may make more of an expression than is read."""
    while len(text := write(twin(parse(expression), draw))) > LONGEST:
        pass
    return text


def test_random_expressions_against_all_short_lines():
    draw = random.Random(1)
    same = 0
    for number in range(36):
        left = random_expression(draw, 4)
        right = short_twin(left, draw) if number % 3 else random_expression(draw, 3)
        line = find_difference(left, right)
        same += line is None
        # Equivalent ones agree on all lines, others on those that are shorter than the one shown.
        for other in LINES:
            if line is None or len(other) < len(line):
                assert matches(left, other) == matches(right, other), (left, right, other)
        assert line is None or matches(left, line) != matches(right, line), (left, right, line)
    assert 20 < same < 36


@pytest.fixture(scope="module")
def published(shared_data):
    return [record.answer for record in read_records(shared_data / "llm_jepa" / "synth_test.jsonl")]


def test_published_expressions_and_their_twins(published):
    draw = random.Random(4)
    for expression in published[::5]:
        other = short_twin(expression, draw)
        began = time.perf_counter()
        assert equivalent(expression, other), (expression, other)
        assert time.perf_counter() - began < 5


def greenery_of(node):
    """The automaton that greenery makes of a tree without word boundaries."""
    match node:
        case Characters(ranges):
            made = fsm.from_charclass(fsm.Charclass(tuple((chr(first), chr(last)) for first, last in ranges)))
        case Concatenation(parts):
            made = fsm.Fsm.concatenate(fsm.EPSILON, *map(greenery_of, parts))
        case Union(parts):
            made = fsm.Fsm.union(*map(greenery_of, parts))
        case Intersection(parts):
            made = fsm.Fsm.intersection(*map(greenery_of, parts))
        case Complement(inner):
            made = greenery_of(ANY).star() - greenery_of(inner)
        case Repetition(inner, least, most):
            turn = greenery_of(inner)
            further = [turn.star()] if most is None else [turn | fsm.EPSILON] * (most - least)
            made = fsm.Fsm.concatenate(fsm.EPSILON, *[turn] * least, *further)
    return made


def test_published_expressions_against_greenery(published):
    draw = random.Random(6)
    same = 0
    # It has no word boundaries, and takes minutes for some of the high bounds.
    expressions = [expression for expression in published[::40] if not re.search(r"\\b|[4-7],", expression)]
    for expression in expressions:
        tree = parse(expression)
        for other in (twin(tree, draw), parse(draw.choice(expressions))):
            verdict = equivalent(expression, write(other))
            assert greenery_of(tree).equivalent(greenery_of(other)) == verdict, (expression, write(other))
            same += verdict
    assert len(expressions) <= same < 2 * len(expressions)
