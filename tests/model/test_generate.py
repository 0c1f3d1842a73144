"""Sampling against brute-force definitions; decoding with and without a cache."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import GPT, ModelConfig
from model.config import SamplingConfig
from model.generate import context_start, draw, filter_logits, generate

LOGITS = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=12)  # halves: ties are frequent
GREEDY = SamplingConfig(temperature=0)


def kept(logits, **options):
    row = filter_logits(torch.tensor([logits], dtype=torch.float64), SamplingConfig(**options))[0]
    return {token for token, value in enumerate(row.tolist()) if value > -math.inf}


def softmax(logits):
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_what_fewer_than_k_tokens_beat(logits, k):
    """Ties with the k-th token stay: which of them goes would be an accident of sorting."""
    expected = {i for i, x in enumerate(logits) if sum(other > x for other in logits) < k}
    assert kept(logits, top_k=k) == expected
    assert len(expected) >= min(k, len(logits))


@given(LOGITS, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p):
    """Its size and its probability are those of the greedy choice from the likeliest down; ties may swap."""
    stays, probabilities = kept(logits, top_p=p), softmax(logits)
    sizes, total = 0, 0.0
    for probability in sorted(probabilities, reverse=True):
        if abs(total - p) < 1e-9:
            return  # on the edge, rounding decides
        if total >= p:
            break
        sizes, total = sizes + 1, total + probability
    assert len(stays) == sizes >= 1
    assert math.isclose(sum(probabilities[i] for i in stays), total, rel_tol=1e-9)


@given(LOGITS, st.floats(0.01, 1.0))
def test_min_p_keeps_a_share_of_the_likeliest(logits, share):
    probabilities = softmax(logits)
    floor = share * max(probabilities)
    if any(abs(p - floor) < 1e-12 for p in probabilities if p != max(probabilities)):
        return
    assert kept(logits, min_p=share) == {i for i, p in enumerate(probabilities) if p >= floor * (1 - 1e-12)}


@given(
    LOGITS,
    st.floats(0.01, 100),
    st.integers(0, 14),
    st.floats(0.001, 1),
    st.floats(0, 1),
)
def test_the_likeliest_token_always_stays(logits, temperature, top_k, top_p, min_p):
    """Some token stays under any filters together, and each that stays keeps its logit, divided by the temperature."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    stays = kept(logits, **options)
    assert stays
    assert max(logits) in {logits[i] for i in stays}
    row = filter_logits(torch.tensor([logits], dtype=torch.float64), SamplingConfig(**options))[0]
    for token in stays:
        assert math.isclose(row[token].item(), logits[token] / temperature, rel_tol=1e-12)


def test_values_too_small_for_float32_keep_the_likeliest_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5e4, -5e4, 0.0]])
    for tiny in (1e-30, 1e-300, 5e-324):
        for options in ({"temperature": tiny}, {"top_p": tiny}, {"temperature": tiny, "top_p": tiny, "min_p": tiny}):
            assert draw(logits, SamplingConfig(**options)).tolist() == [1, 0]


def test_filters_apply_in_the_documented_order():
    """Probabilities 0.4, 0.3, 0.2, 0.1. Top-k 2 leaves 4/7 and 3/7, of which top-p 0.5 keeps one; without top-k
    it keeps two. A temperature of 1/2 squares the odds first: 16/30 alone reaches one half."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, top_k=2, top_p=0.5) == {0}
    assert kept(logits, top_p=0.5) == {0, 1}
    assert kept(logits, temperature=0.5, top_p=0.5) == {0}
    # 0.1/0.4 survives min-p 0.25 at temperature 1 and not at 1/2
    assert kept(logits, min_p=0.24) == {0, 1, 2, 3}
    assert kept(logits, min_p=0.24, temperature=0.5) == {0, 1, 2}


def test_rows_are_filtered_apart():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert filter_logits(logits, SamplingConfig(top_k=1)).isfinite().tolist() == [
        [True, False, False],
        [False, True, False],
    ]


def test_draw_follows_the_probabilities():
    """20,000 draws from 0.5, 0.3, 0.2: within 4 standard errors (0.014)."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    share = draw(logits, SamplingConfig()).bincount() / 20_000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.014, rtol=0)
    hot = draw(logits, SamplingConfig(temperature=0.5)).bincount() / 20_000
    torch.testing.assert_close(hot, torch.tensor([25.0, 9.0, 4.0]) / 38, atol=0.014, rtol=0)
    assert (draw(logits, GREEDY) == 0).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be 0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -2}, "top-k is -2"),
        ({"top_p": 0}, "top-p is 0; it must be above 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"min_p": -0.1}, "min-p is -0.1"),
        ({"min_p": 2}, "min-p is 2"),
    ],
)
def test_impossible_sampling_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**wrong)


