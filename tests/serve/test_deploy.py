"""What lies in deploy/ fits the server: metrics, options, paths. Nothing is built or started here."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream.cli import app
from slipstream.load import Models
from slipstream.options import field_names, gather
from slipstream.serve.metrics import PREFIX, families
from slipstream.serve.options import ServeOptions
from slipstream.serve.steps import StepTimings
from tests.serve.conftest import COMPLETIONS, make_llm, serving

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(rf"{PREFIX}[a-zA-Z0-9_]+")
SERVE_FLAGS = {
    flag
    for command in typer.main.get_group(app).commands.values() if command.name == "serve"
    for parameter in command.params
    for flag in parameter.opts
}  # fmt: skip


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def expressions(panel: Any) -> list[str]:
    return [target["expr"] for target in panel.get("targets", [])]


@pytest.fixture(scope="module")
def names(tiny_pair: Models) -> set[str]:
    """Of all series that there are, those of a GPU included, once a request was served and one refused."""
    with serving(make_llm(tiny_pair)) as running:
        for fields in ({"max_tokens": 20}, {"foo": 1}):
            running.http.get("/metrics")
            running.post(COMPLETIONS, prompt="x", ignore_eos=True, **fields)
        running.wait_until(lambda: running.metric("http_problems_total") == 1)
        page = running.http.get("/metrics").text
    timings = StepTimings()
    timings.device_busy = 1.0
    for field in ("gap", "decide_hidden"):
        getattr(timings, field).add(1.0)
    of_a_gpu = {sample.name for family in families(PREFIX, "m", {"lag": timings}) for sample in family.samples}
    return of_a_gpu | {line.partition("{")[0] for line in page.splitlines() if not line.startswith("#")}


def test_every_metric_of_the_dashboard_exists(names: set[str]) -> None:
    dashboard = json.loads(text("grafana-dashboard.json"))
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    used = {name for panel in dashboard["panels"] for expr in expressions(panel) for name in NAME.findall(expr)}
    assert used | {name for query in variables for name in NAME.findall(query)} <= names
    known = {name.removesuffix("_bucket") for name in names if not name.endswith(("_sum", "_count", "_created"))}
    assert known - {name.removesuffix("_bucket") for name in used} == set(), "metrics that no panel shows"


def test_panels_do_not_lie_upon_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(text("grafana-dashboard.json"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        assert panel["type"] == "row" or all(expressions(panel)), panel["title"]
        taken |= cells


def test_flags_and_files_of_the_image() -> None:
    dockerfile = text("Dockerfile")
    entry, command = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", dockerfile, re.M)[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry[:2] == ["slipstream", "serve"]
    assert {flag for flag in entry + command if flag.startswith("--")} <= SERVE_FLAGS
    assert dockerfile.index("USER slipstream") < dockerfile.index("ENTRYPOINT")
    assert "/health" in re.findall(r"HEALTHCHECK.*?\n.*", dockerfile)[0]
    ignored = (DEPLOY.parent / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.M) for name in line.split()}
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((DEPLOY.parent / name).exists() for name in copied)


def test_the_unit(tmp_path: Path) -> None:
    unit = text("slipstream.service")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    assert {word for word in command.split() if word.startswith("--")} <= SERVE_FLAGS
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(seconds) > ServeOptions().grace_s + 5
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "slipstream.service"
    file.write_text(unit.replace("/opt/slipstream/bin/slipstream", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "slipstream.service" not in done.stderr


def test_the_example_of_a_config_file() -> None:
    own = frozenset(field_names(ServeOptions) - {"keys"})
    options = gather({}, DEPLOY / "serve.toml", own)
    assert options.speculative_config().mode == "lag"
    assert set(options.command) == own & set(tomllib.loads(text("serve.toml")))
    ServeOptions(**options.command)
