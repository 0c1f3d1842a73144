"""The same numbers as another implementation: transformers' GPT-2 with its weights copied into ours."""

from dataclasses import replace

import pytest
import torch

from model import GPT
from model.config import SamplingConfig
from model.generate import generate
from model.gpt2_weights import from_gpt2


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers", reason="transformers (test extra) is not installed")
    config = transformers.GPT2Config(
        n_layer=3,
        n_head=4,
        n_embd=32,
        n_positions=24,
        vocab_size=50,
        attn_implementation="eager",
        # GPT-2's own 0.02 leaves the attention of so small a model nearly uniform, whatever the weights are.
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():  # biases start at zero, norms at one: a swapped pair would not show
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(params=["reference", "flash"])
def ours(theirs, request):
    config, weights = from_gpt2(theirs.state_dict(), n_head=4)
    assert (config.n_layer, config.n_embd, config.block_size, config.vocab_size) == (3, 32, 24, 50)
    model = GPT(replace(config, attention=request.param)).double().eval()
    model.load_state_dict(weights)
    return model


def test_same_logits_and_the_same_attention_maps(theirs, ours):
    maps = []

    def capture(path, args, kwargs, out):  # noqa: ARG001
        maps.append(path.weights(args[0], args[1], rule=kwargs["rule"]))

    for block in ours.blocks:
        block.attn.path.register_forward_hook(capture, with_kwargs=True)
    tokens = torch.randint(50, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens, output_attentions=True)
        logits = ours(tokens)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-10, atol=1e-10)
    assert len(maps) == len(expected.attentions) == 3
    for got, wanted in zip(maps, expected.attentions, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert maps[0].std() > 0.05  # far from uniform: the comparison has something to compare


def test_same_greedy_continuation(theirs, ours):
    prompt = torch.randint(50, (2, 5))
    mask = torch.ones_like(prompt)
    wanted = theirs.generate(
        prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    steps = generate(ours, prompt, max_new_tokens=12, sampling=SamplingConfig(temperature=0), n_valid_tokens=50)
    assert torch.equal(torch.stack(list(steps), dim=1), wanted[:, 5:])


def test_unknown_parameter_is_named(theirs):
    with pytest.raises(ValueError, match=r"'h\.0\.attn\.gate\.weight' is no parameter of GPT-2"):
        from_gpt2({**theirs.state_dict(), "transformer.h.0.attn.gate.weight": torch.ones(1)}, n_head=4)
