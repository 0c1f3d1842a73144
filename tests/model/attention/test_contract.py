"""The contract of an attention path, applied to every path of the folder and, to test the tests, to broken ones.

A check takes `make(**options)` and raises AssertionError when the path that it builds breaks the contract. A path that
claims `log_sum_exp` is a softmax path and is compared with formulas and `reference`; another has its own `weights` as
its oracle (and a file of its own that compares those with their formula). A path that does not train on CPU is checked
forward.
"""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention import available, build, path_class, require
from model.attention.linear import LinearAttention
from model.attention.mask import MaskRule
from model.attention.path import repeat_groups
from model.attention.reference import ReferenceAttention
from model.attention.window import WindowAttention
from model.cache import LayerCache

# Further options to hold to the contract, by path.
OPTIONS: dict[str, list[dict]] = {
    "flash": [{"kernel": "math"}],
    "linear": [{"feature_map": "relu", "chunk": 4}, {"feature_map": "softmax", "chunk": 1}, {"chunk": 9}],
    "ring": [{"block": 4}],
    "tiled": [{"block": 4}, {"block": 1}, {"block": 9}],
    "window": [{"window": 3}, {"window": 2, "n_global": 3}, {"window": 1}],
}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 4, 4]])
RULES = [
    MaskRule(),
    MaskRule(causal=False),
    MaskRule(window=1),
    MaskRule(window=4),
    MaskRule(window=3, n_global=2),
    MaskRule(window=3, causal=False),
    MaskRule(window=2, n_global=2, causal=False),
    MaskRule(documents=DOCUMENTS),
    MaskRule(documents=DOCUMENTS, window=2, n_global=1),
]


def draw_inputs(n_queries=9, n_keys=9, *, heads=4, groups=2, dim=6, dtype=torch.float64):
    g = torch.Generator().manual_seed(n_queries + 100 * n_keys)
    shapes = (heads, n_queries), (groups, n_keys), (groups, n_keys)
    return [torch.randn(2, *s, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def rules_of(path):
    return [rule for rule in RULES if rule.words() <= path.supports]


def followed(path, rule):
    """The rule that the path follows: narrower than `rule` only where that names no window."""
    narrowed = path.rule_for(rule)
    assert narrowed is rule or rule.window is None
    return narrowed


def same(got, wanted, tolerance=1e-12):
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def by_hand(q, k, v, rule, slopes, scale, softcap):
    """(out, log_sum_exp) in plain Python, from the definition; the queries are the last T of the S positions."""
    n_head, n_queries, n_keys = q.shape[1], q.shape[2], k.shape[2]
    out, normaliser = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3], dtype=torch.float64)
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        i, g, terms = n_keys - n_queries + t, h * k.shape[1] // n_head, {}
        for j in range(n_keys):
            seen = j <= i or not rule.causal
            if rule.window is not None:
                seen = seen and (abs(i - j) < rule.window or i < rule.n_global or j < rule.n_global)
            if rule.documents is not None:
                seen = seen and bool(rule.documents[b, i] == rule.documents[b, j])
            if seen:
                score = sum(x * y for x, y in zip(q[b, h, t].tolist(), k[b, g, j].tolist(), strict=True)) * scale
                score = softcap * math.tanh(score / softcap) if softcap else score
                terms[j] = math.exp(score - slopes[h] * abs(i - j))
        normaliser[b, h, t] = math.log(sum(terms.values()))
        out[b, h, t] = sum(term / sum(terms.values()) * v[b, g, j].detach() for j, term in terms.items())
    return out, normaliser


# --- the contract -----------------------------------------------------------------------------------------------------


def check_shape_and_dtype(make):
    for n_queries, dtype in itertools.product((1, 4, 9), (torch.float64, torch.float32, torch.bfloat16)):
        q, k, v = draw_inputs(n_queries, 9, dtype=dtype)
        path = make().eval()
        out = path(q, k, v, rule=MaskRule())
        assert (out.shape, out.dtype) == (q.shape, dtype)
        weights = path.weights(q, k, rule=MaskRule())
        assert weights.shape == (2, 4, n_queries, 9)
        assert weights.dtype == torch.promote_types(dtype, torch.float32)
        assert path.kernel(q, k, v, rule=MaskRule())


