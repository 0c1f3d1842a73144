"""Ring attention on several processes: each has its part of the sequence, together they give what one process gives.

`python -m tests.model.attention.test_ring RANK PROCESSES FILE` is one of the processes; FILE is where they meet.
"""

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from model.attention import build
from model.attention.mask import MaskRule
from model.attention.reference import ReferenceAttention
from model.attention.ring import ring_positions
from tests.tiny import finish, start

N_TOKENS = 24  # 4, 6 or 8 chunks of 6, 4 or 3 tokens: tiles of 4 are cut off, full, or never full
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 6 + [2] * 11, [3] * 16 + [4] * 8])
CASES = {
    "causal": (MaskRule(), {}),
    "bidirectional": (MaskRule(causal=False), {}),
    "window": (MaskRule(window=5), {}),
    "window and globals": (MaskRule(window=3, n_global=2), {}),
    "window, globals, bidirectional": (MaskRule(window=4, n_global=3, causal=False), {}),
    "documents": (MaskRule(documents=DOCUMENTS), {}),
    "documents, window, bidirectional": (MaskRule(documents=DOCUMENTS, window=6, causal=False), {}),
    "softcap": (MaskRule(), {"softcap": 0.8}),
    "alibi": (MaskRule(), {"alibi": True}),
    "alibi, bidirectional": (MaskRule(causal=False), {"alibi": True, "softcap": 2.0, "scale": 0.7}),
    "one tile": (MaskRule(), {"block": 256}),
}


def part_of(x, rank, world_size):
    runs = ring_positions(N_TOKENS, rank, world_size)
    return torch.cat([x[:, :, run.start : run.stop] for run in runs], dim=2)


def check_case(name, rank, world_size):
    """This process's out, log-sum-exp and gradients are its part of those that `reference` has for the whole."""
    rule, options = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    q, pull = (torch.randn(2, 4, N_TOKENS, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, N_TOKENS, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    results = []
    ring = build("ring", **{"block": 4, **options})
    score = {key: value for key, value in options.items() if key != "block"}
    for path, cut in ((ReferenceAttention(**score), None), (ring, part_of)):
        local = [x if cut is None else cut(x, rank, world_size) for x in (q, k, v, pull)]
        inputs = [x.clone().requires_grad_() for x in local[:3]]
        out = path(*inputs, rule=rule)
        lse = path.log_sum_exp(*inputs[:2], rule=rule).unsqueeze(-1)
        results.append([out, lse, *torch.autograd.grad(out, inputs, local[3])])
    for what, whole, got in zip(("out", "log-sum-exp", "dq", "dk", "dv"), *results, strict=True):
        wanted = part_of(whole, rank, world_size)
        message = f"{name}: {what} of process {rank} of {world_size}"
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11, msg=lambda m, where=message: f"{where}: {m}")
    assert ring.kernel(q, k, v, rule=rule) == f"ring of {world_size}"


def check_refusals(world_size):
    """In all processes at once and before anything is sent, so that none waits for another."""
    x = torch.randn(1, 1, 3, 4)
    message = f"{3 * world_size} tokens does not divide into {2 * world_size} chunks for a ring of {world_size}"
    with pytest.raises(ValueError, match=message):
        build("ring")(x, x, x, rule=MaskRule())
    with pytest.raises(ValueError, match=rf"a ring of {world_size} does not decode \(1 queries, 3 keys\)"):
        build("ring")(x[:, :, :1], x, x, rule=MaskRule())


def run_process(rank, world_size, file):
    torch.set_num_threads(1)
    store = dist.FileStore(file, world_size)  # a file and no port: nobody else can take it first
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    for name in CASES:
        check_case(name, rank, world_size)
    check_refusals(world_size)
    dist.barrier()
    dist.destroy_process_group()
    print(f"{len(CASES)} cases")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_several_processes_are_one(world_size, tmp_path):
    module = "tests.model.attention.test_ring"
    file = str(tmp_path / "meeting")
    processes = [start("-m", module, str(rank), str(world_size), file) for rank in range(world_size)]
    try:
        results = [finish(process, timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert results == [(0, f"{len(CASES)} cases\n", "")] * world_size, results


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_one(name):
    check_case(name, 0, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_process_has_as_many_tokens_and_as_many_causal_pairs(world_size):
    """Chunks r and 2W - 1 - r: position p has p + 1 pairs, so chunks from both ends have the same in sum."""
    parts = [[p for run in ring_positions(N_TOKENS, rank, world_size) for p in run] for rank in range(world_size)]
    assert sorted(p for part in parts for p in part) == list(range(N_TOKENS))
    assert all(part == sorted(part) for part in parts)
    assert {len(part) for part in parts} == {N_TOKENS // world_size}
    assert {sum(p + 1 for p in part) for part in parts} == {N_TOKENS * (N_TOKENS + 1) // 2 // world_size}


def test_a_sequence_that_does_not_divide_is_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match="a sequence of 50 tokens does not divide into 8 chunks for a ring of 4"):
        ring_positions(50, 0, 4)
    assert ring_positions(50, 0, 1) == [range(50)]


if __name__ == "__main__":
    run_process(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
