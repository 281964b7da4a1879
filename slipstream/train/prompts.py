"""What the target is asked for training: prompts that it is given, prompts that it writes itself, and the answers.

A prompt of its own is what it writes into its chat template's user header after an opening such as "Write a python
function to". Tokenising and templates end here: the generator and all that follow know token ids only. Called by the
trainer, and by `bench/acceptance.py` for greedy answers to evaluation prompts.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.train.answers import Answer, AnswerSet, Job, SlotGenerator
from slipstream.train.options import MIN_ANSWER_TOKENS

USER_TEMPERATURE = 0.85  # of self-made user turns
MAX_USER_TOKENS = 160
MAX_ROUNDS = 8  # of self-made prompts, until there are answers enough
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SENTINEL = "@@slipstream-user-turn@@"

CODE_PROBLEM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
# Openings of self-made user turns; the model writes the rest.
CODE_OPENINGS = (
    "Write a python function to", "Write a function to", "Write a function that", "Write a Python program that",
    f"{CODE_PROBLEM}from typing import List\n\n\ndef", f"{CODE_PROBLEM}\ndef", f"{CODE_PROBLEM}def",
    "Implement a function", "Write a python function to check whether", "Write a function to find the", "Write a class",
)  # fmt: skip
MATH_OPENINGS = (
    "Find", "Compute", "What is the value of", "If $", "Let $", "Suppose", "How many", "Evaluate", "Simplify",
    "Solve for $x$", "The sum of", "A rectangle", "In triangle", "What is the smallest", "Determine", "A train",
    "Given that", "What is the", "For what value of", "Express", "A box contains", "The function $f(x)", "Each",
    "There are", "Two", "The average",
)  # fmt: skip
CHAT_OPENINGS = (
    "", "Explain", "What is", "What are", "How", "Why", "Describe", "Write a", "Write a short", "Compose",
    "Imagine you are", "Can you", "Give me", "List", "Summarize", "Compare", "I", "I'm", "Please", "Who", "When",
    "Where", "Create", "Suggest", "The", "Discuss", "Tell me", "Provide", "Draft", "Rewrite", "Translate", "Identify",
    "Analyze", "Develop", "Design", "Write an email", "Write a story", "Act as", "Pretend", "Help me",
    "Read the following", "Here is", "Which", "Do you",
)  # fmt: skip


class ChatTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that is needed here."""

    def encode(self, text: str, add_special: bool = False) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str: ...


def chat_frame(tokenizer: ChatTokenizer) -> tuple[str, str]:
    """What the chat template puts before a single user turn, and after it up to the assistant's.

    Rendered once: compiling the template for each of many thousand prompts takes longer than answering them.
    """
    before, _, after = tokenizer.chat([{"role": "user", "content": SENTINEL}]).partition(SENTINEL)
    return before, after


def _opening_jobs(tokenizer: ChatTokenizer, count: int, mix: Sequence[float], rng: random.Random) -> Iterator[Job]:
    """Jobs that continue the user header after an opening; the note is the opening and a suffix for the user turn.

    mix: shares of code, mathematics and chat.
    """
    header, _ = chat_frame(tokenizer)
    encode = functools.cache(lambda opening: tuple(tokenizer.encode(header + opening)))
    for openings in rng.choices((CODE_OPENINGS, MATH_OPENINGS, CHAT_OPENINGS), weights=mix, k=count):
        opening = rng.choice(openings)
        suffix = REASON if openings is MATH_OPENINGS and rng.random() < 0.7 else ""
        note = f"{opening}\0{suffix}"
        yield Job(prompt_ids=encode(opening), temperature=USER_TEMPERATURE, max_new_tokens=MAX_USER_TOKENS, note=note)


def self_made_prompts(
    generator: SlotGenerator, tokenizer: ChatTokenizer, count: int, mix: Sequence[float], seed: int
) -> list[str]:
    """User turns that the model wrote itself.

    Unfinished and repeated ones are dropped, so fewer than `count` come back, and openings that leave no room to go on.
    """
    found: dict[str, None] = {}
    room = generator.max_length - 2 * MIN_ANSWER_TOKENS
    jobs = _opening_jobs(tokenizer, count, mix, random.Random(seed))
    for answer in generator.run(job for job in jobs if len(job.prompt_ids) <= room):
        if answer.finished and len(answer.token_ids) > 3:
            opening, suffix = answer.job.note.split("\0")
            found[(opening + tokenizer.decode(answer.token_ids[:-1])).strip() + suffix] = None
    return list(found)


