"""The import table from GPT-2's parameter names (transformers' GPT2LMHeadModel) to ours."""

import re
from collections.abc import Mapping

from torch import Tensor

from model.config import ModelConfig

# transformers keeps the linear layers of a block as Conv1D: (in, out), transposed to nn.Linear's (out, in).
_BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_proj": "attn.o_proj",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_OUTSIDE = {
    "wte.weight": "token_embedding.weight",
    "wpe.weight": "position_embedding.weight",
    "ln_f.weight": "final_norm.weight",
    "ln_f.bias": "final_norm.bias",
    "lm_head.weight": "lm_head.weight",
}


def from_gpt2(weights: Mapping[str, Tensor], *, n_head: int) -> tuple[ModelConfig, dict[str, Tensor]]:
    """(config, state_dict) for `GPT(config).load_state_dict(state_dict)` from GPT-2's own state_dict.

    n_head is not in the weights: 12 for gpt2, 16 for gpt2-medium, 20 for gpt2-large, 25 for gpt2-xl.
    ValueError for a name that is no parameter of GPT-2. The tensors of the result share memory with `weights`.
    """
    ours: dict[str, Tensor] = {}
    for name, value in weights.items():
        name = name.removeprefix("transformer.")
        place = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
        if name in _OUTSIDE:
            ours[_OUTSIDE[name]] = value
        elif place and place[2] == "attn.c_attn":  # q, k and v side by side: (C, 3·C)
            for part, projection in zip(value.chunk(3, dim=-1), ("q_proj", "k_proj", "v_proj"), strict=True):
                ours[f"blocks.{place[1]}.attn.{projection}.{place[3]}"] = part.mT if part.ndim == 2 else part
        elif place and place[2] in _BLOCK:
            ours[f"blocks.{place[1]}.{_BLOCK[place[2]]}.{place[3]}"] = value.mT if value.ndim == 2 else value
        elif not name.endswith((".attn.bias", ".attn.masked_bias")):  # masks that older files carry
            raise ValueError(f"{name!r} is no parameter of GPT-2")
    ours.setdefault("lm_head.weight", ours["token_embedding.weight"])
    vocab_size, n_embd = ours["token_embedding.weight"].shape
    config = ModelConfig(
        n_layer=sum(name.endswith(".q_proj.weight") for name in ours),
        n_head=n_head,
        n_embd=n_embd,
        block_size=len(ours["position_embedding.weight"]),
        vocab_size=vocab_size,
        bias=True,
    )
    return config, ours
