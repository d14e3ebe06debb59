"""The type of JSON objects."""

from typing import Any

JsonObject = dict[str, Any]
"""A JSON object, as ``json.loads`` returns it: records, rows of files, ``run.json``, summaries."""