def check_weighted_mean(make):
    """Output = weights @ v; the weights are not negative, sum to one, and are zero exactly where the rule forbids."""
    path = make().eval()
    for rule, n_queries in itertools.product(rules_of(path), (1, 4, 9)):
        q, k, v = draw_inputs(n_queries, 9)
        weights = path.weights(q, k, rule=rule)
        assert (weights >= 0).all()
        same(weights.sum(-1), torch.ones(2, 4, n_queries))
        allowed = followed(path, rule).allowed(torch.arange(9 - n_queries, 9), torch.arange(9))
        assert torch.equal(weights > 0, allowed.expand_as(weights))
        same(path(q, k, v, rule=rule), weights @ repeat_groups(v, 4))


def check_formula(make):
    """Values and log-sum-exp against the definition in plain Python, for every rule and score option claimed; an option
    other than the default with every third rule, the hypothesis test below has the other pairs."""
    supports = make().supports
    options = [{}, {"scale": 0.7}]
    options += [{"softcap": 0.8}] * ("softcap" in supports) + [{"alibi": True}] * ("alibi" in supports)
    for choice in options:
        path = make(**choice).eval()
        slopes = [2 ** (-8 * (h + 1) / 4) if choice.get("alibi") else 0.0 for h in range(4)]
        for rule, n_queries in itertools.product(rules_of(path)[:: 3 if choice else 1], (1, 4, 9)):
            q, k, v = draw_inputs(n_queries, 9)
            scale = choice.get("scale", 1 / math.sqrt(6))
            out, lse = by_hand(q, k, v, followed(path, rule), slopes, scale, choice.get("softcap", 0))
            same(path(q, k, v, rule=rule), out)
            same(path.log_sum_exp(q, k, rule=rule), lse)
        assert path.log_sum_exp(q.float(), k.float(), rule=rule).dtype == torch.float32


def check_gradients(make):
    """d out_i / d v_j is not zero exactly where i may see j; gradients against reference."""
    path = make().train()
    for rule in rules_of(path):
        q, k, v = draw_inputs()
        allowed = followed(path, rule).allowed(torch.arange(9), torch.arange(9)).expand(2, 1, 9, 9)
        for i in range(9):
            (grad,) = torch.autograd.grad(path(q, k, v, rule=rule)[:, :, i].sum(), v)
            assert torch.equal(grad[:, 0].abs().sum(-1) > 0, allowed[:, 0, i])
        compare_with_oracle(path, q, k, v, rule)


def compare_with_oracle(path, q, k, v, rule):
    """Output, weights and, where the path trains on CPU, gradients: those of `reference` under the rule that the path
    follows, or of the path's own explicit weights when it is no softmax."""
    weights = path.weights(q, k, rule=rule)
    if "log_sum_exp" in path.supports:
        oracle = ReferenceAttention(scale=path.scale, softcap=path.softcap, alibi=path.alibi)
        explicit = oracle(q, k, v, rule=followed(path, rule))
        same(weights, oracle.weights(q, k, rule=followed(path, rule)))
    else:
        explicit = weights @ repeat_groups(v, q.shape[1])
    out = path(q, k, v, rule=rule)
    same(out, explicit, 1e-11)
    if torch.is_grad_enabled():
        pull = torch.randn(q.shape, dtype=q.dtype)
        pairs = zip(*(torch.autograd.grad(result, (q, k, v), pull) for result in (out, explicit)), strict=True)
        for got, wanted in pairs:
            same(got, wanted, 1e-11)


