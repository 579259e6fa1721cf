"""Debian's Chromium in a test, driven by playwright; and axe, the accessibility engine, from the npm registry.

Both are fetched into .deps and never looked for elsewhere; what cannot be fetched is a loud skip, and in CI a failure.
The browser reaches this machine only: whatever a page asks of anybody else fails the test.
"""

import contextlib
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, Request, sync_playwright
from tools.debian import DEPS, Tool

from support.deps import debian_tool

__all__ = ["PATIENCE_MS", "axe_source", "browsing", "serious_findings", "until", "watched"]

# A bound against hanging, never a measure.
PATIENCE_MS = 15_000
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
)  # fmt: skip
FETCH_TIMEOUT_S = 90.0
AXE = "axe-core@4.14.0"
AXE_SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"


@contextlib.contextmanager
def chromium(playwright: Playwright, tool: Tool, *more: str) -> Iterator[Browser]:
    """A browser with a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="pgl-chromium-") as home:
        browser = playwright.chromium.launch(
            executable_path=tool.path,
            args=[*ARGUMENTS, *more],
            env={**tool.env, "HOME": home, "TZ": "UTC"},
            timeout=PATIENCE_MS * 2,
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """The browser of a test."""
    tool = debian_tool("chromium")
    with sync_playwright() as playwright, chromium(playwright, tool) as browser:
        yield browser


@contextlib.contextmanager
def watched(browser: Browser, url: str, *, may_fail: bool = False, **options: Any) -> Iterator[Page]:
    """A page of a context of its own. An error in its console, a broken policy or a request to elsewhere fail the test.

    `may_fail`: requests of the page fail on purpose, and the console says so.
    """
    context = browser.new_context(base_url=url, timezone_id="UTC", locale="en-GB", **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)

    def check(request: Request) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            wrong.append(f"asked {request.url}")

    page.on("request", check)
    try:
        yield page
    finally:
        context.close()
    network = ("Failed to load resource", "net::ERR_")
    left = [text for text in wrong if not (may_fail and any(word in text for word in network))]
    assert left == []


_LOOK = """
() => new Promise((done, fail) => {
  const late = performance.now() + %d;
  const look = () => {
    if (%s) done(true);
    else if (performance.now() > late) fail(new Error("it did not come true in time"));
    else requestAnimationFrame(look);
  };
  look();
})
"""


def until(page: Page, condition: str) -> None:
    """Until an expression of JavaScript is true, looked at with every frame.

    Playwright's own way evaluates in the page again and again, which the policy of ours forbids.
    """
    page.evaluate(_LOOK % (PATIENCE_MS, condition))


def axe_source() -> str:
    """The engine's script, fetched once."""
    script = DEPS / "npm" / f"{AXE}.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"needs {AXE}: install npm, which fetches it")
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=script.parent) as folder:
            try:
                command = [npm, "pack", AXE, "--ignore-scripts", "--silent", "--pack-destination", folder]
                subprocess.run(command, check=True, capture_output=True, cwd=folder, timeout=FETCH_TIMEOUT_S)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"needs {AXE}: run again with a network, so that npm can fetch it ({error})")
            (archive,) = Path(folder).glob("*.tgz")
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == AXE_SHA256, f"this is not the {AXE} that we know"
            with tarfile.open(archive) as files:
                files.extract("package/axe.min.js", folder, filter="data")
            # At once, because test processes run side by side.
            Path(folder, "package", "axe.min.js").replace(script)
    return script.read_text(encoding="utf-8")


def serious_findings(page: Page) -> list[str]:
    """What axe calls serious or critical, with the elements that it means.

    Evaluated by the browser's debugger, which a page's policy does not bind.
    """
    page.evaluate(axe_source())
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{found['id']} ({found['impact']}): {', '.join(str(each['target']) for each in found['nodes'])[:500]}"
        for found in result["violations"]
        if found["impact"] in ("serious", "critical")
    ]
