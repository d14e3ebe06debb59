"""No network: what ``--offline`` means, and what stays off in any case.

Free of all libraries that it speaks to: they read the environment once, when they are imported.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import urllib.parse
import urllib.request
from typing import Any

NO_TELEMETRY = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}

STAYS_OFFLINE = "STEPJEPA_OFFLINE"
"""Set to 1 in the environment it means ``--offline``, so that processes which a command starts are offline too."""

OFFLINE = {
    STAYS_OFFLINE: "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    # Its second name of offline; at the first one transformers prints a line on standard output, which may be JSON.
    "WANDB_MODE": "dryrun",
}

_LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_CONNECTIONS = ("socket.connect", "socket.sendto", "socket.sendmsg")

_SECONDS = 3
"""To wait for the hub."""

_refusing = False


def no_telemetry() -> None:
    """Have no library report how it is used, unless the environment says otherwise."""
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)


def wanted(arguments: list[str]) -> bool:
    """Whether a command line or the environment asks for no network."""
    return "--offline" in arguments or os.environ.get(STAYS_OFFLINE) == "1"


def go_offline() -> None:
    """Tell the libraries that there is no network, and refuse every connection of this process to other machines.

    To be called before any of these libraries is imported. It can't be taken back. Connections within this machine stay
    possible, and so do those that libraries make without Python: of NCCL, Gloo and torchrun, whose addresses the user
    named.
    """
    global _refusing  # noqa: PLW0603  # of the process, as the hook is
    os.environ.update(OFFLINE)
    if not _refusing:
        _refusing = True
        sys.addaudithook(_refuse)


def use_cache_if_unreachable() -> None:
    """Have the hub's library use its cache alone where the hub does not answer within seconds.

    It would try again and again, for about a minute. Behind a proxy nobody can tell, and it is left to itself.
    """
    from huggingface_hub import constants

    address = urllib.parse.urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies().get(address.scheme):
        return
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
    except OSError as error:
        print(
            f"note: {constants.ENDPOINT} can't be reached ({error}); its cache on this machine is used", file=sys.stderr
        )
        constants.HF_HUB_OFFLINE = True


def _refuse(event: str, values: tuple[Any, ...]) -> None:
    # First of all and cheaply: the hook is called for every event of the interpreter.
    if not event.startswith("socket."):
        return
    if event in _LOOKUPS:
        host = values[0]
    elif event in _CONNECTIONS:
        address = values[1]
        if not isinstance(address, tuple):
            return  # a socket of this machine, or one that is connected already
        host = address[0]
    else:
        return
    if not _is_here(host):
        raise OSError(errno.ENETUNREACH, f"--offline: no connection to {host!r}")


def _is_here(host: Any) -> bool:
    """Whether an address is this machine."""
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if name in (None, "", "localhost", "0.0.0.0", "::") or name == socket.gethostname():
        return True
    try:
        return ipaddress.ip_address(str(name).partition("%")[0]).is_loopback
    except ValueError:
        return False
