"""What the run stands on: device, number type, processes, seeds, signals."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from training.config import RunConfig

if TYPE_CHECKING:
    from training.state import TrainState

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """device and dtype (of autocast), and this process's place among world_size."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """The one process that writes files and prints."""
        return self.rank == 0

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager:
        """Matrix products in `dtype`; float32 is left alone."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def mean(self, value: float) -> float:
        """Over the processes."""
        return self.sum(value)[0] / self.world_size

    def max(self, value: int) -> int:
        """Over the processes."""
        if self.world_size == 1:
            return value
        largest = torch.tensor(value, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the processes."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process runs the body before the others do, which then find what it left in the cache."""
        if self.world_size > 1 and not self.is_main:
            try:
                dist.barrier()
            except RuntimeError as error:  # without this, its refusal would drown in our traceback
                raise ValueError(f"process {self.rank} ends because the main process has; see its message") from error
        yield
        if self.world_size > 1 and self.is_main:
            dist.barrier()


@contextmanager
def running(config: RunConfig) -> Iterator[Runtime]:
    """Chooses device and dtype, joins the process group that torchrun announces and leaves it, seeds torch.

    ValueError when the device or the dtype is not to be had, naming what is.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
    if world_size > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    # Parameters must not depend on the rank; what follows them (dropout) must: seed_rank.
    torch.manual_seed(config.seed)
    try:
        yield Runtime(device, dtype, rank, world_size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Large tensors come and go in every step. By default glibc gives their pages back each time and the system clears
    new ones, which makes element-wise operations up to four times slower. Elsewhere than on glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: smaller blocks come from the heap
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: the heap keeps what was freed


def seed_rank(config: RunConfig, runtime: Runtime) -> None:
    """Gives each process a random stream of its own, after the parameters were drawn alike on all."""
    if runtime.rank:
        torch.manual_seed(config.seed + runtime.rank)


@contextmanager
def stop_requests(state: "TrainState") -> Iterator[None]:
    """Ctrl-C and SIGTERM end the loop after the current step, with a checkpoint; a second one ends it at once."""

    def request_stop(signal_number: int, _: FrameType | None) -> None:
        state.stop_signal = signal_number
        signal.signal(signal_number, before[signal.Signals(signal_number)])

    try:
        before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, where Python delivers no signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def choose_device(name: str) -> torch.device:
    """auto: the first there is of cuda, mps, cpu."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_there in there.items() if is_there)
    kind, _, index = name.partition(":")
    n_devices = torch.cuda.device_count() if kind == "cuda" else 1
    if not there.get(kind) or (index and not (index.isdecimal() and int(index) < n_devices)):
        choices = ", ".join(kind for kind, is_there in there.items() if is_there)
        raise ValueError(f"device {name} is not on this machine; choose one of: auto, {choices}")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device has instructions for it, else float16 on CUDA and float32 elsewhere."""
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"dtype float16 is for cuda; on {device.type} choose bfloat16 or float32")
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.bfloat16
    return torch.float32
