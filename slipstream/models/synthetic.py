"""A tokenizer made up for models without one, of any vocabulary, from nothing but its size.

Text is encoded byte by byte, so that any text goes in and comes out again; ids beyond the 256 bytes are made-up words
(" tavo"), which a text never becomes but a random model writes. Nothing is special and nothing ends an answer.
No torch, no files; called by `load` for random weights.
"""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from slipstream.models.tokenizer import Tokenizer, byte_alphabet

SOURCE = "the synthetic tokenizer"
# Ids in this order: a vocabulary of fewer than 256 tokens still reads words; what it lacks it reads as a space.
_FIRST = b" abcdefghijklmnopqrstuvwxyz"
_BYTES = bytes([*_FIRST, *(byte for byte in range(256) if byte not in _FIRST)])
_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """`vocab_size` tokens, each with a text of its own; the same for equal sizes."""
    spellings = [*_byte_spellings()[:vocab_size], *("Ġ" + _word(number) for number in range(vocab_size - 256))]
    vocabulary = {spelling: index for index, spelling in enumerate(spellings)}
    assert len(vocabulary) == vocab_size, f"{vocab_size} tokens have {len(vocabulary)} spellings"
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=spellings[0]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        source=SOURCE, backend=backend, vocab_size=vocab_size, special_ids=frozenset(), add_bos=False,
        chat_template=_CHAT_TEMPLATE,
    )  # fmt: skip


def _byte_spellings() -> list[str]:
    """The byte-level alphabet in the order of ids."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    return [spelling[byte] for byte in _BYTES]


def _word(number: int) -> str:
    """The number written with syllables for digits, so that no two are alike."""
    word = ""
    while True:
        number, digit = divmod(number, len(_SYLLABLES))
        word += _SYLLABLES[digit]
        if not number:
            return word
