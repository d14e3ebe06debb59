"""Ask a server with OpenAI's chat completions for answers: vLLM, SGLang, llama.cpp, ``transformers serve``."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from itertools import count, takewhile
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stepjepa.base.errors import UserError, shown, visible
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.tool_calls import with_text_arguments
from stepjepa.config.server import KEY_VARIABLE, ServerSettings
from stepjepa.data.messages import SYSTEM_ROLES
from stepjepa.data.record import Record
from stepjepa.evaluation.judging import LineBatches, Question, judge
from stepjepa.models.sampling import Answer, Sampling
from stepjepa.tasks.base import Task, record_error

if TYPE_CHECKING:
    import httpx

CONTACT_SECONDS = 5.0
"""Seconds within which a running server answers a GET of its address, even if it is busy."""

_CONNECT_SECONDS = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 60.0  # seconds before the second try, doubled for each further one
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EXCERPT = 200  # characters of a server's text in an error message


class ServerError(Exception):
    """A server answered a request wrongly or not at all; the message says what it did."""


class ServerEngine:
    """Asks a server for the answers of an evaluation and scores them; see ``judging.Engine``.

    The server applies its own template and stop tokens to the messages of a record, or gets a prompt that is rendered
    here. Only settings of ``sampling`` that differ from a server's default are sent, since some servers reject unknown
    fields. Several samples of a record are several requests, each with its own seed. No likelihoods are computed:
    ``gold_loss`` of a line is None.

    Args:
        task: scores the answers.
        records: the records by position in the test file.
        settings: address and name of the model, and limits.
        sampling: how the server decodes.
        headline: the score that decides whether an answer is an error.
        prompts: the rendered prompt of each record, see ``prompts.rendered_prompts``; None to send messages.
    """

    def __init__(
        self,
        task: Task,
        records: Mapping[int, Record],
        settings: ServerSettings,
        sampling: Sampling,
        *,
        headline: str,
        prompts: Mapping[int, str] | None = None,
    ) -> None:
        if settings.server is None:
            raise ValueError("settings: expected the address of a server, got None")
        self.task, self.records, self.headline = task, records, headline
        self.settings, self.sampling, self.prompts = settings, sampling, prompts
        self._client = Client(settings.server, timeout=settings.timeout, retries=settings.retries)

    def answer_missing(self, done: Container[int]) -> LineBatches:
        """Yield the scored lines of the records that are not in ``done``, as their answers arrive.

        After a failure no new request is sent; the answers to running ones are yielded before it is raised.

        Raises:
            UserError: the server can't be reached, or answers wrongly; the message names the record.
        """
        from anyio.from_thread import start_blocking_portal

        waiting = deque(index for index in self.records if index not in done)
        if not waiting:
            return
        # The event loop runs in another thread: in a notebook this thread has one already.
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self._client):
            portal.call(self._client.check_contact)
            running: dict[Future[list[Answer]], int] = {}
            failure: UserError | None = None
            try:
                while running or (waiting and failure is None):
                    while waiting and failure is None and len(running) < self.settings.concurrency:
                        index = waiting.popleft()
                        running[portal.start_task_soon(self._ask, index)] = index
                    answers, fault = self._next_answers(running)
                    failure = failure or fault
                    if answers:
                        yield self._judge(answers)
            finally:
                for future in running:
                    future.cancel()
            if failure is not None:
                raise failure

    def _next_answers(
        self, running: dict[Future[list[Answer]], int]
    ) -> tuple[dict[int, list[Answer]], UserError | None]:
        """Wait for the next answers, and remove their requests from ``running``.

        Returns the answers by the index of their record, and the first failure among these requests, if there is one.
        """
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        answers: dict[int, list[Answer]] = {}
        failure: UserError | None = None
        for future in sorted(finished, key=running.__getitem__):
            index = running.pop(future)
            try:
                answers[index] = future.result()
            except ServerError as error:
                failure = failure or record_error(self.records[index], f"{self._client.address} {error}")
        return answers, failure

    async def _ask(self, index: int) -> list[Answer]:
        """Ask for the samples of one record, one after the other."""
        answers = []
        for sample in range(self.sampling.num_samples):
            body: JsonObject = {"model": self.settings.server_model, **decoding(self.sampling, index, sample)}
            if self.prompts is None:
                data = await self._client.post("chat/completions", body | chat_fields(self.records[index]))
                answers.append(read_chat_completion(data))
            else:
                data = await self._client.post("completions", body | {"prompt": self.prompts[index]})
                answers.append(read_completion(data))
        return answers

    def _judge(self, answers: Mapping[int, Sequence[Answer]]) -> list[JsonObject]:
        prompts = self.prompts or {}
        questions = [Question(index, self.records[index], prompts.get(index)) for index in answers]
        lines = judge(self.task, questions, list(answers.values()), self.headline)
        return [line | {"gold_loss": None, "gold_tokens": 0} for line in lines]


class Client:
    """Posts requests to a server, and repeats failed ones; an asynchronous context manager.

    Args:
        address: the base address, with the version: ``http://127.0.0.1:8000/v1``.
        timeout: seconds that the server may take for one answer; a request that takes longer is not sent again.
        retries: further tries after a broken connection or a status that says *later* (429, 5xx), with growing pauses.
    """

    def __init__(self, address: str, *, timeout: float, retries: int) -> None:
        try:
            import httpx
        except ImportError:
            raise UserError("server: needs httpx, which is not installed; pip install 'stepjepa[server]'") from None
        self.address, self._timeout, self._retries = address.rstrip("/"), timeout, retries
        # A proxy in the environment is for other machines.
        local = urlsplit(self.address).hostname in _LOOPBACK
        headers = _authorization()
        try:
            httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise UserError(f"server: {shown(self.address)} is no address ({error}); correct it") from None
        try:
            self._client = httpx.AsyncClient(
                headers=headers,
                # Reading has the limit of the whole answer, see `post`.
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=not local,
            )
        # A proxy of an unknown kind, or one that needs a package that is missing; certificates that are not there.
        except (ImportError, ValueError, httpx.InvalidURL, OSError) as error:
            fault = f"proxy or certificates that the environment names can't be used ({_describe(error)})"
            remedy = "correct or unset ALL_PROXY, HTTP_PROXY, HTTPS_PROXY, SSL_CERT_FILE, SSL_CERT_DIR"
            raise UserError(f"server: {fault}; {remedy}") from None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def check_contact(self) -> None:
        """Raise ``UserError`` unless the server answers a GET of its address soon, with any status; one try."""
        import httpx
        from anyio import fail_after

        try:
            with fail_after(CONTACT_SECONDS):
                async with self._client.stream("GET", self.address):
                    return
        except TimeoutError:
            fault = f"accepts connections but gives no answer within {CONTACT_SECONDS:g} seconds"
        except httpx.TransportError as error:
            fault = f"can't be reached ({_describe(error)})"
        remedy = "start it, or name the base address that it listens on, such as http://127.0.0.1:8000/v1"
        raise UserError(f"server: {self.address} {fault}; {remedy}")

    async def post(self, path: str, body: JsonObject) -> object:
        """Send a request and return the JSON of the answer.

        Args:
            path: behind the base address, such as ``chat/completions``.
            body: the JSON of the request.

        Raises:
            ServerError: there is no answer in time, or it is an error, at the last try.
        """
        import anyio
        import httpx

        delay = 0.0
        for attempt in range(self._retries + 1):
            await anyio.sleep(delay)
            delay = min(_FIRST_DELAY * 2**attempt, _LONGEST_DELAY)
            try:
                with anyio.fail_after(self._timeout):
                    response = await self._client.post(f"{self.address}/{path}", json=body)
            except TimeoutError:
                raise ServerError(f"gave no answer within {self._timeout:g} seconds; raise `timeout`") from None
            except httpx.TransportError as error:
                fault = f"broke the connection or is gone ({_describe(error)})"
                continue
            except httpx.DecodingError as error:
                raise ServerError(f"sent a body that can't be unpacked ({_describe(error)})") from None
            if response.status_code not in _RETRIED_STATUS:
                return _read_body(response, path)
            fault = _describe_status(response)
            delay = max(delay, _retry_after(response))
        tries = f" at each of {self._retries + 1} tries" if self._retries else ""
        raise ServerError(f"{fault}{tries}")


def _key() -> str:
    """Return the key of the environment; empty if there is none."""
    return os.environ.get(KEY_VARIABLE, "").strip()  # a key that is read from a file ends in a line end


def _authorization() -> dict[str, str]:
    """Return the header with the key of the environment, if there is one; ``UserError`` for one that no header holds.

    httpx would name the key in its own error.
    """
    key = _key()
    if not (key.isascii() and key.isprintable()):
        fault = f"the key in the environment variable {KEY_VARIABLE} holds characters that no key has"
        raise UserError(f"server: {fault}; set it to one line of ASCII characters")
    return {"Authorization": f"Bearer {key}"} if key else {}


# -- requests ----------------------------------------------------------------------------------------------------------


def chat_fields(record: Record) -> JsonObject:
    """Return the fields of a request that hold a record's chat without its answer, as OpenAI's API spells it.

    A developer message is sent as a system message: most templates drop an unknown role or write its name, and those
    with a developer role treat both in the same way.
    """
    messages = []
    for message in record.messages[:-1]:
        sent = {name: value for name, value in message.items() if name != "weight"}
        if sent["role"] in SYSTEM_ROLES:
            sent["role"] = "system"
        if thought := sent.get("reasoning_content"):
            sent["reasoning"] = thought  # the name that vLLM reads
        if calls := sent.get("tool_calls"):
            # Records hold arguments as an object; the API has them as JSON text.
            sent["tool_calls"] = [with_text_arguments(call) for call in calls]
        messages.append(sent)
    _add_call_ids(messages)
    optional = {"tools": record.tools, "chat_template_kwargs": record.chat_template_kwargs}
    return {"messages": messages, **{name: value for name, value in optional.items() if value is not None}}


def _add_call_ids(messages: Sequence[JsonObject]) -> None:
    """Give tool calls and their results the ids that the API requires, in place, where a record has none."""
    numbers = count(1)
    for place, message in enumerate(messages):
        results = takewhile(lambda following: following["role"] == "tool", messages[place + 1 :])
        for call in message.get("tool_calls") or ():
            result = next(results, JsonObject())
            # Of nine characters, as Mistral's templates want it.
            call["id"] = call.get("id") or result.get("tool_call_id") or f"call{next(numbers):05}"
            result.setdefault("tool_call_id", call["id"])


def decoding(sampling: Sampling, index: int, sample: int) -> JsonObject:
    """Return the fields of a request for decoding, without those that have a server's default.

    Args:
        sampling: the settings.
        index: the record's position in the test file.
        sample: number of the sample of this record; each has a seed of its own.
    """
    fields: JsonObject = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.temperature > 0:
        digest = hashlib.sha256(f"{sampling.seed}:{index}:{sample}".encode()).digest()
        fields["seed"] = int.from_bytes(digest[:4]) >> 1  # some servers read 31 bits
        fields |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        fields |= {"top_k": sampling.top_k} if sampling.top_k else {}
    return fields


# -- answers -----------------------------------------------------------------------------------------------------------


def read_chat_completion(data: object) -> Answer:
    """Read the answer of ``/chat/completions``; ``ServerError`` if it has another form.

    A thought that the server separated from the content is put in front of it, in think tags. Tool calls follow as
    JSON, each in ``<tool_call>`` tags.
    """
    choice = _first_choice(data)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ServerError(f"sent a choice without a message: {_excerpt(choice)}")
    content, calls = message.get("content"), message.get("tool_calls") or []
    thought = message.get("reasoning_content") or message.get("reasoning")
    texts_or_none = all(isinstance(text, str | None) for text in (content, thought))
    if not texts_or_none or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ServerError(f"sent a message that is no text: {_excerpt(message)}")
    text = content or ""
    if text and calls:
        text = text.removesuffix("\n") + "\n"  # vLLM keeps the line end in front of a call, llama.cpp does not
    text += "\n".join(map(_call_as_generated, calls))
    if thought and text:
        # vLLM keeps the line ends around the tags of a thought, llama.cpp the one before the end tag.
        text = f"<think>\n{thought.strip()}\n</think>\n\n" + text.lstrip("\n")
    elif thought:
        # Without content and calls the answer was cut off inside the thought.
        text = "<think>\n" + thought.lstrip("\n")
    return _answer(text, choice, data)


def _call_as_generated(call: JsonObject) -> str:
    """Return a tool call as most models write it: in tags, with arguments as an object instead of the API's text."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError):  # a call that was cut off
            function = {**function, "arguments": json.loads(function["arguments"])}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def read_completion(data: object) -> Answer:
    """Read the answer of ``/completions``; ``ServerError`` if it has another form."""
    choice = _first_choice(data)
    text = choice.get("text")
    if not isinstance(text, str):
        raise ServerError(f"sent a choice without a text: {_excerpt(choice)}")
    return _answer(text, choice, data)


