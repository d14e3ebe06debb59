"""Evaluations that ask a server: what is sent, what is read, what goes wrong, and nothing asked twice."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from chat_templates import FORMS, in_form
from forked import start, status
from questions import ANSWERS, QUESTIONS
from recording_server import Reply, closed_port, question_of, recording_server, say, silent_listener
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.chat.template import ChatTemplate
from stepjepa.cli.main import main
from stepjepa.config.server import KEY_VARIABLE
from stepjepa.data.record import Record
from stepjepa.data.sources import read_records
from stepjepa.evaluation import prompts
from stepjepa.evaluation import server as servers
from stepjepa.evaluation.run import Evaluation, evaluate
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.models.sampling import Answer

pytest.importorskip("httpx", reason="needs httpx: pip install 'stepjepa[server]'")

RIGHT = dict(zip(QUESTIONS, ANSWERS, strict=True))
QUICK = {"task": "generic", "max_new_tokens": 11, "retries": 0}


def right(body):
    return say(RIGHT[question_of(body)])


def ask(server, test_file, name="out.jsonl", **changes):
    settings = QUICK | {"server": server.address, "server_model": "m"} | changes
    return evaluate(None, test_file, output_file=test_file.parent / name, **settings)


def ask_address(address, test_file):
    return evaluate(
        None, test_file, output_file=test_file.parent / "o.jsonl", server=address, server_model="m", **QUICK
    )


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Pauses of a hundredth."""
    monkeypatch.setattr(servers, "_FIRST_DELAY", servers._FIRST_DELAY / 100)


# -- what is sent and read ---------------------------------------------------------------------------------------------


def test_answers_of_a_server_are_scored_like_those_of_the_model(test_file):
    with recording_server(right) as server:
        scores = ask(server, test_file)
        assert server.gets == ["/v1"]
        assert {path for path, _ in server.posts} == {"/v1/chat/completions"}
        # Only what differs from a server's default, since transformers serve refuses fields that it doesn't know.
        assert sorted(server.bodies, key=str) == sorted(
            (
                {
                    "model": "m",
                    "max_tokens": 11,
                    "temperature": 0.0,
                    "messages": [{"role": "system", "content": "Answer."}, {"role": "user", "content": question}],
                }
                for question in QUESTIONS
            ),
            key=str,
        )
        assert not any("Authorization" in each for each in server.headers)
    assert [(line["index"], line["generated"]) for line in scores.lines] == [*enumerate(ANSWERS)]
    assert scores["exact"] == 1.0
    assert {(line["gold_loss"], line["stopped"], line["new_tokens"]) for line in scores.lines} == {(None, True, 3)}
    summary = scores.summary
    assert (summary["gold_loss"], summary["generated_tokens"], summary["ran_on"]) == (None, 15, 0.0)
    assert (summary["server"], summary["settings"]["server_model"]) == (server.address, "m")
    assert summary["not_measured"] == "gold_loss; a server gives no likelihoods"
    assert f"model m at {server.address}" in scores._repr_html_()
    assert "not measured: gold_loss" in scores._repr_html_()


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHAT = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [CALL], "weight": 0},
    {"role": "tool", "content": "a cat", "name": "look", "tool_call_id": "7"},
    {"role": "assistant", "content": "A cat ☂."},
]


def test_tools_thoughts_and_variables_of_the_template_are_passed_on(tmp_path):
    """As OpenAI's API spells them: the arguments of a call are JSON text there; a weight is nothing of a server's."""
    path = tmp_path / "tools.jsonl"
    record = {"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    write_jsonl(path, [record])
    with recording_server(lambda _: say("A cat")) as server:
        evaluate(None, path, output_file=tmp_path / "out.jsonl", server=server.address, server_model="m", **QUICK)
    (body,) = server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be kind."},  # as a template that lacks the role of a developer was trained
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",  # so vLLM calls it
            "tool_calls": [{"id": "7", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}],
        },
        {"role": "tool", "content": "a cat", "name": "look", "tool_call_id": "7"},
    ]
    assert (body["tools"], body["chat_template_kwargs"]) == ([TOOL], {"enable_thinking": False})


