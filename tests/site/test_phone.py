"""The site on a phone: no page is wider than the screen; wide elements scroll inside the page."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--allow-file-access-from-files",  # the page below reads the other pages
    "--virtual-time-budget=1000000",
    "--dump-dom",
)
WIDTH = 390
# Opens each page in a frame as wide as a phone; shows the pages that are wider, and the number of
# pages.
PAGE = """<!doctype html>
<iframe id="phone" width="WIDTH" height="844" style="border: 0"></iframe>
<pre id="result"></pre>
<script>
const phone = document.getElementById("phone");
const wide = {};
async function measure(pages) {
  for (const page of pages) {
    await new Promise(resolve => { phone.onload = resolve; phone.src = page; });
    const width = phone.contentDocument.documentElement.scrollWidth;
    if (width > WIDTH) wide[page] = width;
  }
  document.getElementById("result").textContent = JSON.stringify([pages.length, wide]);
}
measure(PAGES);
</script>
"""


def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("Chromium is not installed")
    names = sorted(path.as_uri() for path in site.rglob("*.html"))
    text = PAGE.replace("WIDTH", str(WIDTH)).replace("PAGES", json.dumps(names))
    page = tmp_path / "phone.html"
    page.write_text(text, encoding="utf-8")
    command = [browser, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    result = re.search(r'<pre id="result">(.+?)</pre>', run.stdout)
    assert result, run.stderr[-2000:]
    count, wide = json.loads(unescape(result[1]))
    assert count == len(names) > 80
    assert wide == {}
