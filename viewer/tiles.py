"""The map of a head at every zoom. Level 0 holds the weights themselves; a cell of level z the largest of 2^z × 2^z.

A maximum, because a mean hides single bright weights. -1 marks a cell all of whose pairs the mask forbids. Tiles of the
first levels are made when they are looked at. The levels from 4 on follow from one pass over the whole map, a strip of
rows at a time, and are kept in float16: of a head with 32,768 tokens 6 MB in place of 4 GB.
"""

import hashlib
from collections.abc import Generator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from probes.record import AttentionRecord, allowed_pairs, replacing

TILE = 256  # cells a side
FORBIDDEN = -1.0
_FIRST_KEPT = 4
_AT_ONCE = 2048  # tokens a side: so much of a map is made in some hundredths of a second
_THUMB = 64
_ROWS, _COLUMNS = 256, 2048  # of one block, which stays in a core's cache

Tiles = Mapping[str, Tensor]  # "level/row/column": cells; a tile that is not there is all forbidden


def n_cells(n_tokens: int, level: int) -> int:
    """Cells a side."""
    return -(-n_tokens >> level)


def last_level(n_tokens: int) -> int:
    """The first level that has at most 64 cells a side: the thumbnail."""
    return next(level for level in range(64) if n_cells(n_tokens, level) <= _THUMB)


def is_made_at_once(n_tokens: int, level: int) -> bool:
    """Whether a tile of this level is quick without the kept ones."""
    return level < _FIRST_KEPT or n_tokens <= _AT_ONCE


def weights(record: AttentionRecord, layer: int, head: int, rows: slice, columns: slice) -> Tensor:
    """Exact weights of some queries on some keys, (rows, columns) float32; -1 where the mask forbids."""
    block, rule = record.block(layer, head, rows, columns), record.layer_info(layer).rule
    if not rule.allows_all(range(rows.start, rows.stop), range(columns.start, columns.stop)):
        i, j = torch.arange(rows.start, rows.stop), torch.arange(columns.start, columns.stop)
        block.masked_fill_(~allowed_pairs(rule, i, j), FORBIDDEN)
    if block.max() > 1.01:
        raise ValueError(f"layer {layer} head {head}: a weight above one; q, k, log-sum-exp and mask do not fit")
    return block


def cells(record: AttentionRecord, layer: int, head: int, rows: slice, columns: slice, level: int) -> Tensor:
    """Of some tokens, the cells of a level: (rows / 2^level, columns / 2^level) float32. Both slices start at multiples
    of 2^level."""
    side, rule = 1 << level, record.layer_info(layer).rule
    out = torch.full((n_cells(rows.stop - rows.start, level), n_cells(columns.stop - columns.start, level)), FORBIDDEN)
    for top in range(rows.start, rows.stop, max(_ROWS, side)):
        bottom = min(top + max(_ROWS, side), rows.stop)
        for left in range(columns.start, columns.stop, max(_COLUMNS, side)):
            right = min(left + max(_COLUMNS, side), columns.stop)
            if not rule.allows_any(range(top, bottom), range(left, right)):
                continue
            block = _pooled(weights(record, layer, head, slice(top, bottom), slice(left, right)), side)
            first, second = (top - rows.start) >> level, (left - columns.start) >> level
            out[first : first + block.shape[0], second : second + block.shape[1]] = block
    return out


def tile(record: AttentionRecord, layer: int, head: int, level: int, row: int, column: int) -> Tensor:
    """One tile, made now."""
    rows, columns = (
        slice(spot * TILE << level, min((spot + 1) * TILE << level, record.n_tokens)) for spot in (row, column)
    )
    return cells(record, layer, head, rows, columns, level)


def make_tiles(record: AttentionRecord, layer: int, head: int) -> Generator[float, None, Tiles]:
    """All tiles of the kept levels, float16. Yields how much is done, 0 to 1, after each few hundred rows."""
    n, kept, rule = record.n_tokens, dict[str, Tensor](), record.layer_info(layer).rule
    strips = []
    for top in range(0, n, _ROWS):
        rows = slice(top, min(top + _ROWS, n))
        strips.append(cells(record, layer, head, rows, slice(0, n), _FIRST_KEPT).half())
        yield (rows.stop / n) ** (2 if rule.causal and rule.window is None else 1)
    grid = torch.cat(strips)
    for level in range(_FIRST_KEPT, last_level(n) + 1):
        for row, band in enumerate(grid.split(TILE)):
            for column, part in enumerate(band.split(TILE, 1)):
                if (part != FORBIDDEN).any():
                    kept[f"{level}/{row}/{column}"] = part.clone()
        grid = _pooled(grid, 2)
    return kept


def kept_tile(tiles: Tiles, n_tokens: int, level: int, row: int, column: int) -> Tensor:
    """One of the tiles that `make_tiles` made, float32."""
    sizes = [min(TILE, n_cells(n_tokens, level) - spot * TILE) for spot in (row, column)]
    found = tiles.get(f"{level}/{row}/{column}")
    return torch.full(sizes, FORBIDDEN) if found is None else found.float()


def key_of(record: AttentionRecord, layer: int, head: int) -> str:
    """SHA-256 of all that the weights of a head follow from."""
    info, digest = record.layer_info(layer), hashlib.sha256()
    rule, documents = info.rule, info.rule.documents
    about = (info.kind, info.scale, info.softcap, info.alibi_slopes, rule.causal, rule.window, rule.n_global, head)
    digest.update(repr((about, None if documents is None else documents.tolist())).encode())
    for name, index in (("q", head), ("k", record.group(head)), ("lse", head)):
        tensor = record.tensor(layer, name, index)
        digest.update(f"{tensor.dtype} {tensor.shape}".encode() + _bytes(tensor))
    return digest.hexdigest()


def save_tiles(tiles: Tiles, path: Path, key: str) -> None:
    """ValueError where the disk refuses."""
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make {path.parent}: {error.strerror}") from error
    with replacing(path) as beside:
        save_file(dict(tiles), beside, metadata={"key": key, "sum": _sum(tiles)})


def load_tiles(path: Path, key: str) -> Tiles | None:
    """What `save_tiles` wrote for the same key; None when it is not there, of something else, or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tiles = {name: file.get_tensor(name) for name in file.keys()} if about.get("key") == key else {}  # noqa: SIM118
        return tiles if about.get("key") == key and about.get("sum") == _sum(tiles) else None
    except (OSError, SafetensorError, ValueError):
        return None


def _pooled(block: Tensor, side: int) -> Tensor:
    """The largest of each side × side values."""
    block = F.pad(block, (0, -block.shape[1] % side, 0, -block.shape[0] % side), value=FORBIDDEN)
    return block.unflatten(0, (-1, side)).amax(1).unflatten(1, (-1, side)).amax(2)


def _sum(tiles: Tiles) -> str:
    digest = hashlib.sha256()
    for name in sorted(tiles):
        digest.update(name.encode() + _bytes(tiles[name]))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