def test_calls_and_results_have_the_ids_that_the_api_requires():
    """Those of the record, else those of its results, else new ones, in the order of the calls."""
    calls = [{**CALL, "id": "a"}, CALL, CALL]
    results = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y", "tool_call_id": "b"}]
    messages = [{"role": "user", "content": "Go"}]
    messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    messages += [{"role": "assistant", "content": "", "tool_calls": [CALL]}, results[0]]
    record = Record((*messages, {"role": "assistant", "content": "z"}))
    sent = servers.chat_fields(record)["messages"]
    assert [[call["id"] for call in sent[at]["tool_calls"]] for at in (1, 4)] == [
        ["a", "b", "call00001"],
        ["call00002"],
    ]
    assert [sent[at]["tool_call_id"] for at in (2, 3, 5)] == ["a", "b", "call00002"]
    assert "id" not in CALL
    assert "tool_call_id" not in results[0]


def test_samples_are_requests_with_a_seed_each(test_file):
    with recording_server(lambda body: say(str(body["seed"] % 10))) as server:
        scores = ask(server, test_file, temperature=0.5, top_p=0.9, top_k=7, num_samples=3, seed=5)
        again = ask(server, test_file, "again.jsonl", temperature=0.5, top_p=0.9, top_k=7, num_samples=3, seed=5)
    assert scores.lines == again.lines
    assert len(server.bodies) == 2 * 5 * 3
    sent = {(body["temperature"], body["top_p"], body["top_k"]) for body in server.bodies}
    assert sent == {(0.5, 0.9, 7)}
    seeds = {(question_of(body), body["seed"]) for body in server.bodies}
    assert len(seeds) == len({seed for _, seed in seeds}) == 15
    assert all(0 <= seed < 2**31 for _, seed in seeds)
    assert not any("n" in body for body in server.bodies)
    assert all(len(line["samples"]) == 3 for line in scores.lines)
    assert scores.lines[0]["new_tokens"] == 9


def test_completions_are_the_prompts_of_training(model, tokenizer, test_file, tmp_path):
    """Without the token that a server's tokenizer puts in front by itself."""
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    prompts = [ChatTemplate(tokenizer).prompt(record.messages[:-1]) for record in read_records(test_file)]
    settings = QUICK | {"server_model": "m", "completions": True, "output_file": tmp_path / "out.jsonl"}
    with recording_server(lambda _: Reply({"choices": [{"text": "4", "finish_reason": "length"}]})) as server:
        scores = evaluate(folder, test_file, server=server.address, **settings)
    assert {path for path, _ in server.posts} == {"/v1/completions"}
    assert {body["prompt"] for body in server.bodies} == set(prompts)
    assert all("messages" not in body for body in server.bodies)
    assert [line["prompt"] for line in scores.lines] == prompts
    assert {(line["stopped"], line["new_tokens"]) for line in scores.lines} == {(False, None)}
    assert scores.summary["tokens_per_second"] is None


@pytest.mark.parametrize(("adds", "sent"), [(True, "without"), (False, "with")])
def test_the_begin_of_text_token_is_not_doubled(adds, sent, tokenizer):
    """Where the template writes it, and the server's tokenizer puts it in front of every text, too."""
    made = in_form(tokenizer, dataclasses.replace(FORMS["Llama-3.2"], adds_bos=adds))
    prompt = ChatTemplate(made).prompt([{"role": "user", "content": "Go"}])
    ids = made(prompt, add_special_tokens=False)["input_ids"]
    assert ids[0] == made.bos_token_id
    text = prompts._text_for(prompt, ids, made)
    assert text == {"with": prompt, "without": prompt.removeprefix("<|begin_of_text|>")}[sent]
    assert made(text)["input_ids"] == ids
    with pytest.raises(UserError, match=r"a server that reads the prompt as text gives '.*' instead of '.*'"):
        prompts._text_for(prompt, [*ids, 5], made)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "4"}, "4"),
        ({"content": ""}, ""),
        ({"content": "4", "reasoning_content": "Hm.\n"}, "<think>\nHm.\n</think>\n\n4"),
        ({"content": "4", "reasoning": "Hm."}, "<think>\nHm.\n</think>\n\n4"),
        ({"content": "\n\n4", "reasoning": "\nHm.\n"}, "<think>\nHm.\n</think>\n\n4"),
        ({"content": None, "reasoning": "\nHm"}, "<think>\nHm"),
        ({"content": None, "reasoning_content": "Hm"}, "<think>\nHm"),
        (
            {"content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ),
        (
            {"content": "4\n\n", "tool_calls": [{"function": {"name": "f", "arguments": '{"é": 1}'}}]},
            '4\n\n<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>',
        ),
        (
            {"content": "4", "tool_calls": [{"function": {"name": "f", "arguments": '{"at": "é'}}]},
            '4\n<tool_call>\n{"name": "f", "arguments": "{\\"at\\": \\"é"}\n</tool_call>',
        ),
    ],
)
def test_thoughts_and_tool_calls_of_an_answer_are_part_of_it(message, text):
    data = {"choices": [{"finish_reason": "stop", "message": message}]}
    assert servers.read_chat_completion(data) == Answer(text, True, None)


