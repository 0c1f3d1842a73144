"""What a record says about itself: where it comes from, and how each layer turned scores into weights.

Stored as one JSON string in the metadata of the safetensors file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model.attention.mask import MaskRule

FORMAT_VERSION = 1
METADATA_KEY = "glassgpt.attention_record"
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class LayerInfo:
    """How one layer turned q and k into weights: all that a weight needs besides the tensors.

    kind softmax: exp(score(q, k) - lse). kind linear: q and k hold the feature maps φ(q) and φ(k), lse the logarithm
    of the sum of their products, and a weight is φ(q)·φ(k)·exp(-lse).
    """

    index: int
    path: str
    kernel: str
    scale: float
    rule: MaskRule
    softcap: float = 0.0
    alibi_slopes: tuple[float, ...] | None = None
    kind: str = "softmax"

    @property
    def q_scale(self) -> float:
        """What multiplies q before its products with k."""
        return self.scale if self.kind == "softmax" else 1.0


@dataclass(frozen=True)
class RecordInfo:
    """Where a record comes from. `token_texts` show a replacement mark where a token is a part of a character."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    token_bytes: tuple[bytes, ...]
    text_hash: str
    model: Mapping[str, Any]
    step: int
    checkpoint_hash: str
    dtype: str
    layers: tuple[LayerInfo, ...]
    versions: Mapping[str, str]


def allowed_pairs(rule: MaskRule, rows: Tensor, columns: Tensor) -> Tensor:
    """(R, C) booleans: may query rows[r] see key columns[c]?"""
    return allowed(rule, rows[:, None], columns[None, :])


def allowed(rule: MaskRule, i: Tensor, j: Tensor) -> Tensor:
    """May query i see key j? Positions of any two shapes that broadcast.

    MaskRule.allowed says the same. It is written a second time on purpose: the models' paths use that one, and an
    error there must not be on both sides of a comparison.
    """
    distance = i - j  # negative in the future
    may_see = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    if rule.window is not None:
        has_global = (i < rule.n_global) | (j < rule.n_global)
        may_see = may_see & ((distance > -rule.window) & (distance < rule.window) | has_global)
    if rule.documents is not None:
        documents = rule.documents[0]  # (S,): a record holds one text
        may_see = may_see & (documents[i] == documents[j])
    return may_see


def is_plain_causal(rule: MaskRule) -> bool:
    """Whether row i sees exactly the i + 1 keys up to its own."""
    return rule.causal and rule.window is None and rule.documents is None


def log_weights(info: LayerInfo, head: int, products: Tensor, lse: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """ln A[i, j], as if every pair were allowed, from the products of q_scale·q_i and k_j, which are
    overwritten, and the lse."""
    if info.kind == "linear":
        return products.log_().clamp_min_(-1e38).sub_(lse)  # finite where a product is 0
    scores = products
    if info.softcap > 0:
        scores = info.softcap * torch.tanh(scores / info.softcap)
    if info.alibi_slopes is not None:
        scores = scores - info.alibi_slopes[head] * (i - j).abs()
    return scores.sub_(lse)


def to_json(info: RecordInfo) -> str:
    """The metadata string. Bytes as hexadecimal, document ids as a list."""
    layers = []
    for layer in info.layers:
        documents = None if layer.rule.documents is None else layer.rule.documents[0].tolist()
        rule = {**asdict(replace(layer.rule, documents=None)), "documents": documents}
        layers.append({**vars(layer), "rule": rule})
    token_bytes = [part.hex() for part in info.token_bytes]
    fields = {**vars(info), "token_bytes": token_bytes, "layers": layers}
    return json.dumps({"format_version": FORMAT_VERSION, "lse_base": "e", **fields})


def from_json(text: str) -> RecordInfo:
    """Inverse of to_json. ValueError for another format version or base; any of KeyError, TypeError, ValueError,
    AttributeError, RecursionError, OverflowError when the string is damaged."""
    fields = json.loads(text)
    version, base = fields.pop("format_version"), fields.pop("lse_base")
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}; this program reads version {FORMAT_VERSION}")
    if base != "e":
        raise ValueError(f"log-sum-exp to base {base}; this program reads base e")
    layers = []
    for layer in fields.pop("layers"):
        rule = layer.pop("rule")
        if rule["documents"] is not None:
            rule["documents"] = torch.tensor(rule["documents"]).unsqueeze(0)
        slopes = layer.pop("alibi_slopes")
        slopes = None if slopes is None else tuple(map(float, slopes))
        layer |= {"scale": float(layer["scale"]), "softcap": float(layer["softcap"])}
        layers.append(LayerInfo(**layer, rule=MaskRule(**rule), alibi_slopes=slopes))
    if not layers or not all(
        type(layer.index) is int and math.isfinite(layer.scale + layer.softcap) for layer in layers
    ):
        raise ValueError("no usable layers")
    if unknown := {layer.kind for layer in layers} - {"softmax", "linear"}:
        raise ValueError(f"a layer of kind {min(unknown)}; this program reads softmax and linear")
    shown = [fields["dtype"], fields["checkpoint_hash"]]
    shown += [name for layer in layers for name in (layer.path, layer.kernel)]
    if type(fields["step"]) is not int or not all(isinstance(name, str) and name.isprintable() for name in shown):
        raise ValueError("a step or name that cannot be shown")  # it could steer the terminal
    token_bytes = tuple(bytes.fromhex(part) for part in fields.pop("token_bytes"))
    ids, texts = tuple(map(int, fields.pop("token_ids"))), tuple(map(str, fields.pop("token_texts")))
    return RecordInfo(**fields, token_ids=ids, token_texts=texts, token_bytes=token_bytes, layers=tuple(layers))


