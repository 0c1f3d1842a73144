"""Every tile of every level is the record's own map, pooled; what is kept on disk is trusted only for the same head."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.attention.mask import MaskRule
from probes.capture import capture
from probes.record import AttentionRecord
from tests.probes.hand_built import record_of, uniform
from tests.probes.small import tiny, tokens
from viewer.tiles import (
    FORBIDDEN,
    TILE,
    is_made_at_once,
    kept_tile,
    key_of,
    last_level,
    load_tiles,
    make_tiles,
    n_cells,
    save_tiles,
    tile,
)


def finished(steps):
    """(progress, result) of `make_tiles`."""
    progress = []
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as end:
            return progress, end.value


def pooled(record, layer, head, level):
    """Written out: the largest allowed weight of each cell, -1 where there is none."""
    info, n = record.layer_info(layer), record.n_tokens
    may_see = info.rule.allowed(torch.arange(n), torch.arange(n)).reshape(n, n)
    whole = record.weights(layer, head).masked_fill(~may_see, -1)
    side, count = 1 << level, n_cells(n, level)
    cells = [
        [whole[i * side : (i + 1) * side, j * side : (j + 1) * side].max() for j in range(count)] for i in range(count)
    ]
    return torch.tensor(cells)


def whole_level(record, layer, head, level, tiles=None):
    """All tiles of a level, made now or taken from kept ones."""
    n = record.n_tokens

    def one(row, column):
        if tiles is None:
            return tile(record, layer, head, level, row, column)
        return kept_tile(tiles, n, level, row, column)

    count = n_cells(n, level + 8)
    return torch.cat([torch.cat([one(row, column) for column in range(count)], 1) for row in range(count)])


RECORDS = {
    "flash": {},
    "grouped": {"n_kv_head": 2, "position": "alibi", "attention": "tiled"},
    "window": {"attention": "window", "window": 40},
    "globals": {"attention": "window", "window": 40, "n_global": 3},
    "linear": {"attention": "linear"},
}


@pytest.mark.parametrize("n", [1, 2, 257, 400])
@pytest.mark.parametrize("kind", RECORDS)
def test_a_tile_is_the_pooled_map(kind, n):
    record = capture(tiny(**RECORDS[kind]), tokens(n))
    for level in range(last_level(n) + 1):
        found = whole_level(record, 1, 2, level)
        torch.testing.assert_close(found, pooled(record, 1, 2, level), atol=1e-6, rtol=0)


def test_documents_and_rules_that_look_ahead():
    n = 300
    documents = torch.tensor([0] * 100 + [1] * 150 + [2] * 50)[None]
    same = (documents[0][:, None] == documents[0]).float()
    for rule, weights in (
        (MaskRule(documents=documents), same.tril()),
        (MaskRule(causal=False, documents=documents), same),
        (MaskRule(causal=False, window=30), ((torch.arange(n)[:, None] - torch.arange(n)).abs() < 30).float()),
    ):
        record = record_of(weights / weights.sum(-1, keepdim=True), rule=rule)
        for level in (0, 1, 3):
            found = whole_level(record, 0, 0, level)
            torch.testing.assert_close(found, pooled(record, 0, 0, level), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "n"), [("flash", 2049), ("window", 5000), ("linear", 3001)])
def test_kept_tiles_are_the_pooled_map(kind, n):
    record = capture(tiny(block_size=n, n_head=2, n_layer=1, **RECORDS[kind]), tokens(n))
    progress, tiles = finished(make_tiles(record, 0, 1))
    assert progress == sorted(progress)
    assert progress[-1] == 1
    levels = [level for level in range(last_level(n) + 1) if not is_made_at_once(n, level)]
    assert levels[0] == 4
    base = whole_level(record, 0, 1, 4)
    for level in levels:
        found = whole_level(record, 0, 1, level, tiles)
        side = 1 << (level - 4)  # of the base level's cells
        expected = torch.full((n_cells(n, level), n_cells(n, level)), FORBIDDEN)
        for i in range(n_cells(n, level)):
            for j in range(n_cells(n, level)):
                expected[i, j] = base[i * side : (i + 1) * side, j * side : (j + 1) * side].max()
        # float16: half a unit in the last of 11 binary digits, and 2^-25 for the smallest numbers
        torch.testing.assert_close(found, expected, rtol=2**-11, atol=2**-25)
        assert torch.equal(found == FORBIDDEN, expected == FORBIDDEN)
    assert max(max(part.shape) for part in tiles.values()) <= TILE
    if kind == "window":  # the far corner has no tile
        assert "4/1/0" in tiles
        assert "4/0/1" not in tiles


def test_the_smallest_cells_agree_with_the_records_own_pooling():
    record = capture(tiny(), tokens(384))
    found = tile(record, 0, 1, 2, 0, 0)  # cells of 4 × 4
    torch.testing.assert_close(found.where(found != FORBIDDEN, torch.nan), record.pooled(0, 1, 96), equal_nan=True)


def test_a_number_that_is_none_is_not_taken_for_a_weight():
    weights = uniform(300)
    record = record_of(weights)
    record.tensor(0, "lse")[0, 200] = torch.nan
    found = tile(record, 0, 0, 1, 0, 0)
    assert found[100, :100].isnan().all()
    assert not found[:100].isnan().any()


def test_kept_tiles_come_back_only_for_what_they_are_of(tmp_path):
    record = capture(tiny(block_size=2100, n_head=2, n_layer=1), tokens(2100))
    _, tiles = finished(make_tiles(record, 0, 0))
    key, path = key_of(record, 0, 0), tmp_path / "cache" / "0-0.0.safetensors"
    assert load_tiles(path, key) is None
    save_tiles(tiles, path, key)
    assert all(torch.equal(load_tiles(path, key)[name], part) for name, part in tiles.items())
    assert load_tiles(path, key_of(record, 0, 1)) is None

    changed = {f"layers.0.{name}": record.tensor(0, name).clone() for name in ("q", "k", "lse")}
    for name in changed:
        others = changed | {name: changed[name] + 1e-3}
        assert key_of(AttentionRecord(record.info, others), 0, 0) != key, name

    save_file(load_file(path), path, metadata={"key": key, "sum": "0" * 64})  # other bytes than were written
    assert load_tiles(path, key) is None
    for damage in (b"", b"\0" * 100, b"not safetensors at all" * 10):
        path.write_bytes(damage)
        assert load_tiles(path, key) is None


def test_a_weight_above_one_is_no_tile():
    record = capture(tiny(), tokens(9))
    record.tensor(1, "lse")[2, 4] = -9.0
    with pytest.raises(ValueError, match="layer 1 head 2: a weight above one"):
        tile(record, 1, 2, 0, 0, 0)