@pytest.mark.parametrize(("reason", "stopped"), [("stop", True), ("tool_calls", True), ("length", False), ("?", None)])
def test_how_an_answer_ended_is_read(reason, stopped):
    assert servers.read_chat_completion(say("4", reason).body).stopped is stopped


def test_half_a_character_of_a_server_is_replaced(test_file):
    """Valid as an escape of JSON, it could not be written to the output file."""
    halves = iter(["a\ud83d", "\ude00", "\ud83d\ude00", "ok", "\ufeff"])
    with recording_server(lambda body: say(next(halves))) as server:
        scores = ask(server, test_file, concurrency=1)
    assert [line["generated"] for line in scores.lines] == ["a\ufffd", "\ufffd", "😀", "ok", "\ufeff"]


def test_the_key_comes_from_the_environment_alone(test_file, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    with recording_server(lambda body: say("4") if server_key(server) else Reply("no", 401)) as server:
        scores = ask(server, test_file)
    assert all(each["Authorization"] == "Bearer s3cret" for each in server.headers)
    written = "".join(file.read_text(encoding="utf-8") for file in test_file.parent.glob("out*"))
    assert "s3cret" not in written + repr(scores.summary)
    for address, words in (
        ("http://user:s3cret@127.0.0.1/v1", f"the address holds a name or a password.*{KEY_VARIABLE}"),
        ("http://127.0.0.1/v1?key=s3cret", "expected an address such as"),
        ("127.0.0.1:8000", "expected an address such as"),
    ):
        with pytest.raises(UserError, match=words):
            ask_address(address, test_file)


def server_key(server):
    return "Authorization" in server.headers[-1]


def test_multiple_choice_counts_by_what_is_said(tmp_path):
    """What needs likelihoods is left out, and said."""
    path = tmp_path / "hellaswag.jsonl"
    choices = "".join(f"\n{letter}) {word}" for letter, word in zip("ABCD", ("w", "x", "y", "z"), strict=True))
    write_jsonl(
        path,
        [
            {"messages": [{"role": "user", "content": f"ctx{choices}"}, {"role": "assistant", "content": letter}]}
            for letter in "AB"
        ],
    )
    with recording_server(lambda _: say("A")) as server:
        settings = QUICK | {"task": "hellaswag", "server": server.address, "server_model": "m"}
        scores = evaluate(None, path, output_file=tmp_path / "out.jsonl", **settings)
    assert scores.names == ["correct", "said_correct", "stopped"]
    assert scores["correct"] == 0.5
    assert scores.summary["not_measured"].startswith("gold_loss, multiple choice by likelihood")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_listener_that_never_answers_is_found_at_first_contact(test_file, monkeypatch):
    monkeypatch.setattr(servers, "CONTACT_SECONDS", 0.3)
    began = time.monotonic()
    with silent_listener() as address, pytest.raises(UserError, match=r"gives no answer within 0\.3 seconds; start it"):
        ask_address(address, test_file)
    assert time.monotonic() - began < 3
    assert not (test_file.parent / "o.jsonl").exists()


def test_a_port_without_a_listener_is_named(test_file, capsys):
    flags = ["--test_file", str(test_file), "--output_file", str(test_file.parent / "o.jsonl"), "--task", "generic"]
    assert main(["evaluate", *flags, "--server", closed_port(), "--server_model", "m"]) == 2
    error = capsys.readouterr().err
    assert "--server: http://127.0.0.1:" in error
    assert "can't be reached" in error
    assert error.count("\n") == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply("<html>busy</html>", 500), r"answered with status 500: <html>busy</html> at each of 3 tries"),
        (
            Reply({"detail": "Unexpected fields: {'top_k'}"}, 422),
            r"answered with status 422: .*Unexpected fields: \{'top_k'\}",
        ),
        (
            Reply({"error": "no model x"}, 404),
            r"answered with status 404: .*no model x.* at /chat/completions; check `server`",
        ),
        (Reply("who?", 401), f"answered with status 401: who\\?; set the environment variable {KEY_VARIABLE}"),
        (Reply("", 307, {"Location": "/elsewhere"}), "answered with status 307: nothing"),
        (Reply("\x1b[31mrubbish"), r"sent no JSON: \\x1b\[31mrubbish"),
        (Reply([1]), r"sent JSON without 'choices': \[1\]"),
        (Reply({"choices": []}), "sent 0 choices where 1 was asked for"),
        (Reply({"choices": [{"finish_reason": "stop"}]}), "sent a choice without a message"),
        (say(None, content=[{"type": "image"}]), "sent a message that is no text"),
    ],
)
def test_a_wrong_answer_is_one_line_that_names_the_record(reply, words, test_file):
    """And what was answered stays: the same call asks for the rest."""
    with recording_server(lambda body: reply if question_of(body) == QUESTIONS[2] else right(body)) as server:
        with pytest.raises(UserError, match=rf"questions\.jsonl:3: {server.address} {words}") as error:
            ask(server, test_file, concurrency=1, retries=2)
        assert "2 of 5 answers are in" in str(error.value)
        assert "\n" not in str(error.value)
        assert len(server.posts) == 2 + (3 if reply.status == 500 else 1)
        server.reply = right
        server.posts.clear()
        scores = ask(server, test_file, retries=2)
    assert sorted(question_of(body) for body in server.bodies) == sorted(QUESTIONS[2:])
    assert scores["exact"] == 1.0