def check_tensors(file: Any, info: RecordInfo) -> None:
    """ValueError unless every tensor is there, with shapes that fit each other and the tokens."""
    n = len(info.token_ids)
    if not n == len(info.token_texts) == len(info.token_bytes) or n == 0:
        raise ValueError(f"{n} token ids, {len(info.token_texts)} texts, {len(info.token_bytes)} byte strings")
    names, sizes = set(file.keys()), set()
    for layer in info.layers:
        key = f"layers.{layer.index}"
        missing = {f"{key}.q", f"{key}.k", f"{key}.lse"} - names
        if missing:
            raise ValueError(f"no tensor {min(missing)}")
        q, k, lse = (file.get_slice(f"{key}.{part}") for part in ("q", "k", "lse"))
        (n_head, n_q, dim), (n_kv_head, n_k, dim_k) = q.get_shape(), k.get_shape()
        fits = n_q == n_k == n and dim == dim_k and n_kv_head > 0 and n_head > 0 and n_head % n_kv_head == 0
        if not fits or lse.get_shape() != [n_head, n]:
            raise ValueError(f"{key}: q {q.get_shape()}, k {k.get_shape()}, lse {lse.get_shape()} for {n} tokens")
        # Feature maps are computed in at least float32, whatever the model runs in.
        expected = "float32" if layer.kind == "linear" and info.dtype in ("bfloat16", "float16") else info.dtype
        if _DTYPES.get(q.get_dtype()) != expected or k.get_dtype() != q.get_dtype() or lse.get_dtype() != "F32":
            raise ValueError(f"{key}: dtypes {q.get_dtype()}, {k.get_dtype()}, {lse.get_dtype()}; not {expected}")
        if layer.alibi_slopes is not None and len(layer.alibi_slopes) != n_head:
            raise ValueError(f"{key}: {len(layer.alibi_slopes)} ALiBi slopes for {n_head} heads")
        if layer.rule.documents is not None and layer.rule.documents.shape != (1, n):
            raise ValueError(f"{key}: document ids for {layer.rule.documents.shape[-1]} of {n} tokens")
        sizes.add((n_head, n_kv_head, dim))
    if len(sizes) > 1:
        raise ValueError("layers of different sizes")


def choices(numbers: Any) -> str:
    """`0..5` for a gapless range, else `0, 2, 5`."""
    numbers = list(numbers)
    is_range = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}..{numbers[-1]}" if is_range else ", ".join(map(str, numbers))


def one_line(error: BaseException) -> str:
    """`KeyError: 'rule'`, cut to 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