def check_causality(make):
    """Changing position t leaves every output before t as it was, bit for bit, and changes that of t."""
    path, (q, k, v) = make().eval(), draw_inputs(9, 9, dtype=torch.float32)
    before = path(q, k, v, rule=MaskRule())
    for t in range(9):
        changed = [x.detach().clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t] += 1
        after = path(*changed, rule=MaskRule())
        assert torch.equal(before[:, :, :t], after[:, :, :t])
        assert (before[:, :, t] != after[:, :, t]).any(-1).all()


def check_permutation(make):
    """A path knows no order: with the causal rule shuffling the past leaves the last row alone, without it the output
    is shuffled the same way. (A path that narrows the rule to a window knows order by it.)"""
    path, (q, k, v) = make().eval(), draw_inputs(9, 9)
    past = torch.tensor([3, 7, 0, 5, 2, 1, 6, 4, 8])
    if (path.rule_for(MaskRule()).window or 9) < 9:
        return
    out = path(q, k, v, rule=MaskRule())
    same(path(q[:, :, past], k[:, :, past], v[:, :, past], rule=MaskRule())[:, :, -1], out[:, :, -1])
    if "bidirectional" in path.supports:
        every, rule = past.flip(0), MaskRule(causal=False)
        shuffled = path(q[:, :, every], k[:, :, every], v[:, :, every], rule=rule)
        same(shuffled, path(q, k, v, rule=rule)[:, :, every])


def check_decoding(make):
    """Token by token, and in pieces, gives what the whole sequence gives at once."""
    path = make().eval()
    for rule in (rule for rule in rules_of(path) if rule.causal and rule.documents is None):
        q, k, v = draw_inputs(12, 12)
        for pieces in ([1] * 12, [5, 3, 1, 1, 2], [1, 6, 5], [12]):
            cache = LayerCache(12)
            parts = zip(*(x.split(pieces, dim=2) for x in (q, k, v)), strict=True)
            steps = [path.decode(*part, rule=rule, cache=cache) for part in parts]
            same(torch.cat(steps, dim=2), path(q, k, v, rule=rule))


def check_bfloat16(make):
    """Within 2^-7 of the largest |v|, against float64 on the same rounded inputs: the weights and result are rounded
    by at most 2^-9 each, and a factor of two is to spare."""
    path = make().eval()
    for rule in rules_of(path):
        q, k, v = draw_inputs(9, 9, dtype=torch.bfloat16)
        out, exact = path(q, k, v, rule=rule), path(q.double(), k.double(), v.double(), rule=rule)
        assert (out.double() - exact).abs().max() <= 2**-7 * v.abs().max()


def check_fresh_memory(make):
    """Memory that nobody wrote to holds anything: filled with NaN, no result changes."""

    def run():
        q, k, v = draw_inputs(9, 9)
        path, results = make().eval(), []
        results.append(path(q, k, v, rule=MaskRule()))
        if "backward_cpu" in path.supports:
            results += torch.autograd.grad(results[0].square().sum(), (q, k, v))
        if "cache" in path.supports:
            cache = LayerCache(12)
            results += [path.decode(q[:, :, :1], k[:, :, :1], v[:, :, :1], rule=MaskRule(), cache=cache)]
        return results

    def filled(function):
        return lambda *args, **kwargs: function(*args, **kwargs).fill_(math.nan)

    wanted = run()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in itertools.product((torch, torch.Tensor), ("empty", "empty_like", "new_empty")):
            if hasattr(owner, name):
                patch.setattr(owner, name, filled(getattr(owner, name)))
        got = run()
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def check_dropout(make):
    """Off in eval mode; in training the mean over drawings is the output without dropout (within 5 standard errors)."""
    q, k, v = draw_inputs(9, 9)
    path, without = make(dropout=0.4), make().eval()
    exact = without(q, k, v, rule=MaskRule())
    assert torch.equal(path.eval()(q, k, v, rule=MaskRule()), exact)
    drawn = torch.stack([path.train()(q, k, v, rule=MaskRule()).detach() for _ in range(400)])
    deviation = drawn.std(0)
    assert (deviation > 0).all()
    assert ((drawn.mean(0) - exact).abs() <= 5 * deviation / 400**0.5).all()