def test_a_server_that_is_busy_or_breaks_off_is_asked_again(test_file):
    observed = []

    def now_and_then(body):
        observed.append(question_of(body))
        tries = observed.count(observed[-1])
        if tries == 1:
            raise ConnectionError
        return Reply("wait", 503, {"Retry-After": "0"}) if tries == 2 else right(body)

    with recording_server(now_and_then) as server:
        assert ask(server, test_file, retries=2)["exact"] == 1.0
    assert len(observed) == 15


def test_pauses_grow_and_follow_the_servers_wish(test_file, monkeypatch):
    import anyio

    pauses = []

    async def note(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(anyio, "sleep", note)
    monkeypatch.setattr(servers, "_FIRST_DELAY", 0.5)
    answers = iter([Reply("", 429), Reply("", 502, {"Retry-After": "7"}), Reply("", 500), say("4")])
    with recording_server(lambda _: next(answers)) as server:
        ask(server, test_file, retries=3, max_examples=1)
    assert pauses == [0.0, 0.5, 7.0, 2.0]


def test_a_slow_answer_is_not_asked_for_twice(test_file):
    slow = threading.Event()

    def reply(body):
        if question_of(body) == QUESTIONS[0]:
            slow.wait(20)
        return right(body)

    with recording_server(reply) as server:
        with pytest.raises(UserError, match=r"questions\.jsonl:1: .* no answer within 1\.5 seconds; raise `timeout`"):
            ask(server, test_file, timeout=1.5, retries=3, concurrency=5)
        slow.set()
        # What was asked beside it is there.
        assert sorted(map(question_of, server.bodies)) == sorted(QUESTIONS)
        server.posts.clear()
        assert ask(server, test_file, timeout=1.5)["exact"] == 1.0
        assert [question_of(body) for body in server.bodies] == [QUESTIONS[0]]


def test_a_server_that_dies_leaves_what_it_answered(test_file):
    with recording_server(right) as server:
        answered = ask(server, test_file, "other.jsonl", max_examples=2).lines

        def dying(body):
            if len(server.posts) > 4:
                server.reply = refuse
                return refuse(body)
            return right(body)

        def refuse(_):
            raise ConnectionError

        server.reply = dying
        with pytest.raises(UserError, match=r"broke the connection or is gone.*2 of 5 answers are in"):
            ask(server, test_file, concurrency=1)
        server.reply = right
        scores = ask(server, test_file)
    assert scores.lines[:2] == answered
    assert len(server.posts) == 2 + 3 + 3


def test_as_many_records_are_asked_at_a_time_as_is_said(test_file):
    running, most, lock = [0], [0], threading.Lock()

    def reply(body):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return right(body)

    with recording_server(reply) as server:
        ask(server, test_file, concurrency=3)
    assert most == [3]


def test_the_evaluation_of_a_server_is_resumed_by_the_name_of_its_model(test_file):
    """Whatever its address, and with the guards of every evaluation."""
    with recording_server(right) as server:
        ask(server, test_file)
    with recording_server(right) as other:
        assert ask(other, test_file)["exact"] == 1.0
        assert not other.gets
        for changes, words in (
            ({"server_model": "n"}, r"another server_model \(\w+, now n\);"),
            ({"max_new_tokens": 3}, r"another max_new_tokens \(\d+, now 3\);"),
            ({"temperature": 1.0}, r"another temperature \(0.0, now 1.0\), seed \(none, now \d+\);"),
        ):
            with pytest.raises(UserError, match=words):
                ask(other, test_file, **changes)
    settings = EvaluationSettings(
        model_path="tiny", test_file=test_file, output_file=test_file.parent / "out.jsonl", task="generic"
    )
    with pytest.raises(UserError, match=r"another model( \([^)]*\))?, engine \(server, now hf\), max_new_tokens \("):
        Evaluation(settings)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--server_model", "m"], "--server_model does nothing without --server;"),
        (["--concurrency", "2"], "--concurrency does nothing without --server;"),
        ([], "--model_path: name the run to evaluate, or a --server that answers"),
        (["--server", "http://h/v1"], "--server_model: name the model as the server does"),
        (
            ["--server", "ftp://h/v1", "--server_model", "m"],
            "--server: expected an address such as http://127.0.0.1:8000",
        ),
        (["--server", "http://h/v1", "--server_model", "m", "--timeout", "0"], "--timeout: expected a number above 0"),
        *(
            (["--server", "http://h/v1", "--server_model", "m", *flags], words)
            for flags, words in (
                (["--completions"], "--completions: needs --model_path, whose chat template"),
                (["--batch_size", "3"], "--batch_size: has no effect on a server; set --concurrency"),
                (["--similarity"], "--similarity: has no effect on a server; leave it out"),
                (["--load_in_4bit"], "has no effect on a server; leave it out"),
                (["--plain"], "--plain: has no effect on a server; add --completions"),
                (["--dtype", "float16"], "--dtype: has no effect on a server"),
                (["--trust_remote_code"], "--trust_remote_code: has no effect on a server"),
            )
        ),
    ],
)
def test_settings_that_do_nothing_are_refused(flags, words, test_file, capsys):
    files = ["--test_file", str(test_file), "--output_file", str(test_file.parent / "o.jsonl")]
    assert main(["evaluate", *files, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_python_needs_a_place_for_the_answers(test_file):
    with pytest.raises(ValueError, match="expected an output_file where model_path is None, got None"):
        evaluate(None, test_file, server="http://h/v1", server_model="m")


def test_a_missing_httpx_names_the_extra(test_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(
        UserError, match=r"server: needs httpx, which is not installed; pip install 'stepjepa\[server\]'"
    ):
        evaluate(
            None, test_file, output_file=test_file.parent / "o.jsonl", server="http://h/v1", server_model="m", **QUICK
        )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle_nothing_is_lost_or_asked_twice(number, test_file):
    """One process is killed while its third record is on the way; another one asks for the rest."""
    third, hold = threading.Event(), threading.Event()

    def reply(body):
        if len(server.posts) == 3:
            third.set()
            hold.wait(300)
        return right(body)

    with recording_server(reply) as server:
        output = test_file.parent / "out.jsonl"
        flags = ["--test_file", str(test_file), "--output_file", str(output), "--task", "generic", "--concurrency", "1"]
        command = ["evaluate", *flags, "--server", server.address, "--server_model", "m"]
        log = test_file.parent / "log"
        process = start(command, log)
        assert third.wait(240)
        os.kill(process.pid, number)
        assert status(process, 20) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
        assert ("2 of 5 examples are in" in log.read_text(encoding="utf-8")) == (number == signal.SIGTERM)
        hold.set()
        assert output.read_text(encoding="utf-8").count("\n") == 2
        assert main(command) == 0
    asked = [question_of(body) for body in server.bodies]
    # The third had no answer when the process died.
    assert asked == [*QUESTIONS[:3], *QUESTIONS[2:]]
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["generated"] for line in lines] == ANSWERS


def test_it_works_where_a_loop_is_running(test_file):
    """As in a notebook."""

    async def cell():
        return ask(server, test_file)["exact"]

    with recording_server(right) as server, ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, cell()).result() == 1.0
