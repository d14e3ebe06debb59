"""Where the steps of a response are: blank lines, markers, and what is no step of its own."""

import json

import pytest

from stepjepa.data.steps import find_steps
from stepjepa.preparing.step_splitting import drop_thinking, split_response, tidy_step


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>Hm.\n\nLet me see.</think>\n\nFirst.", "First."),
        ("Hm.\n\nLet me see.\n</think>\n\nFirst.", "First."),
        ("<think>a</think>One. <think>b</think>Two.", "One. Two."),
        ("One.<think>never ends", "One."),
        ("<think></think>", ""),
    ],
)
def test_drop_thinking(response, answer):
    assert drop_thinking(response) == answer


@pytest.mark.parametrize(
    "mark", ["**Step {}:** ", "**Step {}: Add**\n", "Step {}: ", "#### **Step {}**\n", "{}. ", "**{}.** ", "  {}) "]
)
def test_markers_part_steps_and_blank_lines_inside_them_do_not(mark):
    bodies = [f"We take {i} + {i}.\n\nIt gives {2 * i} eggs." for i in (1, 2)] + ["We add 2 + 4 = 6."]
    text = "\n\n".join(mark.format(i) + body for i, body in enumerate(bodies, start=1))
    expected = [tidy_step(mark.format(i) + body) for i, body in enumerate(bodies, start=1)]
    assert split_response(text) == expected


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        # A conclusion behind the last marked step is a step.
        (
            "### Step 1\n3 + 4 = 7\n\n### Step 2\n7 - 2 = 5\n\nThat is all.\n\n### Final Answer\n\n\\boxed{5}",
            ["### Step 1\n3 + 4 = 7", "### Step 2\n7 - 2 = 5\nThat is all.", "### Final Answer\n\\boxed{5}"],
        ),
        # Paragraphs behind a list are no part of it.
        (
            "1. Take 3 + 4 = 7.\n2. Take 2 away:\n   7 - 2 = 5.\n\nNow we double 5: 10.\n\nThe answer is 10.",
            ["1. Take 3 + 4 = 7.", "2. Take 2 away:\n   7 - 2 = 5.", "Now we double 5: 10.", "The answer is 10."],
        ),
        # A count that begins again, with one marker, does not undo the first one.
        (
            "Step 1: Add 3 and 4.\nStep 2: Double 7.\n\nThat was wrong.\nStep 1: Add 3 and 5.",
            ["Step 1: Add 3 and 4.", "Step 2: Double 7.\nThat was wrong.", "Step 1: Add 3 and 5."],
        ),
        (
            "1. Take 3 + 4 = 7.\n2. Take 2 away: 5.\n1. To check it, 5 + 2 = 7.",
            ["1. Take 3 + 4 = 7.", "2. Take 2 away: 5.", "1. To check it, 5 + 2 = 7."],
        ),
        ("3. Take 3 + 4 = 7.\n1. Take 2 away: 5.", ["3. Take 3 + 4 = 7.\n1. Take 2 away: 5."]),
        # A list inside a step does not part it.
        (
            "**Step 1:** Count:\n1. 3 red\n2. 4 blue\n\n**Step 2:** Add:\n1. 3 + 4\n2. gives 7",
            ["**Step 1:** Count:\n1. 3 red\n2. 4 blue", "**Step 2:** Add:\n1. 3 + 4\n2. gives 7"],
        ),
        (
            "1. Count:\n   1. 3 red\n   2. 4 blue\n2. Add: 3 + 4 = 7",
            ["1. Count:\n   1. 3 red\n   2. 4 blue", "2. Add: 3 + 4 = 7"],
        ),
        # A response whose beginning is cut off.
        ("so 3 + 4 = 7.\n\n2. Take 2: 7 - 2.\n3. It is 5.", ["so 3 + 4 = 7.", "2. Take 2: 7 - 2.", "3. It is 5."]),
        # What does not count from one to the next leaves blank lines to decide.
        ("Step 1 gives us 12 eggs.\n\nNow we add 4 to it.", ["Step 1 gives us 12 eggs.", "Now we add 4 to it."]),
        ("2.5 hours pass at first.\n\n3.5 hours later.", ["2.5 hours pass at first.", "3.5 hours later."]),
        ("**Step 1:** All of it is 1 + 1.\n\nAnd then 2 + 2.", ["**Step 1:** All of it is 1 + 1.", "And then 2 + 2."]),
        # Lead-ins and headings go with what follows.
        (
            "## Eggs\n\n3 + 4 = 7 eggs.\n\nTherefore:\n\n$$7 - 2 = 5$$\n\nOkay.\n\n5 * 2 = 10.",
            ["## Eggs\n3 + 4 = 7 eggs.", "Therefore:\n$$7 - 2 = 5$$", "Okay.\n5 * 2 = 10."],
        ),
    ],
)
def test_steps_of_a_response(text, steps):
    assert split_response(text) == steps


