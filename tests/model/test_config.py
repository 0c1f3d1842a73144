"""ModelConfig refuses what cannot work, and says what can; reading it does not cost torch."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from model import GPT, ModelConfig
from model.attention import path_class

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_layer": 0}, r"model\.n_layer is 0; it must be at least 1"),
        ({"n_head": 0}, r"model\.n_head is 0; it must be at least 1"),
        ({"n_embd": -4}, r"model\.n_embd is -4; it must be at least 1"),
        ({"block_size": 0}, r"model\.block_size is 0; it must be at least 1"),
        ({"vocab_size": -1}, r"model\.vocab_size is -1; it must be 0 or more"),
        ({"n_kv_head": -1}, r"model\.n_kv_head is -1; it must be 0 or more"),
        ({"n_head": 4, "n_kv_head": 3}, r"model\.n_kv_head 3 must divide model\.n_head 4"),
        ({"n_head": 4, "n_kv_head": 8}, r"model\.n_kv_head 8 must divide model\.n_head 4"),
        ({"dropout": 1.0}, r"model\.dropout is 1\.0; it must be at least 0 and below 1"),
        ({"dropout": float("nan")}, r"model\.dropout is nan"),
        ({"attention_dropout": -0.1}, r"model\.attention_dropout is -0\.1"),
        ({"attention_softcap": -1.0}, r"model\.attention_softcap is -1\.0; it must be 0 \(off\) or positive"),
        ({"logit_softcap": float("inf")}, r"model\.logit_softcap is inf"),
        ({"rope_base": 1.0}, r"model\.rope_base is 1\.0; it must be above 1"),
        (
            {"n_embd": 128, "n_head": 5},
            r"n_embd 128 / model\.n_head 5 is no whole head_dim; n_head could be 1, 2, 4, 8",
        ),
        ({"n_embd": 12, "n_head": 4, "position": "rope"}, r"rope needs an even head_dim; n_embd / n_head is 3"),
        ({"attention": "flsh"}, r"model\.attention names 'flsh'; choose from: .*flash.*reference"),
        ({"attention": "flash,flsh"}, r"model\.attention names 'flsh'; choose from: .*flash.*reference"),
        ({"attention": "window,"}, r"model\.attention names ''; choose from: .*flash.*reference"),
        (
            {"attention": "window,window,flash", "n_layer": 4},
            r"model\.attention names 3 paths; their number must divide model\.n_layer 4",
        ),
        ({"window": -1}, r"model\.window is -1; it must be 0 or more"),
        ({"n_global": -1}, r"model\.n_global is -1; it must be 0 or more"),
        ({"n_global": 2}, r"model\.n_global 2 needs a model\.window to be exempt from"),
        ({"full_attention_every": -1}, r"model\.full_attention_every is -1; it must be 0 or more"),
        (
            {"flash_kernel": "cudn"},
            r"model\.flash_kernel is 'cudn'; choose one of: auto, flash, efficient, cudnn, math",
        ),
        (
            {"linear_feature_map": "gelu"},
            r"model\.linear_feature_map is 'gelu'; choose one of: elu, relu, softmax",
        ),
        ({"norm": "batchnorm"}, r"model\.norm is 'batchnorm'; choose one of: layernorm, rmsnorm"),
        ({"norm_placement": "both"}, r"model\.norm_placement is 'both'; choose one of: pre, post"),
        ({"mlp": "relu"}, r"model\.mlp is 'relu'; choose one of: gelu, gelu_exact, relu2, swiglu, none"),
        ({"position": "Rope"}, r"model\.position is 'Rope'; choose one of: learned, sinusoidal, rope, alibi, none"),
    ],
)
def test_wrong_value_is_refused_with_what_is_right(wrong, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**wrong)


def test_option_that_a_path_lacks_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match=r"'flash' does not support alibi; paths that do: .*reference"):
        GPT(ModelConfig(attention="flash", position="alibi", vocab_size=5))
    with pytest.raises(ValueError, match=r"'flash' does not support softcap; paths that do: .*reference"):
        GPT(ModelConfig(attention="flash", attention_softcap=5.0, vocab_size=5))


def test_rule_that_a_path_lacks_is_refused_when_the_model_is_built(monkeypatch):
    monkeypatch.setattr(path_class("flash"), "supports", frozenset({"cache"}))
    with pytest.raises(ValueError, match=r"'flash' does not support bidirectional; paths that do: .*reference"):
        GPT(ModelConfig(attention="flash", causal=False, vocab_size=5))


def test_a_setting_that_one_of_the_layers_lacks_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match=r"'linear' does not support alibi; paths that do: .*reference"):
        GPT(ModelConfig(attention="reference,linear", position="alibi", vocab_size=5))
    with pytest.raises(ValueError, match=r"'flash' does not support softcap; paths that do: .*reference"):
        GPT(ModelConfig(attention="tiled", full_attention_every=2, attention_softcap=5.0, vocab_size=5))
    with pytest.raises(ValueError, match=r"'window' does not support bidirectional; paths that do: .*tiled"):
        GPT(ModelConfig(attention="window", causal=False, vocab_size=5))
    with pytest.raises(ValueError, match=r"'tiled' does not support dropout; paths that do: .*reference"):
        GPT(ModelConfig(attention="tiled", attention_dropout=0.1, vocab_size=5))


@pytest.mark.parametrize("attention", ["linear", "flash", "linear,flash"])
def test_a_window_that_no_layer_follows_is_refused_when_the_model_is_built(attention):
    with pytest.raises(ValueError, match=r"does not support window; paths that do: .*window"):
        GPT(ModelConfig(attention=attention, window=4, vocab_size=5))


def test_model_needs_a_vocabulary():
    with pytest.raises(ValueError, match=r"model\.vocab_size is 0"):
        GPT(ModelConfig())


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "block_size", "vocab_size"])
def test_a_model_larger_than_the_machine_is_refused_before_anything_is_allocated(name):
    sizes = {"vocab_size": 5, "n_head": 1, name: 10**12}
    with pytest.raises(ValueError, match=rf"{name} 1000000000000.* takes at least [\d,]+ GiB; this machine has \d+"):
        GPT(ModelConfig(**sizes))


def test_heads_that_do_not_fit_a_huge_width_are_refused_at_once():
    with pytest.raises(ValueError, match=r"n_head could be 1, 2, 4, 5$"):
        ModelConfig(n_embd=10**18, n_head=3)


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ModelConfig().n_layer = 3


def test_derived_sizes():
    assert ModelConfig(n_embd=96, n_head=6).head_dim == 16
    assert ModelConfig(n_head=4).kv_heads == 4
    assert ModelConfig(n_head=4, n_kv_head=2).kv_heads == 2


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({"attention": "linear"}, "linear linear linear linear"),
        ({"attention": "window,linear"}, "window linear window linear"),
        ({"attention": "window,window,window,reference"}, "window window window reference"),
        ({"attention": "window", "full_attention_every": 4}, "window window window flash"),
        ({"attention": "window,linear", "full_attention_every": 3}, "window linear flash linear"),
        ({"attention": "tiled", "full_attention_every": 1}, "flash flash flash flash"),
        ({"attention": "tiled", "full_attention_every": 5}, "tiled tiled tiled tiled"),
    ],
)
def test_paths_of_the_layers(options, paths):
    assert ModelConfig(n_layer=4, **options).paths == tuple(paths.split())


@pytest.mark.parametrize(
    "statement",
    ["import model.config", "from model import ModelConfig", "from model.attention import available; available()"],
)
def test_does_not_import_torch(statement):
    program = f"import sys; {statement}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def test_unknown_public_name():
    import model as package

    with pytest.raises(AttributeError, match="no attribute 'GTP'; it has GPT, ModelConfig"):
        _ = package.GTP
