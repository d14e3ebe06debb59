"""The prompt of training, the form without a chat."""

import json
import shutil

import pytest
from tokenizers import normalizers, processors

from questions import QUESTIONS, make_tokenizer, question_records
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json, write_jsonl
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special_tokens import add_plain_tokens
from stepjepa.chat.template import ChatTemplate
from stepjepa.cli.main import main
from stepjepa.evaluation.prompts import make_examples, notes_on_prompts, rendered_prompts
from stepjepa.models.loading import load_tokenizer
from stepjepa.models.presets import train_tokenizer
from stepjepa.store.prompts import training_system_prompt, with_system_prompt
from tiny import make_model, make_record


def test_the_form_without_a_chat_is_question_mark_answer_end():
    tokenizer = make_tokenizer()
    with pytest.raises(UserError, match=r"no token '<\|eot_id\|>'; leave `plain` out"):
        PlainTemplate(tokenizer)
    perception, end = add_plain_tokens(tokenizer)
    template = PlainTemplate(tokenizer)
    (example,) = make_examples(enumerate(question_records()[:1]), tokenizer, template)
    assert tokenizer.decode(example.prompt_ids) == "2+2?<|perception|>"
    assert example.prompt_ids[-1] == perception
    ids, start = example.gold
    assert tokenizer.decode(ids[start:]) == "4<|eot_id|>"
    assert template.stop_ids == [end]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (["Do it."], "Do it."),
        (["Do it.", "Do that."], None),
        ([None], ""),
        ([""], None),
        ([], None),
        (["Do it.", None], None),
    ],
)
def test_the_system_prompt_of_training_is_known_if_there_was_one(shown, expected, tmp_path):
    assert training_system_prompt(tmp_path) is None
    write_json(tmp_path / "run.json", {"system_prompts": shown})
    assert training_system_prompt(tmp_path) == expected


def test_a_system_prompt_is_put_in_the_place_of_another_or_in_front():
    with_one, without = question_records()[0], make_record(None, "2+2?", "4", line=9)
    for record in with_system_prompt([with_one, without], "Do it."):
        assert [message["content"] for message in record.messages] == ["Do it.", "2+2?", "4"]
    assert without.messages[0]["role"] == "user"
    for record in with_system_prompt([with_one, without], ""):
        assert [message["content"] for message in record.messages] == ["2+2?", "4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder whose training had one system prompt."""
    folder = tmp_path_factory.mktemp("prompts")
    chats = [[("system", "Do it."), ("user", question), ("assistant", "yes")] for question in QUESTIONS]
    for name, system in (("train", "Do it."), ("test", "Please.")):
        rows = [[(role, system if role == "system" else text) for role, text in chat] for chat in chats]
        write_jsonl(
            folder / f"{name}.jsonl",
            [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows],
        )
    tokenizer = train_tokenizer([text for chat in chats for _, text in chat], 290)
    tokenizer.save_pretrained(folder / "base")
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "base")
    flags = ["--train_file", folder / "train.jsonl", "--model_name", folder / "base", "--output_dir", folder / "run"]
    flags += ["--regular", "--use_cpu", "--max_steps", "1", "--save_strategy", "no"]
    assert main(["train", *map(str, flags)]) == 0
    return folder


@pytest.mark.parametrize(("flags", "shown"), [([], "Do it."), (["--use_test_prompts"], "Please.")])
def test_evaluation_shows_the_prompt_of_training_unless_told_otherwise(flags, shown, run, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    given = ["--model_path", run / "run", "--test_file", run / "test.jsonl", "--output_file", output]
    assert main(["evaluate", *map(str, given), "--task", "generic", "--max_new_tokens", "2", *flags]) == 0
    assert ("system prompt: that of training ('Do it.')" in capsys.readouterr().out) == (shown == "Do it.")
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert all(f"system\n{shown}<|im_end|>" in line["prompt"] for line in lines)


def test_training_without_a_system_prompt_is_told_as_none(run, tmp_path, capsys):
    folder = shutil.copytree(run / "run", tmp_path / "run")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    write_json(folder / "run.json", record | {"system_prompts": [None]})
    given = ["--model_path", folder, "--test_file", run / "test.jsonl", "--output_file", tmp_path / "out.jsonl"]
    assert main(["evaluate", *map(str, given), "--task", "generic", "--max_new_tokens", "2"]) == 0
    assert "system prompt: that of training (none)\n" in capsys.readouterr().out


def test_a_folder_that_servers_would_ask_otherwise_is_named(run, tmp_path, capsys):
    """Here one whose template writes today's date, which the evaluation pins, as training does."""
    given = ["--test_file", run / "test.jsonl", "--task", "generic", "--max_new_tokens", "2"]
    output = ["--output_file", tmp_path / "a.jsonl"]
    assert main(["evaluate", *map(str, ["--model_path", run / "run", *given, *output])]) == 0
    assert "note: programs" not in capsys.readouterr().err
    dated = shutil.copytree(run / "run", tmp_path / "dated")
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    output = ["--output_file", tmp_path / "b.jsonl"]
    assert main(["evaluate", *map(str, ["--model_path", dated, *given, *output])]) == 0
    printed = capsys.readouterr().err
    assert (
        "note: programs that serve this folder send other prompts (line 1: plain apply_chat_template gives '" in printed
    )
    assert "'2024<|im_start|>" in printed


def test_a_prompt_that_a_server_would_tokenise_otherwise_is_refused_and_shows_where(run):
    tokenizer = load_tokenizer(str(run / "run"))
    record = make_record(None, "2+2?", "4", line=3)
    assert rendered_prompts({0: record}, tokenizer)[0].endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    # As sentencepiece does: the tokenizer puts a token of its own in front of every text, the template does not.
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", tokenizer.convert_tokens_to_ids("<|im_end|>"))]
    )
    with pytest.raises(UserError) as refused:
        rendered_prompts({0: record}, tokenizer)
    output = str(refused.value)
    assert "a server that reads the prompt as text gives '<|im_end|><|im_start|>" in output
    assert "instead of '<|im_start|>" in output
    assert "leave `completions` out, so that messages are sent" in output


def test_right_answers_that_the_tokenizer_can_t_write_are_said():
    tokenizer, records = make_tokenizer(), dict(enumerate(question_records()))
    template = ChatTemplate(tokenizer)
    assert notes_on_prompts(make_examples(records.items(), tokenizer, template), records, tokenizer, template) == []
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.chat_template = ChatTemplate(tokenizer).source
    template = ChatTemplate(tokenizer)
    (note,) = notes_on_prompts(make_examples(records.items(), tokenizer, template), records, tokenizer, template)
    assert note.startswith(
        "the tokenizer changes 3 of the first 5 right answers, which can't be given exactly (line 2: "
    )
    assert note.endswith("(line 2: 'Red é ☂': 'red é ☂<|im_end|>')")
