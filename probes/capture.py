"""Capture: one pass of the model on its own attention path, watched by ordinary forward hooks."""

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from model import GPT, ModelConfig
from model.attention.flash import KernelLogSumExp
from model.attention.mask import MaskRule
from model.attention.path import AttentionPath, alibi_slopes
from probes.record import AttentionRecord, LayerInfo, RecordInfo

_VERIFIED_ROWS = 256  # a head; all rows of a longer text would cost more than the pass itself


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer's path as the model makes it: q (1, H, T, D), k and v (1, G, T, D), out (1, H, T, D)."""

    layer: int
    path: AttentionPath
    rule: MaskRule
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def capture(
    model: GPT,
    tokens: Tensor | Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    values: bool = False,
    token_bytes: Sequence[bytes] | None = None,
    dtype: str = "float32",
    step: int = 0,
    checkpoint_hash: str = "",
) -> AttentionRecord:
    """The attention record of one text: tokens (T,) or (1, T), at most block_size of them.

    layers: which to keep; None keeps all. values: keep v too. token_bytes: the UTF-8 bytes of each token, for labels.
    dtype: float32 runs in the model's own dtype, bfloat16 and float16 under autocast, as in training.

    The model is in eval mode while it runs. Each layer is verified as it passes: rows rebuilt from q, k and the
    log-sum-exp must sum to one, and applied to v must give the kernel's output (256 evenly spaced rows of a longer
    text). ValueError with layer, head, row and deviation when they do not, and for bad tokens or layers.
    """
    ids = torch.as_tensor(tokens, device=model.token_embedding.weight.device).reshape(1, -1)  # (1, T)
    chosen = _chosen_layers(model.config, layers)
    _check_tokens(model.config, ids)
    info = _describe(model, ids, token_bytes, step, checkpoint_hash)
    kept: dict[str, Tensor] = {}
    infos, dtypes = list[LayerInfo](), list[str]()

    def see(call: LayerCall) -> None:
        q, k, lse = _factors(call, kernel.take())
        parts = {"q": q, "k": k, "lse": lse.float(), "v": call.v}
        tensors = {f"layers.{call.layer}.{name}": part[0].cpu().contiguous() for name, part in parts.items()}
        infos.append(_layer_info(call))
        dtypes.append(str(call.q.dtype).removeprefix("torch."))
        _verify(AttentionRecord(replace(info, layers=(infos[-1],), dtype=dtypes[-1]), tensors), call)
        if not values:
            del tensors[f"layers.{call.layer}.v"]
        kept.update(tensors)
        if call.layer == chosen[-1]:
            raise _AllSeen

    was_training, kernel = model.training, KernelLogSumExp()
    autocast = torch.autocast(ids.device.type, getattr(torch, dtype), enabled=dtype in ("bfloat16", "float16"))
    try:
        model.eval()
        with torch.no_grad(), autocast, kernel, watching(model, chosen, see), contextlib.suppress(_AllSeen):
            model(ids)
    finally:
        model.train(was_training)
    return AttentionRecord(replace(info, layers=tuple(infos), dtype=dtypes[0]), kept)


class _AllSeen(Exception):
    """Ends the pass after the last layer that is kept: nobody reads what comes then, the logits least of all."""


def capture_text(model: GPT, tokenizer: Tokenizer, tokens: Sequence[int], **options: Any) -> AttentionRecord:
    """The record with the texts of its tokens. options: those of `capture`."""
    return capture(model, tokens, token_bytes=[tokenizer.token_bytes(token) for token in tokens], **options)


