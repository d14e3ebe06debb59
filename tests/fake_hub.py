"""A hub in a thread: as much of the hub's interface as uploads of models use. LFS, not Xet.

``with FakeHub() as hub:`` keeps what was committed in ``hub.files``, and can be told to refuse.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

TOKEN = "hf_of_a_test"

Answer = tuple[int, dict[str, Any]]


class FakeHub:
    """The server and what it holds.

    Attributes:
        files: (repository, branch, path) -> content.
        commits: messages, the first one first.
        made: repository -> what it was made with.
        requests: method and path of every request.
        refuse: a step (``create``, ``preupload``, ``lfs``, ``put``, ``commit``) that is answered with 403.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str, str], bytes] = {}
        self.commits: list[str] = []
        self.made: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.refuse: str | None = None
        self._lfs: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                """Everything but the content of large files."""
                hub._answer(self)

            do_PUT = do_POST  # noqa: N815 - named by the base class
            do_GET = do_POST  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def names(self, repository: str, branch: str = "main") -> set[str]:
        """Paths of a repository."""
        return {path for name, ref, path in self.files if (name, ref) == (repository, branch)}

    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def serve(self, patch: pytest.MonkeyPatch) -> None:
        """Have this process take it for the hub."""
        from huggingface_hub import constants

        patch.setattr(constants, "ENDPOINT", self.endpoint)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_TOKEN", TOKEN)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        step, answer = self._route(path)
        status, value = 404, {"error": f"no such address: {path}"}
        # The storage behind LFS is another service, which needs no token.
        if step != "put" and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, value = 401, {"error": "Invalid credentials"}
        elif step is not None and step == self.refuse:
            status, value = 403, {"error": "You have no right to write here."}
        elif answer is not None:
            status, value = answer(body)
        content = json.dumps(value).encode()
        request.send_response(status)
        if status >= 400:
            request.send_header("X-Error-Message", value.get("error", ""))
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _route(self, path: str) -> tuple[str | None, Callable[[bytes], Answer] | None]:
        routes: dict[str, tuple[str, Callable[..., Answer]]] = {
            r"/api/repos/create": ("create", self._create),
            r"/api/validate-yaml": ("yaml", self._validate),
            r"/api/models/(.+)/preupload/[\w-]+": ("preupload", self._preupload),
            r"/.+\.git/info/lfs/objects/batch": ("lfs", self._batch),
            r"/lfs/(\w+)": ("put", self._put),
            r"/api/models/(.+)/commit/([\w-]+)": ("commit", self._commit),
        }
        for pattern, (step, answer) in routes.items():
            if found := re.fullmatch(pattern, path):
                return step, _bind(answer, found.groups())
        return None, None

    def _create(self, body: bytes) -> Answer:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'tester'}/{asked['name']}"
        if name in self.made:
            return 409, {"error": "You already created this model repo", "url": f"{self.endpoint}/{name}"}
        self.made[name] = asked
        return 200, {"url": f"{self.endpoint}/{name}", "name": name}

    def _validate(self, body: bytes) -> Answer:
        content = json.loads(body)["content"]
        head = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        value = yaml.safe_load(head[1]) if head else None
        if not isinstance(value, dict):
            return 400, {"errors": [{"message": "no metadata"}]}
        return 200, {"errors": [], "warnings": []}

    def _preupload(self, body: bytes, name: str) -> Answer:
        if name not in self.made:
            return 404, {"error": "Repository not found"}
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def _batch(self, body: bytes) -> Answer:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def _put(self, body: bytes, oid: str) -> Answer:
        assert hashlib.sha256(body).hexdigest() == oid
        self._lfs[oid] = body
        return 200, {}

    def _commit(self, body: bytes, name: str, branch: str) -> Answer:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[name, branch, value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name, branch, value["path"]] = self._lfs[value["oid"]]
            else:
                return 400, {"error": f"unknown operation {line['key']}"}
        oid = f"{len(self.commits):040x}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{name}/commit/{oid}"}


def _bind(answer: Callable[..., Answer], parts: tuple[str, ...]) -> Callable[[bytes], Answer]:
    return lambda body: answer(body, *parts)
