"""Small models and texts for the tests of the probes."""

import torch

from model import GPT, ModelConfig


def tiny(seed=0, **options):
    """A model whose scores are far from uniform: its query and key matrices are scaled up."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 400, "vocab_size": 11}
    model = GPT(ModelConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(15)
    return model


def tokens(n, seed=0):
    return torch.randint(11, (n,), generator=torch.Generator().manual_seed(seed))
