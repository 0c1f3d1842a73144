"""GPT: shapes, every configuration, sizes and initialisation by formula."""

import itertools
import math

import pytest
import torch

from model import GPT, ModelConfig
from model.config import SamplingConfig
from model.generate import generate

BABY = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65}  # nanoGPT's baby GPT


def small(**options):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "vocab_size": 13, "attention": "reference"}
    return ModelConfig(**{**sizes, **options})


CHOICES = list(
    itertools.product(
        ("layernorm", "rmsnorm"),
        ("pre", "post"),
        ("gelu", "relu2", "swiglu", "none"),
        ("learned", "sinusoidal", "rope", "alibi", "none"),
    )
)
# Each row of the table goes with one value of the rest, so that all pairs of neighbours meet without 1,280 models.
REST = [
    {},
    {"qk_norm": True, "n_kv_head": 1},
    {"bias": True, "tied_head": False, "n_kv_head": 2},
    {"logit_softcap": 2.0, "attention_softcap": 5.0, "qk_norm": True, "bias": True},
    {"causal": False, "tied_head": False},
    {"attention": "flash", "n_kv_head": 2, "qk_norm": True},
    {"dropout": 0.1, "attention_dropout": 0.1},
    {"attention": "tiled", "window": 5, "n_global": 2, "n_kv_head": 2},
    {"attention": "window,reference", "window": 4},
    {"attention": "linear", "n_kv_head": 2, "linear_feature_map": "relu"},
    {"attention": "ring", "attention_softcap": 5.0},
    {"attention": "dense", "embedding_norm": True, "tied_head": False, "n_kv_head": 2},
    {"previous_embedding": True, "embedding_norm": True},
    {"attention": "window", "window": 3, "n_global": 1, "full_attention_every": 2},
]


def all_configs():
    for number, (norm, placement, mlp, position) in enumerate(CHOICES):
        rest = dict(REST[number % len(REST)])
        if position == "alibi":
            rest |= {"attention": "reference", "full_attention_every": 0}
        yield small(norm=norm, norm_placement=placement, mlp=mlp, position=position, **rest)


def expected_size(c):
    """Number of parameters, counted from the drawing of the architecture and not from the code."""
    linear = lambda n_in, n_out: n_in * n_out + n_out * c.bias  # noqa: E731
    norm = c.n_embd * (1 + (c.bias and c.norm == "layernorm"))
    kv_width = (c.n_kv_head or c.n_head) * c.n_embd // c.n_head
    attention = 2 * linear(c.n_embd, c.n_embd) + 2 * linear(c.n_embd, kv_width)
    if c.mlp == "none":
        mlp = 0
    elif c.mlp == "swiglu":
        hidden = math.ceil(8 * c.n_embd / 3 / 8) * 8
        mlp = 2 * linear(c.n_embd, hidden) + linear(hidden, c.n_embd) + norm
    else:
        mlp = linear(c.n_embd, 4 * c.n_embd) + linear(4 * c.n_embd, c.n_embd) + norm
    embeddings = c.vocab_size * c.n_embd * (1 if c.tied_head else 2)
    embeddings += c.block_size * c.n_embd if c.position == "learned" else 0
    embeddings += (c.vocab_size + 1) * c.n_embd if c.previous_embedding else 0
    return embeddings + c.n_layer * (attention + norm + mlp) + norm * (c.norm_placement == "pre")


def test_every_configuration_builds_runs_learns_and_decodes():
    """Forward, gradient to every parameter, size by formula, cached = uncached greedy tokens."""
    tokens = torch.randint(13, (2, 12))
    for config in all_configs():
        model = GPT(config)
        logits = model(tokens)
        assert logits.shape == (2, 12, 13)
        assert logits.dtype == torch.float32
        assert model.n_parameters() == expected_size(config), config
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        for name, parameter in model.named_parameters():
            assert torch.isfinite(parameter.grad).all(), (name, config)
            assert parameter.grad.any(), (name, config)
        if config.causal:
            model.double().eval()
            with torch.no_grad():
                cache, whole = model.new_cache(), model(tokens)
                steps = [model(part, cache=cache) for part in tokens.split([5, 1, 1, 5], dim=1)]
            torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-9, atol=1e-11)


def test_with_zero_outputs_every_block_starts_as_the_identity():
    model = GPT(small(zero_outputs=True, position="rope", tied_head=False))
    tokens = torch.randint(13, (2, 12))
    torch.testing.assert_close(model(tokens), model.logits(model.final_norm(model.token_embedding(tokens))))
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.3)


def test_embeddings_of_a_position_by_hand():
    """Token and the token before it, of which the first has none (row 13); then unit root-mean-square."""
    model = GPT(small(previous_embedding=True, embedding_norm=True, zero_outputs=True, position="none"))
    tokens = torch.tensor([[3, 7, 7], [0, 12, 3]])
    token, before = model.token_embedding.weight, model.previous_embedding.weight
    rows = [[token[a] + before[b] for a, b in zip(row, [13, *row[:-1]], strict=True)] for row in tokens.tolist()]
    x = torch.stack([torch.stack(row) for row in rows])
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(model(tokens), model.logits(model.final_norm(x)))


