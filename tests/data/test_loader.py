import numpy as np
import pytest
import torch

from data.loader import BatchLoader

TOKENS = np.arange(1000, 1101).astype(np.uint16)  # each value occurs once, so a value tells its position


def loader(tokens=TOKENS, **options):
    return BatchLoader(tokens, **({"block_size": 8, "batch_size": 4, "order": "random", "seed": 3} | options))


@pytest.mark.parametrize("order", ["random", "sequential"])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_targets_are_the_inputs_one_token_later(order, dtype):
    stream = loader(TOKENS.astype(dtype), order=order)
    for _ in range(30):
        inputs, targets = stream.next_batch()
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert torch.equal((inputs - 1000 + 1) % 101, targets - 1000)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_random_windows_start_everywhere_and_never_wrap():
    stream = loader(TOKENS[:20], batch_size=1200)
    starts = stream.next_batch()[0][:, 0] - 1000
    counts = torch.bincount(starts, minlength=20)
    assert (counts[:12] > 60).all()  # 12 = 20 - 8 starts, 100 expected for each
    assert (counts[12:] == 0).all()


@pytest.mark.parametrize(
    ("block_size", "batch_size", "n_tokens"), [(8, 4, 101), (8, 4, 96), (7, 3, 10), (1, 1, 2), (5, 4, 6)]
)
def test_sequential_makes_every_token_a_target_once_in_any_n_targets(block_size, batch_size, n_tokens):
    stream = loader(TOKENS[:n_tokens], block_size=block_size, batch_size=batch_size, order="sequential")
    targets = torch.cat([stream.next_batch()[1].flatten() for _ in range(40)])
    for start in range(len(targets) - n_tokens + 1):
        assert sorted(targets[start : start + n_tokens].tolist()) == TOKENS[:n_tokens].tolist()
    assert targets[0] == 1001


@pytest.mark.parametrize("order", ["random", "sequential"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ranks_together_see_what_one_process_sees(order, world_size):
    alone = loader(order=order)
    ranks = [loader(order=order, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(5):
        whole = alone.next_batch()
        parts = [rank.next_batch() for rank in ranks]
        for i in range(2):
            assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_restored_loader_goes_on_exactly(order, tmp_path):
    stream = loader(order=order)
    for _ in range(7):
        stream.next_batch()
    torch.save(stream.state_dict(), tmp_path / "state")
    expected = [stream.next_batch() for _ in range(5)]
    again = loader(order=order, seed=99)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for inputs, targets in expected:
        got = again.next_batch()
        assert torch.equal(got[0], inputs)
        assert torch.equal(got[1], targets)


def test_the_state_is_a_snapshot_and_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    stream = loader()
    state = stream.state_dict()
    first = stream.next_batch()[0]
    stream.load_state_dict(state)
    assert torch.equal(stream.next_batch()[0], first)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_differ():
    assert not torch.equal(loader(seed=1).next_batch()[0], loader(seed=2).next_batch()[0])


def test_the_shortest_corpus_works():
    for order in ("random", "sequential"):
        assert loader(TOKENS[:9], order=order).next_batch()[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "shuffled"}, "choose from random, sequential"),
        ({"block_size": 0}, "must be at least 1"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside 0 … 1"),
        ({"world_size": 3}, r"4 does not divide among 3 processes \(4 = 3 × 1 \+ 1\)"),
        ({"block_size": 101}, "block_size 101 needs 102 tokens, but there are 101"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loader(**options)


def test_a_position_outside_the_corpus_is_refused():
    state = loader(order="sequential").state_dict() | {"position": 101}
    with pytest.raises(ValueError, match="position 101 is outside the 101 tokens"):
        loader(order="sequential").load_state_dict(state)


def test_a_memory_map_gives_the_same_batches(tmp_path):
    TOKENS.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    assert torch.equal(loader(mapped).next_batch()[0], loader().next_batch()[0])
