"""What is flex's own: on CPU it runs forward, and says so (its values there: test_contract.py)."""

import pytest
import torch

from model import GPT, ModelConfig
from model.attention import available, build, path_class
from model.attention.mask import MaskRule


def test_training_on_cpu_is_refused_with_the_paths_that_can():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    with pytest.raises(ValueError, match="'flex' does not train on CPU; paths that do: ") as refusal:
        build("flex")(q.requires_grad_(), k, v, rule=MaskRule())
    able = str(refusal.value).rpartition(": ")[2].split(", ")
    assert set(able) == {name for name in available() if "backward_cpu" in path_class(name).supports} >= {"tiled"}
    assert "flex" not in able


def test_a_model_evaluates_on_cpu_and_is_refused_to_train():
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 5}
    flex, flash = (GPT(ModelConfig(**sizes, attention=name)) for name in ("flex", "flash"))
    flex.load_state_dict(flash.state_dict())
    tokens = torch.randint(5, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(flex(tokens), flash(tokens))
    with pytest.raises(ValueError, match="'flex' does not train on CPU"):
        flex(tokens)


def test_kernel_says_that_it_is_not_compiled_here():
    q = torch.randn(1, 1, 3, 4)
    assert build("flex").kernel(q, q, q, rule=MaskRule()) == "flex uncompiled"
