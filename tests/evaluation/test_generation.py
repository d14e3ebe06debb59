"""Answers in batches, stop tokens, what is never said, and the loss on the right answers."""

import copy
import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import GenerationConfig

import served_forms
from questions import NEW, push, question_records
from stepjepa.base.errors import UserError
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.chat.template import ChatTemplate
from stepjepa.data.sources import read_records
from stepjepa.evaluation import prompts
from stepjepa.models.generation import Generator
from stepjepa.models.generation_settings import serve_as_trained
from stepjepa.models.sampling import Sampling, Span
from stepjepa.models.token_rows import never_generated
from stepjepa.tasks.base import Continuation
from tiny import make_model


def make_examples(records, tokenizer):
    return prompts.make_examples(enumerate(records), tokenizer, ChatTemplate(tokenizer))


def make_generator(model, tokenizer, **sampling):
    settings = Sampling(**{"max_new_tokens": NEW} | sampling)
    return Generator(model, tokenizer, settings)


def said(model, tokenizer, rows, batch=0, **sampling):
    """The single answer to each prompt."""
    answers = make_generator(model, tokenizer, **sampling).answer(rows, batch)
    assert {len(samples) for samples in answers} == {1}
    return [samples[0] for samples in answers]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3_window"])
def test_batches_give_the_answers_and_losses_of_one_at_a_time(name, tokenizer):
    model = make_model(name, vocab_size=len(tokenizer) + 5)
    generator = make_generator(model, tokenizer)
    examples = make_examples(question_records(), tokenizer)
    together = generator.answer([example.prompt_ids for example in examples])
    assert together == [generator.answer([example.prompt_ids])[0] for example in examples]
    assert len({samples[0].text for samples in together}) == len(examples)
    spans = [example.gold for example in examples]
    logs = generator.log_probabilities(spans)
    assert logs == pytest.approx([generator.log_probabilities([span])[0] for span in spans], rel=1e-4)


def test_greedy_answers_are_those_of_a_plain_loop(model, tokenizer):
    """Also where the model's own generation settings ask for sampling and penalties."""
    own = model.generation_config
    template = ChatTemplate(tokenizer)
    record = question_records()[1]
    ids = tokenizer(template.prompt(record.messages[:-1]), add_special_tokens=False)["input_ids"]
    allowed = torch.full((model.config.vocab_size,), -math.inf)
    allowed[: len(tokenizer) - 2] = 0
    uttered = []
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([[*ids, *uttered]])).logits[0, -1] + allowed
            uttered.append(int(logits.argmax()))
    assert tokenizer.eos_token_id not in uttered
    before = own.to_dict()
    # Each one alone would change the answer.
    theirs = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 30.0, "bad_words_ids": [uttered[:1]]}
    try:
        for name, value in theirs.items():
            setattr(own, name, value)
        changed = own.to_dict()
        answer = said(model, tokenizer, [ids])[0]
        assert model.generation_config is own
        assert own.to_dict() == changed
    finally:
        for name in theirs:
            setattr(own, name, before.get(name))
    assert answer.text == tokenizer.decode(uttered, skip_special_tokens=True)
    assert (answer.stopped, answer.new_tokens) == (False, NEW)


def test_gold_loss_is_that_of_the_answer_and_its_end_of_turn(model, tokenizer):
    record = question_records()[1]
    rendered = ChatTemplate(tokenizer).render(record.messages)
    prompt = tokenizer(rendered.text[: rendered.spans[-1][0]], add_special_tokens=False)["input_ids"]
    answer = tokenizer(record.answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    expected = F.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(answer), reduction="sum")
    example = make_examples([record], tokenizer)[0]
    assert example.gold == Span(prompt + answer, len(prompt))
    assert example.gold.tokens == len(answer)
    assert make_generator(model, tokenizer).log_probabilities([example.gold])[0] == pytest.approx(-float(expected))


def test_every_end_of_the_model_stops_it(model, tokenizer):
    letter = tokenizer("e", add_special_tokens=False)["input_ids"][0]
    other = push(model, letter, 1e4)
    ids = make_examples(question_records(), tokenizer)[0].prompt_ids
    assert not said(other, tokenizer, [ids])[0].stopped
    other.generation_config.eos_token_id = [letter]
    assert make_generator(other, tokenizer).stop_ids == sorted({letter, tokenizer.eos_token_id})
    assert said(other, tokenizer, [ids]) == [("", True, 1)]