def answer_jobs(
    tokenizer: ChatTokenizer, prompts: Iterable[tuple[str, float]], *, max_length: int, max_new_tokens: int
) -> list[Job]:
    """One job per (user turn, temperature). Prompts that leave no room for an answer are left out."""
    before, after = chat_frame(tokenizer)
    pairs = list(prompts)
    encoded = tokenizer.encode_batch([before + user + after for user, _ in pairs])
    return [
        Job(prompt_ids=tuple(prompt_ids), temperature=temperature, max_new_tokens=max_new_tokens)
        for prompt_ids, (_, temperature) in zip(encoded, pairs, strict=True)
        if len(prompt_ids) <= max_length - 2 * MIN_ANSWER_TOKENS
    ]


def greedy_answers(
    generator: SlotGenerator, tokenizer: ChatTokenizer, prompts: Mapping[str, Sequence[str]], max_new_tokens: int
) -> dict[str, AnswerSet]:
    """Greedy answers as serving would give them, loops and all, to several sets of prompts at once: for evaluation."""
    jobs = []
    for name, users in prompts.items():
        pairs = [(user, 0.0) for user in users]
        made = answer_jobs(tokenizer, pairs, max_length=generator.max_length, max_new_tokens=max_new_tokens)
        jobs += [dataclasses.replace(job, note=name) for job in made]
    answers = list(generator.run(jobs))
    return {
        name: AnswerSet.from_answers([answer for answer in answers if answer.job.note == name], cut_loops=False)
        for name in prompts
    }


def generate_answers(
    generator: SlotGenerator,
    tokenizer: ChatTokenizer,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    max_new_tokens: int,
    greedy_share: float,
    sampled_temperature: float,
    mix: Sequence[float],
    seed: int,
    on_tokens: Callable[[int], None] | None = None,
) -> AnswerSet:
    """Answers of `num_tokens` tokens or a little more: to given prompts, greedily and drawn, and to self-made ones.

    The given prompts make at most about half of the tokens; of the self-made ones `greedy_share` are answered greedily.
    What is drawn is drawn at `sampled_temperature`.
    Fewer tokens come back only if the target hardly ever ends a user turn.
    """
    rng = random.Random(seed)
    typical = max(1, min(max_new_tokens, 240))  # answer tokens of one prompt, for sizing only
    pairs = [(prompt, temperature) for prompt in prompts for temperature in (0.0, sampled_temperature)]
    rng.shuffle(pairs)
    del pairs[num_tokens // (2 * typical) + 1 :]
    answers: list[Answer] = []
    for attempt in range(MAX_ROUNDS):
        missing = num_tokens - sum(len(answer.token_ids) for answer in answers)
        count = max(1, missing // typical - len(pairs))
        made = self_made_prompts(generator, tokenizer, int(count * 1.1) + 1, mix, MAX_ROUNDS * seed + attempt)
        pairs += [(prompt, 0.0 if rng.random() < greedy_share else sampled_temperature) for prompt in made]
        rng.shuffle(pairs)
        jobs = answer_jobs(tokenizer, pairs, max_length=generator.max_length, max_new_tokens=max_new_tokens)
        found = _until(generator, jobs, missing, on_tokens)
        answers += found
        if sum(len(answer.token_ids) for answer in found) >= missing:
            break
        pairs = []
    kept = AnswerSet.from_answers(answers, cut_loops=True)
    if not len(kept):
        raise ConfigError(
            f"none of the target's {len(answers)} answers has {MIN_ANSWER_TOKENS} tokens; raise recipe.max_new_tokens "
            "or recipe.max_length, or give prompts that it answers at more length"
        )
    return kept


def _until(
    generator: SlotGenerator, jobs: Sequence[Job], num_tokens: int, on_tokens: Callable[[int], None] | None
) -> list[Answer]:
    """Answers to jobs until `num_tokens` are there; those begun by then are ended, lest long answers be rare."""
    answers: list[Answer] = []
    total = 0

    def while_needed() -> Iterator[Job]:
        for job in jobs:
            if total >= num_tokens:
                return
            yield job

    for answer in generator.run(while_needed(), on_tokens):
        answers.append(answer)
        total += len(answer.token_ids)
    return answers
