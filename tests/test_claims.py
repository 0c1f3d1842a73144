"""Every claim of the chapter on self-attention, with the chapter's numbers. Where the chapter is loose, the docstring
states the exact form that is tested. The numbers follow the chapter; the sections are the order of its account."""

import itertools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, ModelConfig
from model.attention import build
from model.attention.mask import MaskRule
from model.attention.ring import ring_positions
from model.block import MLP, Block
from model.multihead import MultiHeadAttention
from tests.counting import largest_tensor

SEES_ALL = MaskRule(causal=False)


def tiny(**options):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 64, "vocab_size": 11, "attention": "reference"}
    return ModelConfig(**{**sizes, **options})


def layer(module_class, **options):
    """A layer with weights large enough that its attention is far from uniform; x (1, 6, C) in float64."""
    config = tiny(**options)
    module = (MLP(config) if module_class is MLP else module_class(config, 0)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module, torch.randn(1, 6, config.n_embd, dtype=torch.float64)


def run(module, x):
    return module(x, positions=torch.arange(x.shape[1]))


def one_head(*shape, n=3):
    return [torch.randn(1, 1, *shape, dtype=torch.float64, requires_grad=True) for _ in range(n)]


def test_claim_01_one_step_connects_any_two_positions():
    """At every distance up to 2047, in one layer, the last output depends on that input."""
    q, k, v = one_head(2048, 4)
    build("reference")(q, k, v, rule=MaskRule())[0, 0, -1].sum().backward()
    assert (v.grad.abs().sum(-1) > 0).all()
    assert (k.grad.abs().sum(-1) > 0).all()


def test_claim_02_output_is_a_weighted_mean():
    """Weights are not negative, rows sum to one, out = weights @ v; so each output lies between the smallest and the
    largest v in each channel."""
    q, k, v = one_head(9, 4)
    path = build("reference")
    weights, out = path.weights(q, k, rule=SEES_ALL), path(q, k, v, rule=SEES_ALL)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 9, dtype=torch.float64))
    torch.testing.assert_close(out, weights @ v)
    assert ((out >= v.amin(2, keepdim=True)) & (out <= v.amax(2, keepdim=True))).all()


def test_claim_03_three_projections():
    """With W_Q = W_K and no mask the score matrix is symmetric ("A asks B" = "B asks A"), with separate ones it is
    not; replacing V by K changes the output."""
    attention, x = layer(MultiHeadAttention, causal=False)

    def scores():
        q, k = (attention.split_heads(projection(x)) for projection in (attention.q_proj, attention.k_proj))
        return attention.path.scores(q, k, rule=SEES_ALL, rows=torch.arange(6))

    assert (scores() - scores().mT).abs().max() > 0.1
    before = run(attention, x)
    with torch.no_grad():
        attention.v_proj.weight.copy_(attention.k_proj.weight)
    assert (run(attention, x) - before).abs().max() > 0.1
    with torch.no_grad():
        attention.k_proj.weight.copy_(attention.q_proj.weight)
    torch.testing.assert_close(scores(), scores().mT)


def test_claim_04_score_variance_is_the_head_dimension():
    """d_k = 64: the standard deviation of q·k is 8, and 1 after division by √d_k (here within 2 %: 10⁵ draws have a
    relative standard error of about 0.2 %)."""
    q, k = torch.randn(2, 100_000, 1, 1, 64)
    rows = torch.zeros(1, dtype=torch.long)
    for scale, deviation in ((1.0, 8.0), (None, 1.0)):
        scores = build("reference", scale=scale).scores(q, k, rule=SEES_ALL, rows=rows)
        assert abs(scores.std().item() / deviation - 1) < 0.02
    assert build("reference").scale_for(q) == 1 / 8


