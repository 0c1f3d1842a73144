"""The quick decoder against the model itself, for every option; and when it steps aside."""

from dataclasses import fields
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, ModelConfig
from model.attention import available
from model.config import SamplingConfig
from model.decode import Matrix, decoder_for
from model.generate import generate

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 24, "vocab_size": 21}


def model_of(**options):
    """Untied unless asked for, with weights large enough that every part shows in the logits."""
    model = GPT(ModelConfig(**{**SIZES, "tied_head": False, **options})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def every_option():
    """All choices and both truth values of every field, one at a time, and combinations that meet in one line."""
    for field in fields(ModelConfig):
        values = get_args(field.type) or ((True, False) if field.type is bool else ())
        yield from ({field.name: value} for value in values)
    yield from ({"attention": path} for path in available())
    yield from ({"n_kv_head": 2}, {"n_kv_head": 1, "position": "rope"}, {"logit_softcap": 3.0}, {"vocab_size": 24})
    yield {"attention_softcap": 1.0, "attention": "reference"}
    yield {"attention": "window,flash", "window": 5, "n_global": 2}
    yield {"attention": "linear,flash", "qk_norm": True, "bias": True, "mlp": "swiglu"}
    yield {"position": "rope", "qk_norm": True, "n_kv_head": 2, "mlp": "relu2", "norm": "rmsnorm", "bias": True}


def adapted(options):
    """Some choices need others: alibi a path that knows it, a pinned kernel one that runs on CPU."""
    if options.get("position") == "alibi":
        return options | {"attention": "reference"}
    if options.get("flash_kernel") in ("efficient", "cudnn"):
        pytest.skip("a kernel for CUDA")
    if options.get("causal") is False:
        pytest.skip("decoding is causal by nature")
    return options


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("options", list(every_option()), ids=str)
@torch.no_grad()
def test_logits_are_those_of_the_model(options, n_rows):
    """Eighteen tokens after a prompt of five, against one pass over the whole text."""
    model = model_of(**adapted(options))
    decoder = decoder_for(model, n_rows)
    if model.config.norm_placement == "post":
        assert decoder is None
        return
    tokens = torch.randint(SIZES["vocab_size"], (n_rows, 23))
    cache = model.new_cache()
    model(tokens[:, :5], cache=cache)
    got = [decoder(tokens[:, i], cache) for i in range(5, 23)]
    torch.testing.assert_close(torch.stack(got, dim=1), model(tokens)[:, 5:], atol=2e-4, rtol=2e-4)
    assert cache.n_tokens == 23


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("options", list(every_option()), ids=str)
@torch.no_grad()
def test_bfloat16_is_as_far_from_float64_as_autocast_is(options, n_rows):
    """The same roundings: the error is that of the model under autocast, give or take, and not of another kind."""
    model = model_of(**adapted(options))
    tokens, cache = torch.randint(SIZES["vocab_size"], (n_rows, 23)), model.new_cache()
    with torch.autocast("cpu", torch.bfloat16):
        decoder = decoder_for(model, n_rows)
        rounded = model(tokens)[:, 5:]
        model(tokens[:, :5], cache=cache)
        if decoder is None:
            assert model.config.norm_placement == "post"
            return
        got = torch.stack([decoder(tokens[:, i], cache) for i in range(5, 23)], dim=1)
    exact = model.double()(tokens)[:, 5:]
    errors = [(logits.double() - exact).square().mean().sqrt() for logits in (got, rounded)]
    assert 1e-4 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("n_rows", [1, 2, 17])
@pytest.mark.parametrize("n_out", [3, 4, 66])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("has_onednn", [True, False])
@torch.no_grad()
def test_a_matrix_is_its_linear_layers(n_rows, n_out, bias, dtype, tolerance, has_onednn, monkeypatch):
    if not has_onednn:  # or none that knows the number type
        monkeypatch.setattr("model.decode._can_pack", lambda _: False)
    layers = [nn.Linear(10, n_out, bias=bias), nn.Linear(10, 7, bias=bias)]
    x, close = torch.randn(n_rows, 10), {"atol": tolerance, "rtol": tolerance}
    wanted = torch.cat([layer.double()(x.double()) for layer in layers], dim=1).float()
    got = Matrix(n_rows, dtype, *(layer.float() for layer in layers))(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, **close)
    square = nn.Linear(8, 8, bias=bias)
    total, y = torch.randn(n_rows, 8), torch.randn(n_rows, 8)
    wanted = total + F.linear(y, square.weight, square.bias)
    Matrix(n_rows, dtype, square).add_to(total, y)
    torch.testing.assert_close(total, wanted, **close)


def test_it_steps_aside():
    """For hooks, which are to see every call; in training, where dropout acts; in other number types."""
    model = model_of()
    assert decoder_for(model, 1) is not None
    hook = model.blocks[1].attn.path.register_forward_hook(lambda *_: None)
    assert decoder_for(model, 1) is None
    hook.remove()
    assert decoder_for(model, 1) is not None
    with torch.autocast("cpu", torch.float16):
        assert decoder_for(model, 1) is None
    assert decoder_for(model.train(), 1) is None
    assert decoder_for(model.eval().double(), 1) is None
    assert decoder_for(model_of(n_embd=6, n_head=2), 1) is None


@pytest.mark.parametrize("n_rows", [1, 3])
def test_generation_past_the_context_with_and_without_cache(n_rows):
    """In float32, where the quick decoder runs; the context is cut three times."""
    model = model_of(position="rope")
    options = {"max_new_tokens": 60, "sampling": SamplingConfig(temperature=0), "n_valid_tokens": 20}
    prompt = torch.randint(20, (n_rows, 3))
    cached, whole = (torch.stack(list(generate(model, prompt, use_cache=c, **options))) for c in (True, False))
    assert torch.equal(cached, whole)


def test_a_hook_sees_every_call_of_a_generation():
    model, calls = model_of(), []
    model.blocks[0].attn.path.register_forward_hook(lambda *_: calls.append(1))
    options = {"max_new_tokens": 7, "sampling": SamplingConfig(temperature=0), "n_valid_tokens": 20}
    list(generate(model, torch.randint(20, (1, 3)), **options))
    assert len(calls) == 7
