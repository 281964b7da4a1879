"""What a figure was measured on: device, versions, commit. Called by whatever writes measurements to a file."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device) -> dict[str, Any]:
    """What every report begins with: git, versions, device."""
    return {"git": git_commit(), "versions": versions(), "device": device_facts(device)}


def device_facts(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "threads": torch.get_num_threads()}
    return {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads()}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    names = ("slipstream", "torch", "numpy", "tokenizers", "safetensors")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree
            found[name] = "not installed"
    return found


def git_commit() -> str | None:
    """The commit that was measured, with `-dirty` when files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # installed inside somebody else's checkout
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_label(device: torch.device) -> str:
    """One line that tells machines apart as far as step times go: "cpu: AMD EPYC 9V74 x2", "cuda: NVIDIA H200"."""
    facts = device_facts(device)
    return f"{facts['type']}: {facts['name']}" + (f" x{facts['threads']}" if facts["type"] == "cpu" else "")