def test_claim_04_without_scaling_the_softmax_saturates():
    """32 keys, d_k = 64. Unscaled, the largest weight of the median row is above 0.9 and the gradient of the weights
    in the scores, Σ w(1 - w), all but vanishes; scaled, no weight dominates."""
    q, k, _ = (torch.randn(1, 1, n, 64) for n in (2000, 32, 32))
    k = k.expand(1, 1, 32, 64)
    rows = torch.arange(2000)
    largest, gradient = {}, {}
    for scale in (1.0, 1 / 8):
        weights = build("reference", scale=scale).scores(q, k, rule=SEES_ALL, rows=rows).softmax(-1)
        largest[scale] = weights.amax(-1).median().item()
        gradient[scale] = (weights * (1 - weights)).sum(-1).median().item()
    assert largest[1.0] > 0.9
    assert largest[1 / 8] < 0.3
    assert gradient[1.0] < 0.2
    assert gradient[1 / 8] > 0.8


def test_claim_05_worked_example():
    """Three tokens, two dimensions, identity projections. The chapter's values, to its three digits."""
    x = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)[None, None]
    path, rows = build("reference"), torch.arange(3)
    products = build("reference", scale=1.0).scores(x, x, rule=SEES_ALL, rows=rows)[0, 0]
    assert products.tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 2]]

    def digits(row):
        return [round(value, 3) for value in row.tolist()]

    assert digits(path.scores(x, x, rule=SEES_ALL, rows=rows)[0, 0, 2]) == [0.707, 0.707, 1.414]
    assert digits(path.weights(x, x, rule=SEES_ALL)[0, 0, 2]) == [0.248, 0.248, 0.503]  # the chapter rounds up: 0.504
    e, e2 = math.exp(1 / math.sqrt(2)), math.exp(2 / math.sqrt(2))
    exact = (e + e2) / (2 * e + e2)
    assert digits(path(x, x, x, rule=SEES_ALL)[0, 0, 2]) == [round(exact, 3)] * 2 == [0.752, 0.752]


def test_claim_06_shapes():
    """X (n, d_model), W (d_model, d_k), QKᵀ (n, n), output of a head (n, d_k); a block maps (n, d_model) to itself."""
    config = tiny(n_embd=12, n_head=3)
    attention, x = MultiHeadAttention(config, 0), torch.randn(1, 5, 12)
    q, k, v = (attention.split_heads(p(x)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert q.shape == k.shape == v.shape == (1, 3, 5, 4)
    assert attention.path.weights(q, k, rule=MaskRule()).shape == (1, 3, 5, 5)
    assert attention.path(q, k, v, rule=MaskRule()).shape == (1, 3, 5, 4)
    assert run(Block(config, 0), x).shape == x.shape


def test_claim_07_causal_mask_before_softmax():
    """Above the diagonal the weights are exactly 0 and rows still sum to one; masking after the softmax breaks the
    sum; without the mask every position sees all."""
    q, k, _ = one_head(6, 4)
    path, ones = build("reference"), torch.ones(1, 1, 6, dtype=torch.float64)
    weights, unmasked = path.weights(q, k, rule=MaskRule()), path.weights(q, k, rule=SEES_ALL)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), ones)
    masked_after = unmasked.tril().sum(-1)
    assert (masked_after[..., :-1] < 1).all()
    torch.testing.assert_close(unmasked.tril() / masked_after[..., None], weights)  # renormalised it is the same
    assert (unmasked > 0).all()


def test_claim_07_the_future_changes_no_earlier_output():
    """In the whole model: changing token t leaves every logit before t alone, bit for bit, and changes that of t."""
    for attention in ("reference", "flash"):
        model = GPT(tiny(n_layer=2, attention=attention)).eval()
        tokens = torch.randint(10, (1, 12))
        before = model(tokens)
        for t in range(12):
            changed = tokens.clone()
            changed[0, t] = 10
            after = model(changed)
            assert torch.equal(after[:, :t], before[:, :t])
            assert not torch.equal(after[:, t], before[:, t])


