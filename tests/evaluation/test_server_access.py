"""The way to a server: keys, addresses, proxies, certificates, redirections and bodies that can't be read."""

import pytest

from recording_server import Reply, recording_server, say
from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.config.server import KEY_VARIABLE
from stepjepa.evaluation.run import evaluate

pytest.importorskip("httpx", reason="needs httpx: pip install 'stepjepa[server]'")


def ask(address, test_file):
    output = test_file.parent / "o.jsonl"
    # One record at a time, so that the first line is the one that fails.
    settings = {"task": "generic", "server": address, "server_model": "m", "retries": 0, "concurrency": 1}
    return evaluate(None, test_file, output_file=output, **settings)


def test_a_key_that_ends_in_a_line_end_is_sent_without_it(test_file, monkeypatch):
    """As it is where it was read from a file."""
    monkeypatch.setenv(KEY_VARIABLE, "s3cret\r\n")
    with recording_server(lambda _: say("4")) as server:
        ask(server.address, test_file)
    assert all(each["Authorization"] == "Bearer s3cret" for each in server.headers)


@pytest.mark.parametrize("key", ["s3cret\ns3cret", "s3cret\x1b", "s3crét"])
def test_a_key_that_no_header_holds_is_refused_without_naming_it(key, test_file, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, key)
    flags = ["--test_file", str(test_file), "--output_file", str(test_file.parent / "o.jsonl"), "--task", "generic"]
    with recording_server(lambda _: say("4")) as server:
        assert main(["evaluate", *flags, "--server", server.address, "--server_model", "m"]) == 2
    error = capsys.readouterr().err
    assert f"the key in the environment variable {KEY_VARIABLE} holds characters that no key has; set it" in error
    assert error.count("\n") == 1
    assert "s3cr" not in error


@pytest.mark.parametrize(
    "reply",
    [Reply({"error": "no such key: s3cret"}, 401), Reply({"headers": {"Authorization": f"Bearer {'-' * 150} s3cret"}})],
)
def test_a_key_that_the_server_repeats_is_not_printed(reply, test_file, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    with recording_server(lambda _: reply) as server, pytest.raises(UserError, match=r"\*\*\*") as error:
        ask(server.address, test_file)
    assert "s3c" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:99999/v1",
        "http://127.0.0.1:0/v1",
        "http://127.0.0.1:port/v1",
        "http://[::1/v1",
        "http://127.0.0.1:8000/v\x01",
    ],
)
def test_an_address_that_can_be_none_is_refused(address, test_file):
    with pytest.raises(UserError, match=r"^server: .*(expected an address such as|is no address)"):
        ask(address, test_file)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ALL_PROXY", "socks4://127.0.0.1:9"), ("HTTPS_PROXY", "http://127.0.0.1:port"), ("SSL_CERT_FILE", "/no/file")],
)
def test_proxies_and_certificates_that_cannot_be_used_are_named(variable, value, test_file, monkeypatch):
    for name in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=rf"^server: proxy or certificates .* unset .*{variable}"):
        ask("https://server.invalid/v1", test_file)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            Reply("", 308, {"Location": "https://server.invalid/v1/chat/completions"}),
            "answered with status 308: nothing; it is redirected to https://server.invalid/v1/chat/completions: name",
        ),
        (Reply("no gzip", headers={"Content-Encoding": "gzip"}), "sent a body that can't be unpacked"),
        (Reply("[" * 100_000), "sent no JSON"),
    ],
)
def test_what_cannot_be_followed_or_read_is_one_line(reply, words, test_file):
    with (
        recording_server(lambda _: reply) as server,
        pytest.raises(UserError, match=rf"questions\.jsonl:1: {server.address} {words}"),
    ):
        ask(server.address, test_file)
