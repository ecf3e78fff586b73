"""The environment in which a run was computed: versions, device, threads, command."""

import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from . import source

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """The contents of ``environment.json``: whatever may change the last bits, and the command."""
    device = torch.device(device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "coterie": __version__,
        "source": source.fingerprint(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git_commit": source.commit(),
        "argv": list(sys.argv),
    }
