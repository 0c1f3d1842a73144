"""Choosing device and number type; the place among processes."""

import pytest
import torch

from training.config import RunConfig
from training.runtime import Runtime, choose_device, choose_dtype, running, seed_rank

CPU = torch.device("cpu")


@pytest.fixture
def only_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def two_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "foo", "meta", "", "cuda:x", "cpu:1"])
@pytest.mark.usefixtures("only_cpu")
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"device {name} is not on this machine; choose one of: auto, cpu$"):
        choose_device(name)


@pytest.mark.usefixtures("only_cpu")
def test_auto_takes_the_cpu_where_there_is_nothing_else():
    assert choose_device("auto") == CPU


@pytest.mark.usefixtures("two_cuda_devices")
def test_cuda_devices_are_counted():
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="cuda:2 is not on this machine"):
        choose_device("cuda:2")


def test_float16_is_for_cuda():
    with pytest.raises(ValueError, match=r"float16 is for cuda; on cpu choose bfloat16 or float32"):
        choose_dtype("float16", CPU)
    assert choose_dtype("float16", torch.device("cuda")) == torch.float16
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize(
    ("avx512", "amx", "expected"),
    [(False, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.bfloat16)],
)
def test_auto_takes_bfloat16_where_the_processor_has_it(avx512, amx, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert choose_dtype("auto", CPU) == expected


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_on_cuda(has_bfloat16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)  # noqa: ARG005
    assert choose_dtype("auto", torch.device("cuda")) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_autocast_touches_matrix_products_only_when_asked(dtype, expected):
    a = torch.ones(2, 2)
    with Runtime(CPU, dtype).autocast():
        assert (a @ a).dtype == expected
        assert (a + a).dtype == torch.float32


def test_one_process_needs_no_group():
    with running(RunConfig(device="cpu", dtype="float32", seed=5)) as runtime:
        assert (runtime.is_main, runtime.rank, runtime.world_size) == (True, 0, 1)
        assert (runtime.mean(0.1), runtime.max(3), runtime.sum(0.1, 2.0)) == (0.1, 3, [0.1, 2.0])
        assert not torch.distributed.is_initialized()
        with runtime.main_first():
            pass
        first = torch.rand(3)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_each_rank_draws_other_numbers_after_equal_parameters():
    config, drawn = RunConfig(seed=5), []
    for rank in range(3):
        torch.manual_seed(config.seed)
        seed_rank(config, Runtime(CPU, torch.float32, rank, world_size=3))
        drawn.append(torch.rand(4).tolist())
    assert len({tuple(numbers) for numbers in drawn}) == 3
