"""Settings of evaluations whose answers come from a server. Free of torch."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from stepjepa.base.errors import UserError, shown
from stepjepa.config.option import FROM_ONE, FROM_ZERO, POSITIVE, check_effects, check_values, option

KEY_VARIABLE = "STEPJEPA_SERVER_KEY"
"""Environment variable with the key of the server."""

_SERVER = "ask a server with OpenAI's chat completions instead of loading the model; its address, http://HOST:PORT/v1"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The server that answers, and the form of requests; ``server`` is None if the model is loaded instead.

    UserError if the address is wrong, or a setting is missing or out of range.
    """

    server: str | None = option(None, _SERVER, metavar="URL")
    server_model: str | None = option(
        None, "name of the model there; the answers of one name belong together", metavar="NAME", only_with="server"
    )
    completions: bool = option(
        False, "send rendered prompts instead of messages; needs `model_path` for the template", only_with="server"
    )
    concurrency: int = option(8, "records asked at a time", allowed=FROM_ONE, only_with="server")
    timeout: float = option(600.0, "seconds for one answer", metavar="SEC", allowed=POSITIVE, only_with="server")
    retries: int = option(
        5, "further tries after status 429 or 5xx or a broken connection", allowed=FROM_ZERO, only_with="server"
    )

    def __post_init__(self) -> None:
        check_values(self)
        check_effects(vars(self), ServerSettings)
        if self.server is None:
            return
        expected = f"server: expected an address such as http://127.0.0.1:8000/v1, got {shown(self.server)}"
        try:
            parts = urlsplit(self.server)
            port = parts.port
        except ValueError as error:  # half of brackets, a port that is no number or too large
            raise UserError(f"{expected} ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
            raise UserError(expected)
        if "@" in parts.netloc:
            fault = "the address holds a name or a password, and it is written into the summary"
            raise UserError(f"server: {fault}; set the environment variable {KEY_VARIABLE} to the key instead")
        if not self.server_model:
            raise UserError("server_model: name the model as the server does; GET ADDRESS/models lists the names")
