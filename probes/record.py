"""The attention record: q, k and the log-sum-exp of each row, from which every attention map is exact, on demand.

    A[i, j] = exp(score(q_i, k_j) - lse_i)    where the mask rule allows (i, j), else exactly 0

Linear paths have no softmax: q and k are then the feature maps φ(q) and φ(k), lse is the logarithm of the row's
normaliser, and A[i, j] = φ(q_i)·φ(k_j)·exp(-lse_i).

An n×n map of one head at n = 131,072 is 34 GB in bfloat16; q, k and lse are 34 MB. So no map is ever stored.
Every flash-attention backward pass recomputes its maps the same way (Dao et al. 2022, section 3.1).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from probes.metadata import (
    METADATA_KEY,
    LayerInfo,
    RecordInfo,
    allowed,
    allowed_pairs,
    check_tensors,
    choices,
    from_json,
    is_plain_causal,
    log_weights,
    one_line,
    to_json,
)
from probes.statistics import RowStatistics, received, statistics, top_keys

__all__ = ["AttentionRecord", "LayerInfo", "RecordInfo", "allowed_pairs", "replacing"]

_FORBIDDEN = torch.finfo(torch.float32).min  # ln of a weight that the mask forbids: exp of it is 0, and 0 times it too
_BLOCK_WEIGHTS = 2**18  # of one map that are held at once: as many as a core's cache takes


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
    def has_values(self) -> bool:
        """Whether v was kept."""
        return f"layers.{self.layers[0]}.v" in self._tensors.keys()  # noqa: SIM118 - an open file is no mapping

    @property
    def is_causal(self) -> bool:
        return all(layer.rule.causal for layer in self.info.layers)

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

    def group(self, head: int) -> int:
        """The key-value head that serves this head."""
        return head // (self.n_head // self.n_kv_head)

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
        self.check((layer,), (head,))
        return self._log_block(layer, head, self._positions(rows), self._positions(columns)).exp_().float()

    def pairs(self, layer: int, head: int, rows: Tensor, columns: Tensor) -> Tensor:
        """The weight of each pair (rows[p], columns[p]), (P,) float32: one dot product each."""
        self.check((layer,), (head,))
        q, k = self.tensor(layer, "q", (head,)), self.tensor(layer, "k", (self.group(head),))  # (T, D)
        dtype = torch.promote_types(q.dtype, torch.float32)
        info = self.layer_info(layer)
        products = (q[rows].to(dtype) * info.q_scale * k[columns].to(dtype)).sum(-1)
        lse = self.tensor(layer, "lse", (head,))[rows]
        weights = log_weights(info, head, products, lse, rows, columns).exp_()
        return weights.masked_fill(~allowed(info.rule, rows, columns), 0.0).float()

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
        """The map from top to bottom as (rows, weights (rows, T) float32); see `bands`."""
        for rows, columns, weights in self.bands(layer, head, at_most):
            yield rows, F.pad(weights, (columns.start, self.n_tokens - columns.stop))

    def bands(self, layer: int, head: int, at_most: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """The map from top to bottom, never more than a few hundred rows at once, as (rows, columns, weights): only the
        columns that the mask rule can reach; the rest of the rows is zero. See `log_bands`."""
        for rows, columns, weights, _ in self.log_bands(layer, head, at_most):
            yield rows, columns, weights

    def log_bands(
        self, layer: int, head: int, at_most: int | None = None
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """As `bands`, and the logarithms of the weights, _FORBIDDEN where the mask forbids.

        `at_most` takes only evenly spaced blocks with about that many rows in total, the last row among them.
        ValueError, with layer, head, row and deviation, when a row does not sum to one: then q, k, lse or the rule
        are not those of one kernel.
        """
        self.check((layer,), (head,))
        rule, n = self.layer_info(layer).rule, self.n_tokens
        starts = [0]
        while starts[-1] + _block_rows(starts[-1]) < n:
            starts.append(starts[-1] + _block_rows(starts[-1]))
        if at_most is not None and at_most < n:
            n_blocks = max(2, at_most * len(starts) // n)
            starts = sorted({starts[round(x * (len(starts) - 1) / (n_blocks - 1))] for x in range(n_blocks)})
        for start in starts:
            rows = slice(start, min(start + _block_rows(start), n))
            near = rule.window is not None and rule.n_global == 0
            first = max(0, start - (rule.window or 0) + 1) if near else 0
            columns = slice(first, rows.stop if rule.causal else n)
            logs = self._log_block(layer, head, rows, columns).float()
            weights = logs.exp()
            self._check_sums(layer, head, start, weights)
            yield rows, columns, weights, logs

    def pooled(self, layer: int, head: int, n_cells: int, how: Literal["max", "mean"] = "max") -> Tensor:
        """The map shrunk to at most n_cells × n_cells: of each cell the largest weight, so that single bright weights
        stay visible, or the mean over its allowed pairs. float32; NaN where the mask forbids every pair of a cell."""
        rule, stride = self.layer_info(layer).rule, -(-self.n_tokens // n_cells)
        n_cells = -(-self.n_tokens // stride)
        pooled, counts = torch.zeros(n_cells, n_cells), torch.zeros(n_cells, n_cells)
        for rows, columns, weights in self.bands(layer, head):
            i, j = torch.arange(rows.start, rows.stop), torch.arange(columns.start, columns.stop)
            reach = slice(columns.start // stride, -(-columns.stop // stride))  # in cells
            padding = (columns.start - reach.start * stride, reach.stop * stride - columns.stop)
            may_see = allowed_pairs(rule, i, j).float()
            weights, may_see = (F.pad(x, padding).unflatten(1, (-1, stride)) for x in (weights, may_see))
            cells = (i // stride)[:, None].expand(-1, reach.stop - reach.start)
            counts[:, reach].scatter_add_(0, cells, may_see.sum(-1))
            if how == "max":
                pooled[:, reach].scatter_reduce_(0, cells, weights.amax(-1), "amax")
            else:
                pooled[:, reach].scatter_add_(0, cells, weights.sum(-1))
        pooled = pooled if how == "max" else pooled / counts
        return pooled.masked_fill(counts == 0, float("nan"))

    def statistics(self, layer: int, head: int, *, n_sink: int = 1) -> RowStatistics:
        """Entropy, distance, sink mass and more of every row, see `RowStatistics`."""
        return statistics(self, layer, head, n_sink=n_sink)

    def top_keys(self, layer: int, head: int, i: int, k: int) -> list[tuple[int, float]]:
        """The k keys that query i looks at most, heaviest first, as (position, weight); fewer when it sees fewer."""
        return top_keys(self, layer, head, i, k)

    def received(self, layer: int, head: int) -> Tensor:
        """The attention that each key receives, (T,): its mean over the queries that may see the key."""
        return received(self, layer, head)[0]

    def save(self, path: Path | str) -> None:
        """Writes one safetensors file, beside and renamed: `path` is never half a record. ValueError when it fails."""
        parts = ("q", "k", "lse", "v") if self.has_values else ("q", "k", "lse")
        names = [(layer, part) for layer in self.layers for part in parts]
        tensors = {f"layers.{layer}.{part}": self.tensor(layer, part).contiguous() for layer, part in names}
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
            RuntimeError,  # of torch, for document ids that are no numbers; RecursionError and the like too
            OverflowError,
            SafetensorError,
        ) as error:
            raise ValueError(f"{path} is a damaged attention record ({one_line(error)})") from None
        return cls(info, file)

    def _log_block(self, layer: int, head: int, rows: slice, columns: slice) -> Tensor:
        """ln of the weights, (rows, columns) in at least float32; _FORBIDDEN where the mask forbids."""
        q = self.tensor(layer, "q", (head, rows))  # (rows, D)
        k = self.tensor(layer, "k", (self.group(head), columns))  # (columns, D)
        dtype = torch.promote_types(q.dtype, torch.float32)
        i, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(columns.start, columns.stop)[None, :]
        lse, info = self.tensor(layer, "lse", (head, rows))[:, None], self.layer_info(layer)
        logs = log_weights(info, head, q.to(dtype) * info.q_scale @ k.to(dtype).T, lse, i, j)
        # Where only the future is forbidden, the columns up to the first query need no look at each pair.
        first = max(0, rows.start - columns.start) if is_plain_causal(info.rule) else 0
        logs[:, first:].masked_fill_(~allowed(info.rule, i, j[:, first:]), _FORBIDDEN)
        return logs

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


def _block_rows(start: int) -> int:
    """How many rows from `start` on make a block: fewer where a causal map is wide, whatever the layer's rule, so that
    the blocks of two records lie side by side."""
    return min(256, max(16, _BLOCK_WEIGHTS // (start + 256)))


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