@pytest.mark.parametrize(
    "formula", ["$$7 - 2 = 5$$", "\\[\n7 - 2 = 5\n\\]", "= 7 - 2", "where x is 5.", "\\boxed{5}", "#### 5", "**5**"]
)
def test_what_completes_a_step_goes_with_it(formula):
    assert split_response(f"She has 3 + 4 = 7.\n\nShe keeps 5 of 7.\n\n{formula}") == [
        "She has 3 + 4 = 7.",
        f"She keeps 5 of 7.\n{formula}",
    ]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1. Add them\n2. Double it\n3. So \\boxed{8}", ["1. Add them", "2. Double it", "3. So \\boxed{8}"]),
        ("1) do a\n2) do b", ["1) do a", "2) do b"]),
        (
            "We need:\n\n1. apples\n2. pears\n\nSo two fruits.\n\nThe answer is 2.",
            ["We need:\n1. apples", "2. pears", "So two fruits.\nThe answer is 2."],
        ),
        ("Add them.\n\nDouble it.\n\nHalve it.", ["Add them.", "Double it.", "Halve it."]),
        ("```\nx = 1\n```\n\n$$x = 2$$\n\n\\boxed{2}", ["```\nx = 1\n```", "$$x = 2$$\n\\boxed{2}"]),
        ("She has 3 + 4 = 7.\n\n#### 7", ["She has 3 + 4 = 7.\n#### 7"]),
    ],
)
def test_short_pieces_are_steps_where_they_are_numbered_or_nothing_else_is(text, steps):
    assert split_response(text) == steps


@pytest.mark.parametrize(
    "block",
    [
        "```python\na = 3\n\n\nb = 4\n\n1. no\n2. step\n```",
        "~~~yaml\na: 3\n\n---\n\nb: 4\n~~~",
        "$$\n3 + 4\n\n= 7\n$$.",
        "\\[\n3 + 4\n\n= 7\n\\]",
        "\\begin{align*}\n3 + 4\n\n= 7 is 7\n\\end{align*}",
    ],
)
def test_blocks_are_not_cut(block):
    steps = split_response(f"We calculate 3 + 4 as follows:\n\n{block}\n\nThen she eats 2 eggs.")
    assert steps == [f"We calculate 3 + 4 as follows:\n{block}", "Then she eats 2 eggs."]
    content = "\n\n".join(steps)
    assert [content[start:end].strip() for start, end in find_steps(content)] == steps


def test_a_fence_that_nothing_closes_joins_no_steps():
    assert split_response("She has 3 + 4 = 7.\n\n```\na = 7\n\nb = 2 is not the end") == [
        "She has 3 + 4 = 7.",
        "```\na = 7",
        "b = 2 is not the end",
    ]


def test_real_traces_lose_nothing_and_are_found_again(shared_data):
    traces = json.loads((shared_data / "traces" / "star_repo_star.detailed_results.json").read_text(encoding="utf-8"))
    several = 0
    for trace in traces:
        steps = split_response(trace["full_response"])
        assert "".join("".join(steps).split()) == "".join(trace["full_response"].split())
        assert all(step == tidy_step(step) for step in steps)
        assert len(find_steps("\n\n".join(steps), "blank")) == len(steps)
        several += len(steps) > 1
    assert several > 0.97 * len(traces)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 100_000,
        "```a\nb\n" * 100_000,
        "\\[\n" * 100_000 + "\\] x",
        "\\begin{a}\n" * 50_000 + "\\end{b}\n" * 50_000,
        "x\n\n" + "=1\n\n" * 100_000,
        "x\n\n" + " " * 500_000 + "# a" + " " * 500_000 + "=",
        "x\n\n" + "$ " * 200_000 + "x",
        "```\n1. a\n```\n" * 30_000,
    ],
    ids=["thinking", "fences", "brackets", "environments", "formulas", "blanks", "dollars", "markers"],
)
def test_a_long_response_takes_no_time_that_grows_with_its_square(text):
    """With a search for every opening, each of these took minutes to hours; here it must only end."""
    assert isinstance(split_response(drop_thinking(text) or text), list)
