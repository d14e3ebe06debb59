"""Network access: ``--offline``, telemetry (off by default), and the fallback to the hub's cache.

Imports none of the libraries that it configures: they read the environment once, when they are imported.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import urllib.parse
import urllib.request
from contextlib import suppress
from typing import Any

NO_TELEMETRY = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}

STAYS_OFFLINE = "STEPJEPA_OFFLINE"
"""Environment variable that means ``--offline`` if it is 1, so that child processes of a command are offline too."""

OFFLINE = {
    **dict.fromkeys((STAYS_OFFLINE, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    # W&B's synonym of "offline", for which transformers would print a line to standard output (which may hold JSON).
    "WANDB_MODE": "dryrun",
}

# Audit events of the socket module, with the position of the host or address in their arguments.
_CONNECTIONS = dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), 0)
_CONNECTIONS |= dict.fromkeys(("socket.connect", "socket.sendto", "socket.sendmsg"), 1)

_refusing = False


def no_telemetry() -> None:
    """Switch off the libraries' usage reports, unless the environment already sets these variables."""
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)


def wanted(arguments: list[str]) -> bool:
    """Whether the command line or the environment asks for offline mode."""
    return "--offline" in arguments or os.environ.get(STAYS_OFFLINE) == "1"


def go_offline() -> None:
    """Switch the libraries to offline mode, and refuse every connection of this process to other machines.

    Call it before any of these libraries is imported; it can't be undone. Still possible are connections within this
    machine, and connections made outside Python (NCCL, Gloo, torchrun), whose addresses the user chose.
    """
    global _refusing  # noqa: PLW0603  # an audit hook belongs to the process, too
    os.environ.update(OFFLINE)
    if not _refusing:
        _refusing = True
        sys.addaudithook(_refuse)


def use_cache_if_unreachable() -> None:
    """Switch huggingface_hub to its local cache if the hub does not answer in 3 seconds; its own retries take a minute.

    Not checked behind a proxy, where a direct connection says nothing.
    """
    from huggingface_hub import constants

    address = urllib.parse.urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies().get(address.scheme):
        return
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=3).close()
    except OSError as error:
        told = f"note: {constants.ENDPOINT} can't be reached ({error}); its cache on this machine is used"
        print(told, file=sys.stderr)
        constants.HF_HUB_OFFLINE = True


def _refuse(event: str, values: tuple[Any, ...]) -> None:
    if event not in _CONNECTIONS:
        return
    host = values[_CONNECTIONS[event]]
    if _CONNECTIONS[event]:
        # Anything but a tuple is a Unix socket, or a socket that is connected already.
        host = host[0] if isinstance(host, tuple) else None
    if not _is_here(host):
        raise OSError(errno.ENETUNREACH, f"--offline: no connection to {host!r}")


def _is_here(host: Any) -> bool:
    """Whether a host name or address belongs to this machine."""
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if name in (None, "", "localhost", "0.0.0.0", "::", socket.gethostname()):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(str(name).partition("%")[0]).is_loopback
    return False
