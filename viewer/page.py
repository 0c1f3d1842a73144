"""One HTML file with q, k and the log-sum-exp of each layer, from which the browser computes every weight exactly.

So a page grows with the length of the text, not with its square, and needs no network and no server.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.capture import Tokenizer, readable
from probes.record import AttentionRecord, replacing
from viewer.content import View, view_of_model

MOST_BYTES = 30_000_000
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("weights.js", "draw.js", "map.js", "lines.js", "heads.js", "strip.js", "page.js", "controls.js")


@dataclass(frozen=True)
class PageSize:
    """What decides how large a page gets; known before anything runs."""

    n_tokens: int
    n_layers: int
    n_head: int
    n_kv_head: int
    head_dim: int
    itemsize: int = 4
    n_steps: int = 1
    n_predicted: int = 1  # steps of which the model's predictions are known

    @classmethod
    def of(cls, view: View) -> "PageSize":
        record = view.last
        sizes = (record.n_tokens, len(view.shown_layers), record.n_head, record.n_kv_head, record.head_dim)
        n_predicted = sum("predictions" in known for known in view.known.values())
        return cls(*sizes, 2 if record.info.dtype == "bfloat16" else 4, len(view.records), n_predicted)

    @classmethod
    def of_model(cls, config: Any, n_tokens: int, layers: Sequence[int] | None) -> "PageSize":
        """Of a run that is yet to be captured, in float32."""
        n_layers = config.n_layer if layers is None else len(set(layers))
        return cls(n_tokens, n_layers, config.n_head, config.kv_heads, config.head_dim)

    @property
    def n_bytes(self) -> int:
        """About; base64 takes four characters for three bytes."""
        row = (self.n_head + self.n_kv_head) * self.head_dim * self.itemsize + self.n_head * 4  # q, k and lse
        tensors = self.n_layers * self.n_tokens * row * 4 // 3
        words = self.n_tokens * 35 + self.n_layers * self.n_head * 400  # tokens; scores
        predictions = self.n_predicted * self.n_tokens * 130
        assets = sum(file.stat().st_size for file in _ASSETS.iterdir())
        return self.n_steps * (tensors + words) + predictions + assets

    def most(self, name: str) -> int:
        """How large n_tokens, n_layers or n_steps may be, the rest as it is; at least 1."""
        none, one = (replace(self, **{name: n}).n_bytes for n in (0, 1))
        return max(1, (MOST_BYTES - none) // (one - none))

    def check(self) -> int:
        """The size. ValueError, naming a smaller choice, when that is more than a page should have."""
        if self.n_bytes <= MOST_BYTES:
            return self.n_bytes
        one = replace(self, n_layers=1)
        if one.n_bytes <= MOST_BYTES:
            choice = f"choose fewer layers, such as --layers {','.join(map(str, range(self.most('n_layers'))))}"
        else:
            choice = f"choose one layer and at most {one.most('n_tokens'):,} tokens"
        raise ValueError(
            f"the page would have {readable(self.n_bytes)}, more than {readable(MOST_BYTES)}; {choice}, "
            "or look at all of it with: probe.py serve"
        )


def answer(view: View, output: str, *, as_json: bool) -> int:
    """`probe.py page`: says how large the page will be and writes it, with as many steps of training as fit."""
    view = view.thinned(PageSize.of(view).most("n_steps"))
    size, steps = PageSize.of(view).check(), sorted(view.records)
    if not as_json:
        of = f", {len(steps)} steps of training" if len(steps) > 1 else ""
        print(f"{view.last.n_tokens} tokens{of}: a page of about {readable(size)}", flush=True)
    write_page(view, output)
    n_bytes = Path(output).stat().st_size
    if as_json:
        about = {"page": output, "estimated_bytes": size, "bytes": n_bytes, "tokens": view.last.n_tokens}
        print(json.dumps(about | {"layers": view.shown_layers, "steps": steps}))
    else:
        print(f"wrote {output}, {readable(n_bytes)}; it opens in a browser, without a network")
    return 0


def write_page(view: View, path: Path | str) -> None:
    """One HTML file, beside and renamed. ValueError when it cannot be written."""
    text = build_page(view)
    with replacing(Path(path)) as beside:
        beside.write_text(text, encoding="utf-8")


def write_run_page(model: Any, tokenizer: Tokenizer, tokens: Sequence[int], run: Path, step: int) -> AttentionRecord:
    """page.html in the directory of a run that has just ended, of as many tokens as a page can hold. The record."""
    most = PageSize.of_model(model.config, len(tokens), None).most("n_tokens")
    view = view_of_model(model, tokenizer, tokens[:most], run=run, title=str(run), step=step)
    write_page(view, run / "page.html")
    return view.last


def build_page(view: View, source: str = "embedded") -> str:
    """The page with all that it shows inside; with source `server`, without weights and of the newest step only."""
    newest, *earlier = sorted(view.records, reverse=True)
    parts = [_json('id="content"', view.content(newest, source))]
    if source == "embedded":
        parts += [_json(f'data-key="{step}/content"', view.content(step)) for step in earlier]
        parts += [part for step in (newest, *earlier) for part in _tensors(view.records[step], view.shown_layers, step)]
    scripts = [(_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    style = (_ASSETS / "style.css").read_text(encoding="utf-8")
    connect = "; connect-src 'self'" if source == "server" else ""
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'{connect}"
    )
    whole = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "title": html.escape(view.title or "attention"),
        "style": f"<style>{style}</style>",
        "data": "\n".join(parts),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    template = (_ASSETS / "index.html").read_text(encoding="utf-8")
    # In one pass: what a token says is never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: whole[match[1]], template)


@dataclass(frozen=True)
class Page:
    """A page that a notebook displays."""

    text: str

    def _repr_html_(self) -> str:
        # The sandbox keeps the page apart from the notebook: it has an origin of its own.
        frame = 'width="100%" height="820" style="border: 0" sandbox="allow-scripts"'
        return f'<iframe title="attention" {frame} srcdoc="{html.escape(self.text)}"></iframe>'


def show(record: AttentionRecord, **options: Any) -> Page:
    """The page of a record in a notebook. options: title, layers. ValueError when it would be too large."""
    view = View.of(record, **options)
    PageSize.of(view).check()
    return Page(build_page(view))


def _json(name: str, content: Mapping[str, Any]) -> str:
    """A data block. All but ASCII is escaped, and what could end the block or begin another one."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" {name}>{text}</script>'


def _tensors(record: AttentionRecord, layers: list[int], step: int) -> list[str]:
    """q, k and the log-sum-exp of each layer, little endian; bfloat16 as it is, the rest in float32."""
    parts = []
    for layer in layers:
        for name in ("q", "k", "lse"):
            tensor = record.tensor(layer, name)
            tensor = tensor if tensor.dtype == torch.bfloat16 else tensor.float()
            about = f'data-shape="{",".join(map(str, tensor.shape))}" data-dtype="{str(tensor.dtype)[6:]}"'
            body = base64.b64encode(_bytes(tensor)).decode("ascii")
            parts.append(f'<script type="text/plain" data-key="{step}/{layer}/{name}" {about}>{body}</script>')
    return parts


def _bytes(tensor: Tensor) -> bytes:
    kind = torch.int16 if tensor.dtype == torch.bfloat16 else torch.float32  # numpy has no bfloat16
    little = tensor.contiguous().view(kind).numpy()
    return little.astype(little.dtype.newbyteorder("<"), copy=False).tobytes()


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
