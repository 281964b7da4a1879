"""Kernels compile for an H200 on machines that have none, in few variants.

The interpreter takes Python that the compiler refuses, so passing in it is not enough. Run as a script, this file calls
the wrappers on CPU tensors with a driver that compiles what they launch for compute capability 9.0 and launches
nothing. The test is its caller, because whether kernels are interpreted is settled once in a process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Part -> kernel -> variants that it may have over the calls below. Start-up compiles all that a run needs: few is a
# promise.
VARIANTS = {
    "batch": {"_admit": 1, "_write_pages": 1, "_layout": 1, "_fill": 1, "_draft_inputs": 1, "_rank": 2},
    "networks": {"_attention_kernel": 2, "_own_rows_kernel": 13, "_rope_kernel": 2, "_context_kernel": 1},
    "products": {"_product": 36, "_rms_norm": 2},
    "acceptance": {
        "_row_best": 2, "_verdict": 2, "_apply": 1, "_draw": 6, "_finish": 4,
        "_row_stats": 1, "_judge": 3, "_sum_tiles": 3, "_draw_following": 3,  # drafts: certain, of all ids, of some
    },
    "filters": {  # of bf16 and fp32; over two vocabularies
        "_find_summits": 2, "_begin": 4, "_narrow": 4, "_count_ties": 2, "_finish": 4, "_row_best": 4, "_verdict": 2,
    },
    "shaping": {"_clear": 1, "_count": 1, "_shaped_row_best": 2, "_verdict": 2, "_shape": 1},
    "deterministic": {
        "_product": 18, "_rms_norm": 4, "_rope_kernel": 2, "_attention_kernel": 2, "_row_best": 1, "_verdict": 2,
    },
    "reports": {"_tiles": 4, "_join": 4, "_locate": 1},
}  # fmt: skip
# Registers that these spill are spilled around or in the loop over a whole context, or over the top tokens.
KEEP_REGISTERS = {"_attention_kernel", "_own_rows_kernel", "_tiles", "_join", "_shaped_row_best", "_narrow"}


class CompilingDriver:
    """What the launcher of triton asks its driver for, without a device."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(calls: Callable[[], None]) -> dict[str, int]:
    """Kernel -> number of variants that `calls` needed."""
    import triton

    from slipstream.kernels import early

    found: set[tuple[str, str]] = set()
    launch = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert self.fn.__name__ not in KEEP_REGISTERS or stack_bytes(kernel.asm["cubin"]) == 0, kernel.metadata
        assert not kernel.metadata.launch_pdl or waits_first(kernel.asm["ptx"]), kernel.metadata
        found.add((self.fn.__name__, kernel.hash))

    early._can = lambda device: True  # type: ignore[assignment]
    triton.JITFunction.run = compile_only
    triton.runtime.driver.set_active(CompilingDriver())
    calls()
    return dict(Counter(name for name, _ in found))


def waits_first(ptx: str) -> bool:
    """Whether a program waits for the kernel before it, and does so before it touches memory or leaves."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    wait = body.find("griddepcontrol.wait")
    others = re.search(r"\b(ld\.(?!param)|st\.|cp\.async|atom|red\.|ret;)", body)
    assert others is not None
    return 0 <= wait < others.start()


def stack_bytes(cubin: bytes) -> int:
    """Of a thread of a compiled kernel: where spilled registers go."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def batch_and_rank() -> None:
    """Steps of many sizes, odd ones too, as an engine with 33 slots of 300 positions would have them."""
    from slipstream.device.state import SlotState, make_slot_state
    from slipstream.kernels import batch
    from slipstream.kernels.rank import rank

    state = make_slot_state(33, 300, 16, torch.device("cpu"))
    fields = {name: getattr(state, name) for name in SlotState.__slots__}
    gathered = {name: fields[name] for name in ("context", "page_table", "token_ids")}
    longs = torch.zeros(8 * 512, dtype=torch.int64)
    floats, flags = torch.zeros(2 * 16 * 2), torch.zeros(512, dtype=torch.bool)
    for n in (1, 2, 15, 16, 33):
        batch.admit(
            batch.Admissions(
                longs[:n], longs[: n + 1], longs.int(), longs[:n], floats[:n], longs[:n], floats[:n], floats[:n], longs[:n],
                floats[:n], floats[:n], floats[:n], longs[:n], longs[: n + 1], longs[:n], floats[:n], longs[:n],
            ),
            **fields,
        )  # fmt: skip
        batch.write_pages(state.page_table, longs[: 3 * n].view(n, 3))
        rows = batch.make_rows(num_sequences=n, num_rows=8 * n, num_outputs=8 * n, num_tiles=n, device="cpu")
        per_sequence = longs[:n], longs[:n], flags[:n], longs[:n]
        batch.layout(*per_sequence, **gathered, page_size=16, block_q=n, draft_stride=7 + n % 2, out=rows)
        batch.fill(rows.token_ids, rows.draft_index, longs)
        batch.draft_inputs(longs[:n], state.context, state.token_ids, 16 * n, min(n, 17))
        signal, calibration = torch.zeros(n, 7), torch.zeros(2, 7, 2)
        per_sequence = longs[:n], state.temperature, longs[:n]
        rank(signal, 7 - n % 7, calibration, *per_sequence, longs[:1], longs[:n])


