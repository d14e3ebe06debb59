"""A tiny model, its tokenizer and a test file of five questions."""

import pytest

from questions import make_tokenizer, question_records
from stepjepa.base.files import write_jsonl
from tiny import make_model


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model("llama", vocab_size=len(tokenizer) + 5)


@pytest.fixture
def test_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    write_jsonl(path, [{"messages": record.messages} for record in question_records()])
    return path
