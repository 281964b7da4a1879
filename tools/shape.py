"""How big files and functions are: a cheap measure of whether the code is still read in an afternoon.

Usage: python tools/shape.py slipstream
"""

import ast
import statistics
import sys
from pathlib import Path

LONG_FUNCTION = 30  # lines
NUM_LISTED = 8


def function_lengths(tree: ast.AST) -> list[tuple[int, str]]:
    """(lines, name) of every function, docstring not counted."""
    lengths = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = node.lineno
            body = node.body
            doc = ast.get_docstring(node, clean=False)
            skipped = (body[0].end_lineno - body[0].lineno + 1) if doc is not None else 0
            lengths.append((node.end_lineno - start + 1 - skipped, node.name))
    return lengths


def main(root: Path) -> None:
    files, functions, comments, code = [], [], 0, 0
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines()]
        files.append((len(lines), path))
        comments += sum("#" in line for line in lines)
        code += sum(bool(line) for line in lines)
        functions += [(length, f"{path}:{name}") for length, name in function_lengths(ast.parse(text))]
    lengths = [length for length, _ in functions]
    print(
        f"{len(files)} files, {sum(size for size, _ in files)} lines, {comments / code * 100:.1f} comments per 100 lines"
    )
    print("  by folder:")
    for folder in sorted({path.parent for _, path in files}):
        print(f"  {sum(size for size, path in files if path.parent == folder):6} {folder}")
    print("  biggest files:")
    for size, path in sorted(files, reverse=True)[:NUM_LISTED]:
        print(f"  {size:6} {path}")
    within = sum(length <= LONG_FUNCTION for length in lengths) / len(lengths)
    print(
        f"{len(lengths)} functions, median {statistics.median(lengths):.0f} lines, {within:.0%} within {LONG_FUNCTION}"
    )
    print("  longest:")
    for length, name in sorted(functions, reverse=True)[:NUM_LISTED]:
        print(f"  {length:6} {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "slipstream"))