NEEDS = {  # check: the words without which it does not apply
    check_shape_and_dtype: set(),
    check_weighted_mean: set(),
    check_formula: {"log_sum_exp"},
    check_gradients: {"backward_cpu"},
    check_causality: set(),
    check_permutation: set(),
    check_decoding: {"cache"},
    check_bfloat16: set(),
    check_fresh_memory: set(),
    check_dropout: {"dropout"},
}


def paths_with(*words):
    return [name for name in available() if set(words) <= path_class(name).supports]


CASES = [
    pytest.param(
        check,
        functools.partial(build, name, **options),
        id="-".join([check.__name__[6:], name, *(f"{option}={value}" for option, value in options.items())]),
    )
    for check, words in NEEDS.items()
    for name in paths_with(*words)
    for options in [{}, *OPTIONS.get(name, [])]
]


@pytest.mark.parametrize(("check", "make"), CASES)
def test_contract(check, make):
    with torch.set_grad_enabled("backward_cpu" in make().supports):
        check(make)


def draw_case(data, name):
    """Options of a path, inputs and a rule. Lengths up to 70: many windows of 1 to 9 keys, and several tiles."""
    supports = path_class(name).supports
    n_keys = data.draw(st.one_of(st.sampled_from([1, 2, 63, 65, 70]), st.integers(1, 24)), label="keys")
    n_queries = data.draw(st.one_of(st.just(n_keys), st.integers(1, n_keys)), label="queries")
    groups, share = data.draw(st.integers(1, 3), label="groups"), data.draw(st.integers(1, 3), label="heads a group")
    dim = data.draw(st.integers(1, 17), label="head_dim")
    options = dict(data.draw(st.sampled_from([{}, *OPTIONS.get(name, [])]), label="options of the path"))
    if "log_sum_exp" in supports:
        options["scale"] = data.draw(st.sampled_from([None, 0.3]), label="scale")
    for word, choices in {"softcap": [0.0, 2.0], "alibi": [False, True]}.items():
        options[word] = data.draw(st.sampled_from(choices if word in supports else choices[:1]), label=word)
    windows = st.one_of(st.none(), st.integers(1, 9), st.integers(1, 70))
    window = data.draw(windows, label="window") if "window" in supports else None
    n_global = data.draw(st.integers(0, 5), label="globals") if "globals" in supports else 0
    causal = data.draw(st.booleans(), label="causal") if "bidirectional" in supports else True
    documents = None
    if "documents" in supports and data.draw(st.booleans(), label="documents"):
        documents = torch.randint(3, (2, n_keys), generator=torch.Generator().manual_seed(n_keys))
    inputs = draw_inputs(n_queries, n_keys, heads=groups * share, groups=groups, dim=dim)
    return options, inputs, MaskRule(causal, window, n_global, documents)


@pytest.mark.parametrize("name", available())
def test_any_size_and_rule_agrees_with_the_oracle(name):
    trains = "backward_cpu" in path_class(name).supports

    @settings(max_examples=60 if trains else 15)  # what does not train on CPU is slow there
    @given(data=st.data())
    def agrees(data):
        options, inputs, rule = draw_case(data, name)
        with torch.set_grad_enabled(trains):
            compare_with_oracle(build(name, **options), *inputs, rule)

    agrees()


@pytest.mark.parametrize("n_global", [0, 2])
@pytest.mark.parametrize("name", paths_with("window"))
def test_row_sees_exactly_the_window(name, n_global):
    """Row i sees min(i + 1, w) keys, itself the last of them, and the globals."""
    if n_global and "globals" not in path_class(name).supports:
        pytest.skip(f"path {name} claims no globals")
    q, k, _ = draw_inputs(12, 12)
    for w in (1, 2, 5, 12, 40):
        weights = build(name).weights(q, k, rule=MaskRule(window=w, n_global=n_global))[0, 0]
        for i in range(12):
            nearest = set(range(max(0, i + 1 - w), i + 1))
            assert len(nearest) == min(i + 1, w)
            keys = set(range(i + 1)) if i < n_global else nearest | set(range(min(n_global, i + 1)))
            assert set(weights[i].nonzero().flatten().tolist()) == keys


