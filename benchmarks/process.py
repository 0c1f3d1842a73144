"""Measurements in a process of their own, so that the memory that one sees is its own; and whole runs of train.py."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parents[1]


def in_own_process(function: Callable[..., Any], *arguments: Any, bare: bool = False) -> Any:
    """function(*arguments), as a new process computes it; `bare` is one that has loaded nothing but what it needs.
    MemoryError when the system killed that process."""
    context = multiprocessing.get_context("spawn" if bare else "forkserver")
    if not bare:
        context.set_forkserver_preload(["torch", "tyro", "rich.progress"])  # slow to import; a new process has them
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise MemoryError("the process was killed, for its memory most likely") from None


def memory_bytes(device: str, field: Literal["VmHWM", "VmRSS"]) -> int:
    """What this process holds (VmRSS) or has held at most (VmHWM); elsewhere than on Linux the latter for both."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() if field == "VmHWM" else torch.cuda.memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split(f"{field}:")[1].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def configuration(name: str) -> str:
    """The path of a configuration of the caller's, or else of one of the repository."""
    return name if Path(name).exists() else str(REPOSITORY / name)


def run_training(config: str, run: Path, *flags: str, **environment: str) -> dict[str, Any]:
    """One whole process of train.py into the directory `run`, new for each, since an earlier run would be resumed ->
    its last row of metrics. ValueError with its message when it fails."""
    command = [sys.executable, str(REPOSITORY / "train.py"), configuration(config), *flags]
    command += [f"--run.dir={run}", "--log.progress=False"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join([config, *flags])} failed: {done.stderr.strip()}")
    if not (run / "best.pt").exists():
        raise ValueError(f"{' '.join([config, *flags])} leaves no checkpoint")
    row: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return row
