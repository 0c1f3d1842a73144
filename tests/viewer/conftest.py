"""A real browser, and pages in it that may not complain."""

import shutil

import pytest

from tests.viewer.browsing import wait_until

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """open_page(address, **options of the context): a page that has drawn its map. At the end of the test none may have
    met an error, a message on the console, or a dialog."""
    complaints, contexts = [], []

    def go(address, *, offline=False, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.set_offline(offline)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        corner = "map.valueAt(map.view.y >> map.level, map.view.x >> map.level)"
        wait_until(page, f"map.frame === null && {corner} !== undefined")
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []
