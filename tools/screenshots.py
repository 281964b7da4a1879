"""Pictures of the page at / for the docs: the built-in pair answers, headless Chromium looks on.

    .venv/bin/python tools/screenshots.py        # into docs/img

Needs `make setup`, Chromium (Debian: apt-get install chromium), and half a minute.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "img"
SERVE = "serve --draft smollm2-135m-dspark --verify lag --also off --dtype float32 --max-num-seqs 8 --port 0"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
QUESTION = "A baker sells 12 boxes of 8 rolls each. How many rolls is that?"
SETTINGS = {"max_tokens": 72, "temperature": 0.9, "seed": 11}
DESK, PHONE = {"width": 1240, "height": 860}, {"width": 360, "height": 740}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "slipstream", *SERVE.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stderr is not None
        started = json.loads(next(line for line in server.stderr if '"serving"' in line))
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = chromium.new_page(viewport=DESK)
        page.goto(f"http://127.0.0.1:{started['port']}/")
        take(page)
        chromium.close()
        server.terminate()


def take(page: Any) -> None:
    page.select_option("#beside", "off")
    page.evaluate(
        "(given) => { for (const name in given) document.getElementById(name).value = given[name]; }", SETTINGS
    )
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".verdict", timeout=120_000)
    page.wait_for_timeout(1500)  # the charts look once a second
    page.locator(".text .token.pruned").first.hover()
    shoot(page, "page")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(500)
    shoot(page, "page-dark")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(PHONE)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)
    shoot(page, "page-phone")


def shoot(page: Any, name: str) -> None:
    """Few colours are enough, and a third of the bytes."""
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)


if __name__ == "__main__":
    main()
