"""Compilation: on, off, auto, and a compiler that does not work."""

import pytest
import torch
from torch import nn

from model import GPT, ModelConfig
from tests.tiny import tiny_config
from train import train
from training.parallel import compile_model, gradient_sync, wrap
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
