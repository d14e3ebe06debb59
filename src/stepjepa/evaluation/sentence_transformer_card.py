"""The README of a folder for sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass

from stepjepa.store.environment import versions

_TEXT = """\
---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---

# {name}

Embeddings of {model}, exported by stepjepa {version}.
An embedding is {readout}. A query and its document are near each other.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["How many singers do we have?"])
documents = model.encode_document(["SELECT count(*) FROM singer"])
print(model.similarity(queries, documents))
```

- Without a task a text is a *document*. Set the task where a library calls `encode` for queries, too: in LangChain
  `HuggingFaceEmbeddings(model_name=..., query_encode_kwargs={{"task": "query"}})`. In `mteb` wrap the model:
  `SentenceTransformerEncoderWrapper(SentenceTransformer(...))`.
- A query is {query}; a document is {document}.{only_here}
- sentence-transformers cuts texts off at {length} tokens; special tokens that a text spells count as such, and a
  thought in think tags in front of a document is embedded with it: remove it first, as training did.
- The chat template of this folder is for embeddings; to answer with the model, export it without `--embeddings`.
"""
_COPIES = """
- Tokens such as `{copy}` are copies of those in front of a text, which its mean leaves out."""
_SERVERS = """
- A server that reads the last token of the last layer, as vLLM does, gives other vectors, without an error."""

_FLOAT32 = """
- Load it in float32, as it is by default: its networks behind a mean fail in any other dtype."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts in a README.

    Attributes:
        name: of the model.
        model: a description of the model.
        readout: a description of the hidden states that an embedding is made of.
        query: what the model reads for a query ``TEXT``.
        document: what it reads for a document.
        length: most tokens of a text.
        copy: a copied token of the template; None if there is none.
        read_by_servers: whether programs without the modules of sentence-transformers read the same embedding.
        needs_float32: whether the modules fail in any other dtype.
    """

    name: str
    model: str
    readout: str
    query: str
    document: str
    length: int
    copy: str | None
    read_by_servers: bool
    needs_float32: bool = False

    def text(self) -> str:
        """Return the README."""
        copies = "" if self.copy is None else _COPIES.format(copy=self.copy)
        return _TEXT.format(
            name=self.name,
            model=self.model,
            version=versions()["stepjepa"],
            readout=self.readout,
            query=_code(self.query),
            document=_code(self.document),
            only_here=copies + ("" if self.read_by_servers else _SERVERS) + (_FLOAT32 if self.needs_float32 else ""),
            length=self.length,
        )


def _code(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)[1:-1].replace("`", "'")
    return f"`{escaped}`"