def test_claim_08_heads_cost_the_same_multiplications():
    """h heads of d_model/h against one of d_model: counted, not computed; d_model = 512 and 8 heads as in the paper."""
    counts = []
    for n_head in (1, 8):
        attention, x = MultiHeadAttention(tiny(n_embd=512, n_head=n_head), 0), torch.randn(1, 16, 512)
        with FlopCounterMode(display=False) as counter:
            run(attention, x)
        counts.append(counter.get_total_flops() // 2)
    projections, scores_and_sum = 4 * 16 * 512 * 512, 2 * 16 * 16 * 512
    assert counts == [projections + scores_and_sum] * 2


def test_claim_08_output_is_the_joined_heads_times_w_o():
    attention, x = layer(MultiHeadAttention)
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        q, k, v = (x @ p.weight[part].T for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)  # √4 = 2
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(run(attention, x), torch.cat(heads, dim=-1) @ attention.o_proj.weight.T)


def test_claim_08_heads_can_differ():
    """Hand-set weights on one-hot tokens: head 0 looks for its own token, head 1 for the next one in the alphabet."""
    attention = MultiHeadAttention(tiny(causal=False), 0).double()
    own, following = torch.eye(4).double(), torch.eye(4).roll(1, dims=0).double()
    with torch.no_grad():
        attention.q_proj.weight.copy_(100 * torch.cat((own, following)).repeat(1, 2) / 2)
        attention.k_proj.weight.copy_(torch.cat((own, own)).repeat(1, 2))
    x = torch.eye(4).repeat(1, 2).double()[None]
    q, k = (attention.split_heads(p(x)) for p in (attention.q_proj, attention.k_proj))
    weights = attention.path.weights(q, k, rule=SEES_ALL)
    assert weights[0, 0].argmax(-1).tolist() == [0, 1, 2, 3]
    assert weights[0, 1].argmax(-1).tolist() == [1, 2, 3, 0]
    assert (weights.amax(-1) > 0.99).all()


def test_claim_09_attention_between_positions_feed_forward_within():
    """Changing token i changes attention's output at later j, and the MLP's at i only."""
    (attention, x), (mlp, _) = layer(MultiHeadAttention), layer(MLP)
    changed = x.clone()
    changed[0, 2] += 1

    def moved(module):
        return (module(changed) != module(x)).any(-1)[0].tolist()

    assert moved(mlp) == [False, False, True, False, False, False]
    assert moved(lambda inputs: run(attention, inputs)) == [False, False, True, True, True, True]


def test_claim_09_residual_and_both_placements_of_the_norm():
    """With zeroed outputs a pre-norm block is the identity. Pre (GPT-2): x + f(norm(x)); post (the chapter's drawing):
    norm(x + f(x)). With zeroed outputs a post-norm block is its norms."""
    for placement in ("pre", "post"):
        block, x = layer(Block, norm_placement=placement)
        if placement == "pre":
            middle = x + run(block.attn, block.attn_norm(x))
            expected = middle + block.mlp(block.mlp_norm(middle))
        else:
            middle = block.attn_norm(x + run(block.attn, x))
            expected = block.mlp_norm(middle + block.mlp(middle))
        torch.testing.assert_close(run(block, x), expected)
        with torch.no_grad():
            block.attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        still = x if placement == "pre" else block.mlp_norm(block.attn_norm(x))
        assert torch.equal(run(block, x), still)


def test_claim_10_weights_depend_on_the_data():
    """Two inputs, two weight matrices, same parameters. A dense layer's matrix, its Jacobian, does not change."""
    attention, x = layer(MultiHeadAttention)
    other = torch.randn_like(x)

    def weights(inputs):
        q, k = (attention.split_heads(p(inputs)) for p in (attention.q_proj, attention.k_proj))
        return attention.path.weights(q, k, rule=MaskRule())

    assert (weights(x) - weights(other)).abs().max() > 0.1
    jacobians = [torch.autograd.functional.jacobian(attention.v_proj, inputs) for inputs in (x, other)]
    torch.testing.assert_close(*jacobians)


def test_claim_11_soft_addressing_becomes_a_lookup():
    """Differentiable in q, k and v; the error against the hard lookup falls as the scores are scaled up, to 0."""
    q, k, v = one_head(7, 4)
    build("reference")(q, k, v, rule=SEES_ALL).square().sum().backward()
    assert all(x.grad.abs().amin() > 0 for x in (q, k, v))
    looked_up = v[0, 0, (q @ k.mT)[0, 0].argmax(-1)]
    errors = [
        (build("reference", scale=scale)(q, k, v, rule=SEES_ALL)[0, 0] - looked_up).abs().max().item()
        for scale in (1, 10, 100, 10_000)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-12


def knock_out_effects(q, k, v):
    """(weights, effects) of the last row's edges: how far its output moves when an edge is taken away and the rest
    renormalised."""
    path = build("reference")
    weights, out = path.weights(q, k, rule=MaskRule())[0, 0, -1], path(q, k, v, rule=MaskRule())[0, 0, -1]
    effects = []
    for j in range(len(weights)):
        kept = weights.clone()
        kept[j] = 0
        effects.append((kept / kept.sum() @ v[0, 0] - out).norm())
    return weights, torch.stack(effects)


def test_claim_12_weights_are_no_reliable_account_of_the_decision():
    """Exact form: the edge with the largest weight need not be the one whose removal changes the output most; over 200
    random heads of 12 keys it is not in at least a tenth of them, and the mean rank correlation of weight and effect
    is above 0.5 and below 0.95: an account, and not a reliable one. The effect is w·|v_j - out| / (1 - w), so v counts
    as much as the weight."""
    correlations, disagreements = [], 0
    for _ in range(200):
        q, k, v = (x.detach() for x in one_head(12, 4))
        weights, effects = knock_out_effects(q, k, v)
        out = weights @ v[0, 0]
        torch.testing.assert_close(effects, weights / (1 - weights) * (v[0, 0] - out).norm(dim=-1))
        ranks = torch.stack([x.argsort().argsort().double() for x in (weights, effects)])
        correlations.append(torch.corrcoef(ranks)[0, 1])
        disagreements += int(weights.argmax() != effects.argmax())
    assert 0.5 < torch.stack(correlations).mean() < 0.95
    assert disagreements >= 20


def test_claim_13_a_tiny_weight_still_changes_the_output():
    """An edge of weight below 1 % beside one above 90 %: its value is large, and without it the output is gone."""
    q = torch.tensor([1.0]).view(1, 1, 1, 1)
    k = torch.tensor([0.0, 2.2, 7.0]).view(1, 1, 3, 1)
    v = torch.tensor([1000.0, 0.0, 0.0]).view(1, 1, 3, 1)
    weights, effects = knock_out_effects(q, k, v)
    assert weights[0] < 0.01
    assert weights[2] > 0.9
    out = build("reference")(q, k, v, rule=MaskRule())[0, 0, -1, 0]
    assert 0.5 < out < 1
    torch.testing.assert_close(effects[0], out)


def test_claim_14_no_built_in_order():
    """Without positions and mask, permuting the input permutes the output (equivariance; the chapter says invariance)
    and the mean over positions is invariant. With positions it is not."""
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for position, knows_order in (
        ("none", False),
        ("learned", True),
        ("sinusoidal", True),
        ("rope", True),
        ("alibi", True),
    ):
        model = GPT(tiny(n_layer=2, causal=False, position=position)).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
        gap = (model(tokens[:, order]) - model(tokens)[:, order]).abs().max().item()
        mean_gap = (model(tokens[:, order]).mean(1) - model(tokens).mean(1)).abs().max().item()
        assert (gap > 1e-3, mean_gap > 1e-3) == (knows_order, knows_order), position
        assert knows_order or max(gap, mean_gap) < 1e-12


def test_claim_14_under_the_causal_mask_the_last_row_ignores_the_order_of_the_past():
    """One layer, no positions: shuffling the earlier tokens leaves the last row alone. In two layers it does not: the
    mask itself is a source of order."""
    order = torch.tensor([3, 0, 4, 1, 2, 5])
    gaps = []
    for n_layer in (1, 2):
        model = GPT(tiny(n_layer=n_layer, position="none")).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
        gaps.append((model(tokens[:, order])[:, -1] - model(tokens)[:, -1]).abs().max().item())
    assert gaps[0] < 1e-12
    assert gaps[1] > 1e-3


def test_claim_15_cost_of_the_explicit_map_is_quadratic():
    """n = 4096: 16.8 million entries a head. Doubling n multiplies entries and multiplications of the map by four."""
    path = build("reference")
    q = torch.randn(1, 1, 4096, 1)
    assert path.weights(q, q, rule=SEES_ALL).numel() == 16_777_216
    costs = []
    for n in (64, 128, 256):
        q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            path(q, k, v, rule=MaskRule())
        costs.append((path.weights(q, k, rule=MaskRule()).numel(), counter.get_total_flops()))
    for smaller, larger in itertools.pairwise(costs):
        assert [b / a for a, b in zip(smaller, larger, strict=True)] == [4, 4]


def test_claim_15_a_window_meets_n_times_w_pairs():
    """Allowed pairs at n = 512: n(n + 1)/2 causal, n·w - w(w - 1)/2 with a window of w."""
    places = torch.arange(512)
    assert MaskRule().allowed(places, places).sum() == 512 * 513 // 2
    for w in (1, 16, 64):
        assert MaskRule(window=w).allowed(places, places).sum() == 512 * w - w * (w - 1) // 2


def test_claim_15_memory_of_the_ways_out_grows_with_n():
    """The largest tensor of forward and backward, for twice the tokens: four times the numbers in the explicit form,
    twice in the others (window and linear hold some for each block of tokens)."""
    window, factors = MaskRule(window=16), {}
    for name, options in {"reference": {}, "flash": {}, "tiled": {"block": 32}, "window": {}, "linear": {}}.items():
        rule = window if name == "window" else MaskRule()
        small, large = (largest_tensor(build(name, **options), n, rule, dim=16) for n in (512, 1024))
        factors[name] = large / small
    assert factors.pop("reference") == 4
    assert all(1.9 < factor < 2.1 for factor in factors.values()), factors


def test_claim_15_a_window_and_a_state_make_time_linear():
    """Multiplications of forward and backward for twice the tokens; those of the window double with w too."""

    def n_flops(path, n, rule):
        q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
        # The fused kernel hides its products from the counter.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            path(q, k, v, rule=rule).sum().backward()
        return counter.get_total_flops()

    for path, rule in ((build("window"), MaskRule(window=16)), (build("linear"), MaskRule())):
        assert n_flops(path, 1024, rule) / n_flops(path, 512, rule) == pytest.approx(2, rel=0.02)
    narrow, wide = (n_flops(build("window"), 1024, MaskRule(window=w)) for w in (8, 16))
    assert wide / narrow == pytest.approx(2, rel=0.02)
    explicit = (n_flops(build("reference"), n, MaskRule()) for n in (1024, 512))
    assert next(explicit) / next(explicit) == 4


def test_claim_15_a_ring_divides_the_sequence():
    """Each of W processes holds n/W tokens and computes 1/W of the causal pairs. (On real ones: test_ring.py.)"""
    for world_size in (2, 4, 8):
        for rank in range(world_size):
            positions = [p for run in ring_positions(1024, rank, world_size) for p in run]
            assert len(positions) == 1024 // world_size
            assert sum(p + 1 for p in positions) == 1024 * 1025 // 2 // world_size


def test_claim_16_heads_can_be_previous_token_long_distance_and_uniform():
    """Hand-set queries and keys make the three kinds of head that the chapter names."""
    n = 16
    places = torch.eye(n, dtype=torch.float64)
    previous = 100 * places.roll(1, dims=0)  # the query of i is the key of i - 1
    previous[0] = 100 * places[0]
    first = 100 * places[:1].expand(n, n)
    q = torch.stack((previous, first, torch.zeros(n, n, dtype=torch.float64)))[None]
    weights = build("reference").weights(q, places.expand(1, 3, n, n), rule=MaskRule())[0]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    mean_distance = (weights * distance).sum(-1)  # (H, T)
    rows = torch.arange(n, dtype=torch.float64)
    for head, expected in zip(mean_distance, (rows.clamp(max=1), rows, rows / 2), strict=True):
        torch.testing.assert_close(head, expected, atol=1e-6, rtol=0)
    entropy = torch.special.entr(weights[2]).sum(-1)
    torch.testing.assert_close(entropy, (rows + 1).log())  # uniform over the i + 1 visible keys
