"""The page in headless Chromium, over a tiny pair: what a person sees, by pointer, keyboard and on a phone."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.load import Models
from tests.serve.conftest import CHAT, Running, make_llm, serving, slowed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("needs Chromium (Debian: apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
pytestmark = pytest.mark.slow

ALONE = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
FLAGS = ["--no-sandbox", "--disable-gpu", *ALONE.split()]
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script> & <b>bold</b>"
SPOKEN = {
    "accepted": {"drafted": 4, "verified": 3, "accepted": 1, "tokens": ["<img src=x ", "onerror="]},
    "pruned": {"drafted": 4, "verified": 1, "accepted": 1, "tokens": ["a", "b"]},
}


@pytest.fixture(scope="module")
def served(tiny_pair: Models) -> Iterator[Running]:
    with serving([make_llm(tiny_pair, mode) for mode in ("lag", "off")]) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, served: Running) -> Iterator[Any]:
    yield from opened(browser, served.url)


def opened(browser: Any, url: str) -> Iterator[Any]:
    """The page, which must not complain of anything; what the policy forbids would be a complaint."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(url)
    page.wait_for_selector("#verify option", state="attached")
    yield page
    page.close()
    assert [said for said in complaints if "status of 4" not in said] == []  # Chromium tells of every 4xx


def ask(page: Any, text: str = "hello", **settings: str) -> None:
    if not page.is_visible("#seed"):
        page.click("summary")
    for name, value in {"seed": "1", "temperature": "1", "max_tokens": "90", **settings}.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ended(page: Any) -> Any:
    page.wait_for_selector("#send:visible")
    return page.locator(".turn").last


def test_tokens_are_marked_by_their_origin(page: Any, served: Running) -> None:
    heard: list[Any] = []

    def listen(route: Any) -> None:
        heard.append(route.fetch())
        route.fulfill(response=heard[-1])

    page.route(f"**{CHAT}", listen)
    ask(page, max_tokens="200")
    turn = ended(page)
    events = [json.loads(line[6:]) for line in heard[0].text().splitlines() if line.startswith("data: {")]
    steps = [step for event in events for step in event["choices"][0]["steps"]]
    body = {"messages": [{"role": "user", "content": "hello"}], "seed": 1, "max_tokens": 200}
    text = served.post(CHAT, **body, verify="off").json()["choices"][0]["message"]["content"]
    assert turn.locator(".text").evaluate("box => box.textContent") == text
    told = {"accepted": 0, "own": 0, "pruned": 0}
    for step in steps:
        told["accepted"] += step["accepted"]
        is_pruned = step["accepted"] == step["verified"] < step["drafted"]
        told["pruned" if is_pruned else "own"] += len(step["tokens"]) - step["accepted"]
    assert {kind: turn.locator(f".token.{kind}").count() for kind in told} == told
    assert min(told.values()) > 0
    marks = {kind: turn.locator(f".token.{kind}").first.evaluate(LOOK) for kind in told}
    assert {mark[0] for mark in marks.values()} == {"solid rgba(0, 0, 0, 0)", "solid", "dashed"}  # not by hue alone
    assert len({mark[1] for mark in marks.values()}) == 3
    assert f"in {len(steps)} steps" in turn.inner_text()
    assert text in page.locator("#announcer").evaluate("box => box.textContent")


LOOK = """token => {
    const style = getComputedStyle(token), line = style.borderBottomColor;
    return [style.borderBottomStyle + (line.endsWith(", 0)") ? " " + line : ""), style.backgroundColor];
}"""


def test_pointer_and_keyboard_show_what_a_step_did(page: Any) -> None:
    ask(page)
    turn = ended(page)
    inspector = page.locator("#inspector")
    token = turn.locator(".token.accepted:visible").first
    token.hover()
    assert "Accepted draft" in inspector.inner_text()
    assert re.search(r"width \d: drafted \d, verified \d, accepted \d", inspector.inner_text())
    assert token.get_attribute("aria-describedby") == "inspector"
    page.mouse.move(2, 2)
    assert not inspector.is_visible()
    page.focus(".token[tabindex='0']")
    first = inspector.inner_text()
    assert re.search(r"Step \d, token 1 of ", first)
    seen = set()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
        seen.add(inspector.inner_text().splitlines()[0])
    assert len(seen) > 1
    page.keyboard.press("Home")
    assert inspector.inner_text() == first
    page.keyboard.press("Escape")
    assert not inspector.is_visible()
    assert turn.locator("[tabindex='0']").count() == 1  # one stop of the tab key


