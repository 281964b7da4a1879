"""The page at / and its figures, as HTTP has them; what a browser makes of it is in test_page_in_a_browser."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from slipstream.load import Models
from slipstream.serve import stats, webpage
from tests.serve.conftest import COMPLETIONS, Running, make_llm, serving

OWN = {name: text.decode() for name, text in webpage.contents().items() if not name.startswith("vendor/")}
ASKED = {"prompt": "once", "max_tokens": 30, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_pair: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    with serving([make_llm(tiny_pair, "lag"), make_llm(tiny_pair, "off")], api_keys=keys) as running:
        running.http.headers["authorization"] = "Bearer secret"
        yield running
        running.settle()


def test_the_page_needs_no_key_and_may_load_nothing_from_elsewhere(served: Running) -> None:
    page = served.http.get("/", headers={"authorization": ""})
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors" in policy


def test_it_is_sent_once(served: Running) -> None:
    first = served.http.get("/page/app.js")
    again = served.http.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert served.http.get("/page/chat.js").headers["etag"] != first.headers["etag"]


def test_all_that_it_refers_to_is_there(served: Running) -> None:
    named = re.findall(r'(?:src|href)="(?!#)([^"]+)"', OWN["index.html"])
    modules = [
        (name, found) for name, text in OWN.items() for found in re.findall(r'^import .* from "([^"]+)"', text, re.M)
    ]
    named += [f"page/{PurePosixPath(name).parent / found}" for name, found in modules]
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert len(named) > 12
    for path in named:
        response = served.http.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-type"].startswith(types[PurePosixPath(path).suffix])
    assert "The MIT License" in served.http.get("/page/vendor/LICENSE").text


@pytest.mark.parametrize(
    "path", ["nothing.js", "../stats.py", "%2e%2e/stats.py", "vendor", "", "/etc/passwd", "index.html/"]
)
def test_nothing_else_is_served(served: Running, path: str) -> None:
    assert served.http.get(f"/page/{path}").status_code == 404
    assert served.http.post("/", json={}).status_code == 405


def test_text_never_becomes_markup() -> None:
    for name, text in OWN.items():
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "srcdoc"):
            assert way not in text, name
        assert not re.search(r"localStorage|indexedDB|cookie", text), "a key would outlive the tab"
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", OWN["index.html"]), "the policy forbids it"


def test_stats_are_those_of_the_engines(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "FRESH_S", -1.0)
    for mode in ("lag", "off"):
        assert served.post(COMPLETIONS, **ASKED, verify=mode).status_code == 200
    served.settle()
    found = served.http.get("/stats").json()
    about = [found[name] for name in ("model", "verify", "dtype", "acceptance", "needs_key", "ready")]
    assert about == ["tiny", "lag", "float32", "coupled", True, True]
    assert list(found["modes"]) == ["lag", "off"]
    for llm in served.llms:
        totals, mode = llm.engine.totals, found["modes"][llm.speculative.mode]
        assert (mode["state"], mode["open"], mode["running"], mode["waiting"], mode["tokens"]) == (
            "running",
            0,
            0,
            0,
            30,
        )
        for name in ("drafted", "verified", "accepted", "emitted"):
            assert mode[name] == getattr(totals, name)
        assert (mode["steps"], mode["rows"]) == (llm.engine.num_decode_steps, totals.steps + totals.verified)
        assert mode["step_s"]["count"] > 0 < mode["step_s"]["sum"]
        assert mode["gap_s"] is mode["decide_hidden_s"] is mode["device_busy"] is None  # a CPU has none of them
    lag, off = found["modes"].values()
    assert lag["widths"] == [served.llm.engine.totals.width_histogram[width] for width in range(6)]
    assert lag["verified_at"][0] >= lag["accepted_at"][0] > 0
    assert (len(lag["verified_at"]), off["verified_at"], len(off["widths"])) == (5, [], 1)


def test_all_who_ask_at_a_time_are_told_the_same(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking makes the engine record some steps."""
    monkeypatch.setattr(stats, "FRESH_S", 1e9)
    first = served.http.get("/stats").json()
    assert served.http.get("/stats", headers={"authorization": ""}).json() == first
    monkeypatch.setattr(stats, "FRESH_S", -1.0)
    assert served.http.get("/stats").json()["time_s"] > first["time_s"]