def networks() -> None:
    """SmolLM2 decoding at several sizes, its drafter's block, and Qwen3-8B, which has head norms, with a window too."""
    from slipstream.kernels import rope
    from slipstream.kernels.attention import Tiles, attention_workspace, choose_splits, paged_attention
    from slipstream.kernels.own_attention import block_attention, decode_attention

    table, cos_sin = torch.zeros(9, 40, dtype=torch.int64), torch.zeros(4096, 128)

    def attend(kind: str, heads: tuple[int, int, int], block_q: int, count: int, window: int | None = None) -> None:
        num_heads, num_kv_heads, head_dim = heads
        qkv, at = bf16(count * block_q, (num_heads + 2 * num_kv_heads) * head_dim), torch.zeros(512, dtype=torch.int64)
        pages = 2 * [bf16(4, 16, num_kv_heads, head_dim)]
        tiles = Tiles(torch.zeros(count, 4, dtype=torch.int32), block_q, choose_splits(count, num_kv_heads, 4096))
        how = 0.1, window, attention_workspace(num_heads, num_kv_heads, head_dim, block_q, "cpu")
        norm = None if kind == "decode" and head_dim == 64 else bf16(head_dim)
        turn = cos_sin.view(-1, head_dim), norm, norm, 1e-6
        if kind == "paged":
            paged_attention(qkv.view(len(qkv), -1, head_dim)[:, :num_heads], *pages, tiles, table, *how)
        elif kind == "decode":
            decode_attention(qkv, *pages, tiles, table, *turn, at, *how)
        else:
            block_attention(qkv, *pages, tiles, table, *turn, *how)

    smollm2, qwen3 = (9, 3, 64), (32, 8, 128)
    for count in (1, 32, 256):  # launches differ: see choose_launch
        attend("decode", smollm2, 1, count)
        attend("decode", smollm2, 8, count)
        attend("block", smollm2, 8, count)
    for block_q, window in ((1, None), (8, None), (8, 128), (16, None)):
        attend("decode", qwen3, block_q, 32, window)
    attend("block", qwen3, 7, 32)
    for count in (32, 256):  # prompts
        attend("paged", smollm2, 16, count)
        attend("paged", qwen3, 16, count)
    for rows in (1, 15, 16, 256):
        at, pages, norm = torch.zeros(rows, dtype=torch.int64), bf16(2, 4, 16, 8, 128), bf16(128)
        rope.rope_and_store(bf16(rows, 48 * 128), at, cos_sin, norm, norm, 1e-6, *pages, at, 32)
        rope.store_context(bf16(rows, 2 * 16 * 128), at, cos_sin, bf16(2, 128), 1e-6, pages, pages, at)


def products() -> None:
    """Every tile of the tuned table, in the first product that has it; into the stream also half normed for the next."""
    from slipstream.kernels.linear import TUNED, Tile, add_linear, fused_linear

    seen: set[Tile] = set()
    behind = {576: (3072, 576), 4096: (24576, 4096)}  # gate and up
    for (num_out, num_in), tiles in TUNED.items():
        is_gated = num_out > num_in and num_out not in (960, 6144)
        for num_rows, tile in tiles:
            if tile is None or tile in seen:
                continue
            seen.add(tile)
            x, weight = bf16(num_rows, num_in), bf16(num_out, num_in)
            if num_out > num_in:
                fused_linear(x, weight, norm=bf16(num_in), eps=1e-6, gated=is_gated)
                continue
            stream, norm, then = bf16(num_rows, num_out), bf16(num_out), bf16(*behind[num_out])
            add_linear(x, weight, None, stream)
            if (half := add_linear(x, weight, None, stream, (norm, then))) is not None:
                fused_linear(stream, then, norm=norm, eps=1e-6, gated=True, half=half)


