"""A hub in this process: stands for the two calls of ``HfApi`` that uploads of models use.

``with FakeHub() as hub: hub.serve(monkeypatch)`` keeps what was committed in ``hub.files``, and can be told to refuse.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

TOKEN = "hf_of_a_test"


class FakeHub:
    """What the hub holds."""

    endpoint = "https://hub.test"

    def __init__(self) -> None:
        self.files: dict[tuple[str, str, str], bytes] = {}  # (repository, branch, path) -> content
        self.commits: list[str] = []  # messages
        self.made: dict[str, dict[str, Any]] = {}  # repository -> what it was made with
        self.requests: list[str] = []  # names of all calls that would have been requests
        self.refuse: str | None = None  # "create", or anything else for uploads, to be answered with 403

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def names(self, repository: str, branch: str = "main") -> set[str]:
        """Paths of a repository."""
        return {path for name, ref, path in self.files if (name, ref) == (repository, branch)}

    def serve(self, patch: pytest.MonkeyPatch) -> None:
        """Have this process take it for the hub."""
        patch.setattr(constants, "ENDPOINT", self.endpoint)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr(HfApi, "create_repo", lambda _api, repo_id, **options: self._create(repo_id, **options))
        patch.setattr(HfApi, "upload_folder", lambda _api, **options: self._upload(**options))

    def _meet(self, step: str, refused: bool) -> None:
        self.requests.append(step)
        if refused:
            # As HfHubHTTPError, which is an OSError with a response.
            error: Any = OSError("403 Forbidden: you have no right to write here.")
            error.response = SimpleNamespace(status_code=403)
            raise error

    def _create(self, repo_id: str, *, token: str | None = None, private: bool | None, exist_ok: bool) -> Any:
        validate_repo_id(repo_id)
        assert exist_ok and token is None
        self._meet("create", self.refuse == "create")
        name = repo_id if "/" in repo_id else f"tester/{repo_id}"
        self.made.setdefault(name, {"visibility": "private" if private else None})
        return SimpleNamespace(repo_id=name)

    def _upload(
        self, *, repo_id: str, folder_path: Path, commit_message: str, allow_patterns: list[str], **options: Any
    ) -> None:
        assert repo_id in self.made
        self._meet("upload", self.refuse not in (None, "create"))
        paths = [str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()]
        for path in filter_repo_objects(paths, allow_patterns=allow_patterns):
            self.files[repo_id, options["revision"] or "main", path] = (folder_path / path).read_bytes()
        self.commits.append(commit_message)
