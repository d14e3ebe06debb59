"""Where the steps of a response are: blank lines, markers, and what is no step of its own."""

import json

import pytest

from stepjepa.data.records import find_steps
from stepjepa.preparing.step_splitting import drop_thinking, split_response, tidy_step


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>Hm.\n\nLet me see.</think>\n\nFirst.", "First."),
        ("Hm.\n\nLet me see.\n</think>\n\nFirst.", "First."),
        ("<think>a</think>One. <think>b</think>Two.", "One. Two."),
        ("One.<think>never ends", "One."),
        ("<think>never ends", ""),
        ("<think></think>", ""),
        ("No thinking.", "No thinking."),
    ],
)
def test_drop_thinking(response, answer):
    assert drop_thinking(response) == answer


MARKS = (
    *("**Step {}:** ", "**Step {}: Add**\n", "Step {}: ", "### Step {}\n", "## Step {}: Add\n", "#### **Step {}**\n"),
    *("{}. ", "{}) ", "**{}.** ", "### {}. ", "**{}. Add.** ", "  {}. ", "step {} - "),
)


@pytest.mark.parametrize("mark", MARKS)
def test_markers_part_steps_and_blank_lines_inside_them_do_not(mark):
    bodies = [f"We take {i} + {i}.\n\nIt gives {2 * i} eggs." for i in (1, 2)] + ["We add 2 + 4 = 6."]
    text = "\n\n".join(mark.format(i) + body for i, body in enumerate(bodies, start=1))
    expected = [tidy_step(mark.format(i) + body) for i, body in enumerate(bodies, start=1)]
    assert split_response(text) == expected


def test_a_conclusion_behind_the_last_marked_step_is_a_step():
    text = "### Step 1\n3 + 4 = 7\n\n### Step 2\n7 - 2 = 5\n\nThat is all there is.\n\n### Final Answer\n\n\\boxed{5}"
    assert split_response(text) == [
        "### Step 1\n3 + 4 = 7",
        "### Step 2\n7 - 2 = 5\nThat is all there is.",
        "### Final Answer\n\\boxed{5}",
    ]


def test_paragraphs_behind_a_list_are_no_part_of_it():
    text = "1. Take 3 + 4 = 7.\n2. Take 2 away:\n   7 - 2 = 5.\n\nNow we double 5: 10.\n\nThe answer is 10."
    assert split_response(text) == [
        "1. Take 3 + 4 = 7.",
        "2. Take 2 away:\n   7 - 2 = 5.",
        "Now we double 5: 10.",
        "The answer is 10.",
    ]


def test_a_list_of_what_is_given_does_not_count_the_steps():
    text = (
        "We are given:\n\n1. 3 red eggs\n2. 4 blue eggs\n\nTogether 3 + 4 = 7.\n\nShe eats 2 of them, so 5.\n\n"
        "She doubles them, so 10."
    )
    assert split_response(text) == [
        "We are given:\n1. 3 red eggs\n2. 4 blue eggs",
        "Together 3 + 4 = 7.",
        "She eats 2 of them, so 5.",
        "She doubles them, so 10.",
    ]


def test_a_list_inside_a_step_does_not_part_it():
    text = "**Step 1:** Count:\n1. 3 red\n2. 4 blue\n\n**Step 2:** Add:\n1. 3 + 4\n2. gives 7"
    assert split_response(text) == ["**Step 1:** Count:\n1. 3 red\n2. 4 blue", "**Step 2:** Add:\n1. 3 + 4\n2. gives 7"]
    nested = "1. Count:\n   1. 3 red\n   2. 4 blue\n2. Add: 3 + 4 = 7"
    assert split_response(nested) == ["1. Count:\n   1. 3 red\n   2. 4 blue", "2. Add: 3 + 4 = 7"]


@pytest.mark.parametrize(
    "text",
    [
        "Step 1 gives us 12 eggs.\n\nNow we add 4 to it.",
        "2.5 hours pass at first.\n\n3.5 hours pass later.",
        "**Step 1:** All of it happens in 1 + 1.\n\nAnd then 2 + 2.",
    ],
)
def test_what_does_not_count_from_one_to_the_next_leaves_blank_lines_to_decide(text):
    assert split_response(text) == text.split("\n\n")


def test_lead_ins_and_headings_go_with_what_follows():
    text = "## Eggs\n\n3 + 4 = 7 eggs.\n\nTherefore:\n\n$$7 - 2 = 5$$\n\n"
    text += "Now let's double that number.\n\nOkay.\n\n5 * 2 = 10."
    assert split_response(text) == [
        "## Eggs\n3 + 4 = 7 eggs.",
        "Therefore:\n$$7 - 2 = 5$$",
        "Now let's double that number.",
        "Okay.\n5 * 2 = 10.",
    ]


@pytest.mark.parametrize(
    "formula", ["$$7 - 2 = 5$$", "\\[\n7 - 2 = 5\n\\]", "= 7 - 2", "where x is 5.", "\\boxed{5}", "#### 5", "**5**"]
)
def test_what_completes_a_step_goes_with_it(formula):
    assert split_response(f"She has 3 + 4 = 7.\n\nShe keeps 5 of 7.\n\n{formula}") == [
        "She has 3 + 4 = 7.",
        f"She keeps 5 of 7.\n{formula}",
    ]


@pytest.mark.parametrize(
    "block",
    [
        "```python\na = 3\n\nb = 4\n\n1. no\n2. step\n```",
        "$$\n3 + 4\n\n= 7\n$$",
        "\\[\n3 + 4\n\n= 7\n\\]",
        "\\begin{align*}\n3 + 4\n\n= 7\n\\end{align*}",
    ],
)
def test_blocks_are_not_cut(block):
    text = f"We calculate 3 + 4 as follows:\n\n{block}\n\nThen she eats 2 eggs."
    steps = split_response(text)
    assert len(steps) == 2
    assert steps[0].count("\n") == 1 + block.replace("\n\n", "\n").count("\n")
    assert steps[1] == "Then she eats 2 eggs."


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
