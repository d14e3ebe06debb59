"""The environment of a launch that its results depend on: versions of packages, hardware."""

import importlib.metadata
import os
import platform

from stepjepa.base.json_object import JsonObject


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages that affect the results."""
    packages = ("stepjepa", "torch", "transformers", "accelerate", "peft", "tokenizers", "numpy")
    installed = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "platform": platform.platform(), **installed}


def machine(*, use_cpu: bool = False) -> JsonObject:
    """Return the hardware facts that affect rounding: processes, threads, device; ``use_cpu`` ignores accelerators."""
    import torch

    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    # torch.mps has no get_device_name.
    name = None if accelerator is None else getattr(torch.get_device_module(accelerator), "get_device_name", None)
    kind = "cpu" if accelerator is None else accelerator.type
    return {
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "device": kind if name is None else str(name(accelerator)),
    }