REFUSALS = [
    (name, word)
    for name in available()
    for word in ("softcap", "alibi", "dropout", "bidirectional", "window", "globals", "documents")
    if word not in path_class(name).supports
]


@pytest.mark.parametrize(("name", "word"), REFUSALS)
def test_unsupported_word_is_refused_by_name(name, word):
    options = {"softcap": 1.0, "alibi": True, "dropout": 0.5}
    asked = {word: options[word]} if word in options else {}
    with pytest.raises(ValueError, match=f"'{name}' does not support {word}; paths that do: ") as refusal:
        require(build(name, **asked), {word})
    able = str(refusal.value).rpartition(": ")[2].split(", ")
    assert set(able) == set(paths_with(word)) or able == ["none"]
    assert "reference" in able


def test_unknown_path_and_option_are_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"no attention path 'flsh'; choose one of: .*flash.*reference"):
        build("flsh")
    with pytest.raises(ValueError, match="'reference' has no option 'windw'; it has: alibi, dropout, scale, softcap"):
        build("reference", windw=3)


# --- testing the tests ------------------------------------------------------------------------------------------------


class _Allowing(MaskRule):
    """The causal rule with another condition in its place."""

    def __init__(self, condition):
        super().__init__()
        object.__setattr__(self, "condition", condition)

    def allowed(self, rows, columns):
        return self.condition(rows[:, None], columns[None, :])


class FutureLeak(ReferenceAttention):
    def forward(self, q, k, v, *, rule):  # noqa: ARG002
        return super().forward(q, k, v, rule=_Allowing(lambda i, j: j <= i + 1))


class FutureLeakEverywhere(FutureLeak):
    """The weights show the leak too, so that output and weights agree."""

    def weights(self, q, k, *, rule):  # noqa: ARG002
        return super().weights(q, k, rule=_Allowing(lambda i, j: j <= i + 1))


class SelfMissing(ReferenceAttention):
    def weights(self, q, k, *, rule):  # noqa: ARG002
        return super().weights(q, k, rule=_Allowing(lambda i, j: j < i.clamp(min=1)))


class WrongScale(ReferenceAttention):
    def scale_for(self, q):
        return 1 / q.shape[-1]


class Unnormalised(ReferenceAttention):
    def weights(self, q, k, *, rule):
        return self.scores(q, k, rule=rule, rows=torch.arange(k.shape[2] - q.shape[2], k.shape[2])).exp()


