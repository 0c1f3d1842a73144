"""Several processes train as one would: a batch divided among them, or a sequence."""

import contextlib
import json
import socket
from pathlib import Path

import pytest
import torch

from tests.tiny import finish, start, tiny_config, tiny_flags
from train import train
from training.metrics import read_metrics
from training.parallel import share_of
from training.runtime import Runtime

CLOCK = {"seconds", "tokens_per_second"}


def last(folder: Path) -> dict:
    """The training state in last.pt."""
    return torch.load(folder / "last.pt", weights_only=True)


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides."""
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read_metrics(folder)]


_MAIN_SEVERAL_TIMES = """
import json, os, sys, train
for flags, os.environ["MASTER_PORT"] in json.loads(sys.argv[1]):
    print("code", train.main(flags))
"""


def _two_processes(*runs: list[str]) -> list[tuple[int, str, str]]:
    """What torchrun --nproc-per-node 2 does: the runs one after the other on two processes, each on a free port."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in runs]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in probes]
    arguments = ("-c", _MAIN_SEVERAL_TIMES, json.dumps(list(zip(runs, ports, strict=True))))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [start(*arguments, **place, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    try:
        return [finish(process, timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_processes_give_the_losses_of_one_also_when_resumed(tmp_path):
    changes = {"max_steps": 10, "micro_batch_size": 1}
    train(tiny_config(tmp_path, "one", **changes))
    first, other = _two_processes(
        tiny_flags(tmp_path, "two", batch_size=3),
        tiny_flags(tmp_path, "two", source="nowhere.txt"),
        tiny_flags(tmp_path, "two", stop_at=5, **changes),
        tiny_flags(tmp_path, "two", **changes),
        tiny_flags(tmp_path, "muon two", name="muon", **changes),
    )
    assert [line for line in first[1].splitlines() if line.startswith("code")] == [
        "code 2",
        "code 2",
        "code 0",
        "code 0",
        "code 0",
    ]
    assert other[1] == "code 2\ncode 2\ncode 0\ncode 0\ncode 0\n"  # only the main process speaks
    assert f"resuming {tmp_path / 'two'} after step 5" in first[1]
    for _, _, err in (first, other):
        assert "train.batch_size 3 / 2 processes = 1.5: not whole; try 2" in err
        assert err.count("\n") == 2
    assert "nowhere.txt" in first[2]
    assert "the main process has; see its message" in other[2]
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["step"] for row in two] == list(range(1, 11))
    assert [row.keys() for row in two] == [row.keys() for row in one]
    # float32 sums in another order: differences of 1e-7 grow a little over ten steps
    for got, expected in zip(two, one, strict=True):
        assert got == pytest.approx(expected, rel=1e-4)
    for p, q in zip(last(tmp_path / "two")["model"].values(), last(tmp_path / "one")["model"].values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    assert len(last(tmp_path / "two")["training"]["rng"]) == 2
    train(tiny_config(tmp_path, "muon", name="muon", **changes))
    for got, expected in zip(rows(tmp_path / "muon two"), rows(tmp_path / "muon"), strict=True):
        assert got == pytest.approx(expected, rel=2e-2)  # its update is rounded to bfloat16


def test_a_ring_of_two_gives_the_losses_and_parameters_of_one(tmp_path):
    """The sequence divided among processes; 22 targets a window of validation text are padded to divide by four."""
    changes = {"attention": "ring", "position": "rope", "n_kv_head": 1, "max_steps": 10, "eval_tokens": 86}
    changes["interval"] = 5  # looks at the heads take one process, and the other waits
    train(tiny_config(tmp_path, "one", **changes | {"attention": "reference"}))
    results = _two_processes(
        tiny_flags(tmp_path, "ring", block_size=18, **changes),
        tiny_flags(tmp_path, "ring", stop_at=5, **changes),
        tiny_flags(tmp_path, "ring", **changes),
    )
    assert results[1][1] == "code 2\ncode 0\ncode 0\n"
    assert "block_size 18 / (2 · 2 processes) = 4.5: a ring needs a whole number; try 20" in results[0][2]
    assert [row["step"] for row in read_metrics(tmp_path / "ring", "probes.jsonl")] == [5, 10]
    for got, expected in zip(rows(tmp_path / "ring"), rows(tmp_path / "one"), strict=True):
        assert got == pytest.approx(expected, rel=1e-4)
    for p, q in zip(last(tmp_path / "ring")["model"].values(), last(tmp_path / "one")["model"].values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_ring_takes_all_layers_or_none(tmp_path):
    runtime = Runtime(torch.device("cpu"), torch.float32, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"model\.attention ring,flash under 2 processes: .* use ring for all layers"):
        share_of(tiny_config(tmp_path, attention="ring,flash").model, runtime)
