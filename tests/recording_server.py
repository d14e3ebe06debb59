"""A small HTTP server in a thread that notes every request and answers as a test says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class Reply:
    """What the server sends: JSON, or a text as it is."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class RecordingServer:
    """The requests that arrived, in their order, and the function that answers them."""

    reply: Callable[[Body], Reply]
    address: str = ""
    gets: list[str] = field(default_factory=list)  # paths
    posts: list[tuple[str, Body]] = field(default_factory=list)  # paths and bodies
    headers: list[dict[str, str]] = field(default_factory=list)  # of every request

    @property
    def bodies(self) -> list[Body]:
        """The bodies of the requests for answers."""
        return [body for _, body in self.posts]


def say(text: str | None, reason: str = "stop", **message: Any) -> Reply:
    """A choice with this content, as servers send it."""
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text, **message}}
    return Reply({"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 3}})


def question_of(body: Body) -> str:
    """The content of the last message of a request."""
    return str(body["messages"][-1]["content"])


@contextmanager
def recording_server(reply: Callable[[Body], Reply]) -> Iterator[RecordingServer]:
    """Listen on a free loopback port; ``reply`` may raise ``ConnectionError`` to close the connection unanswered."""
    server = RecordingServer(reply)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with lock:
                server.gets.append(self.path)
                server.headers.append(dict(self.headers))
            self.answer(Reply({"detail": "Not Found"}, 404))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.posts.append((self.path, body))
                server.headers.append(dict(self.headers))
            try:
                reply = server.reply(body)
            except ConnectionError:
                self.close_connection = True
                return
            self.answer(reply)

        def answer(self, reply: Reply) -> None:
            content = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            data = content.encode()
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client has given up
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as listener:
        server.address = f"http://127.0.0.1:{listener.server_address[1]}/v1"
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


@contextmanager
def silent_listener() -> Iterator[str]:
    """The address of a socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def closed_port() -> str:
    """An address at which nothing listens."""
    with silent_listener() as address:
        return address
