"""Generated descriptions and expressions: of the published grammar, worded like it, as frequent as there."""

import hashlib
import json

import pytest

from nl_rx_trees import find_trees
from stepjepa.tasks import nl_rx
from stepjepa.tasks.nl_rx import STRINGS, Tree, describe, generate_split, is_sound
from stepjepa.tasks.regex import parse

PUBLISHED_SIZE = 9863
# Together no more than the draws for the published set bring: what comes after them is larger.
TEST_SIZE = 100


@pytest.fixture(scope="module")
def generated():
    """As many training pairs as there are different published ones, and test pairs."""
    return generate_split(PUBLISHED_SIZE, TEST_SIZE, seed=0)


@pytest.fixture(scope="module")
def published(shared_data):
    """The different pairs of NL-RX-Synth."""
    lines = [(shared_data / "nl_rx" / f"NL-RX-Synth.{part}.txt").read_text().splitlines() for part in ("src", "targ")]
    pairs = list(dict.fromkeys(zip(*lines, strict=True)))
    assert len(pairs) == PUBLISHED_SIZE
    return pairs


def tree(name, *parts, times=None):
    return Tree(name, tuple(tree(part) if isinstance(part, str) else part for part in parts), times)


@pytest.mark.parametrize(
    ("drawn", "description", "regex"),
    [
        (tree("containing", "number"), "lines containing a number", ".*[0-9].*"),
        (tree("followed by", "string", "string"), "lines with the string 'dog' followed by the string 'truck'", None),
        (tree("zero or more times", "character"), "lines with a character, zero or more times", "(.)*"),
        (tree("containing only", "character"), "lines containing only a character", "."),
        (tree("not", tree("before", "string", "vowel")), "lines not having the string 'dog' before a vowel", None),
        (
            tree("words with", tree("not", tree("starting with", "number"))),
            "lines with words that don't starting with a number",
            r"\b~(([0-9])(.*))\b",
        ),
        (
            tree("not", tree("and", "vowel", "number")),
            "lines not having a vowel and not a number",
            "~(([AEIOUaeiou])&([0-9]))",
        ),
        (
            tree("ending with", tree("either, or", "string", "string", "string")),
            "lines ending with either the string 'dog', the string 'truck', or the string 'ring'",
            "(.*)((dog)|(truck)|(ring))",
        ),
    ],
)
def test_wording_and_expression_of_a_tree(drawn, description, regex):
    found = describe(drawn)
    assert found[0] == description
    assert regex in (None, found[1])
    parse(found[1])


def test_all_pairs_are_sentences_about_lines_and_expressions_and_none_comes_twice(generated):
    train, test = generated
    assert (len(train), len(test)) == (PUBLISHED_SIZE, TEST_SIZE)
    assert len(dict([*train, *test])) == PUBLISHED_SIZE + TEST_SIZE
    assert not {regex for _, regex in train} & {regex for _, regex in test}
    for description, regex in [*train, *test]:
        assert description.startswith("lines ")
        assert not set(description) & set("<>{}")
        assert "WORD" not in description + regex
        assert "  " not in description
        parse(regex)
        # The strings come in their order.
        named = [word for word in STRINGS if f"'{word}'" in description]
        assert named == list(STRINGS[: len(named)])
        assert all(word in regex for word in named)


def test_a_smaller_size_gives_the_first_of_the_pairs(monkeypatch):
    # Fewer draws: this is about order, not about what comes up.
    monkeypatch.setattr(nl_rx, "_DRAWS", dict.fromkeys(nl_rx._DRAWS, 3000))
    train, test = generate_split(300, 40, seed=4)
    assert generate_split(100, 40, seed=4) == (train[:100], test)
    assert generate_split(100, 0, seed=4)[1] == []
    assert generate_split(300, 40, seed=5)[0] != train
    # More than the first draws bring: drawn on.
    more, _ = generate_split(3000, 40, seed=4)
    assert more[:300] == train
    assert len({description for description, _ in more}) == 3000


def test_published_pairs_are_of_the_grammar(published):
    for pair in published[::6]:
        trees = find_trees(*pair)
        assert len(trees) == 1, pair
        assert is_sound(trees[0]), pair


def test_the_pairs_of_a_seed_stay_what_they_were(generated):
    text = json.dumps(generated, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest().startswith("7c2ceab2d37c62bc")
