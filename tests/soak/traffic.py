"""What strangers send: requests of all kinds, drawn from a seed one by one; some of them nobody could answer.

Request i of a seed is always the same, whatever came before it. Called by `chaos`.
"""

import random
from dataclasses import dataclass
from typing import Any

from slipstream.config import SamplingParams
from slipstream.structured import StructuredOutput

STOPS = ("b", "ab", "é", "🙂", "END", "bb", " a", "zz")


@dataclass(frozen=True)
class Wish:
    prompt: list[int]
    fields: dict[str, Any]  # of SamplingParams
    is_bad: bool = False  # and has to be refused

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.fields)


@dataclass(frozen=True)
class Traffic:
    seed: int
    vocab_size: int
    longest: int  # tokens of prompt and answer
    structured: StructuredOutput | None = None  # what constrained requests ask for; None: there are none

    def wish(self, number: int) -> Wish:
        rng = random.Random(f"{self.seed}/{number}")
        return self._bad(rng) if rng.random() < 0.05 else self._good(rng)

    def _good(self, rng: random.Random) -> Wish:
        """Half of the prompts begin with one of four prefixes."""
        prefix: list[int] = []
        if rng.random() < 0.5:
            shared = random.Random(rng.randrange(4))
            prefix = [shared.randrange(3, self.vocab_size) for _ in range(shared.randrange(8, self.longest // 3))]
        own = [rng.randrange(3, self.vocab_size) for _ in range(rng.randrange(1, self.longest // 4))]
        fields: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 2 * self.longest // 5), "seed": rng.randrange(2**64),
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        }  # fmt: skip
        for name, draw in self._more(rng).items():
            if rng.random() < 0.12:
                fields[name] = draw
        if "structured" in fields:  # refused beside these
            fields = {name: value for name, value in fields.items() if name not in ("min_tokens", "ignore_eos")}
        if "min_tokens" in fields:
            fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
        return Wish(prefix + own, fields)

    def _more(self, rng: random.Random) -> dict[str, Any]:
        token = lambda: rng.randrange(self.vocab_size)  # noqa: E731
        found: dict[str, Any] = {
            "top_p": rng.uniform(0.3, 1.0), "top_k": rng.randrange(1, 50), "min_p": rng.uniform(0.0, 0.4),
            "repetition_penalty": rng.uniform(0.7, 2.0), "frequency_penalty": rng.uniform(-1.0, 2.0),
            "presence_penalty": rng.uniform(-1.0, 2.0), "logit_bias": {token(): rng.uniform(-5, 5) for _ in range(3)},
            "min_tokens": rng.randrange(1, 8), "stop_token_ids": (token(), token()), "ignore_eos": True,
            "stop": tuple(rng.sample(STOPS, 2)), "n": rng.randrange(2, 4), "logprobs": rng.randrange(4),
            "prompt_logprobs": rng.randrange(3),
        }  # fmt: skip
        return found | ({} if self.structured is None else {"structured": self.structured})

    def _bad(self, rng: random.Random) -> Wish:
        good = self._good(rng)
        prompts: list[list[Any]] = [[], [-1], [self.vocab_size], [3] * (self.longest + 1), [2**70], [1.5]]
        fields: list[dict[str, Any]] = [
            {"max_tokens": 0}, {"temperature": float("nan")}, {"top_p": 1.5}, {"n": 10**6}, {"stop_token_ids": (-1,)},
            {"logit_bias": {self.vocab_size: 1.0}}, {"logprobs": 999}, {"seed": "x"}, {"min_tokens": 10**6},
        ]  # fmt: skip
        if rng.random() < 0.5:
            return Wish(rng.choice(prompts), good.fields, is_bad=True)
        return Wish(good.prompt, good.fields | rng.choice(fields), is_bad=True)
