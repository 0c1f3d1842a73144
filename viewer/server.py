"""The page from this machine: `probe.py serve`. The weights come as tiles, made from the record while it is looked at.

GET only, no request names a file, and the Host must be this machine: a page elsewhere whose name was pointed here (DNS
rebinding) is refused. Values are float32, little endian, row by row; -1 where the mask forbids.
"""

import asyncio
import contextlib
import ipaddress
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Container, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from probes.metadata import one_line
from probes.record import AttentionRecord, allowed_pairs
from viewer.content import View
from viewer.page import build_page
from viewer.tiles import FORBIDDEN, is_made_at_once, kept_tile, last_level, n_cells, tile, weights
from viewer.worker import Head, Making, Worker

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest stands in the page
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(view: View, source: str, *, host: str, port: int, as_json: bool) -> int:
    """Serves until Ctrl-C; made tiles are kept beside the record, or in the run directory. ValueError for a port that
    is taken."""
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}/"
    folder = Path(source)
    app = build_app(view, folder / "tiles" if folder.is_dir() else folder.with_suffix(".tiles"), host)
    print(json.dumps({"address": address}) if as_json else f"{address}  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """ValueError when that is not possible."""
    listener = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ValueError(
            f"cannot listen on {host}, port {port} ({error.strerror}); choose another --port or --host"
        ) from error
    return listener


def build_app(view: View, folder: Path, host: str = "127.0.0.1") -> Starlette:
    """folder: where made tiles are kept."""
    service = Service(view, folder)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.worker.close()

    head = "{step}/{layer}/{head}"
    answers = {
        "/": service.page,
        "/content.json": service.content,
        f"/tile/{head}/{{level}}/{{row}}/{{column}}": service.tile,
        f"/thumb/{head}": service.thumb,
        f"/row/{head}/{{row}}": service.row,
        f"/column/{head}/{{column}}": service.column,
    }
    routes = [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
    return Starlette(routes=routes, middleware=[Middleware(Guard, host=host)], lifespan=lifespan)


class Service:
    """What is answered. All that computes runs on the worker's thread."""

    def __init__(self, view: View, folder: Path) -> None:
        self.view, self.worker = view, Worker(view.records, folder)
        self.n_tokens = view.last.n_tokens
        self._page = cache(lambda: build_page(view, "server"))
        self._content = cache(lambda step: json.dumps(view.content(step, "server"), allow_nan=False))

    async def page(self, _: Request) -> Response:
        return HTMLResponse(await self._compute(self._page))

    async def content(self, request: Request) -> Response:
        step = _number(request.query_params, "step", self.view.records)
        return Response(await self._compute(lambda: self._content(step)), media_type="application/json")

    async def tile(self, request: Request) -> Response:
        parts = request.path_params
        level = _number(parts, "level", range(last_level(self.n_tokens) + 1))
        spots = [_number(parts, name, range(n_cells(self.n_tokens, level + 8))) for name in ("row", "column")]
        found = await self._cells(request, level, *spots, is_urgent=True)
        if isinstance(found, Making):
            return JSONResponse(found.to_json(), status_code=202)
        return _values(found, {"X-Rows": str(found.shape[0]), "X-Columns": str(found.shape[1])})

    async def thumb(self, request: Request) -> Response:
        found = await self._cells(request, last_level(self.n_tokens), 0, 0, is_urgent=False)
        if isinstance(found, Making):
            return JSONResponse(found.to_json(), status_code=202)
        return _values(found, {"X-Size": str(len(found))})

    async def row(self, request: Request) -> Response:
        record, (_, layer, head) = self._head(request)
        i = _number(request.path_params, "row", range(self.n_tokens))
        may_see = allowed_pairs(record.layer_info(layer).rule, torch.tensor([i]), torch.arange(self.n_tokens))[0]
        row = await self._compute(lambda: record.row(layer, head, i))
        return _values(row.masked_fill(~may_see, FORBIDDEN))

    async def column(self, request: Request) -> Response:
        record, (_, layer, head) = self._head(request)
        j = _number(request.path_params, "column", range(self.n_tokens))
        column = slice(0, self.n_tokens), slice(j, j + 1)
        return _values(await self._compute(lambda: weights(record, layer, head, *column)))

    async def _cells(self, request: Request, level: int, row: int, column: int, *, is_urgent: bool) -> Tensor | Making:
        record, (step, layer, head) = self._head(request)
        if is_made_at_once(self.n_tokens, level):
            made: Tensor = await self._compute(lambda: tile(record, layer, head, level, row, column))
            return made
        tiles = self.worker.tiles((step, layer, head), is_urgent=is_urgent)
        if isinstance(tiles, Exception):
            raise HTTPException(500, one_line(tiles))
        return tiles if isinstance(tiles, Making) else kept_tile(tiles, self.n_tokens, level, row, column)

    def _head(self, request: Request) -> tuple[AttentionRecord, Head]:
        parts = request.path_params
        step, layer = _number(parts, "step", self.view.records), _number(parts, "layer", self.view.shown_layers)
        return self.view.records[step], (step, layer, _number(parts, "head", range(self.view.last.n_head)))

    async def _compute(self, task: Callable[[], Any]) -> Any:
        try:
            return await asyncio.wrap_future(self.worker.submit(task))
        except (ValueError, RuntimeError) as error:  # the record contradicts itself, or fills the memory
            raise HTTPException(500, one_line(error)) from error


class Guard:
    """Refuses what is addressed to another host, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        is_own = len(hosts) == 1 and is_own_host(hosts[0], self._host)
        app = self._app if is_own else PlainTextResponse("another host's name; use the address that was printed", 403)
        await app(scope, receive, send_with_headers)


def is_own_host(header: str, host: str) -> bool:
    """Whether a Host header names this machine, which listens on `host`. Beyond loopback addresses are taken too: only
    a name can be pointed here by somebody else."""
    match = re.fullmatch(r"\[?([\w.:-]+?)\]?(?::\d{1,5})?", header, re.ASCII)
    name = match[1].lower() if match else ""
    if name in ("localhost", "127.0.0.1", "::1", host.lower()):
        return True
    return not _is_loopback(host) and (name == socket.gethostname().lower() or _address(name) is not None)


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _number(parts: Mapping[str, str], name: str, choices: Container[int]) -> int:
    text = parts.get(name, "")
    if re.fullmatch("[0-9]{1,9}", text) and int(text) in choices:
        return int(text)
    raise HTTPException(404, f"there is no {name} {text[:20]!r} here")


def _values(values: Tensor, headers: Mapping[str, str] | None = None) -> Response:
    body = values.contiguous().numpy().astype("<f4", copy=False).tobytes()
    return Response(body, media_type="application/octet-stream", headers=headers)
