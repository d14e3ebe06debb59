"""Network access: the setting ``offline``, and telemetry, which is off.

Imports none of the libraries that it configures: they read the environment once, when they are imported.
"""

import os

STAYS_OFFLINE = "STEPJEPA_OFFLINE"
"""Environment variable that switches ``offline`` on if it is 1, for the child processes of a command."""

OFFLINE = {
    **dict.fromkeys((STAYS_OFFLINE, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    # W&B's synonym of "offline", for which transformers would print a line to standard output (which may hold JSON).
    "WANDB_MODE": "dryrun",
}


def set_environment(arguments: list[str]) -> None:
    """Switch telemetry off unless the environment switches it on, and libraries to offline mode if requested."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
    if "--offline" in arguments or os.environ.get(STAYS_OFFLINE) == "1":
        os.environ.update(OFFLINE)
