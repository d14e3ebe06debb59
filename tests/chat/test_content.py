"""Which part of an answer is its content."""

import time

import pytest

from stepjepa.chat.content import content_part, opens_thought

HARMONY = "<|channel|>analysis<|message|>two and three<|end|><|start|>assistant<|channel|>final<|message|>5"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("5", "5"),
        ("<think>\ntwo and three\n</think>\n\n5", "\n\n5"),
        ("two and three\n</think>\n\n5", "\n\n5"),
        ("<think>\n\n</think>\n\n5", "\n\n5"),
        ("<think>a</think>b<think>c</think>5", "5"),
        (" <think>\ntwo and", ""),
        ("It is <think>", "It is <think>"),
        ("<seed:think>two and three</seed:think>5", "5"),
        ("[THINK]two and three[/THINK]\n5", "\n5"),
        ("[THINK]two and", ""),
        ("It is [THINK]", "It is [THINK]"),
        ("5 [/THINK] 6", "5 [/THINK] 6"),
        ("<think:open>two</think:open>5", "5"),
        ("<mm:think>two</mm:think>5", "5"),
        ("<|channel>thought\ntwo\n<channel|>5", "5"),
        ("Here are my reasoning steps:\ntwo\n[BEGIN FINAL RESPONSE]\n5", "\n5"),
        (HARMONY, "5"),
        (f"{HARMONY}<|return|>", "5"),
        (HARMONY.replace("final<", "final <|constrain|>json<"), "5"),
        (HARMONY.replace("final", "commentary"), ""),
        (HARMONY.replace("final", "final <|channel|>final"), "5"),
        (HARMONY.replace("final<|message|>", "final "), ""),
        ("<|channel|>final<|message|>5", "5"),
        ("analysistwo and threeassistantfinal5", "5"),
        ("analysis of 5", "analysis of 5"),
    ],
)
def test_the_content_stands_behind_the_thought(text, content):
    assert content_part(text) == content


def test_a_header_that_is_repeated_without_end_stays_quick():
    begun = time.process_time()
    assert content_part("<|channel|>final " * 20_000) == ""
    assert time.process_time() - begun < 4


def test_a_prompt_may_open_the_thought():
    assert opens_thought("<|Assistant|><think>\n") and not opens_thought("<think>\n\n</think>\n\n")
    assert not opens_thought(None)
    assert content_part("two and", in_thought=True) == ""
    assert content_part("two and</think>5", in_thought=True) == "5"
    assert opens_thought("assistant\n<seed:think>\n") and opens_thought("<|turn>model\n<|channel>thought\n")
    assert opens_thought("Here are my reasoning steps:\n") and not opens_thought("an <unthink>")
    assert content_part("two[BEGIN FINAL RESPONSE]5", in_thought=True) == "5"
    assert content_part("two and", in_thought=True) == ""
    assert content_part("two and</seed:think>5", in_thought=True) == "5"
