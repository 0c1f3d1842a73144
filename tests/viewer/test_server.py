"""The server: values are the record's, nothing but this page is answered, to nobody but this machine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import numpy as np
import pytest
import torch

from probes.capture import capture
from tests.probes.small import tiny, tokens
from tests.tiny import REPOSITORY
from viewer.content import View
from viewer.tiles import FORBIDDEN, make_tiles, tile

pytest.importorskip("starlette", reason="needs starlette (the extra serve)")
uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn (the extra serve)")

from starlette.testclient import TestClient  # noqa: E402

from viewer.server import build_app, is_own_host, listen  # noqa: E402


def values(answer):
    return torch.from_numpy(np.frombuffer(answer.content, "<f4").copy())


def client_of(view, folder, host="127.0.0.1"):
    return TestClient(build_app(view, folder, host), base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def record():
    return capture(tiny(attention="window", window=50), tokens(300), step=4)


@pytest.fixture
def client(record, tmp_path):
    with client_of(View.of(record, title="a"), tmp_path / "tiles") as client:
        yield client


def test_tiles_rows_columns_and_thumbs_are_the_records(client, record):
    weights = record.weights(1, 2)
    may_see = record.layer_info(1).rule.allowed(torch.arange(300), torch.arange(300))
    whole = weights.masked_fill(~may_see, FORBIDDEN)
    found = client.get("/tile/4/1/2/0/1/0")
    assert (found.headers["X-Rows"], found.headers["X-Columns"]) == ("44", "256")
    torch.testing.assert_close(values(found).reshape(44, 256), whole[256:, :256], atol=1e-6, rtol=0)
    found = client.get("/tile/4/1/2/2/0/0")
    torch.testing.assert_close(values(found).reshape(75, 75), tile(record, 1, 2, 2, 0, 0))
    found = client.get("/thumb/4/1/2")
    assert found.headers["X-Size"] == "38"  # level 3: 300 tokens in cells of 8
    torch.testing.assert_close(values(found).reshape(38, 38), tile(record, 1, 2, 3, 0, 0))
    torch.testing.assert_close(values(client.get("/row/4/1/2/200")), whole[200], atol=1e-6, rtol=0)
    torch.testing.assert_close(values(client.get("/column/4/1/2/200")), whole[:, 200], atol=1e-6, rtol=0)


def test_the_page_and_its_content(client):
    page = client.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    inside = json.loads(re.search('id="content">(.*?)</script>', page.text)[1])
    assert (inside["source"], inside["step"], inside["n_tokens"]) == ("server", 4, 300)
    assert "data-key" not in re.sub(r"<script>.*?</script>", "", page.text, flags=re.DOTALL)
    assert "connect-src 'self'" in page.text
    assert client.get("/content.json?step=4").json() == inside


@pytest.mark.parametrize(
    "path",
    [
        *("/tile/4/1/2/0/2/0", "/tile/4/1/2/0/0/2", "/tile/4/1/2/4/0/0", "/tile/5/1/2/0/0/0", "/tile/4/2/2/0/0/0"),
        *("/tile/4/1/4/0/0/0", "/tile/4/1/-1/0/0/0", "/tile/4/1/2/0/0", "/tile/4/1/2/0/0/0/0", "/tile/4/1/2/0/0/0.5"),
        *(
            "/tile/4/1/x/0/0/0",
            "/tile/4/1/٣/0/0/0",
            "/tile/4/1/2/0/0/" + "9" * 5000,
            "/row/4/1/2/300",
            "/row/4/1/2/1e1",
        ),
        *(
            "/column/4/1/2/300",
            "/thumb/4/1",
            "/thumb/4/9/0",
            "/content.json",
            "/content.json?step=5",
            "/content.json?step=",
        ),
        *(
            "/../probe.py",
            "/%2e%2e/probe.py",
            "/tile/../../etc/passwd",
            "/tile/4/1/2/0/0/..%2f..%2fprobe.py",
            "//etc/passwd",
        ),
        *(
            "/assets/page.js",
            "/tiles/4-0.0.safetensors",
            "/tile/4/1/2/0/0/%00",
            "/row/4/1/2/%0a1",
            "/docs",
            "/favicon.ico",
        ),
    ],
)
def test_what_is_not_there_is_one_line_and_404(client, path):
    found = client.get(path)
    assert found.status_code == 404
    assert found.headers["Content-Type"].startswith("text/plain")
    assert found.text.isprintable()
    assert len(found.text) < 100
    assert "passwd" not in found.text
    assert found.headers["X-Content-Type-Options"] == "nosniff"


def test_only_reading_is_answered(client):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert client.request(method, "/row/4/1/2/3").status_code == 405
    head = client.head("/row/4/1/2/3")
    assert (head.status_code, head.content, head.headers["Content-Length"]) == (200, b"", "1200")


@pytest.mark.parametrize("path", ["/", "/row/4/1/2/3", "/nothing"])
def test_a_foreign_host_is_refused(client, path):
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::2]",
        "a b",
    ):
        found = client.get(path, headers={"Host": host})
        assert (found.status_code, len(found.text.splitlines())) == (403, 1)
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:8000", "[::1]:8000"):
        assert client.get(path, headers={"Host": host}).status_code != 403
    headers = client.get(path).headers
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "Access-Control-Allow-Origin" not in headers


def test_beyond_this_machine_addresses_are_taken_but_no_foreign_names():
    assert is_own_host("192.168.0.7:8000", "0.0.0.0")
    assert is_own_host("[fe80::1]:8000", "::")
    assert is_own_host("glass.example:8000", "glass.example")
    assert not is_own_host("evil.example:8000", "0.0.0.0")
    assert not is_own_host("192.168.0.7:8000", "127.0.0.1")
    assert not is_own_host("192.168.0.7:8000", "localhost")


def test_a_record_that_contradicts_itself_is_said(tmp_path):
    record = capture(tiny(), tokens(40))
    record.tensor(0, "lse")[1, 7] += 1
    with client_of(View.of(record), tmp_path) as client:
        found = client.get("/row/0/0/1/7")
        assert (found.status_code, client.get("/row/0/0/1/8").status_code) == (500, 200)
    assert re.fullmatch(r"ValueError: layer 0 head 1 row 7: the weights sum to 0\.3678\d\d, .*", found.text)


def made(client, path):
    """The answer once the tiles are made; every answer before says how far they are."""
    progress = []
    while (found := client.get(path)).status_code == 202:
        progress.append(found.json()["progress"])
        assert found.json()["seconds_left"] is None or found.json()["seconds_left"] >= 0
        time.sleep(0.01)
    assert progress == sorted(progress)
    return found, progress


def test_coarse_levels_are_made_once_and_kept(tmp_path):
    record = capture(tiny(block_size=2500, n_layer=1, n_head=2), tokens(2500), step=9)
    folder = tmp_path / "a.tiles"
    with client_of(View.of(record), folder) as client:
        found, progress = made(client, "/tile/9/0/1/4/0/0")
        assert progress[0] == 0
        exact = tile(record, 0, 1, 4, 0, 0)
        torch.testing.assert_close(values(found).reshape(157, 157), exact, rtol=2**-11, atol=2**-25)
        made(client, "/thumb/9/0/0")
        assert client.get("/tile/9/0/1/3/0/1").status_code == 200  # finer ones need none
    assert sorted(path.name for path in folder.iterdir()) == ["9-0.0.safetensors", "9-0.1.safetensors"]

    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "9-0.0.safetensors").write_bytes(b"damaged")
    with client_of(View.of(record), folder) as client:
        again, progress = made(client, "/tile/9/0/1/4/0/0")
        assert again.content == found.content
        assert set(progress) == {0}  # it came from the file
        assert torch.equal(
            values(made(client, "/thumb/9/0/0")[0]) == FORBIDDEN, tile(record, 0, 0, 6, 0, 0).flatten() < 0
        )
    assert (folder / "9-0.1.safetensors").stat().st_mtime_ns == before[folder / "9-0.1.safetensors"]


def test_a_head_whose_tiles_cannot_be_made_is_said_and_the_others_go_on(tmp_path, monkeypatch):
    def failing(record, layer, head):
        if head == 0:
            raise RuntimeError("not enough memory\nfor this")
        return make_tiles(record, layer, head)

    monkeypatch.setattr("viewer.worker.make_tiles", failing)
    record = capture(tiny(block_size=2100, n_layer=1, n_head=2), tokens(2100))
    with client_of(View.of(record), tmp_path) as client:
        found, _ = made(client, "/tile/0/0/0/4/0/0")
        assert (found.status_code, found.text) == (500, "RuntimeError: not enough memory for this")
        assert made(client, "/tile/0/0/1/4/0/0")[0].status_code == 200


def test_without_a_place_to_keep_them_tiles_stay_in_memory(tmp_path, capsys):
    (tmp_path / "a.tiles").write_text("a file where the folder should be")
    record = capture(tiny(block_size=2100, n_layer=1, n_head=2), tokens(2100))
    with client_of(View.of(record), tmp_path / "a.tiles") as client:
        for head in (0, 1):
            found, _ = made(client, f"/thumb/0/0/{head}")
            assert found.headers["X-Size"] == "33"
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiles"]


@contextlib.contextmanager
def running(view, folder):
    """A real server; yields its address."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(view, folder), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_ten_clients_at_once_get_the_right_values(tmp_path):
    record = capture(tiny(block_size=2500, n_layer=1, n_head=2), tokens(2500), step=9)
    future = torch.ones(2500, 2500, dtype=torch.bool).triu(1)
    expected = record.weights(0, 1).masked_fill(future, FORBIDDEN)[::250]

    def visit(number):
        with httpx.Client(base_url=address, timeout=60) as client:
            made(client, f"/tile/9/0/{number % 2}/4/0/0")
            rows = [client.get(f"/row/9/0/1/{i}") for i in range(0, 2500, 250)]
            return number, client.get("/").status_code, [values(row) for row in rows]

    with running(View.of(record), tmp_path / "tiles") as address, ThreadPoolExecutor(10) as pool:
        for _, status, rows in pool.map(visit, range(10)):
            assert status == 200
            for row, right in zip(rows, expected, strict=True):
                torch.testing.assert_close(row, right, atol=1e-6, rtol=0)


def test_the_command_prints_its_address_and_ends_at_ctrl_c(tmp_path):
    capture(tiny(), tokens(12), step=3).save(tmp_path / "a.safetensors")
    command = [sys.executable, str(REPOSITORY / "probe.py"), "serve", str(tmp_path / "a.safetensors"), "--port"]
    process = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/  \(Ctrl-C ends it\)\n", line)
    address = line.split()[0]
    assert httpx.get(address, timeout=60).status_code == 200
    port = address.rstrip("/").rsplit(":", 1)[1]
    second = subprocess.run([*command, port], capture_output=True, text=True, env=os.environ)
    assert (second.returncode, second.stdout) == (2, "")
    assert re.fullmatch(
        rf"probe\.py: cannot listen on 127\.0\.0\.1, port {port} \(.*\); choose another --port or --host\n",
        second.stderr,
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