def _first_choice(data: object) -> JsonObject:
    """Return the first choice of a server's response; raise ``ServerError`` if there is none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list):
        raise ServerError(f"sent JSON without 'choices': {_excerpt(data)}")
    if not choices:
        raise ServerError("sent 0 choices where 1 was asked for")
    if not isinstance(choices[0], dict):
        raise ServerError(f"sent a choice that is no object: {_excerpt(choices[0])}")
    return choices[0]


def _answer(text: str, choice: JsonObject, data: object) -> Answer:
    """Make an answer of a choice and of the response that holds it."""
    reason = choice.get("finish_reason")
    usage = data.get("usage") if isinstance(data, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # Half of a character, as an escape of JSON, can't be written to a file.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Answer(
        text,
        stopped={"stop": True, "tool_calls": True, "length": False}.get(reason) if isinstance(reason, str) else None,
        new_tokens=tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None,
    )


def _read_body(response: httpx.Response, path: str) -> object:
    """Return the JSON of a response; ``ServerError`` for another status than success, or no JSON."""
    if not response.is_success:
        remedies = {
            401: f"; set the environment variable {KEY_VARIABLE} to the server's key",
            403: f"; set the environment variable {KEY_VARIABLE} to a key that may",
            404: f" at /{path}; check `server`, which mostly ends in /v1, and `server_model`",
        }
        remedy = remedies.get(response.status_code, "")
        if response.has_redirect_location:
            place = _excerpt(response.headers["location"])
            remedy = f"; it is redirected to {place}: name the address there as `server`"
        raise ServerError(f"{_describe_status(response)}{remedy}")
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise ServerError(f"sent no JSON: {_excerpt(response.text)}") from None


def _describe_status(response: httpx.Response) -> str:
    return f"answered with status {response.status_code}: {_excerpt(response.text)}"


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def _excerpt(value: object) -> str:
    """Return the beginning of a server's text in one line, without the key, which some repeat."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).split())
    text = text.replace(key, "***") if (key := _key()) else text
    return visible(f"{text[:_EXCERPT]}..." if len(text) > _EXCERPT else text) or "nothing"


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of the header ``Retry-After``, 0 where it is missing or a date."""
    text = response.headers.get("retry-after", "")
    return min(float(text), _LONGEST_DELAY) if text.isdecimal() else 0.0
