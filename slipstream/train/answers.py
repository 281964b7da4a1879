"""Text in bulk: the target continues thousands of prompts side by side, and the answers are kept in one file.

`SlotGenerator` is a dense batch of slots with a fixed length: every call of its step moves every slot by one token,
prompt tokens included, and finished slots are refilled between steps. On a GPU the step is one CUDA graph; on a CPU the
same function runs as it is. It serves nobody: no stops but end-of-turn, no top-p, no pages, no text. `AnswerSet` is
what came of it, cut where a text ends in a loop. Called by `prompts`, the trainer and `bench/acceptance.py`.

Shapes: N slots, T positions per slot, L layers, nkv KV heads, hd head size, G query heads per KV head, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.files import replace
from slipstream.models.decoder import Decoder
from slipstream.repetition import find_loop
from slipstream.train.options import MIN_ANSWER_TOKENS

STEPS_PER_CHECK = 16  # steps between two looks at which slots are done


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One text to be continued."""

    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    note: str = ""  # the caller's own, untouched


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A job and what came of it."""

    job: Job
    token_ids: tuple[int, ...]  # the new tokens, the end-of-turn token included
    finished: bool  # it ended by itself; False: it ran into the limit


class SlotGenerator:
    """N slots of T positions; see the module's docstring.

    One run at a time; a run leaves nothing behind but its RNG state.
    """

    def __init__(
        self, decoder: Decoder, *, num_slots: int, max_length: int, seed: int, graph: bool | None = None
    ) -> None:
        spec, table = decoder.spec, decoder.embed_tokens.weight
        device = table.device
        self.decoder, self.num_slots, self.max_length = decoder, num_slots, max_length
        self.group = spec.num_heads // spec.num_kv_heads  # G
        self.eos = torch.tensor(spec.eos_token_ids or (-1,), device=device)
        self.rng = torch.Generator(device).manual_seed(seed)
        cache = (spec.num_layers, num_slots, max_length, spec.num_kv_heads, spec.head_dim)
        self.keys = torch.zeros(cache, dtype=table.dtype, device=device)  # [L, N, T, nkv, hd]
        self.values = torch.zeros(cache, dtype=table.dtype, device=device)
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.int64, device=device)  # [N, T] prompt, then answer
        self.position = torch.zeros(num_slots, dtype=torch.int64, device=device)  # [N] of the newest token
        self.prompt_end = torch.zeros_like(self.position)  # [N] positions below it are given
        self.limit = torch.ones_like(self.position)  # [N] tokens at most, prompt included
        self.temperature = torch.zeros(num_slots, device=device)  # [N] fp32
        self.done = torch.ones(num_slots, dtype=torch.bool, device=device)  # [N] also: idle
        self.slots = torch.arange(num_slots, device=device)
        self.steps = torch.arange(max_length, device=device)
        # The masked form reads all of the cache in every step; layers with a sliding window have no other.
        self.flash = device.type == "cuda"
        self.windows = {spec.window(layer) for layer in range(spec.num_layers)}
        use_graph = device.type == "cuda" if graph is None else graph
        self.advance: Callable[[], None] = self._captured() if use_graph else self._step

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph; idle slots make the warm-up harmless."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.rng)
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    @torch.no_grad()
    def _step(self) -> None:
        """One token for every slot. Done slots repeat their last position and change nothing."""
        position, following = self.position, (self.position + 1).clamp(max=self.max_length - 1)
        token = self.tokens.gather(1, position[:, None])[:, 0]
        hidden, _ = self.decoder(token, position, self._attend(position))
        drawn = self._draw(self.decoder.logits(hidden).float())
        given = (following < self.prompt_end) | self.done
        kept = self.tokens.gather(1, following[:, None])[:, 0]
        self.tokens.scatter_(1, following[:, None], torch.where(given, kept, drawn)[:, None])
        ended = ~given & ((drawn[:, None] == self.eos).any(dim=1) | (following + 1 >= self.limit))
        self.position.copy_(torch.where(self.done, position, following))
        self.done |= ended

    def _draw(self, logits: Tensor) -> Tensor:
        """argmax(logits + T g) with Gumbel noise g: a draw from softmax(logits / T), the plain argmax at T = 0.

        [N, V] -> [N].
        """
        noise = torch.empty_like(logits).exponential_(generator=self.rng).clamp_(min=1e-30).log_()
        return (logits - self.temperature[:, None] * noise).argmax(dim=-1)

    def _attend(self, position: Tensor) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """An Attend over the slots' caches."""
        over_cache = {
            window: self._flash(position) if self.flash and window is None else self._dense(position, window)
            for window in self.windows
        }

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[self.slots, position] = k
            values[self.slots, position] = v
            return over_cache[self.decoder.spec.window(layer)](q, keys, values).reshape(self.num_slots, -1)

        return attend

    def _dense(self, position: Tensor, window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Masked attention; the query heads of a KV head stand in for query rows, so that nothing is repeated."""
        unseen = self.steps > position[:, None]
        if window is not None:
            unseen = unseen | (self.steps <= position[:, None] - window)
        bias = torch.zeros(unseen.shape, dtype=self.keys.dtype, device=unseen.device).masked_fill_(
            unseen, float("-inf")
        )

        def over_cache(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            grouped = q.view(self.num_slots, keys.shape[2], self.group, -1)  # [N, nkv, G, hd]
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [N, nkv, T, hd]
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias[:, None, None, :])

        return over_cache

    def _flash(self, position: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The kernel behind `torch.nn.attention.varlen`, told how much of each slot is in use."""
        used = (position + 1).int()
        first_q = torch.arange(self.num_slots + 1, dtype=torch.int32, device=position.device)
        first_k = first_q * self.max_length

        def over_cache(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [N * T, nkv, hd]
            flash = torch.ops.aten._flash_attention_forward
            out: Tensor = flash(
                q, keys, values, first_q, first_k, 1, self.max_length, 0.0, False, False, seqused_k=used
            )[0]  # fmt: skip
            return out

        return over_cache

    def run(self, jobs: Iterable[Job], on_tokens: Callable[[int], None] | None = None) -> Iterator[Answer]:
        """Answers in the order in which they end.

        Stops when the jobs are used up; closing it early drops what is unfinished.
        """
        waiting = iter(jobs)
        owners: list[Job | None] = [None] * self.num_slots
        self.done.fill_(True)
        while True:
            done: list[int] = self.done.nonzero()[:, 0].tolist()
            yield from self._collect([slot for slot in done if owners[slot] is not None], owners)
            self._refill(done, owners, waiting)
            active = sum(owner is not None for owner in owners)
            if active == 0:
                return
            for _ in range(STEPS_PER_CHECK):
                self.advance()
            if on_tokens is not None:
                on_tokens(active * STEPS_PER_CHECK)

    def _collect(self, slots: Sequence[int], owners: list[Job | None]) -> Iterator[Answer]:
        if not slots:
            return
        index = torch.tensor(slots, device=self.tokens.device)
        tokens_np, lengths = self.tokens[index].cpu().numpy(), (self.position[index] + 1).tolist()
        eos = set(self.eos.tolist())
        for slot, row, length in zip(slots, tokens_np, lengths, strict=True):
            job, owners[slot] = owners[slot], None
            assert job is not None
            token_ids = tuple(row[len(job.prompt_ids) : length].tolist())
            yield Answer(job=job, token_ids=token_ids, finished=token_ids[-1] in eos)

    def _refill(self, free: Sequence[int], owners: list[Job | None], waiting: Iterator[Job]) -> None:
        taken = [(slot, job) for slot, job in zip(free, waiting, strict=False)] if free else []
        if not taken:
            return
        tokens_np = np.zeros((len(taken), self.max_length), dtype=np.int64)
        for row, (slot, job) in enumerate(taken):
            assert 0 < len(job.prompt_ids) < self.max_length, (
                f"a prompt of {len(job.prompt_ids)} tokens in {self.max_length}"
            )
            tokens_np[row, : len(job.prompt_ids)] = job.prompt_ids
            owners[slot] = job
        device = self.tokens.device
        index = torch.tensor([slot for slot, _ in taken], device=device)
        lengths = torch.tensor([len(job.prompt_ids) for _, job in taken], device=device)
        room = torch.tensor([job.max_new_tokens for _, job in taken], device=device)
        self.tokens[index] = torch.from_numpy(tokens_np).to(device)
        self.position[index] = 0
        self.prompt_end[index] = lengths
        self.limit[index] = (lengths + room).clamp(max=self.max_length)
        self.temperature[index] = torch.tensor(
            [job.temperature for _, job in taken], dtype=torch.float32, device=device
        )
        self.done[index] = False


# ---- a set of answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSet:
    """Prompts with their answers, one after the other. n texts."""

    token_ids: NDArray[np.int32]  # [sum of lengths] prompt, answer, prompt, answer, ...
    starts: NDArray[np.int64]  # [n + 1] half-open range of each text
    prompt_lengths: NDArray[np.int32]  # [n]
    temperatures: NDArray[np.float32]  # [n]
    looping: NDArray[np.bool_]  # [n] the answer ended in a loop (and may have been cut)

    @classmethod
    def from_answers(cls, answers: Sequence[Answer], *, cut_loops: bool) -> "AnswerSet":
        """`cut_loops` keeps two rounds of a final loop: for training. Evaluation keeps all, as serving meets it."""
        texts, lengths, temperatures, looping = [], [], [], []
        for answer in answers:
            token_ids = answer.token_ids
            loop = None if answer.finished else find_loop(token_ids)
            if loop is not None and cut_loops:
                token_ids = token_ids[: sum(loop)]
            if len(token_ids) < MIN_ANSWER_TOKENS:
                continue
            texts.append(np.array((*answer.job.prompt_ids, *token_ids), dtype=np.int32))
            lengths.append(len(answer.job.prompt_ids))
            temperatures.append(answer.job.temperature)
            looping.append(loop is not None)
        return cls(
            token_ids=np.concatenate(texts) if texts else np.zeros(0, dtype=np.int32),
            starts=np.cumsum([0, *(len(text) for text in texts)]),
            prompt_lengths=np.array(lengths, dtype=np.int32),
            temperatures=np.array(temperatures, dtype=np.float32),
            looping=np.array(looping, dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def text(self, index: int) -> NDArray[np.int32]:
        return self.token_ids[self.starts[index] : self.starts[index + 1]]

    def answer(self, index: int) -> NDArray[np.int32]:
        return self.text(index)[self.prompt_lengths[index] :]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.starts[-1] - self.prompt_lengths.sum())

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> "AnswerSet":
        texts = [self.text(int(index)) for index in indices]
        return AnswerSet(
            token_ids=np.concatenate(texts) if texts else np.zeros(0, dtype=np.int32),
            starts=np.cumsum([0, *(len(text) for text in texts)]),
            prompt_lengths=self.prompt_lengths[indices],
            temperatures=self.temperatures[indices],
            looping=self.looping[indices],
        )

    @classmethod
    def join(cls, sets: Sequence["AnswerSet"]) -> "AnswerSet":
        lengths = np.concatenate([np.diff(part.starts) for part in sets])
        return cls(
            token_ids=np.concatenate([part.token_ids for part in sets]),
            starts=np.concatenate(([0], np.cumsum(lengths))),
            prompt_lengths=np.concatenate([part.prompt_lengths for part in sets]),
            temperatures=np.concatenate([part.temperatures for part in sets]),
            looping=np.concatenate([part.looping for part in sets]),
        )

    def save(self, path: Path) -> None:
        """Whole or not at all: it took hours to make."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, partial(save_file, {name: getattr(self, name) for name in _FIELDS}))

    def digest(self) -> str:
        """A name for this content, order included."""
        parts = (np.ascontiguousarray(getattr(self, name), dtype=kind) for name, kind in _FIELDS.items())
        return hashlib.sha256(b"".join(hashlib.sha256(part.data).digest() for part in parts)).hexdigest()

    @classmethod
    def load(cls, path: Path, remedy: str = "name another file") -> "AnswerSet":
        """Raises, with the remedy, if the file is no whole set of answers."""
        try:
            found = load_file(path)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"answers file {path} cannot be read: {error}; {remedy}") from error
        fault = _fault(found)
        if fault is not None:
            raise CheckpointError(f"answers file {path}: {fault}; {remedy}")
        return cls(**{name: found[name].astype(kind, copy=False) for name, kind in _FIELDS.items()})


_FIELDS: Mapping[str, type[np.generic]] = {
    "token_ids": np.int32, "starts": np.int64, "prompt_lengths": np.int32, "temperatures": np.float32,
    "looping": np.bool_,
}  # fmt: skip


def _fault(found: Mapping[str, NDArray[Any]]) -> str | None:
    """What keeps arrays from being a set of answers, field first."""
    for name, kind in _FIELDS.items():
        if name not in found:
            return f"{name} is missing"
        if found[name].ndim != 1 or found[name].dtype.kind != np.dtype(kind).kind:
            return f"{name} is {found[name].dtype} {list(found[name].shape)}, not a list of {np.dtype(kind)}"
    tokens, starts, prompts, temperatures, looping = (found[name] for name in _FIELDS)
    if not len(prompts):
        return "prompt_lengths is empty: it holds no answer"
    if len(starts) != len(prompts) + 1 or starts[0] != 0 or starts[-1] != len(tokens):
        return f"starts does not go from 0 to {len(tokens)}, the number of token_ids, in {len(prompts)} texts"
    if not ((prompts > 0) & (prompts < np.diff(starts))).all():
        return "prompt_lengths leaves no prompt or no answer in one of the texts of starts"
    for name, values in (("temperatures", temperatures), ("looping", looping)):
        if len(values) != len(prompts):
            return f"{name} has {len(values)} values for {len(prompts)} texts"
    if not (np.isfinite(temperatures) & (temperatures >= 0)).all():
        return "temperatures holds one that is below 0 or not finite"
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        return f"token_ids holds {tokens.min() if tokens.min() < 0 else tokens.max()}, which is no token"
    return None
