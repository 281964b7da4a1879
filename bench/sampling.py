"""What drawing and judging cost: `kernels.accept`, `kernels.filters`, `kernels.draft` and `kernels.reject` in CUDA graphs.

    PYTHONPATH=$PWD python bench/sampling.py

For SmolLM2-135M (V 49152; drafter: Vd 16384, rank 32) and the Qwen3-8B shape (V and Vd 151936, rank 256), greedy and
sampled, from 1 to 256 sequences of 7 drafts. A graph repeats the call over several copies of the logits: large ones are
found in memory, not in the level-2 cache. `GB/s` counts each logit once, and W2 once per position. `cut` is what filters
cost beside acceptance, over rows whose largest logits stand out as a language model's do and over nearly flat ones. JSON to $OUT (or
runs/). Needs a CUDA device; ends within 60 s.
"""

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.accept import accept_coupled
from slipstream.kernels.draft import ConfidenceHead, draft_chain, draft_workspace
from slipstream.kernels.filters import cut_rows
from slipstream.kernels.reject import KeptLaw, accept_rejection
from slipstream.plan import NUM_VERDICT_COLUMNS

DEVICE = "cuda"
DTYPE = torch.bfloat16
L2_BYTES = 200e6
NUM_DRAFTS = 7


@dataclass(frozen=True)
class Shape:
    name: str
    vocab: int
    draft_vocab: int
    rank: int
    hidden: int


@dataclass(frozen=True)
class Row:
    shape: str
    kernel: str
    num_sequences: int
    microseconds: float
    gb_per_s: float


SHAPES = (Shape("smollm2", 49152, 16384, 32, 576), Shape("8b", 151936, 151936, 256, 4096))


def slots(count: int, temperature: float) -> dict[str, Tensor]:
    """Slot state that a step of `count` sequences reads."""
    return {
        "slots": torch.arange(count, device=DEVICE),
        "context": torch.full((count + 1,), 300, dtype=torch.int64, device=DEVICE),
        "temperature": torch.full((count + 1,), temperature, device=DEVICE),
        "seed": torch.arange(count + 1, device=DEVICE),
    }


