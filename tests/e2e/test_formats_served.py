"""Drafters of other dialects through the public face: loaded, probed, overridden, exported and inspected."""

import dataclasses
import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.cli import main
from slipstream.decide.calibration import Calibration
from slipstream.errors import ConfigError
from slipstream.load import load_models
from slipstream.models.drafters import BlockDrafter, load_drafter, save_drafter
from slipstream.models.export import ExportTarget, export_drafter
from slipstream.models.headers import weights_digest
from slipstream.models.locate import TARGETS, built_in_drafters, resolve_target
from slipstream.models.probe import LayoutAgreement
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.weights import load_decoder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def foreign(tiny_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """The tiny drafter without the key that marks it as ours."""
    shutil.copytree(tiny_folders[1], tmp_path / "foreign")
    config = json.loads((tmp_path / "foreign" / "config.json").read_text())
    del config["slipstream"]
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config))
    return tmp_path / "foreign"


@pytest.fixture
def drafter(tiny_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """One that leaves the target's last layer alone: engines disagree about its features, so none could be exported."""
    target = load_decoder(tiny_folders[0], torch.float32)
    spec = load_drafter(tiny_folders[1], target).spec
    network = BlockDrafter(dataclasses.replace(spec, target_layer_ids=(-1, 0)), torch.float32).init_random(5, std=0.2)
    network.share(target)
    save_drafter(network, tmp_path / "drafter", dtype=torch.float32)
    return tmp_path / "drafter"


def note(notes: Any, field: str) -> tuple[object, str] | None:
    return next(((value, reason) for name, value, reason in notes if name == field), None)


def test_only_drafters_of_others_are_probed(tiny_folders: tuple[Path, Path], foreign: Path) -> None:
    """The tiny drafter is random, so the probe can tell nothing: it says so and does not warn."""
    target, drafter = tiny_folders
    assert note(load_models(str(target), str(drafter), dtype="float32").notes, "layout_probe") is None
    found = note(load_models(str(target), str(foreign), dtype="float32").notes, "layout_probe")
    assert found is not None
    assert found[0] in ("inconclusive", "agrees")
    assert "anchor_first agrees with" in found[1]


def test_a_contradicted_layout_is_warned_of_with_the_remedy(
    tiny_folders: tuple[Path, Path], foreign: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The load goes on: output does not depend on it, and the probe may err."""
    found = LayoutAgreement(layout="anchor_first", as_read=0.02, other=0.6, num_compared=60)
    monkeypatch.setattr("slipstream.load.layout_agreement", lambda *_: found)
    with caplog.at_level(logging.WARNING, "slipstream"):
        models = load_models(str(tiny_folders[0]), str(foreign), dtype="float32")
    (message,) = [record.getMessage() for record in caplog.records]
    assert "anchor_first agrees with 2%, fill_in with 60%; set draft_layout (--draft-layout) to fill_in" in message
    assert note(models.notes, "layout_probe") == ("contradicts", str(found))


def test_a_target_without_chat_template_is_probed_with_raw_text(
    tiny_folders: tuple[Path, Path], foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folders[0], tmp_path / "raw")
    settings = json.loads((tmp_path / "raw" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "raw" / "tokenizer_config.json").write_text(json.dumps(settings))
    encoded: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, *a: encoded.append(text) or encode(self, text, *a))
    assert note(load_models(str(tmp_path / "raw"), str(foreign), dtype="float32").notes, "layout_probe")
    assert encoded == ["Write a Python function that checks whether a number is prime."]


def test_draft_layout_overrides_the_file(tiny_folders: tuple[Path, Path]) -> None:
    """Fault 24: read as fill-in the same file makes one draft less, and says why; the text stays the target's."""
    target, drafter = (str(folder) for folder in tiny_folders)
    texts = []
    for layout, drafts in (("auto", 5), ("anchor_first", 5), ("fill_in", 4)):
        config = SpeculativeConfig(draft_model=drafter, draft_layout=layout)  # type: ignore[arg-type]
        llm = LLM(target, speculative=config, dtype="float32", max_num_seqs=1)
        assert llm.engine.drafter is not None
        assert llm.engine.drafter.max_draft_tokens == drafts
        decided, reason = note(llm.notes, "layout") or ("", "")
        assert (decided, reason == "set by the user") == (layout.replace("auto", "anchor_first"), layout != "auto")
        texts.append(llm.generate("to be read", SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_a_draft_layout_that_has_no_effect_is_refused(tiny_folders: tuple[Path, Path]) -> None:
    target, drafter = (str(folder) for folder in tiny_folders)
    with pytest.raises(ConfigError, match="draft_layout is 'sideways'; choose one of auto, fill_in, anchor_first"):
        SpeculativeConfig(draft_model=drafter, draft_layout="sideways")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft_layout: no effect without draft_model"):
        SpeculativeConfig(draft_layout="fill_in")
    with pytest.raises(ConfigError, match="ngram has no blocks"):
        SpeculativeConfig(draft_model="ngram", draft_layout="fill_in")
    models = load_models(target, drafter, dtype="float32")
    config = SpeculativeConfig(draft_model=drafter, draft_layout="fill_in")
    with pytest.raises(ConfigError, match="loaded as anchor_first; ask load_models"):
        LLM(models, speculative=config)


@pytest.mark.parametrize("dialect", ["deepspec", "speculators"])
def test_an_exported_drafter_serves_as_before(
    run: Run, tiny_folders: tuple[Path, Path], drafter: Path, tmp_path: Path, dialect: str
) -> None:
    """Same drafts, so the same steps with the same counts; `inspect` names the dialect without the target."""
    target = tiny_folders[0]
    out = tmp_path / dialect
    flags = ("--dialect", dialect, "--model", target)
    name = ("--target-name", "someone/tiny") if dialect == "speculators" else ()
    mine, other = ("head", "greedy"), ("peak", "greedy")
    digests = {mine: weights_digest(drafter), other: "of yet other weights"}
    Calibration(temperatures={mine: (2.0,), other: (3.0,)}, weights=digests).save(drafter / "calibration.json")
    code, text, error = run("export", drafter, out, *flags, *name, "--json")
    assert code == 0, error
    copy = Calibration.load(out / "calibration.json")
    assert copy.of_other_weights(weights_digest(out)) == [other], "the same weights in another form"
    assert ("someone/tiny" in (out / "config.json").read_text()) == (dialect == "speculators")
    assert json.loads(text.splitlines()[-1])["dialect"] == dialect
    code, text, error = run("inspect", out, "--json")
    report = json.loads(text.splitlines()[-1])
    assert (report["dialect"], report["layout"], report["max_draft_tokens"]) == (dialect, "anchor_first", 5)
    served = []
    for folder in (drafter, out):
        llm = LLM(str(target), speculative=SpeculativeConfig(draft_model=str(folder)), dtype="float32", max_num_seqs=1)
        done = llm.generate("to be served", SamplingParams(max_tokens=40, ignore_eos=True))[0]
        served.append((done.token_ids, done.accepted, done.spec))
    assert served[0] == served[1]
    assert served[0][2].drafted > 0


def test_mistakes_at_the_command_line(run: Run, tiny_folders: tuple[Path, Path], drafter: Path, tmp_path: Path) -> None:
    """Exit code 2 for wrong use, 1 for what the dialect cannot say; one line, nothing written."""
    target = tiny_folders[0]
    for flags, code, says in (
        (["--dialect", "eagle"], 2, "dialect is 'eagle'"),
        (["--dialect", "deepspec"], 2, "--model"),
        (["--dialect", "deepspec", "--target-name", "a/b"], 2, "target_name: no effect without model"),
        (
            ["--dialect", "deepspec", "--model", target, "--target-name", "a/b"],
            2,
            "target_name: no effect in the dialect",
        ),
        (["--dialect", "z-lab", "--model", target], 1, "Markov or confidence head cannot be said"),
        (["--dialect", "deepspec", "--model", target, "--draft-layout", "sideways"], 2, "draft_layout is 'sideways'"),
        (
            ["--dialect", "deepspec", "--model", target, "--draft-layout", "fill_in"],
            1,
            "export to z-lab or speculators",
        ),
    ):
        got, text, error = run("export", drafter, tmp_path / "out", *flags)
        assert (got, text) == (code, ""), error
        assert says in error
        assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(built_in_drafters()))
def test_the_shipped_drafters_are_told_apart(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read as their file says they agree, read the other way they are warned of, by a wide margin on real weights."""
    shutil.copytree(built_in_drafters()[name], tmp_path / name)
    config = json.loads((tmp_path / name / "config.json").read_text())
    del config["slipstream"]
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    target = next(iter(TARGETS))
    right = load_models(target, str(tmp_path / name))
    assert (note(right.notes, "layout_probe") or [""])[0] == "agrees"
    assert right.network is not None
    assert not caplog.records
    other = "fill_in" if right.network.spec.layout == "anchor_first" else "anchor_first"
    wrong = load_models(target, str(tmp_path / name), layout=other)
    assert (note(wrong.notes, "layout_probe") or [""])[0] == "contradicts"
    assert f"set draft_layout (--draft-layout) to {right.network.spec.layout}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(built_in_drafters()))
def test_the_shipped_drafters_go_to_speculators(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Their reduced head is cut from the GGUF target, in bf16; read back it is the target's, whatever that is held in."""
    path = resolve_target("smollm2-135m")
    export_drafter(built_in_drafters()[name], tmp_path / name, "speculators", ExportTarget.at(path))
    target = load_decoder(path, dtype)
    mine, theirs = load_drafter(built_in_drafters()[name], target), load_drafter(tmp_path / name, target)
    assert "lm_head.weight" in load_file(tmp_path / name / "model.safetensors")
    assert not theirs.spec.own_head
    assert theirs.state_dict().keys() == mine.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in mine.state_dict().items())
    assert torch.equal(mine.draft_token_ids, theirs.draft_token_ids)
    assert torch.equal(mine.head_weight, theirs.head_weight)
