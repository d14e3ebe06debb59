"""Generate answers and compute likelihoods with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.errors import UserError
from stepjepa.evaluation.judging import Answer
from stepjepa.evaluation.prompts import Span, make_template
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.models.loading import refuse_pickled


class VllmEngine:
    """A vLLM model in this process, with the methods of ``evaluation.generation.Generator``.

    Greedy answers are those of ``Generator`` up to rounding; sampling is repeatable with the same version of vLLM.

    Args:
        settings: settings of the evaluation.

    Attributes:
        tokenizer: the tokenizer of the model.
        positions: number of tokens that the model has positions for.
        max_new_tokens: greatest length of an answer.

    Raises:
        UserError: vLLM can't load the model.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        import vllm

        self._vllm, self._sampling = vllm, settings.sampling
        refuse_pickled(settings.model_path)
        try:
            self._model = vllm.LLM(
                model=settings.model_path,
                dtype=settings.dtype,
                seed=settings.sampling.seed,
                trust_remote_code=settings.trust_remote_code,
            )
        except (ValueError, OSError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"vLLM can't load '{settings.model_path}' ({first}); --engine hf does without it") from None
        self.positions: int | None = self._model.llm_engine.model_config.max_model_len
        self.max_new_tokens = settings.sampling.max_new_tokens
        self.tokenizer: Any = self._model.get_tokenizer()
        eos = self.tokenizer.eos_token_id
        ends = make_template(self.tokenizer, plain=settings.plain).end_of_turn_ids
        self._stop_ids = sorted({*ends, *([] if eos is None else [eos])})
        self._never = dict.fromkeys(all_predictor_ids(self.tokenizer), -100.0)

    def answer(self, prompts: Sequence[Sequence[int]], batch_number: int = 0) -> list[list[Answer]]:
        """The samples of each prompt, see ``Generator.answer``."""
        sampling = self._sampling
        settings = self._vllm.SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed + batch_number if sampling.temperature > 0 else None,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=self._stop_ids,
            logit_bias=self._never or None,
            skip_special_tokens=True,
        )
        outputs = self._model.generate(_as_prompts(prompts), settings, use_tqdm=False)
        return [
            [Answer(one.text, one.finish_reason == "stop", len(one.token_ids)) for one in output.outputs]
            for output in outputs
        ]

    def log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        """The natural logarithm of the probability of each span's scored tokens, given the tokens before them."""
        settings = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self._model.generate(_as_prompts([span.ids for span in spans]), settings, use_tqdm=False)
        # With prompt_logprobs=0, vLLM returns for each position only the probability of the prompt's own token.
        return [
            sum(output.prompt_logprobs[at][span.ids[at]].logprob for at in range(span.start, len(span.ids)))
            for output, span in zip(outputs, spans, strict=True)
        ]


def _as_prompts(rows: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(row)} for row in rows]
