"""Records for the tests of tasks."""

from stepjepa.data.records import parse_record


def record(answer, user="question", *, system=None, path="test.jsonl", line=1, **extra):
    """A record of one question and its answer, perhaps below a system prompt."""
    messages = [("system", system)] if system is not None else []
    messages += [("user", user), ("assistant", answer)]
    return parse_record(
        {"messages": [{"role": role, "content": content} for role, content in messages], **extra}, path, line
    )