def acceptance() -> None:
    """Coupled acceptance, a DSpark draft and rejection over SmolLM2's vocabulary."""
    from slipstream.kernels import accept, draft
    from slipstream.kernels.reject import KeptLaw, accept_rejection

    vocabulary, num_drafts, rank = 49152, 7, 64
    context, floats, token_ids = torch.zeros(34, dtype=torch.int64), torch.zeros(34), torch.zeros(34, 301).int()
    slot_state = {"context": context, "temperature": floats, "seed": context}
    for n in (1, 33):
        longs, flags = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool)
        outputs, logits = torch.zeros(8 * n, dtype=torch.int64), bf16(8 * n, vocabulary)
        drafts, result = torch.zeros(n, num_drafts, dtype=torch.int64), torch.zeros(n, num_drafts + 4).int()
        step = {
            "output_sequence": outputs, "output_offset": outputs, "cu_outputs": torch.zeros(n + 1, dtype=torch.int64),
            "widths": longs, "emits": flags, "drafts": drafts, "slots": longs, "num_given": longs, "result": result,
        }  # fmt: skip
        accept.accept_coupled(logits, vocabulary - 3, **step, **slot_state)
        accept.apply(result, slots=longs, num_given=longs, emits=flags, context=context, token_ids=token_ids)
        w1, w2, base = bf16(vocabulary, rank), bf16(vocabulary, rank), bf16(n, num_drafts, vocabulary)
        prob = torch.zeros(n, num_drafts)
        kept = KeptLaw.make(33, num_drafts, None, vocabulary - 3, base.dtype, base.device)
        head = draft.ConfidenceHead(bf16(n, num_drafts, 576), bf16(576 + rank), bf16(1), True)
        for law in (None, kept):
            draft.draft_chain(
                base, w1, w2, longs, None, vocabulary - 3, slots=longs, **slot_state, sample=True, signal="head",
                head=head, law=law, drafts=drafts, prob=prob, previous=drafts,
                workspace=draft.draft_workspace(n, num_drafts, "cpu"),
            )  # fmt: skip
    reduced = torch.arange(300)
    w2, base = bf16(300, rank), bf16(n, num_drafts, 300)
    some = KeptLaw.make(33, num_drafts, reduced, vocabulary - 3, base.dtype, base.device)
    for table, signal in (((w1, w2), "head"), ((None, None), "peak")):
        draft.draft_chain(
            base, *table, longs, reduced, 300, slots=longs, **slot_state, sample=True, signal=signal,
            head=head if signal == "head" else None, law=some, drafts=drafts, prob=prob, previous=drafts,
            workspace=draft.draft_workspace(n, num_drafts, "cpu"),
        )  # fmt: skip
    for law in (None, kept, some):
        accept_rejection(logits, vocabulary - 3, **step, **slot_state, law=law)


def shaping() -> None:
    """Penalties and edits within acceptance of any number of rows, and apart from it."""
    from slipstream.device.state import make_slot_state
    from slipstream.kernels.accept import accept_coupled
    from slipstream.kernels.shape_logits import Shaper, shape_logits

    vocabulary, num_drafts = 49152, 7
    state = make_slot_state(33, 300, 16, torch.device("cpu"))
    shaper = Shaper.make(state.shaping, state.token_ids, vocabulary - 3)
    slot_state = {"temperature": state.temperature, "seed": state.seed}
    for n in (1, 2, 33):
        longs, outputs, logits = (
            torch.zeros(n + 1, dtype=torch.int64),
            torch.zeros(8 * n).long(),
            bf16(8 * n, vocabulary),
        )
        step = {
            "output_sequence": outputs, "output_offset": outputs, "emits": torch.zeros(n, dtype=torch.bool),
            "drafts": torch.zeros(n, num_drafts, dtype=torch.int64), "slots": longs[:n], "num_given": longs[:n],
            "context": state.context,
        }  # fmt: skip
        rest = {"cu_outputs": longs, "widths": longs[:n], "result": torch.zeros(n, num_drafts + 4).int()}
        accept_coupled(logits, vocabulary - 3, **step, **rest, **slot_state, shaper=shaper)
        shape_logits(logits, vocabulary - 3, shaper, **step)


def filters() -> None:
    """Where rows are cut, and acceptance behind it: any number of rows over two vocabularies, alone and after penalties."""
    from slipstream.kernels.accept import accept_coupled
    from slipstream.kernels.filters import cut_rows

    floats, longs = torch.zeros(34), torch.zeros(8 * 256, dtype=torch.int64)
    for vocabulary in (49152, 151_936):
        for n in (1, 2, 33, 256):
            outputs, ids = longs[: 8 * n], longs[:n]
            for logits in (bf16(8 * n, vocabulary), bf16(8 * n, vocabulary).float()):
                step = {"output_sequence": outputs, "slots": ids, "temperature": floats}
                cut = cut_rows(logits, vocabulary - 3, **step, top_k=longs[:34], top_p=floats, min_p=floats)
                accept_coupled(
                    logits, vocabulary - 3, **step, output_offset=outputs, cu_outputs=longs[: n + 1], widths=ids,
                    emits=ids.bool(), drafts=torch.zeros(n, 7, dtype=torch.int64), num_given=ids, context=longs[:34],
                    seed=longs[:34], result=torch.zeros(n, 11).int(), cut=cut,
                )  # fmt: skip


