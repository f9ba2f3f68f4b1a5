"""Where a number came from: revision, versions, device, time. Stamped on every report."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("draftsmith", "torch", "transformers", "datasets", "accelerate", "mlflow", "dvc")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def package_version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """The processor's marketing name, or what the platform calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device() -> dict[str, Any]:
    """The accelerator that measurements run on.

    Returns:
        `kind` (cpu or cuda), `name`, `torch`, `transformers`, `dtypes` (usable for decoding),
        `threads` (intra-op threads of the process).
    """
    import torch  # noqa: PLC0415  a report is read without torch

    if torch.cuda.is_available():
        kind, name = "cuda", torch.cuda.get_device_name()
        dtypes = ["float32", "float16"] + ["bfloat16"] * torch.cuda.is_bf16_supported()
    else:
        kind, name, dtypes = "cpu", processor_name(), ["float32", "bfloat16"]
    return {
        "kind": kind,
        "name": name,
        "torch": torch.__version__,
        "transformers": package_version("transformers"),
        "dtypes": dtypes,
        "threads": torch.get_num_threads(),
    }


def collect(seed: int | None = None) -> dict[str, Any]:
    """Facts that let somebody repeat a measurement; never secrets, never paths."""
    return {
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "seed": seed,
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
