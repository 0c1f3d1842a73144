"""Records whose maps are written by hand."""

import torch

from model.attention.mask import MaskRule
from probes.record import AttentionRecord, LayerInfo, RecordInfo


def record_of(*maps, token_ids=None, rule=None, **tensors):
    """One layer with the given maps (T, T) as its heads: q_i = ln A[i, ·] and k the identity give A exactly."""
    n = len(maps[0])
    ids = tuple(range(n)) if token_ids is None else tuple(token_ids)
    q = torch.stack(maps).clamp_min(1e-30).log()
    layer = LayerInfo(0, "reference", "reference", 1.0, rule or MaskRule())
    info = RecordInfo(ids, ("x",) * n, (b"x",) * n, "", {}, 0, "", "float32", (layer,), {})
    k, lse = torch.eye(n).expand(len(maps), n, n), torch.zeros(len(maps), n)
    return AttentionRecord(info, {"layers.0.q": q, "layers.0.k": k, "layers.0.lse": lse, **tensors})


def identity(n):
    return torch.eye(n)


def shifted(n):
    """All on the previous token; row 0 has only itself."""
    return stripe(n, 1)


def uniform(n):
    return torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]


def on_first(n):
    first = torch.zeros(n, n)
    first[:, 0] = 1
    return first


def stripe(n, offset):
    """All on the token `offset` before, where there is one; before that on itself."""
    return torch.stack([torch.eye(n)[i - offset if i >= offset else i] for i in range(n)])