def test_side_by_side(page: Any) -> None:
    page.select_option("#beside", "off")
    assert "one after the other" in page.inner_text("#hint")
    ask(page, max_tokens="40")
    turn = ended(page)
    lag, off = (turn.locator(f".answer[data-mode={mode}]") for mode in ("lag", "off"))
    assert lag.locator(".text").inner_text() == off.locator(".text").inner_text()
    assert off.locator(".token.accepted").count() == 0 < lag.locator(".token.accepted").count()
    assert turn.locator(".verdict").inner_text().startswith("The same text: ")
    assert lag.bounding_box()["x"] < off.bounding_box()["x"]
    page.check("#together")
    ask(page, "and now", max_tokens="20")  # a second turn, with the first as its history
    assert ended(page).locator(".verdict").inner_text().startswith("The same text: ")


def test_charts_draw_what_the_server_says(page: Any, served: Running) -> None:
    ask(page)
    ended(page)
    served.wait_until(lambda: sum(any(map(str.isdigit, said)) for said in page.evaluate(SAID)) >= 4)
    said = page.evaluate(SAID)
    assert [one.partition(":")[0] for one in said] == [
        "Tokens per second", "Accepted, by place in the block", "Steps, by width", "Rows per step", "Time of a step"
    ]  # fmt: skip
    assert (
        page.evaluate("[...document.querySelectorAll('.chart canvas')].map(isDrawn)".replace("isDrawn", DRAWN))
        == [True] * 5
    )
    path = dict(
        zip(page.locator("#path dt").all_inner_texts(), page.locator("#path dd").all_inner_texts(), strict=True)
    )
    assert path["Whole step"].endswith("s")
    assert path["Device busy"] == path["Gap between draft and verify"] == "not measured"


SAID = "[...document.querySelectorAll('.chart')].map((chart) => chart.ariaLabel)"
DRAWN = "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value > 0)"


def test_stop(page: Any, served: Running) -> None:
    with slowed(served.llm, 0.02):
        ask(page, max_tokens="200")
        page.wait_for_selector(".token")
        page.keyboard.press("Escape")
        assert "stopped" in ended(page).inner_text()
        served.settle()  # the server's part of it has ended too


def speaks(page: Any, *events: dict[str, Any], status: int = 200) -> None:
    """Say this to the page in the server's place."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    text = json.dumps(events[0]) if status >= 400 else body
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=text))


def chunk(step: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": "".join(step["tokens"])}, "steps": [step], "finish_reason": None}]}


def test_what_a_model_writes_stays_text(page: Any) -> None:
    steps = [{"drafted": 9, "verified": 9, "accepted": 0, "tokens": [piece]} for piece in (HOSTILE, *HOSTILE)]
    speaks(page, *map(chunk, steps))
    ask(page, HOSTILE)
    turn = ended(page)
    assert turn.locator(".text").inner_text() == HOSTILE + HOSTILE
    assert turn.locator(".asked").inner_text() == HOSTILE
    assert page.locator("#log img, #log script, #log b:not(h3 b)").count() == 0
    assert page.title() == "Slipstream"


@pytest.mark.parametrize("says", [{"message": "<b>too</b> long", "code": "context_length_exceeded"}, None])
def test_errors_are_shown_as_the_server_words_them(page: Any, says: dict[str, Any] | None) -> None:
    if says is None:  # a stream that breaks off
        speaks(page, chunk(SPOKEN["accepted"]), {"error": {"message": "the engine failed", "code": "engine_error"}})
    else:
        speaks(page, {"error": says}, status=400)
    ask(page)
    shown = ended(page).locator("[role=alert]").inner_text()
    assert shown == (
        "200 engine_error the engine failed" if says is None else "400 context_length_exceeded <b>too</b> long"
    )


def test_dark_and_narrow(page: Any, tmp_path: Any) -> None:
    speaks(page, *map(chunk, SPOKEN.values()), chunk({**SPOKEN["pruned"], "tokens": ["x" * 400, "y"]}))
    ask(page)
    ended(page)
    light = page.evaluate(GROUND)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(GROUND) < light
    page.select_option("#beside", "off")
    ask(page)
    ended(page)
    for width in (360, 800, 1200):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


GROUND = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"


def test_a_key_is_asked_for_and_kept_for_the_tab_only(browser: Any, tiny_pair: Models, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with serving(make_llm(tiny_pair, "off"), api_keys=tmp_path / "keys") as running:
        for page in opened(browser, running.url):
            page.wait_for_selector("#key:visible")
            assert page.is_disabled("#beside")
            assert "--also" in page.inner_text("#hint")
            ask(page, max_tokens="5")
            assert ended(page).locator("[role=alert]").inner_text().startswith("401 invalid_api_key ")
            page.fill("#key", "secret")
            ask(page, max_tokens="5")
            assert "5 tokens" in ended(page).inner_text()
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            page.reload()
            page.wait_for_selector("#key:visible")
            assert page.input_value("#key") == "secret"
