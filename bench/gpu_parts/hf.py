"""The small pair beside Hugging Face transformers: the same weights, prompts and answer lengths, in turn.

`generate` on left-padded batches, and continuous batching (`generate_batch`) where the installed version has it. The
model is made from our decoder, since the weights come in another file format. What fails is reported as what it said.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu_parts.goals import Goal, Report, ratio, reported
from bench.gpu_parts.scale import Scale
from bench.gpu_parts.session import Clock, Session, serve, tokens
from bench.gpu_parts.small import slots_for
from slipstream.models.decoder import Decoder

MODES = ("off", "lag")
Ids = Sequence[Sequence[int]]


def run(session: Session, scale: Scale, clock: Clock) -> Report:
    import transformers

    model = from_decoder(session.models.target)
    kinds: dict[str, Callable[[Ids, int], int]] = {
        "generate": lambda prompts, count: generated(model, prompts, count),
        # It may stop without an answer, and must not take the bench with it.
        "generate_batch": lambda prompts, count: within(scale.patience_s, lambda: batched(model, prompts, count)),
    }
    rows, failed = [], {}
    for at in scale.small_at[:2]:
        prompts = session.pair.prompts(session.models, at)
        for mode in MODES:
            llm = session.llm(mode, scale.drafts[0], slots_for(scale, at))
            served = serve(llm, prompts, tokens(scale.beside_tokens), at)
            rows.append({"what": f"slipstream {mode}", "concurrency": at, "tok_per_s": served.wave.tok_per_s})
        for kind, run_it in kinds.items():
            if kind in failed or not clock.allows(f"{kind} at {at}", 10.0):
                continue
            try:
                run_it(prompts, 4)  # what is done once is not timed
                begin = time.perf_counter()
                count = run_it(prompts, scale.beside_tokens)
                speed = count / (time.perf_counter() - begin)
                rows.append({"what": f"transformers {kind}", "concurrency": at, "tok_per_s": speed})
            except Exception as error:  # somebody else's code: whatever it raises is a result
                failed[kind] = f"{type(error).__name__}: {error}"[:400]
        for row in rows:
            if row["concurrency"] == at:
                session.say(f"{row['what']} at {at}: {row['tok_per_s']:,.0f} tok/s")
    for kind, why in failed.items():
        session.say(f"transformers {kind} failed: {why}")
    report = {
        "transformers": transformers.__version__,
        "rows": rows,
        "failed": failed,
        "output_tokens": scale.beside_tokens,
    }
    return report, goals(rows)


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    ours = {row["concurrency"]: row["tok_per_s"] for row in rows if row["what"] == "slipstream off"}
    found = []
    for row in rows:
        what = f"{row['what']} at {row['concurrency']}"
        found.append(reported(f"{what}: tok/s", row["tok_per_s"]))
        if row["what"].startswith("transformers"):
            found.append(reported(f"slipstream off / {what}", ratio(ours[row["concurrency"]], row["tok_per_s"])))
    return found


def from_decoder(target: Decoder) -> Any:
    """A LlamaForCausalLM with these weights, on their device and in their dtype."""
    import transformers

    spec = target.spec
    assert spec.family == "llama" and spec.rope.scaling == "none", spec.family
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, rms_norm_eps=spec.rms_norm_eps, max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta}, attention_bias=spec.qkv_bias,
        tie_word_embeddings=spec.tie_word_embeddings, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    weight = target.head_weight
    model = transformers.LlamaForCausalLM(config).to(weight.device, weight.dtype).eval()
    missing, unexpected = model.load_state_dict(named_weights(target), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def named_weights(target: Decoder) -> dict[str, Tensor]:
    """Our packed matrices under the names of files."""
    found = {"model.embed_tokens.weight": target.embed_tokens.weight, "model.norm.weight": target.norm.weight}
    if not target.spec.tie_word_embeddings:
        found["lm_head.weight"] = target.head_weight
    for index, layer in enumerate(target.layers):
        prefix, attention, mlp = f"model.layers.{index}", layer.self_attn, layer.mlp
        for packed, group, names in (
            (attention.qkv_proj, "self_attn", ("q", "k", "v")),
            (attention.o_proj, "self_attn", ("o",)),
            (mlp.gate_up_proj, "mlp", ("gate", "up")),
            (mlp.down_proj, "mlp", ("down",)),
        ):
            for name, weight in zip(names, packed.weight.split(packed.parts), strict=True):
                found[f"{prefix}.{group}.{name}_proj.weight"] = weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = getattr(layer, norm).weight
    return found


@torch.inference_mode()
def generated(model: Any, prompts: Ids, count: int) -> int:
    """Greedy answers of `count` tokens; returns how many tokens came out in all."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    out = model.generate(
        ids, attention_mask=seen, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return int(out[:, longest:].numel())


def batched(model: Any, prompts: Ids, count: int) -> int:
    """The same through continuous batching."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True)
    answers = model.generate_batch(inputs=[list(p) for p in prompts], generation_config=config)
    made = sum(len(answer.generated_tokens) for answer in answers.values())
    if made < len(prompts) * count:
        raise RuntimeError(f"{made} tokens came out, {len(prompts) * count} were asked for")
    return made


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns, or a TimeoutError while it goes on by itself."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to whoever waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]
