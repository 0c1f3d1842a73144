"""One model over several processes, and its compilation."""

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from training.evaluate import next_token_loss
from training.runtime import Runtime


def wrap(model: nn.Module, runtime: Runtime) -> nn.Module:
    """Data parallel over all processes: each backward pass ends with the mean of everyone's gradients."""
    if runtime.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[runtime.device] if runtime.device.type == "cuda" else None)


def gradient_sync(model: nn.Module, is_last_micro_step: bool) -> AbstractContextManager:
    """Only the last micro-step's backward pass has to exchange gradients."""
    if isinstance(model, DistributedDataParallel) and not is_last_micro_step:
        return model.no_sync()
    return contextlib.nullcontext()


def compile_model(model: GPT, mode: str, runtime: Runtime) -> nn.Module:
    """torch.compile when `mode` is on, or auto on CUDA. Tried at once, on one token: where the machine cannot compile
    (no C++ compiler, no Triton) the model comes back as it is, with one line of notice."""
    if mode == "off" or (mode == "auto" and runtime.device.type != "cuda"):
        return model
    tokens = torch.zeros(2, min(8, model.config.block_size), dtype=torch.int64, device=runtime.device)
    # The trial must not move the random streams that dropout draws from, nor leave gradients.
    with torch.random.fork_rng(devices=[runtime.device] if runtime.device.type == "cuda" else []):
        try:
            compiled = cast(nn.Module, torch.compile(model))
            with runtime.autocast():
                logits = compiled(tokens)
            next_token_loss(logits, tokens).backward()
        except Exception as error:  # every backend fails in its own way
            reason = str(error).strip().splitlines() or [type(error).__name__]
            print(f"torch.compile does not work here, training uncompiled: {reason[0]}", file=sys.stderr)
            return model
        finally:
            model.zero_grad(set_to_none=True)
    return compiled
