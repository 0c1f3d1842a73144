"""Compilation: on, off, auto, and a compiler that does not work."""

import pytest
import torch
from torch import nn

from model import GPT, ModelConfig
from tests.tiny import tiny_config
from train import train
from training.parallel import ALONE, _fits, compile_model, fit_micro_batch, gradient_sync, wrap
from training.runtime import Runtime

CPU = Runtime(torch.device("cpu"), torch.float32)
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 5, "dropout": 0.5}


@pytest.fixture
def model():
    return GPT(ModelConfig(**SIZES))


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_cpu_compiles_only_when_told_to(mode, model, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda _: pytest.fail("compiled"))
    assert compile_model(model, mode, CPU) is model
    assert capsys.readouterr().err == ""


class _BreaksWhenRun(nn.Module):
    def forward(self, _):
        raise RuntimeError("no C++ compiler found\nsecond line of the complaint")


class _BreaksGoingBack(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        logits = self.model(tokens)
        logits.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("no C++ compiler found")))
        return logits


def _breaks_at_once(_):
    raise RuntimeError("no C++ compiler found")


@pytest.mark.parametrize("broken", [_breaks_at_once, lambda _: _BreaksWhenRun(), _BreaksGoingBack])
def test_a_broken_compiler_costs_one_line_and_nothing_else(broken, model, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", broken)
    before, random_state = {name: p.clone() for name, p in model.state_dict().items()}, torch.get_rng_state()
    assert compile_model(model, "on", CPU) is model
    notice = capsys.readouterr().err
    assert notice == "torch.compile does not work here, training uncompiled: no C++ compiler found\n"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_working_compiler_leaves_no_trace_of_the_trial(model, monkeypatch, capsys):
    compiled = nn.Sequential(model)
    monkeypatch.setattr(torch, "compile", lambda _: compiled)
    random_state = torch.get_rng_state()
    assert compile_model(model, "on", CPU) is compiled
    assert capsys.readouterr().err == ""
    assert torch.equal(torch.get_rng_state(), random_state)  # dropout drew in the trial
    assert all(p.grad is None for p in model.parameters())


def test_one_process_is_not_wrapped(model):
    assert wrap(model, CPU) is model
    with gradient_sync(model, is_last_micro_step=False):
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    assert model.token_embedding.weight.grad is not None


@pytest.mark.parametrize("mode", ["off", "auto", "on"])
def test_training_goes_on_whether_torch_compile_works_or_not(mode, tmp_path, monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    train(tiny_config(tmp_path, "plain", max_steps=2, dropout=0.1))
    train(tiny_config(tmp_path, mode, max_steps=2, dropout=0.1, compile=mode))
    assert capsys.readouterr().err.count("training uncompiled: no C++ compiler\n") == (mode == "on")
    plain, other = (torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in ("plain", mode))
    assert all(torch.equal(p, other[name]) for name, p in plain.items())


class _Holds(nn.Module):
    """Stands in for a model on a GPU whose memory holds so many sequences."""

    def __init__(self, model, n_sequences):
        super().__init__()
        self.model, self.n_sequences = model, n_sequences

    def forward(self, tokens):
        logits = self.model(tokens)
        if len(tokens) > self.n_sequences:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return logits


def test_a_trial_of_memory_leaves_no_trace(model):
    random_state = torch.get_rng_state()
    assert [_fits(_Holds(model, 3), size, 4, CPU) for size in (1, 3, 4)] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("n_held", "expected"), [(100, 12), (12, 12), (11, 6), (5, 4), (1, 1)])
def test_the_micro_batch_is_the_largest_part_of_the_share_that_fits(n_held, expected, model, tmp_path, monkeypatch):
    config, gpu = tiny_config(tmp_path, batch_size=12), Runtime(torch.device("cuda"), torch.float32)
    monkeypatch.setattr("training.parallel._fits", lambda model, size, *_: _fits(_Holds(model, n_held), size, 4, CPU))
    assert fit_micro_batch(model, config, ALONE, gpu) == expected
    assert fit_micro_batch(model, config, ALONE, CPU) == 12  # only a GPU's memory is tried
    assert fit_micro_batch(model, tiny_config(tmp_path, batch_size=12, micro_batch_size=3), ALONE, gpu) == 3


def test_a_sequence_that_does_not_fit_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr("training.parallel._fits", lambda *_: False)
    with pytest.raises(ValueError, match="not even one sequence of 16 tokens fits the memory of cuda"):
        fit_micro_batch(model, tiny_config(tmp_path), ALONE, Runtime(torch.device("cuda"), torch.float32))