def deterministic() -> None:
    """A step of SmolLM2 and of Qwen3-8B with any number of rows: each product, each kernel between them, in one variant."""
    from slipstream.device.triton import DETERMINISTIC_BLOCK_Q
    from slipstream.kernels import accept, rope
    from slipstream.kernels.attention import Tiles, attention_workspace, deterministic_launch, paged_attention
    from slipstream.kernels.linear import deterministic_linear

    models = ((576, 9, 3, 64, 1536, 49152), (4096, 32, 8, 128, 12288, 151936))
    table = torch.zeros(9, 40, dtype=torch.int64)
    for hidden, num_heads, num_kv_heads, head_dim, inner, vocabulary in models:
        q, qkv = num_heads * head_dim, (num_heads + 2 * num_kv_heads) * head_dim
        normed = {"norm": bf16(hidden), "eps": 1e-6}
        head_norm = None if head_dim == 64 else bf16(head_dim)
        cos_sin, pages = torch.zeros(4096, head_dim), bf16(2, 4, 16, num_kv_heads, head_dim)
        space = attention_workspace(num_heads, num_kv_heads, head_dim, DETERMINISTIC_BLOCK_Q, "cpu")
        launch = deterministic_launch(DETERMINISTIC_BLOCK_Q, num_heads // num_kv_heads, head_dim, torch.bfloat16)
        weights = [bf16(*size) for size in ((qkv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner))]
        head, longs = bf16(vocabulary, hidden), torch.zeros(2048, dtype=torch.int64)
        for rows in (1, 2, 8, 33, 256, 2048):
            x, heads, tiles = bf16(rows, hidden), bf16(rows, qkv), torch.zeros(rows, 4, dtype=torch.int32)
            deterministic_linear(x, weights[0], **normed)
            deterministic_linear(bf16(rows, q), weights[1], residual=x)
            deterministic_linear(x, weights[2], gated=True, **normed)
            deterministic_linear(bf16(rows, inner), weights[3], residual=x)
            at = longs[:rows]
            rope.rope_and_store(
                heads, at, cos_sin, head_norm, head_norm, 1e-6, *pages, at, num_heads,
                heads_per_program=rope.DETERMINISTIC_HEADS,
            )  # fmt: skip
            paged_attention(
                heads.view(rows, -1, head_dim)[:, :num_heads], *pages, Tiles(tiles, DETERMINISTIC_BLOCK_Q, 1), table,
                0.1, None, space, launch=launch,
            )  # fmt: skip
        for rows in (1, 33):
            at, result = longs[:rows], torch.zeros(rows, 11, dtype=torch.int32)
            made = deterministic_linear(bf16(rows, hidden), head, **normed)
            accept.accept_coupled(
                made, vocabulary - 3, output_sequence=at, output_offset=at, cu_outputs=longs[: rows + 1], widths=at,
                emits=at.bool(), drafts=torch.zeros(rows, 7, dtype=torch.int64), slots=at, num_given=at, context=at,
                temperature=torch.zeros(34), seed=at, result=result, block=accept.deterministic_tile_size(vocabulary),
            )  # fmt: skip


def reports() -> None:
    """Log-probabilities over two vocabularies, of rows that the host knows and of what a step emitted: a variant for each.

    Neither top tokens nor rows make more.
    """
    from slipstream.kernels.logprobs import report, report_outputs

    for vocab_size in (49152, 151_936):
        for count, num_top in ((1, 0), (8, 1), (33, 5), (256, 20)):
            ids = torch.zeros(count + 1, dtype=torch.int64)
            logits = bf16(4, vocab_size + 64)[:, :vocab_size]
            report(logits, ids[1:], ids[:-1], num_top)
            result = torch.zeros(count, 11, dtype=torch.int32)
            report_outputs(
                logits, result, cu_outputs=ids, turns=ids[:-1], num_top=ids[:1],
                out=torch.zeros(42 * 8 * count, dtype=torch.int32),
            )  # fmt: skip


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


PARTS = {
    "batch": batch_and_rank,
    "networks": networks,
    "products": products,
    "acceptance": acceptance,
    "filters": filters,
    "shaping": shaping,
    "deterministic": deterministic,
    "reports": reports,
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device, every test of a kernel compiles it")
@pytest.mark.parametrize("part", PARTS)
def test_kernels_compile_without_a_device_in_few_variants(part: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, part], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    variants = json.loads(done.stdout.splitlines()[-1])
    assert variants.keys() == VARIANTS[part].keys()
    assert all(count <= VARIANTS[part][name] for name, count in variants.items()), variants


if __name__ == "__main__":
    print(json.dumps(compiled(PARTS[sys.argv[1]])))
