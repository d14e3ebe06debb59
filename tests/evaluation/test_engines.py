"""vLLM, by a stand-in for it: what it is asked, and how its words are read. bitsandbytes, by its absence."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from questions import NEW, question_records
from stepjepa.chat.template import ChatTemplate
from stepjepa.errors import UserError
from stepjepa.evaluation.generation import Generator
from stepjepa.evaluation.prompts import make_examples
from stepjepa.evaluation.run import Evaluation, make_engine
from stepjepa.evaluation.settings import EvaluationSettings, Sampling
from stepjepa.files import write_jsonl
from stepjepa.models.loading import load_for_inference


class Stand:
    """Does with a tiny model what vLLM's documentation says of ``vllm.LLM``."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=509))

    def get_tokenizer(self):
        return self.tokenizer

    def generate(self, prompts, settings, use_tqdm):
        assert not use_tqdm
        return [self.one(prompt["prompt_token_ids"], settings) for prompt in prompts]

    @torch.no_grad()
    def one(self, ids, settings):
        said, reason = [], "length"
        while len(said) < settings["max_tokens"]:
            logits = self.model(torch.tensor([[*ids, *said]])).logits[0, -1]
            for token, bias in (settings.get("logit_bias") or {}).items():
                logits[token] += bias
            said.append(int(logits[: len(self.tokenizer)].argmax()))
            if said[-1] in settings.get("stop_token_ids", ()):
                reason = "stop"
                break
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        one = SimpleNamespace(text=text, finish_reason=reason, token_ids=said)
        logs = [None]
        if settings.get("prompt_logprobs") is not None:
            found = torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1)
            logs += [{token: SimpleNamespace(logprob=float(found[at][token]))} for at, token in enumerate(ids[1:])]
        return SimpleNamespace(outputs=[one] * settings.get("n", 1), prompt_logprobs=logs)


@pytest.fixture
def stand(model, tokenizer, monkeypatch):
    module = ModuleType("vllm")
    module.__spec__ = SimpleNamespace(name="vllm")  # type: ignore[assignment]
    module.LLM = lambda **_: Stand(model, tokenizer)  # type: ignore[attr-defined]
    module.SamplingParams = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return model, tokenizer


def settings(**changes):
    return EvaluationSettings("some/model", "test.jsonl", "out.jsonl", **{"engine": "vllm"} | changes)


def test_it_answers_and_weighs_as_transformers_does(stand):
    model, tokenizer = stand
    examples = make_examples(question_records(), tokenizer, ChatTemplate(tokenizer))
    engine, same = make_engine(settings(sampling=Sampling(max_new_tokens=NEW)), lambda: pytest.fail("not needed"))
    assert same is tokenizer
    ours = Generator(model, tokenizer, ChatTemplate(tokenizer).end_of_turn_ids, Sampling(max_new_tokens=NEW))
    rows = [example.prompt_ids for example in examples]
    assert engine.answer(rows) == ours.answer(rows)
    spans = [example.gold for example in examples]
    assert engine.log_probabilities(spans) == pytest.approx(ours.log_probabilities(spans), rel=1e-4)


def test_a_whole_evaluation_runs_on_it(stand, tmp_path):
    write_jsonl(tmp_path / "q.jsonl", [{"messages": record.messages} for record in question_records()])
    sampling = Sampling(max_new_tokens=NEW, temperature=1.0, num_samples=2)
    chosen = EvaluationSettings(
        "some/model", tmp_path / "q.jsonl", tmp_path / "out.jsonl", task="generic", engine="vllm", sampling=sampling
    )
    summary = Evaluation(chosen).run(lambda: pytest.fail("not needed"))
    assert (summary["n"], "pass@2" in summary["scores"]) == (5, True)


def test_pickled_weights_are_refused_before_they_are_opened(stand, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    chosen = EvaluationSettings(str(tmp_path), "test.jsonl", "out.jsonl", engine="vllm")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        make_engine(chosen, lambda: pytest.fail("not needed"))


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is installed here")
def test_its_absence_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"vLLM is not installed; install it .* or use --engine hf"):
        make_engine(settings(), lambda: pytest.fail("not needed"))


@pytest.mark.parametrize("change", [{"similarity": "llm-jepa"}, {"quantization": "4bit"}])
def test_what_it_can_not_do_is_refused(change):
    with pytest.raises(UserError, match="needs --engine hf"):
        settings(**change)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_quantized_weights_need_bitsandbytes(kind, model, tokenizer, monkeypatch, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"--load_in_{kind} needs bitsandbytes, which is not installed"):
        load_for_inference(tmp_path, quantization=kind)