@contextmanager
def watching(model: GPT, layers: Iterable[int], see: Callable[[LayerCall], Tensor | None]) -> Iterator[None]:
    """While it lasts, `see` gets every call of the attention paths of these layers, after the call. A tensor that it
    returns takes the place of the output."""

    def hook_for(layer: int) -> Any:
        def hook(path: AttentionPath, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
            q, k, v = args
            return see(LayerCall(layer, path, kwargs["rule"], q, k, v, out))

        return hook

    handles = []
    for layer in layers:
        path = model.get_submodule(f"blocks.{layer}.attn.path")
        handles.append(path.register_forward_hook(hook_for(layer), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def estimate(
    config: ModelConfig, n_tokens: int, *, n_layers: int | None = None, values: bool = False, dtype: str = "float32"
) -> int:
    """Bytes of the record of a text, before anything runs. n_layers: how many layers are kept; None is all."""
    n_layers = config.n_layer if n_layers is None else n_layers
    heads = config.n_head + config.kv_heads * (2 if values else 1)  # q, k and v
    itemsize = 4 if "linear" in config.paths else getattr(torch, dtype).itemsize  # feature maps are never narrower
    row = heads * config.head_dim * itemsize + config.n_head * 4  # and lse
    return n_layers * (n_tokens * row + 1024) + n_tokens * 32 + 4096  # names and token texts


def estimate_seconds(model: GPT, tokens: Sequence[int]) -> float:
    """Time of a capture, foretold from one of the first 512 tokens by the arithmetic of both: two operations a
    parameter and token, and in each layer 3·C·T a token for the causal half of the map, in the kernel and for its sums.
    """
    n_parameters, first = model.n_parameters(), tokens[:512]

    def arithmetic(n: int) -> int:
        return n * (2 * n_parameters + 3 * model.config.n_layer * model.config.n_embd * n)

    capture(model, first)  # libraries load
    start = time.perf_counter()
    capture(model, first)
    return (time.perf_counter() - start) * arithmetic(len(tokens)) / arithmetic(len(first))


def working_memory(config: ModelConfig, n_tokens: int) -> int:
    """Bytes that the pass itself needs besides the record, roughly: the residual stream and one layer's widest
    activations."""
    return 4 * n_tokens * (4 + 12) * config.n_embd


def check_room(
    config: ModelConfig, n_tokens: int, folder: Path, *, n_layers: int | None = None, values: bool = False, dtype: str
) -> int:
    """The estimate. ValueError, naming a smaller choice, when the disk of `folder` or the memory cannot hold it."""
    size = estimate(config, n_tokens, n_layers=n_layers, values=values, dtype=dtype)
    memory = free_memory() - working_memory(config, n_tokens)
    room, place = min((shutil.disk_usage(folder).free, "disk"), (memory, "memory"))
    if size <= room:
        return size
    sizes = [estimate(config, n_tokens, n_layers=n, values=values, dtype=dtype) for n in range(1, config.n_layer)]
    fitting = [n for n, smaller in enumerate(sizes, start=1) if smaller <= room]
    choice = f"--layers {','.join(map(str, range(fitting[-1])))} would fit" if fitting else "take a shorter text"
    raise ValueError(f"the record needs {readable(size)} of {place}; {readable(max(0, room))} are free; {choice}")


def free_memory() -> float:
    """Bytes that can be taken without swapping; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return math.inf


def readable(n_bytes: float) -> str:
    """`1.2 MB`"""
    for unit in ("bytes", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} GB"


def _chosen_layers(config: ModelConfig, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return list(range(config.n_layer))
    for layer in layers:
        if not 0 <= layer < config.n_layer:
            raise ValueError(f"layer {layer} does not exist; choose 0..{config.n_layer - 1}")
    if not layers:
        raise ValueError("no layers chosen; a record needs at least one")
    return sorted(set(layers))


def _check_tokens(config: ModelConfig, ids: Tensor) -> None:
    n_tokens = ids.shape[1]
    if n_tokens == 0:
        raise ValueError("the text is empty; at least one token is needed")
    if n_tokens > config.block_size:
        raise ValueError(f"the text has {n_tokens} tokens; this model reads at most {config.block_size} (block_size)")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the vocabulary 0..{config.vocab_size - 1}")


def _describe(
    model: GPT, ids: Tensor, token_bytes: Sequence[bytes] | None, step: int, checkpoint_hash: str
) -> RecordInfo:
    token_ids = tuple(ids[0].tolist())
    parts = (b"",) * len(token_ids) if token_bytes is None else tuple(token_bytes)
    if len(parts) != len(token_ids):
        raise ValueError(f"{len(parts)} byte strings for {len(token_ids)} tokens")
    return RecordInfo(
        token_ids=token_ids,
        token_texts=tuple(part.decode("utf-8", "replace") for part in parts),
        token_bytes=parts,
        text_hash=hashlib.sha256(b"".join(parts)).hexdigest(),
        model=asdict(model.config),
        step=step,
        checkpoint_hash=checkpoint_hash,
        dtype="",
        layers=(),
        versions={name: version(name) for name in ("torch", "safetensors")},
    )


def _factors(call: LayerCall, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and lse as the path factors them; what its kernel has just computed is not computed again."""
    if call.path.name == "flash" and lse is not None:
        return call.q, call.k, lse
    return call.path.factors(call.q, call.k, rule=call.rule)


def _layer_info(call: LayerCall) -> LayerInfo:
    path, q = call.path, call.q
    slopes = tuple(alibi_slopes(q.shape[1], torch.float32, q.device).tolist()) if path.alibi else None
    followed = path.rule_for(call.rule)
    if followed.documents is not None:
        followed = replace(followed, documents=followed.documents.cpu())
    kernel = path.kernel(q, call.k, call.v, rule=call.rule)
    scale, softcap = float(path.scale_for(q)), float(path.softcap)
    return LayerInfo(call.layer, path.name, kernel, scale, followed, softcap, slopes, path.kind)


def _verify(record: AttentionRecord, call: LayerCall) -> None:
    """ValueError unless every row sums to one (row_blocks sees to it) and weights @ v is the kernel's output.

    The second catches a forward pass that disagrees with its own log-sum-exp: a record of a map nobody used.
    """
    layer, out = call.layer, call.out[0].cpu()  # (H, T, D)
    values = record.tensor(layer, "v").float()  # (G, T, D)
    # The fused kernels round weights and output to the dtype of v: two roundings of at most one unit each.
    limit = max(1e-4, 2 * torch.finfo(out.dtype).eps) * max(1.0, float(values.abs().max()))
    for head in range(record.n_head):
        v = values[head // (record.n_head // record.n_kv_head)]  # (T, D)
        for rows, weights in record.row_blocks(layer, head, at_most=_VERIFIED_ROWS):
            deviation = (weights @ v - out[head, rows].float()).abs().amax(-1)  # (rows,)
            if not deviation.max() <= limit:
                row = int(deviation.nan_to_num(float("inf")).argmax())
                raise ValueError(
                    f"layer {layer} head {head} row {rows.start + row}: the recorded weights give an output that is "
                    f"{float(deviation[row]):.1e} from the kernel's (limit {limit:.1e}); forward and log_sum_exp of "
                    f"path {call.path.name!r} disagree"
                )