class WindowTooWide(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        wider = None if rule.window is None else rule.window + 1
        return super().forward(q, k, v, rule=MaskRule(rule.causal, wider, rule.n_global, rule.documents))


class WindowTooNarrow(WindowAttention):
    """The rule that it says to follow is narrower too, so that output, weights and rule agree."""

    def rule_for(self, rule):
        return MaskRule(window=rule.window - 1, n_global=rule.n_global) if rule.window == 4 else rule


class WindowBlocksMissAKey(WindowAttention):
    """Only past the first window, where rows come in blocks."""

    def _blocks(self, q, k, v, rule, window, start):
        narrower = MaskRule(window=max(1, rule.window - 1), n_global=rule.n_global)
        return super()._blocks(q, k, v, narrower, window, start)


class WindowForgetsEarly(WindowAttention):
    def decode(self, q, k, v, *, rule, cache):
        out = super().decode(q, k, v, rule=rule, cache=cache)
        cache.keep(rule.n_global, max(0, (self.rule_for(rule).window or 1) - 2))
        return out


class LinearForgetsTheState(LinearAttention):
    """Each call of `decode`, and the queries that continue a context, begin anew."""

    def _causal(self, q, k, v, state):
        return super()._causal(q, k, v, (0 * state[0], 0 * state[1]))


class LinearUnnormalised(LinearAttention):
    def forward(self, q, k, v, *, rule):
        return super().forward(q, k, v, rule=rule) * k.shape[2]


class LinearSeesTheNext(LinearAttention):
    def forward(self, q, k, v, *, rule):
        out = super().forward(q, k, v, rule=rule)
        return torch.cat((out[:, :, 1:], out[:, :, -1:]), dim=2)


class CacheDropsAKey(ReferenceAttention):
    def decode(self, q, k, v, *, rule, cache):
        k, v = cache.append(k, v)
        n_dropped = int(k.shape[2] > 8)
        return self(q, k[:, :, n_dropped:], v[:, :, n_dropped:], rule=rule)


class KeysWithoutGradient(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        return super().forward(q, k.detach() + 0 * k, v, rule=rule)


class GroupsInterleaved(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        copies = q.shape[1] // k.shape[1]
        return super().forward(q, k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1), rule=rule)


class LogarithmToBaseTwo(ReferenceAttention):
    def log_sum_exp(self, q, k, *, rule):
        return super().log_sum_exp(q, k, rule=rule) / math.log(2)


class ReadsFreshMemory(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        return super().forward(q, k, v, rule=rule) + 0 * torch.empty(q.shape[-1], dtype=q.dtype)


class DropoutUnscaled(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        out = super().forward(q, k, v, rule=rule)
        return out * (1 - self.dropout) if self.training else out


class DropoutInEval(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        self.training = True
        return super().forward(q, k, v, rule=rule)


class ForgetsDtype(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        return super().forward(q, k, v, rule=rule).float()


class FourBitsInBfloat16(ReferenceAttention):
    def weights(self, q, k, *, rule):
        weights = super().weights(q, k, rule=rule)
        return weights.to(torch.float8_e4m3fn).float() if q.dtype == torch.bfloat16 else weights


class KnowsOrder(ReferenceAttention):
    def forward(self, q, k, v, *, rule):
        return super().forward(q, k + torch.arange(k.shape[2], dtype=k.dtype)[:, None], v, rule=rule)


BROKEN = {
    FutureLeak: {check_weighted_mean, check_formula, check_gradients, check_causality, check_decoding},
    FutureLeakEverywhere: {check_weighted_mean, check_formula, check_gradients, check_causality, check_decoding},
    SelfMissing: {check_weighted_mean, check_formula, check_gradients},
    WrongScale: {check_formula, check_gradients},
    Unnormalised: {check_weighted_mean, check_formula, check_gradients},
    WindowTooWide: {check_weighted_mean, check_formula, check_gradients},
    WindowTooNarrow: {check_weighted_mean, check_formula, check_gradients},
    WindowBlocksMissAKey: {check_weighted_mean, check_formula, check_gradients, check_decoding},
    WindowForgetsEarly: {check_decoding},
    LinearForgetsTheState: {check_weighted_mean, check_decoding},
    LinearUnnormalised: {check_weighted_mean, check_gradients, check_decoding},
    LinearSeesTheNext: {check_weighted_mean, check_gradients, check_causality, check_decoding},
    CacheDropsAKey: {check_decoding},
    KeysWithoutGradient: {check_gradients},
    GroupsInterleaved: {check_weighted_mean, check_formula, check_gradients},
    LogarithmToBaseTwo: {check_formula},
    ReadsFreshMemory: {check_fresh_memory},
    DropoutUnscaled: {check_dropout},
    DropoutInEval: {check_dropout},
    ForgetsDtype: {check_shape_and_dtype},
    FourBitsInBfloat16: {check_bfloat16},
    KnowsOrder: {check_permutation},
}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        pytest.param(broken, check, id=f"{broken.__name__}-{check.__name__[6:]}")
        for broken, checks in BROKEN.items()
        for check in sorted(checks, key=lambda check: check.__name__)
    ],
)
def test_broken_path_fails(broken, check):
    with pytest.raises(AssertionError):
        check(broken)


def test_every_check_can_fail():
    assert set().union(*BROKEN.values()) == set(NEEDS)