def test_baby_gpt_has_nanogpts_size():
    """10.65 M without the 256 · 384 learned positions, as nanoGPT reports it: 65·C embeddings, 6 · (12·C² + 2·C)
    blocks, C final norm."""
    assert 65 * 384 + 6 * (12 * 384**2 + 2 * 384) + 384 == 10_646_784
    assert GPT(ModelConfig(**BABY)).n_parameters() == 10_646_784 + 256 * 384


def test_gpt2_has_its_published_size():
    """124 M: the small model of GPT-2, with biases; counted on the meta device."""
    config = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, bias=True)
    with torch.device("meta"):
        assert GPT(config).n_parameters() == 124_439_808 == expected_size(config)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_loss_is_that_of_guessing(tied):
    """ln(vocab): the logits of a fresh pre-norm model have variance s² = C · 0.02² about zero, which adds about s²/2 to
    the loss; C = 64 makes that 0.013."""
    model = GPT(small(n_embd=64, vocab_size=500, block_size=64, tied_head=tied))
    tokens = torch.randint(500, (8, 65))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(500)) < 0.05


def test_initial_deviations():
    """0.02, and 0.02/√(2·n_layer) for the two matrices of a block that write to the residual stream (GPT-2, section
    2.3); within 5 %. Biases 0, norms 1."""
    model = GPT(small(n_layer=8, n_embd=128, vocab_size=200, block_size=100, bias=True, mlp="swiglu", tied_head=False))
    n_seen = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            n_seen += 1
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert abs(parameter.std().item() / (0.02 / 4 if writes else 0.02) - 1) < 0.05, name
            assert abs(parameter.mean().item()) < 0.02 / 10, name
        else:
            assert (parameter == float("norm" in name and name.endswith("weight"))).all(), name
    assert n_seen == 2 + 8 * 7 + 1


def test_tied_head_is_the_embedding_itself():
    tied, untied = GPT(small()), GPT(small(tied_head=False))
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert untied.lm_head.weight is not untied.token_embedding.weight


def test_softcap_bounds_the_logits():
    tokens, model = torch.randint(13, (1, 12)), GPT(small(logit_softcap=0.5))
    torch.nn.init.normal_(model.token_embedding.weight, std=3)
    plain = model.lm_head(model.final_norm(torch.randn(4, 16)))
    assert plain.abs().max() > 2
    assert model(tokens).abs().max() <= 0.5
    x = torch.randn(4, 16)
    torch.testing.assert_close(model.logits(x), 0.5 * torch.tanh(x @ model.token_embedding.weight.T / 0.5))


@pytest.mark.parametrize("option", ["dropout", "attention_dropout"])
def test_dropout_acts_in_training_only(option):
    tokens, model = torch.randint(13, (1, 12)), GPT(small(**{option: 0.5}))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_dropout_sits_on_the_embedding_and_on_each_sublayers_output():
    """With each dropout made to drop all, a pre-norm block is the identity, a post-norm block its norms, and nothing of
    the embedding is left."""
    for placement in ("pre", "post"):
        model = GPT(small(norm_placement=placement))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))
        x, block = torch.randn(1, 12, 16), model.blocks[0]
        kept = x if placement == "pre" else block.mlp_norm(block.attn_norm(x))
        assert torch.equal(block(x, positions=torch.arange(12)), kept)
        assert not model(torch.randint(13, (1, 12))).any()


def test_bidirectional_model_sees_the_future():
    tokens = torch.randint(12, (1, 12))
    changed = tokens.clone()
    changed[0, -1] = 12
    for causal in (True, False):
        model = GPT(small(causal=causal)).eval()
        assert torch.equal(model(tokens)[:, 0], model(changed)[:, 0]) == causal


def test_longer_than_block_size_is_refused():
    model = GPT(small())
    with pytest.raises(ValueError, match=r"13 tokens are more than model\.block_size 12"):
        model(torch.zeros(1, 13, dtype=torch.long))
    cache = model.new_cache()
    model(torch.zeros(1, 10, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="13 tokens"):
        model(torch.zeros(1, 3, dtype=torch.long), cache=cache)


def test_a_few_steps_learn_a_pattern():
    """The loss of a repeated sequence falls from ln 13 to near zero: the gradient points the right way."""
    tokens = torch.arange(13).repeat(2, 2)[:, :13]
    model = GPT(small(position="rope"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(80):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :12]).flatten(0, 1), tokens[:, 1:13].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    sampling = SamplingConfig(temperature=0)
    steps = generate(model.eval(), tokens[:1, :3], max_new_tokens=9, sampling=sampling, n_valid_tokens=13)
    assert torch.cat(list(steps)).tolist() == list(range(3, 12))
