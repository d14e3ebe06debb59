"""The settings of ``stepjepa.evaluate`` by name and type, for type checkers and for the completion of an editor."""

import os
from typing import Literal, TypedDict

from stepjepa.config.jepa import Dtype, Pooling


class EvaluationOptions(TypedDict, total=False):
    """Settings of an evaluation, which have the names, the defaults and the meanings of ``stepjepa evaluate --help``.

    They are the fields of ``EvaluationSettings`` and of the classes nested in it, but for the paths that
    :func:`stepjepa.evaluate` takes itself.
    """

    # Scoring.
    task: str
    scoring: Literal["own", "reference"]
    startswith: bool
    max_examples: int | None
    similarity: Literal["own", "llm-jepa", "step-jepa"] | None
    overwrite: bool
    columns: list[str] | None
    bad_records: Literal["error", "skip"]
    # Retrieval.
    retrieval: bool
    layer: int | None
    pooling: Pooling | None
    linear_map: str | os.PathLike[str] | None
    projection_heads: bool
    # The model and its answers.
    batch_size: int
    dtype: Dtype
    load_in_4bit: bool
    load_in_8bit: bool
    trust_remote_code: bool
    use_test_prompts: bool
    plain: bool
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    num_samples: int
    # Tasks.
    spider_path: str | None
    missing_databases: Literal["error", "skip"]
    time_limit: float
    memory_limit: int
    workers: int | None
    # A server that answers.
    server: str | None
    server_model: str | None
    completions: bool
    concurrency: int
    timeout: float
    retries: int