@pytest.mark.parametrize("form", ["ChatML, other end of text", "Llama-3", "Phi-3", "Gemma-3", "GLM"])
@pytest.mark.parametrize("configured", [None, 5])
def test_a_saved_model_stops_where_its_evaluation_does(configured, form, tokenizer):
    """At the tokenizer's end of text, too, which ends no turn here, whatever the model's configuration has."""
    served = served_forms.in_form(served_forms.with_all_markers(tokenizer), form)
    model = make_model("llama", vocab_size=len(served) + 3)
    model.generation_config.eos_token_id = configured
    serve_as_trained(model, served, plain=False)
    ends = {served.eos_token_id, *ChatTemplate(served).stop_ids, *([] if configured is None else [configured])}
    assert len(ends) > 1
    assert {*model.generation_config.eos_token_id} == ends == {*make_generator(model, served).stop_ids}


def test_settings_that_transformers_loads_and_does_not_save_are_left_out(tmp_path, tokenizer, capsys):
    """As in Llama-2's folder: once a stop token is added transformers refuses them, at the end of training."""
    model = make_model("llama", vocab_size=len(tokenizer) + 3)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "length_penalty": 2.0}')
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "before")
    serve_as_trained(model, copy.deepcopy(tokenizer), plain=False)
    said = "temperature 0.6, top_p 0.9, length_penalty 2.0 left out, which transformers uses and saves only with"
    override = """--override-generation-config '{"temperature": 0.6, "top_p": 0.9}'"""
    said += f" do_sample and num_beams; vLLM would sample by them: serve with {override}"
    assert f"note: generation_config.json: {said}\n" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "after")
    assert GenerationConfig.from_pretrained(tmp_path / "after").temperature is None
    # With sampling they stay, and nothing is said.
    model.generation_config.update(do_sample=True, temperature=0.6)
    serve_as_trained(model, copy.deepcopy(tokenizer), plain=False)
    assert model.generation_config.temperature == 0.6
    assert "note: " not in capsys.readouterr().err
    model.generation_config.output_scores = True
    with pytest.raises(UserError, match=r"generation_config.json of the model can't be saved again .*output_scores"):
        serve_as_trained(model, copy.deepcopy(tokenizer), plain=False)


def test_in_one_batch_some_stop_and_some_run_on(model, tokenizer):
    """What a stopped row is filled up with while the others go on is neither read nor counted."""
    ids = [example.prompt_ids for example in make_examples(question_records(), tokenizer)]
    with torch.no_grad():
        row = model.generate(torch.tensor([ids[1]]), max_new_tokens=3, pad_token_id=0, do_sample=False)[0].tolist()
    other = push(model, 0, 0.0)
    other.generation_config.eos_token_id = row[-1]
    answers = said(other, tokenizer, ids)
    assert {answer.stopped for answer in answers} == {True, False}
    assert answers[1] == (tokenizer.decode(row[-3:-1]), True, 3)
    assert all(answer.new_tokens == NEW for answer in answers if not answer.stopped)
    assert answers == [said(other, tokenizer, [each])[0] for each in ids]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "file"), [("minimind", "gsm8k_test"), ("qwen2.5", "gsm8k_test"), ("olmo2", "spider_test")]
)
def test_prompt_and_right_answer_meet_in_the_tokens_of_real_templates(name, file, real_tokenizer, shared_data):
    real = real_tokenizer(name)
    records = read_records(shared_data / "llm_jepa" / f"{file}.jsonl")[:53]
    end = ChatTemplate(real).stop_ids
    for example, record in zip(make_examples(records, real), records, strict=True):
        ids, start = example.gold
        assert ids[:start] == example.prompt_ids
        assert ids[-1:] == list(end)
        assert real.decode(ids[start:-1]) == record.answer


@pytest.mark.parametrize(
    ("said", "text"), [("a</think>b<|x|>", "a</think>b<|x|>"), ("<|channel|>a", "<|channel|>a"), ("a<|x|>b", "ab")]
)
def test_special_tokens_that_part_thought_and_content_stay(said, text, model, tokenizer):
    other = copy.deepcopy(tokenizer)
    added = {"extra_special_tokens": ["</think>", "<|channel|>", "<|x|>"]}
    other.add_special_tokens(added, replace_extra_special_tokens=False)
    assert make_generator(model, other)._decode(other(said, add_special_tokens=False)["input_ids"]).text == text


@pytest.mark.parametrize("unwanted", ["predictor", "row without a token"])
def test_what_is_no_text_is_never_generated(unwanted, model, tokenizer):
    token = tokenizer.convert_tokens_to_ids("<|predictor_2|>") if unwanted == "predictor" else len(tokenizer) + 3
    biased = push(model, token, 1e4)
    ids = make_examples(question_records(), tokenizer)[0].prompt_ids
    with torch.no_grad():
        assert int(biased(torch.tensor([ids])).logits[0, -1].argmax()) == token
    plain, pushed = (said(each, tokenizer, [ids])[0] for each in (model, biased))
    assert pushed == plain
    assert pushed.text


