"""The layers are real: a file imports only lower ranks, and host code imports no torch.

Read over the imports that the files contain, wherever in the file they stand.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "slipstream"

# Longest prefix wins. Within one folder files may import each other (without a cycle); between folders only downwards.
RANKS: dict[str, float] = {
    "slipstream": 9,  # the public names, loaded lazily
    "slipstream.errors": 0,
    "slipstream.logprobs": 0.05,
    "slipstream.patterns": 0.03,
    "slipstream.schema": 0.04,
    "slipstream.structured": 0.05,
    "slipstream.plan": 0.15,
    "slipstream.config": 0.1,
    "slipstream.metrics": 0.2,
    "slipstream.options": 0.2,
    "slipstream.prompts": 0.2,
    "slipstream.repetition": 0.2,
    "slipstream.files": 0.2,
    "slipstream.child": 0.2,
    "slipstream.constraint": 0.3,
    "slipstream.ops": 1,
    "slipstream.kernels": 1.1,  # of ops they take constants; only what runs on a GPU imports them, for they need triton
    "slipstream.models": 2,
    "slipstream.models.folder": 0.2,  # calibrations lie in model folders too
    "slipstream.models.export": 2.1,  # a calibration goes along
    "slipstream.cache.pages": 0.2,  # kernels know the null page and the scratch page
    "slipstream.cache.shared": 0.2,
    "slipstream.cache": 2,
    "slipstream.decide": 2,
    "slipstream.device": 3,
    "slipstream.draft": 4,
    "slipstream.verify": 4,
    "slipstream.request": 5,
    "slipstream.answers": 5.04,
    "slipstream.ledger": 5.05,
    "slipstream.prefixes": 5.05,
    "slipstream.scheduler": 5.1,
    "slipstream.commit": 5.2,
    "slipstream.stream": 5.3,
    "slipstream.masking": 5.4,
    "slipstream.engine": 6,
    "slipstream.rehearse": 6.1,
    "slipstream.lab.machine": 0.3,
    "slipstream.lab.profile": 6.2,  # also what makes a cost model at start when none is stored
    "slipstream.load": 6.3,
    "slipstream.sizes": 6.32,
    "slipstream.backends": 6.34,
    "slipstream.capture": 6.36,
    "slipstream.peak": 6.38,
    "slipstream.build": 6.4,
    "slipstream.compiler": 0.4,
    "slipstream.grammars": 6.5,
    "slipstream.host": 6.6,
    "slipstream.llm": 7,
    "slipstream.testing": 7.1,
    "slipstream.train": 7.2,
    "slipstream.lab": 7.3,
    "slipstream.serve.options": 0.2,
    "slipstream.serve": 7.35,
    "slipstream.commands": 7.4,
    "slipstream.cli": 8,
    "slipstream.__main__": 8.1,
}

# Modules (with all below them) that must be importable without torch.
TORCH_FREE = (
    "slipstream",
    "slipstream.errors",
    "slipstream.logprobs",
    "slipstream.plan",
    "slipstream.config",
    "slipstream.metrics",
    "slipstream.options",
    "slipstream.structured",
    "slipstream.patterns",
    "slipstream.schema",
    "slipstream.constraint",
    "slipstream.compiler",
    "slipstream.grammars",
    "slipstream.host",
    "slipstream.prompts",
    "slipstream.repetition",
    "slipstream.files",
    "slipstream.child",
    "slipstream.request",
    "slipstream.answers",
    "slipstream.ledger",
    "slipstream.prefixes",
    "slipstream.scheduler",
    "slipstream.commit",
    "slipstream.stream",
    "slipstream.models.spec",
    "slipstream.models.rope",
    "slipstream.models.tensors",
    "slipstream.models.folder",
    "slipstream.models.template",
    "slipstream.models.tokenizer",
    "slipstream.models.locate",
    "slipstream.models.shapes",
    "slipstream.models.synthetic",
    "slipstream.models.checkpoint",
    "slipstream.models.dialect_configs",
    "slipstream.models.inspect",
    "slipstream.cache.pages",
    "slipstream.cache.shared",
    "slipstream.decide",
    "slipstream.lab.calibrate_options",
    "slipstream.lab.bench_options",
    "slipstream.lab.dense",
    "slipstream.lab.trace_options",
    "slipstream.lab.evaluate_options",
    "slipstream.lab.simulate",
    "slipstream.lab.simulate_loop",
    "slipstream.lab.simulate_options",
    "slipstream.lab.simulate_policies",
    "slipstream.lab.quality",
    "slipstream.lab.scaling",
    "slipstream.lab.tables",
    "slipstream.lab.verify_exact_options",
    "slipstream.lab.verify_exact_report",
    "slipstream.lab.waves",
    "slipstream.lab.plots",
    "slipstream.lab.timeline",
    "slipstream.lab.timeline_plot",
    "slipstream.lab.paint",
    "slipstream.lab.report",
    "slipstream.lab.scores",
    "slipstream.lab.critical_path",
    "slipstream.train.options",
    "slipstream.serve",
    "slipstream.train.presets",
    "slipstream.commands",
    "slipstream.cli",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def owner(name: str) -> str:
    """The entry of RANKS that a module falls under."""
    while name not in RANKS:
        name = name.rpartition(".")[0]
        assert name, "a module outside the package"
    return name


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, submodules named by `from x import y` included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return {name for name in found if name in MODULES}


def package_of(name: str) -> str:
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_file_imports_only_lower_ranks(name: str) -> None:
    assert owner(name) != "slipstream" or name == "slipstream", f"{name} has no rank; give it one in RANKS"
    if name == "slipstream":
        return  # loads lazily; see test_package_is_lazy
    for imported in imports(MODULES[name]):
        if RANKS[owner(imported)] == RANKS[owner(name)]:
            same_folder = package_of(imported) == package_of(name) != "slipstream"
            assert same_folder, f"{name} imports {imported}, which stands beside it"
        else:
            assert RANKS[owner(imported)] < RANKS[owner(name)], f"{name} imports {imported}, which lies above it"


def test_imports_have_no_cycle() -> None:
    graph = {name: imports(path) - {name} for name, path in MODULES.items() if name != "slipstream"}
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert not graph, f"imports in a cycle: {', '.join(sorted(graph))}"


def test_host_code_imports_no_torch() -> None:
    names = sorted(n for n in MODULES if any(n == t or n.startswith(t + ".") for t in TORCH_FREE if t != "slipstream"))
    # One process for all; it names the first module after which torch is there.
    code = (
        "import importlib, sys\n"
        f"for name in ['slipstream', *{names!r}]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name + ' imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_package_is_lazy() -> None:
    code = "import sys, slipstream; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_init_files_are_empty() -> None:
    full = [name for name, path in MODULES.items() if path.name == "__init__.py" and path.read_text().strip()]
    assert full in ([], ["slipstream"]), f"only the package's own __init__.py holds code, found {full}"
