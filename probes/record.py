"""The attention record: q, k and the log-sum-exp of each row, from which every attention map is exact, on demand.

    A[i, j] = exp(score(q_i, k_j) - lse_i)    where the mask rule allows (i, j), else exactly 0

An n×n map of one head at n = 131,072 is 34 GB in bfloat16; q, k and lse are 34 MB. So no map is ever stored.
Every flash-attention backward pass recomputes its maps the same way (Dao et al. 2022, section 3.1).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from model.attention.mask import MaskRule
from probes.metadata import METADATA_KEY, LayerInfo, RecordInfo, check_tensors, choices, from_json, one_line, to_json

__all__ = ["AttentionRecord", "LayerInfo", "RecordInfo", "allowed_pairs", "replacing"]

_BLOCK_ROWS = 256  # rows of one map that are held at once


class AttentionRecord:
    """The captured attention of one text. Per layer l, in `tensors` or in a memory-mapped file:

    layers.{l}.q (H, T, D), layers.{l}.k (G, T, D) as the kernel saw them; layers.{l}.lse (H, T) float32, natural
    logarithm; on request layers.{l}.v (G, T, D). H heads, G key-value heads, T tokens, D head_dim.
    """

    def __init__(self, info: RecordInfo, tensors: Mapping[str, Tensor] | Any) -> None:
        self.info = info
        self._tensors = tensors
        self._layers = {layer.index: layer for layer in info.layers}
        first = f"layers.{info.layers[0].index}"
        self.n_head, self.n_tokens, self.head_dim = self._shape(f"{first}.q")
        self.n_kv_head = self._shape(f"{first}.k")[0]

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the captured layers, ascending."""
        return tuple(sorted(self._layers))

    def layer_info(self, layer: int) -> LayerInfo:
        """ValueError with the choices when `layer` was not captured."""
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not in this record; it has {choices(self.layers)}")
        return self._layers[layer]

    def check(self, layers: Iterable[int], heads: Iterable[int]) -> None:
        """ValueError with the choices when one of these layers or heads is not here."""
        for layer in layers:
            self.layer_info(layer)
        for head in heads:
            if not 0 <= head < self.n_head:
                raise ValueError(f"head {head} does not exist; choose {choices(range(self.n_head))}")

    def tensor(self, layer: int, name: str, index: Any = slice(None)) -> Tensor:
        """`q`, `k`, `lse` or `v` of a layer, or the part that `index` asks for; only that part is read from a file."""
        self.layer_info(layer)
        key = f"layers.{layer}.{name}"
        if isinstance(self._tensors, Mapping):
            return self._tensors[key][index]
        return self._tensors.get_slice(key)[index]

    def block(self, layer: int, head: int, rows: slice, columns: slice) -> Tensor:
        """Exact weights of some queries on some keys: (rows, columns) float32; exactly 0 where the mask forbids.

        rows and columns are slices of positions with step 1. ValueError for a layer or head that is not there.
        """
        info = self.layer_info(layer)
        self.check((layer,), (head,))
        rows, columns = self._positions(rows), self._positions(columns)
        group = head // (self.n_head // self.n_kv_head)
        q = self.tensor(layer, "q", (head, rows))  # (rows, D)
        k = self.tensor(layer, "k", (group, columns))  # (columns, D)
        lse = self.tensor(layer, "lse", (head, rows))  # (rows,)
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(dtype) @ k.to(dtype).T * info.scale
        if info.softcap > 0:
            scores = info.softcap * torch.tanh(scores / info.softcap)
        i, j = torch.arange(rows.start, rows.stop), torch.arange(columns.start, columns.stop)
        if info.alibi_slopes is not None:
            scores = scores - info.alibi_slopes[head] * (i[:, None] - j[None, :]).abs()
        weights = torch.exp(scores - lse[:, None])
        return weights.masked_fill(~allowed_pairs(info.rule, i, j), 0.0).float()

    def row(self, layer: int, head: int, i: int) -> Tensor:
        """Weights of query i on all keys, (T,) float32. ValueError when they do not sum to one."""
        if not 0 <= i < self.n_tokens:
            raise ValueError(f"row {i} does not exist; the text has {self.n_tokens} tokens")
        weights = self.block(layer, head, slice(i, i + 1), slice(None))
        self._check_sums(layer, head, i, weights)
        return weights[0]

    def weights(self, layer: int, head: int) -> Tensor:
        """The whole map (T, T) float32: O(T²) memory, for short texts."""
        return torch.cat([weights for _, weights in self.row_blocks(layer, head)])

    def row_blocks(self, layer: int, head: int, at_most: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The map from top to bottom as (rows, weights (rows, T) float32), never more than a few hundred rows at once.

        `at_most` takes only evenly spaced blocks with about that many rows in total, the last row among them.
        ValueError, with layer, head, row and deviation, when a row does not sum to one: then q, k, lse or the rule
        are not those of one kernel.
        """
        rule, n = self.layer_info(layer).rule, self.n_tokens
        starts = list(range(0, n, _BLOCK_ROWS))
        if at_most is not None and at_most < n:
            n_blocks = max(2, at_most // _BLOCK_ROWS)
            starts = sorted({starts[round(x * (len(starts) - 1) / (n_blocks - 1))] for x in range(n_blocks)})
        for start in starts:
            rows = slice(start, min(start + _BLOCK_ROWS, n))
            # Only the columns that the rule can reach are computed; the rest of the row is zero.
            near = rule.window is not None and rule.n_global == 0
            first = max(0, start - (rule.window or 0) + 1) if near else 0
            last = rows.stop if rule.causal else n
            weights = torch.zeros(rows.stop - rows.start, n)
            weights[:, first:last] = self.block(layer, head, rows, slice(first, last))
            self._check_sums(layer, head, start, weights)
            yield rows, weights

    def pooled(self, layer: int, head: int, n_cells: int) -> Tensor:
        """The map shrunk to at most n_cells × n_cells by taking the largest weight under each cell, so that single
        bright weights stay visible. float32; NaN where the mask forbids every pair of a cell. O(T·rows) memory."""
        rule, n = self.layer_info(layer).rule, self.n_tokens
        stride = -(-n // n_cells)
        columns, cells, carry = torch.arange(n), [], torch.empty(0, n)
        for rows, weights in self.row_blocks(layer, head):
            weights = weights.masked_fill(~allowed_pairs(rule, torch.arange(rows.start, rows.stop), columns), -1.0)
            carry = torch.cat((carry, weights))
            whole = len(carry) if rows.stop == n else len(carry) // stride * stride
            if whole:
                pool = F.max_pool2d(carry[None, None, :whole], stride, ceil_mode=True)
                cells.append(pool[0, 0])
                carry = carry[whole:]
        pooled = torch.cat(cells)
        return pooled.masked_fill(pooled < 0, float("nan"))

    def save(self, path: Path | str) -> None:
        """Writes one safetensors file, beside and renamed: `path` is never half a record. ValueError when it fails."""
        names = [f"layers.{layer}.{part}" for layer in self.layers for part in ("q", "k", "lse", "v")]
        tensors = {name: self._tensors[name].contiguous() for name in names if name in self._tensors}
        with replacing(Path(path)) as beside:
            save_file(tensors, beside, metadata={METADATA_KEY: to_json(self.info)})

    @classmethod
    def load(cls, path: Path | str) -> "AttentionRecord":
        """Opens a saved record memory-mapped: tensors stay on disk until a part of them is asked for.

        ValueError, one line, for a file that is missing, damaged, no record, or of another format version.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is no file")
        try:
            file = safe_open(path, framework="pt")
            metadata = file.metadata() or {}
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is no attention record, or a damaged one ({one_line(error)})") from None
        if METADATA_KEY not in metadata:
            raise ValueError(f"{path} is a safetensors file but no attention record")
        try:
            info = from_json(metadata[METADATA_KEY])
            check_tensors(file, info)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            OverflowError,
            SafetensorError,
        ) as error:
            raise ValueError(f"{path} is a damaged attention record ({one_line(error)})") from None
        return cls(info, file)

    def _shape(self, key: str) -> tuple[int, ...]:
        if isinstance(self._tensors, Mapping):
            return tuple(self._tensors[key].shape)
        return tuple(self._tensors.get_slice(key).get_shape())

    def _positions(self, positions: slice) -> slice:
        start, stop, step = positions.indices(self.n_tokens)
        if step != 1:
            raise ValueError(f"a block has step 1, not {step}")
        return slice(start, max(start, stop))

    def _check_sums(self, layer: int, head: int, first_row: int, weights: Tensor) -> None:
        deviation = (weights.sum(-1) - 1).abs()
        limit = 1e-4 if self.info.dtype in ("float32", "float64") else 5e-3
        if not deviation.max() <= limit:  # NaN fails too
            row = int(deviation.nan_to_num(float("inf")).argmax())
            raise ValueError(
                f"layer {layer} head {head} row {first_row + row}: the weights sum to {float(weights[row].sum()):.6f}, "
                f"{float(deviation[row]):.1e} from 1 (limit {limit:g}); q, k, log-sum-exp and mask do not fit"
            )


def allowed_pairs(rule: MaskRule, rows: Tensor, columns: Tensor) -> Tensor:
    """(R, C) booleans: may query rows[r] see key columns[c]?

    MaskRule.allowed says the same. It is written a second time on purpose: the models' paths use that one, and an
    error there must not be on both sides of a comparison.
    """
    distance = rows[:, None] - columns[None, :]  # (R, C), negative in the future
    allowed = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    if rule.window is not None:
        has_global = (rows[:, None] < rule.n_global) | (columns[None, :] < rule.n_global)
        allowed = allowed & ((distance > -rule.window) & (distance < rule.window) | has_global)
    if rule.documents is not None:
        documents = rule.documents[0]  # (S,): a record holds one text
        allowed = allowed & (documents[rows][:, None] == documents[columns][None, :])
    return allowed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; renamed to `path` when the block ends well, removed when it does not.

    ValueError, one line, when the disk refuses.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise ValueError(f"cannot write {path}: {reason}") from error
    finally:
        beside.unlink(missing_ok=True)