def test_sampling_follows_the_seed_and_leaves_the_generator_alone(model, tokenizer):
    ids = [example.prompt_ids for example in make_examples(question_records(), tokenizer)]
    torch.manual_seed(3)
    before = torch.get_rng_state()

    def answers(seed, batch=0):
        return said(model, tokenizer, ids, batch, temperature=2.0, seed=seed)

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    assert answers(1) != answers(1, 1)
    samples = make_generator(model, tokenizer, temperature=2.0, num_samples=3).answer(ids)
    assert [len(each) for each in samples] == [3] * len(ids)
    assert len({answer.text for each in samples for answer in each}) > 3
    # Near temperature 0 all samples of a prompt are its greedy answer: none is another prompt's.
    cold = make_generator(model, tokenizer, temperature=1e-6, num_samples=3).answer(ids)
    assert [[answer.text for answer in each] for each in cold] == [
        [greedy.text] * 3 for (greedy,) in make_generator(model, tokenizer).answer(ids)
    ]
    assert torch.equal(torch.get_rng_state(), before)


def test_likelihoods_are_those_of_a_plain_loop_over_tokens(model, tokenizer):
    """Behind the prompt of a record, and behind a context of their own."""
    record = question_records()[0]
    wanted = [
        Continuation("four", "4"),
        Continuation("long", " of the rain"),
        Continuation("other", " it rained.", context="Because"),
    ]
    (example,) = prompts.make_examples([(0, record)], tokenizer, ChatTemplate(tokenizer), lambda _: wanted)
    spans = list(example.continuations.values())
    prompt = ChatTemplate(tokenizer).prompt(record.messages[:-1])
    beginnings = [prompt, prompt, (tokenizer.bos_token or "") + "Because"]
    values = make_generator(model, tokenizer).log_probabilities(spans)
    for continuation, span, beginning, value in zip(wanted, spans, beginnings, values, strict=True):
        assert tokenizer.decode(span.ids[: span.start]) == beginning
        assert tokenizer.decode(span.ids[span.start :]) == continuation.text
        expected = 0.0
        for at in range(span.start, len(span.ids)):
            with torch.no_grad():
                logits = model(torch.tensor([span.ids[:at]])).logits[0, -1]
            expected += float(torch.log_softmax(logits, -1)[span.ids[at]])
        assert value == pytest.approx(expected, rel=1e-4)


def test_a_closer_that_is_no_token_is_no_part_of_an_answer(model, tokenizer):
    """Of a template that writes it between the content and the token at which generation stops."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace("<|im_end|>", "\n### End<|im_end|>")
    assert other.chat_template != tokenizer.chat_template
    generator, end = make_generator(model, other), other.convert_tokens_to_ids("<|im_end|>")
    assert generator.template.closer == "\n### End" and generator.template.stop_tokens == ["<|im_end|>"]
    ids = other("Cod.\n### End", add_special_tokens=False)["input_ids"]
    assert generator._decode([*ids, end]).text.strip() == "Cod."
    assert generator._decode(ids).text == "Cod.\n### End"  # it did not stop


def test_a_closer_with_tokens_is_no_part_of_an_answer(model, tokenizer):
    """Kimi-K3's form: its tokens are special, so that decoding leaves words of it behind."""
    other = served_forms.in_form(served_forms.with_all_markers(tokenizer), "Kimi-K3")
    generator, end = make_generator(model, other), other.convert_tokens_to_ids("<|end_of_msg|>")
    assert generator.template.closer == "<|close|>response<|sep|><|close|>message<|sep|>"
    ids = other("Cod.<|close|>response<|sep|><|close|>message<|sep|>", add_special_tokens=False)["input_ids"]
    assert generator._decode([*ids, end]).text == "Cod."


def test_a_token_behind_a_gap_of_the_ids_is_generated(tokenizer):
    """Where ids have gaps, as those of GPT-4's tokenizer, the number of tokens is not the id of the next one."""
    other = copy.deepcopy(tokenizer)
    description = json.loads(other.backend_tokenizer.to_str())
    size, last = len(tokenizer), len(tokenizer) + 7
    description["model"]["vocab"]["<|end|>"] = last
    other._tokenizer = Tokenizer.from_str(json.dumps(description))
    other.add_special_tokens({"extra_special_tokens": ["<|end|>"]}, replace_extra_special_tokens=False)
    assert (other.convert_tokens_to_ids("<|end|>"), len(other)) == (last, size + 1)
    unwanted = {*range(last + 4)} - {*other.get_vocab().values()} | {*all_predictor_ids(other)}
    assert len(unwanted) == 7 + 3 + 2  # gaps, rows beyond the last token, predictor tokens
    model = make_model("llama", vocab_size=last + 4)
    assert {*never_generated(model, other)} == unwanted
    (answer,) = said(push(model, last, 1e4), other, [[1, 2, 3]])
    assert answer.new_tokens == NEW