# --- decoding ---------------------------------------------------------------------------------------------------------


def model_of(**options):
    # An untied head: a tied one with random weights mostly repeats the token that it sees.
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 10, "vocab_size": 20, "tied_head": False}
    model = GPT(ModelConfig(**{**sizes, **options})).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def continuation(model, prompt, n, **options):
    options = {"sampling": GREEDY, "n_valid_tokens": 20, **options}
    return torch.stack(list(generate(model, prompt, max_new_tokens=n, **options)), dim=1)


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rope", "alibi", "none"])
@pytest.mark.parametrize("n_prompt", [1, 9, 10, 11, 27])
def test_the_same_tokens_with_and_without_cache_past_block_size(position, n_prompt):
    """Greedy, and drawn with one seed: random weights make greedy decoding repeat itself soon, draws don't."""
    model = model_of(position=position, attention="reference" if position == "alibi" else "flash")
    prompt = torch.randint(20, (2, n_prompt))
    for sampling in (GREEDY, SamplingConfig()):
        cached, whole = (
            continuation(
                model, prompt, 35, sampling=sampling, use_cache=use_cache, generator=torch.Generator().manual_seed(1)
            )
            for use_cache in (True, False)
        )
        assert torch.equal(cached, whole)
    assert cached.unique().numel() > 8


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "window", "window": 3},
        {"attention": "window", "window": 2, "n_global": 2},
        {"attention": "window,flash", "window": 4},
        {"attention": "linear"},
        {"attention": "linear,window", "window": 3, "n_global": 1},
        {"attention": "tiled", "window": 4, "n_global": 1},
        {"attention": "ring"},
        {"attention": "flex", "window": 4},
    ],
)
@pytest.mark.parametrize("n_prompt", [1, 9])
def test_every_path_decodes_what_the_whole_context_says(options, n_prompt):
    """Past the window and past block_size, one new token a step."""
    model = model_of(position="rope", **options)
    prompt = torch.randint(20, (2, n_prompt))
    cached, whole = (continuation(model, prompt, 24, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("block_size", [1, 2, 3, 10])
def test_context_is_cut_to_its_newer_half_and_grows_again(block_size):
    """The policy by simulation: grow to block_size, then drop the older half (rounded down, at least one)."""
    start = 0
    for n_tokens in range(1, 6 * block_size):
        if n_tokens - start > block_size:
            start += max(1, block_size // 2)
        assert context_start(n_tokens, block_size) == start
        assert 1 <= n_tokens - start <= block_size


def test_decoding_is_what_the_whole_context_says():
    """Each greedy token against one forward pass over the context of the stated policy."""
    model, prompt = model_of(), torch.randint(20, (1, 4))
    tokens = torch.cat((prompt, continuation(model, prompt, 30)), dim=1)
    for n in range(4, 34):
        start = context_start(n, 10)
        assert model(tokens[:, start:n])[0, -1].argmax() == tokens[0, n]


def test_padded_rows_are_never_drawn():
    """The padding has by far the largest logits; neither argmax nor sampling takes it."""
    model, prompt = model_of(), torch.randint(17, (4, 3))
    with torch.no_grad():
        model.lm_head.weight[17:] = 100 * model.lm_head.weight[:3].abs()
        model.lm_head.weight[:17] *= 0.01
    assert (continuation(model, prompt, 20) >= 17).any()
    for sampling in (GREEDY, SamplingConfig(temperature=5.0), SamplingConfig(top_k=1)):
        assert (continuation(model, prompt, 20, n_valid_tokens=17, sampling=sampling) < 17).all()


def test_rows_of_a_batch_are_independent():
    model, prompts = model_of(), torch.randint(20, (3, 5))
    together = continuation(model, prompts, 20)
    for row in range(3):
        assert torch.equal(together[row : row + 1], continuation(model, prompts[row : row + 1], 20))


def test_seed_fixes_the_draws_and_leaves_the_global_generator_alone():
    model, prompt = model_of(), torch.randint(20, (2, 3))
    before = torch.get_rng_state()

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return continuation(model, prompt, 20, sampling=SamplingConfig(), generator=generator)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_empty_prompt_is_refused_and_the_prompt_is_left_alone():
    model, prompt = model_of(), torch.randint(20, (1, 3))
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        continuation(model, prompt[:, :0], 3)
    copy = prompt.clone()
    assert continuation(model, prompt, 5).shape == (1, 5)
    assert torch.equal(prompt, copy)
