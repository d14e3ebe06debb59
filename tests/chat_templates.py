"""Chat templates like those of models whose tokenizers are not at hand: written by us, of the same form."""

import copy
from dataclasses import dataclass
from typing import Any

# No system role, a lone assistant turn is refused, contents are trimmed.
GEMMA_LIKE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_TOKENS = ["<start_of_turn>", "<end_of_turn>"]

# A begin-of-text token, blank lines in every header, today's date in the system turn.
LLAMA_LIKE = (
    "{{ '<|begin_of_text|>' }}"
    "{% set today = strftime_now('%d %b %Y') if strftime_now is defined else 'never' %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}"
    "{{ today + '\n\n' + system + '<|eot_id|>' }}"
    "{% for message in rest %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

# Nothing closes an assistant turn.
OPEN_ENDED = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"

# The user's text as it is, the assistant's without leading line ends, as in Qwen3.
HALF_TRIMMING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'].lstrip('\n') if message['role'] == 'assistant' else message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)

# The user's text as it is, an empty thought before the last answer, as in Qwen3.
QWEN3_LIKE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'].lstrip('\n') if message['role'] == 'assistant' else message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)

# The template itself puts the system text before the first user text.
GEMMA3_LIKE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ (prefix if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
)

# Role names in angle brackets that are no tokens of the vocabulary, the eos token behind every message.
ZEPHYR_LIKE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
)

# A token for the end of a turn, and one more behind the whole chat.
PHI3_LIKE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)

# No line ends at all.
PHI4_LIKE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
)

# The system text stands bare behind the begin of text; what an answer thought is left out; only answers are closed.
DEEPSEEK_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% else %}{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
)


# Qwen3's form in short: only the last answer has a thought, an empty one where there is none; tools in a system turn.
THINKING = (
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}"
    "{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{- message.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Form:
    """A chat template with the special tokens that it takes.

    Attributes:
        template: Jinja source.
        tokens: special tokens beside those below.
        eos: the tokenizer's end of text.
        bos: the tokenizer's begin of text, if it has one.
        adds_bos: the tokenizer itself writes it before every text.
    """

    template: str
    tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False


FORMS = {
    "Llama-3.2": Form(LLAMA_LIKE, tuple(LLAMA_TOKENS[1:]), "<|eot_id|>", "<|begin_of_text|>", adds_bos=True),
    "Qwen3": Form(QWEN3_LIKE, ("<|im_start|>",), "<|im_end|>"),
    "Gemma-2": Form("{{ bos_token }}" + GEMMA_LIKE, tuple(GEMMA_TOKENS), "<eos>", "<bos>", adds_bos=True),
    "Gemma-3": Form(GEMMA3_LIKE, tuple(GEMMA_TOKENS), "<eos>", "<bos>", adds_bos=True),
    "OpenELM": Form(ZEPHYR_LIKE, (), "</s>", "<s>", adds_bos=True),
    "Phi-3": Form(
        PHI3_LIKE, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>", "<s>", adds_bos=False
    ),
    "Phi-4": Form(PHI4_LIKE, ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|endoftext|>"),
    "DeepSeek-R1-Distill": Form(
        DEEPSEEK_LIKE, ("<|User|>", "<|Assistant|>"), "<|end_of_sentence|>", "<|begin_of_sentence|>", adds_bos=True
    ),
}


def in_form(tokenizer: Any, form: Form) -> Any:
    """A copy of a tokenizer with the tokens and the template of a form."""
    from tokenizers.processors import TemplateProcessing

    made = copy.deepcopy(tokenizer)
    roles = {"eos_token": form.eos} | ({"bos_token": form.bos} if form.bos else {})
    made.add_special_tokens({**roles, "extra_special_tokens": list(form.tokens)}, replace_extra_special_tokens=False)
    if form.adds_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{form.bos} $A", special_tokens=[(form.bos, made.bos_token_id)]
        )
    made.chat_template = form.template
    return made
