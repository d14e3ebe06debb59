"""Thirty and more ways to write a chat, in the form of templates in use but written by us, on one small tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import chat_templates

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Form:
    """A chat template, and what a tokenizer of it has.

    Attributes:
        template: Jinja source.
        end: the tokenizer's end of text, which need not end a turn.
        start: the tokenizer's begin of text, if it has one.
        thinks: whether the template writes ``reasoning_content`` or ``thinking``.
        calls: whether it writes tools and calls of them.
        variables: ``chat_template_kwargs`` of a run.
        mark: what stands behind questions where another form has the same prompt and another answer.
    """

    template: str
    end: str = "<|im_end|>"
    start: str | None = None
    thinks: bool = False
    calls: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    mark: str = ""


def by_turns(opening: str, closing: str, prompt: str, before: str = "", content: str = "message['content']") -> str:
    """A template that writes all turns alike; ``opening`` is an expression of Jinja, the others are texts."""
    return (
        f"{{{{ {json.dumps(before)} }}}}{{% for message in messages %}}"
        f"{{{{ {opening} + {content} + {json.dumps(closing)} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {json.dumps(prompt)} }}}}{{% endif %}}"
    )


def by_role(user: str, assistant: str, system: str, prompt: str, before: str = "") -> str:
    """A template with an expression of Jinja for each role."""
    return (
        f"{{{{ {before or repr('')} }}}}{{% for message in messages %}}{{% set text = message['content'] %}}"
        f"{{% if message['role'] == 'user' %}}{{{{ {user} }}}}"
        f"{{% elif message['role'] == 'assistant' %}}{{{{ {assistant} }}}}{{% else %}}{{{{ {system} }}}}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {json.dumps(prompt)} }}}}{{% endif %}}"
    )


CHATML = by_turns("'<|im_start|>' + message['role'] + '\\n'", "<|im_end|>\n", "<|im_start|>assistant\n")

# Thoughts of answers behind the last question alone; tools in a system turn, calls in tags, results in user turns.
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- set last = namespace(index=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set last.index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content, thought = message.content or '', message.reasoning_content or '' %}"
    "{%- if message.role == 'assistant' and '</think>' in content and not thought %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > last.index %}"
    "{%- if loop.last or thought %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- content.lstrip('\n') }}{%- else %}{{- content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# The prompt opens the thought, the chat leaves it out once there is an answer.
R1 = (
    "{{ bos_token }}{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'system' %}{{ text }}{% elif message['role'] == 'user' %}{{ '<|User|>' + text }}"
    "{% else %}{{ '<|Assistant|>' + text.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# The prompt opens the thought, and the last answer has one.
QWQ = QWEN3.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}").partition(
    "{%- if enable_thinking"
)[0] + ("{%- endif %}")
LLAMA_31 = (
    "{{- bos_token }}{%- set today = date_string if date_string is defined else strftime_now('%d %b %Y') %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + today + '\n\n' + system }}"
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- for message in messages %}{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- (call.arguments | tojson) + '}<|eom_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) }}"
    "{{- '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# A system message is refused.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# The system text stands in the last user turn, so that it moves from turn to turn; so do the tools.
NEMO = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% set last = namespace(index=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.index = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if tools and loop.index0 == last.index %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}{{ '[INST]' }}"
    "{% if system and loop.index0 == last.index %}{{ system + '\n\n' }}{% endif %}"
    "{{ message['content'] + '[/INST]' }}"
    "{% elif message['role'] == 'tool' %}{{ '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}"
    "{% elif message['tool_calls'] is defined %}{{ '[TOOL_CALLS][' }}{% for call in message['tool_calls'] %}"
    "{{ call['function'] | tojson }}{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Nothing closes a turn: the marker of the role that follows ends it.
GLM = by_role(
    "'<|user|>\\n' + text",
    "'<|assistant|>\\n' + text",
    "'<|' + ('system' if message['role'] == 'system' else 'observation') + '|>\\n' + text",
    "<|assistant|>\n",
    "'[gMASK]<sop>'",
)
# Channels; the end of the last answer is another than that of earlier ones, and of a call; thoughts go once answered.
HARMONY = (
    "{%- set answered = messages[-1].role == 'assistant' and not messages[-1].tool_calls %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|start|>functions.look_up to=assistant<|message|>' + message.content + '<|end|>' }}"
    "{%- elif message.role != 'assistant' %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content }}"
    "{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}{{- '<|end|>' }}"
    "{%- elif message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{%- if message.thinking and not answered %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{%- endif %}{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- (call.arguments | tojson) + '<|call|>' }}"
    "{%- else %}{%- if loop.last and message.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
SEED = (
    "{% for message in messages %}{{ '<seed:bos>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and message['reasoning_content'] %}"
    "{{ '<seed:think>' + message['reasoning_content'] + '</seed:think>' }}{% endif %}"
    "{{ message['content'] + '<seed:eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<seed:bos>assistant\n' }}{% endif %}"
)

# The prompt has an empty thought that the chat leaves out; its tags are those of a channel.
GEMMA_4 = (
    "{{ bos_token }}{%- if tools %}{{- '<|turn>system\n' + tools | tojson + '<turn|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{%- if message.role == 'assistant' and message.reasoning_content and enable_thinking and loop.last %}"
    "{{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<|tool_call>call:' + call.function.name + call.function.arguments | tojson + '<tool_call|>' }}{%- endfor %}"
    "{{- message.content | trim + '<turn|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|turn>model\n' }}"
    "{%- if not enable_thinking %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}{%- endif %}"
)
# Two tokens behind a content, of which the second ends the turn, also that of a call.
COMMAND_R7B = (
    "{{ bos_token }}{% if tools %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + tools | tojson }}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{% if message.role == 'user' %}{{ '<|USER_TOKEN|>' + message.content }}"
    "{% elif message.role != 'assistant' %}{{ '<|SYSTEM_TOKEN|>' + message.content }}"
    "{% elif message.tool_calls %}{{ '<|CHATBOT_TOKEN|><|START_ACTION|>[' }}{% for call in message.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}{{ ']<|END_ACTION|>' }}"
    "{% else %}{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}{% endif %}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
# Elements within elements; their closing marks stand behind a content, and the end of a message behind those.
KIMI_K3 = (
    "{% macro begin(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}"
    "{% macro end(tag) %}{{ '<|close|>' + tag + '<|sep|>' }}{% endmacro %}"
    "{% if tools %}{{ begin('message system') + tools | tojson + end('message') + '<|end_of_msg|>' }}{% endif %}"
    "{% for message in messages %}{{ begin('message ' + message.role) }}"
    "{% if message.role == 'assistant' %}{{ begin('think') + (message.reasoning_content or '') + end('think') }}"
    "{{ begin('response') + message.content + end('response') }}{% for call in message.tool_calls or [] %}"
    "{{ begin('call ' + call.function.name) + call.function.arguments | tojson + end('call') }}{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}{{ end('message') + '<|end_of_msg|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ begin('message assistant') + begin('think') }}{% endif %}"
)
# The prompt opens the thought in words, which the chat leaves out.
APRIEL = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|begin_assistant|>\n' }}"
    "{% if message.reasoning_content and loop.last %}"
    "{{ message.reasoning_content + '\n[BEGIN FINAL RESPONSE]\n' }}{% endif %}{{ message.content + '\n<|end|>\n' }}"
    "{% else %}{{ '<|begin_' + message.role + '|>\n' + message.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin_assistant|>\nHere are my reasoning steps:\n' }}{% endif %}"
)
# The last answer stands in the thought that the prompt opens, as if it were one.
NEMOTRON_NANO = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<SPECIAL_11>Assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n\n' }}{% endif %}"
    "{{ message.content.split('</think>')[-1].strip() + '\n<SPECIAL_12>\n' }}"
    "{% else %}{{ '<SPECIAL_10>System' if message.role == 'system' else '<SPECIAL_11>User' }}"
    "{{ '\n' + message.content.strip() + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\n<think>\n\n' }}{% endif %}"
)
# As Qwen3's, but every prompt opens a thought, and an answer without one has no tags.
MINIMAX_M2 = (
    "{{- ']~!b[]~b]system\n' + (messages[0].content if messages[0].role == 'system' else 'Help.') }}"
    "{%- if tools %}{{- '\n' + tools | tojson }}{%- endif %}{{- '[e~[\n' }}"
    "{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- set last = namespace(index=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set last.index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{- ']~b]ai\n' }}"
    "{%- if message.reasoning_content and loop.index0 > last.index %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '\n<invoke name=\"' + call.function.name + '\">' }}"
    "{%- for name, value in call.function.arguments | items %}"
    "{{- '<parameter name=\"' + name + '\">' + value + '</parameter>' }}{%- endfor %}{{- '</invoke>' }}{%- endfor %}"
    "{%- else %}{{- ']~b]' + message.role + '\n' + message.content }}{%- endif %}{{- '[e~[\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}"
)
# As GLM's, with a thought, empty in earlier turns; the prompt does not end the line of the role.
GLM_46 = (
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\n' + tools | tojson }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|assistant|>\n<think>' + (message.reasoning_content or '' if loop.last else '') + '</think>' }}"
    "{%- if message.content %}{{- '\n' + message.content.strip() }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name }}"
    "{{- '\n' + call.function.arguments | tojson + '\n</tool_call>' }}{%- endfor %}"
    "{%- else %}{{- '<|observation|>' if message.role == 'tool' else '<|' + message.role + '|>' }}"
    "{{- '\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# A call as Python writes one.
LFM2 = (
    "{{- bos_token }}{%- if tools %}{{- '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|tool_call_start|>[' + call.function.name + '(' }}"
    "{%- for name, value in call.function.arguments | items %}{{- name + '=' + value | tojson }}{%- endfor %}"
    "{{- ')]<|tool_call_end|>' }}{%- endfor %}{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

FORMS: dict[str, Form] = {
    "ChatML": Form(CHATML),
    "ChatML, other end of text": Form(CHATML, end="<|endoftext|>"),
    "ChatML, begin of text": Form("{{ bos_token }}" + CHATML, end="</s>", start="<s>"),
    "ChatML, own system prompt": Form(
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        + CHATML
    ),
    "ChatML, ends that are not special": Form(CHATML.replace("<|im_end|>", "<end>"), end="<|endoftext|>"),
    "Qwen3": Form(QWEN3, thinks=True, calls=True, mark=" /think"),
    "Qwen3, no thinking": Form(QWEN3, calls=True, variables={"enable_thinking": False}),
    "QwQ": Form(QWQ, thinks=True, calls=True),
    "DeepSeek-R1": Form(R1, end="<|end_of_sentence|>", start="<|begin_of_sentence|>"),
    "DeepSeek-V3": Form(R1.replace("<think>\n", ""), end="<|end_of_sentence|>", start="<|begin_of_sentence|>"),
    "Llama-2": Form(LLAMA_2, end="</s>", start="<s>"),
    "Llama-3": Form(chat_templates.LLAMA_LIKE, end="<|end_of_text|>", start="<|begin_of_text|>"),
    "Llama-3.1": Form(LLAMA_31, end="<|eot_id|>", start="<|begin_of_text|>", calls=True),
    "Mistral": Form(MISTRAL, end="</s>", start="<s>", mark=" now"),
    "Mistral-Nemo": Form(NEMO, end="</s>", start="<s>", calls=True),
    "Gemma-2": Form("{{ bos_token }}" + chat_templates.GEMMA_LIKE, end="<eos>", start="<bos>"),
    "Gemma-3": Form(
        chat_templates.GEMMA3_LIKE + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        end="<eos>",
        start="<bos>",
    ),
    "Phi-3": Form(
        chat_templates.PHI3_LIKE.replace("{{ eos_token }}", "{{ eos_token }}{% else %}{{ '<|assistant|>\n' }}"),
        end="<|endoftext|>",
    ),
    "Phi-4": Form(
        chat_templates.PHI4_LIKE + "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        end="<|endoftext|>",
    ),
    "Zephyr": Form(
        chat_templates.ZEPHYR_LIKE + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}", end="</s>"
    ),
    "GLM": Form(GLM, end="<|endoftext|>"),
    "Baichuan": Form(
        by_role("'<reserved_106>' + text", "'<reserved_107>' + text", "text", "<reserved_107>"), end="</s>"
    ),
    "harmony": Form(HARMONY, end="<|return|>", thinks=True, calls=True),
    "Vicuna": Form(
        by_role("'USER: ' + text + ' '", "'ASSISTANT: ' + text + '</s>'", "text + ' '", "ASSISTANT:"), end="</s>"
    ),
    "blank in front of answers": Form(
        by_role("'USER: ' + text + '\\n'", "'ASSISTANT: ' + text + '</s>'", "text + '\\n'", "ASSISTANT: "), end="</s>"
    ),
    "Alpaca": Form(
        by_role(
            "'### Instruction:\\n' + text + '\\n\\n'",
            "'### Response:\\n' + text + '\\n\\n'",
            "text + '\\n\\n'",
            "### Response:\n",
        ),
        end="</s>",
    ),
    "Falcon": Form(by_turns("message['role'] | capitalize + ': '", "\n", "Assistant:"), end="<|endoftext|>"),
    "Command-R": Form(
        by_turns(
            "'<|START_OF_TURN_TOKEN|><|' + {'user': 'USER', 'system': 'SYSTEM', 'assistant': 'CHATBOT'}"
            "[message['role']] + '_TOKEN|>'",
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "<BOS_TOKEN>",
            "message['content'] | trim",
        ),
        end="<|END_OF_TURN_TOKEN|>",
        start="<BOS_TOKEN>",
    ),
    "Granite": Form(
        by_turns(
            "'<|start_of_role|>' + message['role'] + '<|end_of_role|>'",
            "<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        end="<|end_of_text|>",
    ),
    "OpenChat": Form(
        by_turns(
            "'GPT4 Correct ' + message['role'] | title + ': '", "<|end_of_turn|>", "GPT4 Correct Assistant:", "<s>"
        ),
        end="<|end_of_turn|>",
        start="<s>",
    ),
    "Kimi": Form(
        by_turns(
            "'<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>'",
            "<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        )
    ),
    "Seed-OSS": Form(SEED, end="<seed:eos>", thinks=True),
    "Gemma-4": Form(GEMMA_4, end="<eos>", start="<bos>", calls=True),
    "Gemma-4, thinking": Form(
        GEMMA_4, end="<eos>", start="<bos>", thinks=True, calls=True, variables={"enable_thinking": True}
    ),
    "Command-R7B": Form(
        COMMAND_R7B, end="<|END_OF_TURN_TOKEN|>", start="<BOS_TOKEN>", calls=True, mark=" Answer or act."
    ),
    "Kimi-K3": Form(KIMI_K3, end="[EOS]", thinks=True, calls=True),
    "Apriel": Form(APRIEL, end="<|end|>", thinks=True),
    "Nemotron-Nano": Form(NEMOTRON_NANO, end="<SPECIAL_12>"),
    "MiniMax-M2": Form(MINIMAX_M2, end="[e~[", thinks=True, calls=True),
    "GLM-4.6": Form(GLM_46, end="<|endoftext|>", thinks=True, calls=True, mark=" (think)"),
    "LFM2": Form(LFM2, start="<s>", calls=True, mark=" (short)"),
    "no generation prompt": Form(chat_templates.HALF_TRIMMING),
    "roles and colons": Form(chat_templates.OPEN_ENDED),
}

SPECIAL = [
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|begin_of_sentence|>",
    "<|end_of_sentence|>",
    "<|User|>",
    "<|Assistant|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|end|>",
    "<|im_sep|>",
    "[gMASK]",
    "<sop>",
    "<reserved_106>",
    "<reserved_107>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|end_of_turn|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<seed:bos>",
    "<seed:eos>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[EOS]",
    "<|begin_user|>",
    "<|begin_assistant|>",
    "<|begin_system|>",
    "<SPECIAL_10>",
    "<SPECIAL_11>",
    "<SPECIAL_12>",
    "]~!b[",
    "]~b]",
    "[e~[",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
]
# As in Qwen3's tokenizer these are added and not special.
ADDED = ["<end>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def with_all_markers(tokenizer: Any) -> Any:
    """A copy of a tokenizer that has the markers of all forms."""
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"extra_special_tokens": SPECIAL}, replace_extra_special_tokens=False)
    made.add_tokens(ADDED)
    return made


def in_form(tokenizer: Any, name: str) -> Any:
    """A copy of a tokenizer of :func:`with_all_markers` with the template of a form."""
    form, made = FORMS[name], copy.deepcopy(tokenizer)
    made.eos_token = form.end
    if form.start is not None:
        made.bos_token = form.start
    made.chat_template = form.template
    return made


def chat(*texts: str, system: str = "") -> list[Message]:
    """Questions and answers in turn."""
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def with_thoughts(*texts: str) -> list[Message]:
    """Question, thought and answer in turn, the thought under the one name and the other."""
    messages = []
    for number in range(0, len(texts), 3):
        question, thought, answer = texts[number : number + 3]
        key = "thinking" if number % 2 else "reasoning_content"
        messages += chat(question, answer)
        messages[-1][key] = thought
    return messages


def with_call(question: str, word: str, result: str, answer: str) -> list[Message]:
    """A question, a call of a tool, its result, the answer."""
    call = {"type": "function", "id": "call00001", "function": {"name": "look_up", "arguments": {"word": word}}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "call00001", "name": "look_up"},
        {"role": "assistant", "content": answer},
    ]