def microseconds(calls: list[Callable[[], None]], repeats: int = 20) -> float:
    """Median time of one call; the calls do the same on different memory."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copies(make: Callable[[], Tensor]) -> list[Tensor]:
    first = make()
    size = first.numel() * first.element_size()
    return [first, *(make() for _ in range(min(50, int(L2_BYTES // size))))]


def even_law(count: int, vocab: int) -> KeptLaw:
    """Of drafts that may have been any token."""
    law = KeptLaw.make(count, NUM_DRAFTS, None, vocab, DTYPE, torch.device(DEVICE))
    law.mass.fill_(vocab)
    return law


def accept(shape: Shape, count: int, width: int, temperature: float, is_rejection: bool = False) -> Row:
    outputs = count * (width + 1)
    step = {
        "output_sequence": torch.arange(count, device=DEVICE).repeat_interleave(width + 1),
        "output_offset": torch.arange(width + 1, device=DEVICE).repeat(count),
        "cu_outputs": torch.arange(0, outputs + 1, width + 1, device=DEVICE),
        "widths": torch.full((count,), width, device=DEVICE),
        "emits": torch.ones(count, dtype=torch.bool, device=DEVICE),
        "drafts": torch.zeros(count, NUM_DRAFTS, dtype=torch.int64, device=DEVICE),
        "num_given": torch.ones(count, dtype=torch.int64, device=DEVICE),
        "result": torch.zeros(count, NUM_VERDICT_COLUMNS + NUM_DRAFTS + 1, dtype=torch.int32, device=DEVICE),
        **slots(count, temperature),
    }
    law = even_law(count, shape.vocab) if is_rejection else None

    def call(logits: Tensor) -> None:
        if is_rejection:
            accept_rejection(logits, shape.vocab, law=law, **step)
        else:
            accept_coupled(logits, shape.vocab, **step)

    logits = copies(lambda: torch.randn(outputs, shape.vocab, device=DEVICE).to(DTYPE))
    spent = microseconds([lambda each=each: call(each) for each in logits])
    name = f"{'reject' if is_rejection else 'accept'} w={width} T={temperature:g}"
    return Row(shape.name, name, count, spent, _rate(logits[0].numel(), spent))


FILTERS = {"top_k 50": (50, 1.0), "top_p .9": (0, 0.9), "both": (50, 0.9), "off": (0, 1.0)}  # top_k, top_p


def cut(shape: Shape, count: int, width: int, filters: str, is_flat: bool) -> Row:
    """Where filters cut rows, of requests at temperature 1."""
    outputs, (top_k, top_p) = count * (width + 1), FILTERS[filters]
    state = slots(count, 1.0)
    asked = {
        "output_sequence": torch.arange(count, device=DEVICE).repeat_interleave(width + 1), "slots": state["slots"],
        "temperature": state["temperature"], "top_k": torch.full((count + 1,), top_k, device=DEVICE),
        "top_p": torch.full((count + 1,), top_p, device=DEVICE), "min_p": torch.zeros(count + 1, device=DEVICE),
    }  # fmt: skip
    sigma = 0.5 if is_flat else 4.5  # top-p .9 keeps three quarters of the ids, or one in 1,400
    logits = copies(lambda: (sigma * torch.randn(outputs, shape.vocab, device=DEVICE)).to(DTYPE))
    spent = microseconds([lambda each=each: cut_rows(each, shape.vocab, **asked) for each in logits])
    name = f"cut w={width} {filters}{' flat' if is_flat else ''}"
    return Row(shape.name, name, count, spent, _rate(logits[0].numel(), spent))


def draft(
    shape: Shape,
    count: int,
    temperature: float,
    has_markov: bool,
    *,
    is_rejection: bool = False,
    is_judged: bool = False,
) -> Row:
    """is_judged: a confidence head says how sure each draft is, in place of the largest probability."""
    rank = shape.rank if has_markov else 0
    w1 = torch.randn(shape.vocab, rank, device=DEVICE).to(DTYPE) if rank else None
    w2 = torch.randn(shape.draft_vocab, rank, device=DEVICE).to(DTYPE) if rank else None
    is_mapped = shape.draft_vocab < shape.vocab
    out = [torch.zeros(count, NUM_DRAFTS, dtype=kind, device=DEVICE) for kind in (torch.int64, torch.float32)]
    previous, anchors = torch.zeros_like(out[0]), torch.zeros(count, dtype=torch.int64, device=DEVICE)
    workspace = draft_workspace(count, NUM_DRAFTS, DEVICE)
    token_ids = torch.arange(shape.draft_vocab, device=DEVICE) * 2 if is_mapped else None
    state, law, head = slots(count, temperature), None, None
    if is_judged:
        hidden = torch.randn(count, NUM_DRAFTS, shape.hidden, device=DEVICE).to(DTYPE)
        weight = torch.randn(1, shape.hidden + rank, device=DEVICE).to(DTYPE)
        head = ConfidenceHead(hidden, weight, torch.zeros(1, device=DEVICE, dtype=DTYPE), rank > 0)
    if is_rejection:
        law = KeptLaw.make(count, NUM_DRAFTS, token_ids, shape.vocab, DTYPE, torch.device(DEVICE))

    def call(base: Tensor) -> None:
        draft_chain(
            base, w1, w2, anchors, token_ids, shape.draft_vocab, **state, sample=True,
            signal="head" if head else "none" if rank else "peak", drafts=out[0], prob=out[1], previous=previous,
            workspace=workspace, head=head, law=law,
        )  # fmt: skip

    base = copies(lambda: torch.randn(count, NUM_DRAFTS, shape.draft_vocab, device=DEVICE).to(DTYPE))
    spent = microseconds([lambda each=each: call(each) for each in base])
    numbers = base[0].numel() + NUM_DRAFTS * shape.draft_vocab * rank
    name = (
        f"draft {'markov ' if rank else 'plain '}{'head ' if head else ''}{'reject ' if law else ''}T={temperature:g}"
    )
    return Row(shape.name, name, count, spent, _rate(numbers, spent))


def _rate(num_numbers: int, spent: float) -> float:
    return num_numbers * DTYPE.itemsize / spent / 1e3


def measure(shapes: tuple[Shape, ...], counts: tuple[int, ...]) -> list[Row]:
    rows = []
    for shape in shapes:
        for count in counts:
            for temperature in (0.0, 1.0):
                rows += [accept(shape, count, width, temperature) for width in (0, NUM_DRAFTS)]
                rows += [draft(shape, count, temperature, has_markov) for has_markov in (True, False)]
            rows.append(draft(shape, count, 1.0, True, is_judged=True))
            rows += [draft(shape, count, 1.0, has_markov, is_rejection=True) for has_markov in (True, False)]
            rows += [cut(shape, count, NUM_DRAFTS, name, is_flat=False) for name in FILTERS]
            rows.append(cut(shape, count, NUM_DRAFTS, "top_p .9", is_flat=True))
            if count <= 32:
                rows.append(accept(shape, count, NUM_DRAFTS, 1.0, is_rejection=True))
    return rows


def main() -> None:
    rows = measure(SHAPES, (1, 8, 32, 256))
    print(f"{'shape':8} {'kernel':22} {'sequences':>9} {'us':>9} {'GB/s':>7}")
    for row in rows:
        print(f"{row.shape:8} {row.kernel:22} {row.num_sequences:9} {row.microseconds:9.1f} {row.gb_per_s:7.0f}")
    folder = Path(os.environ.get("OUT", "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sampling.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
