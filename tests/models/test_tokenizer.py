"""Our tokenizers against transformers' on the same files; chat templates; text that streams."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from slipstream.errors import CheckpointError, RequestError
from slipstream.models.locate import resolve_target
from slipstream.models.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello world",
    "I'm sure they'll say THEY'RE here; we've 'd",
    "naïve café “quotes” — Ωμέγα, русский, עברית, हिन्दी, ไทย",
    "日本語のテキスト 中文字符 한국어",
    "🙂👩\u200d👩\u200d👧\u200d👦 e\u0301 \u200b zero",
    "def f(x: int) -> int:\n    return x**2 + 10.5\n\n\nclass A: pass\t\t# y\r\n",
    "  leading and trailing   ",
    "\n\n \n\t x\n",
    "1 22 333 4444 3.14159 1,000,000 x2y",
    "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <file_sep> c<|im_end",
    "https://example.org/a?b=c&d=%20#e {\"json\": [1, null]} $\\frac{1}{2}$",
]  # fmt: skip
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1? <b>&"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "naïve 日本 🙂"},
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_target("smollm2-135m"))


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    path = resolve_target("smollm2-135m")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.slow
def test_ids_and_texts_equal_transformers(smollm2: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert ids == reference.encode(text), text
        assert ids == smollm2.encode(text, add_special=True), "this model puts no token first"
        for skip in (True, False):
            assert smollm2.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


@pytest.mark.slow
def test_random_text_equals_transformers_with_digits_cut_first(smollm2: Tokenizer, reference: Any) -> None:
    """transformers drops the pre-tokenizer's name when it reads GGUF, and with it the cut before each digit.

    It only shows where several spaces stand before a digit, and in numerals like ½; with the cut put back the two agree on everything.
    """
    assert smollm2.encode("x  12") == [104, 256, 33, 34]
    backend = tokenizers.Tokenizer.from_str(reference.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    draw = random.Random(0)
    alphabet = " \n\t\r0123456789abcXYZ.,'é日🙂½Ⅳ٣_-<|>" + "".join(map(chr, range(0x370, 0x400)))
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randrange(60)))
        assert smollm2.encode(text) == backend.encode(text).ids, text


def test_what_the_tokenizer_knows(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.is_special(1)
    assert not smollm2.is_special(smollm2.encode("a")[0])
    assert (smollm2.token(2), smollm2.token(49152)) == ("<|im_end|>", None)
    assert smollm2.encode("<|im_start|>") == [1], "special tokens in a text are read as such"


def test_chat_equals_transformers(smollm2: Tokenizer, reference: Any) -> None:
    for messages in (CONVERSATION, CONVERSATION[1:], CONVERSATION[:2]):
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert smollm2.chat(messages, add_generation_prompt=prompt) == expected


def test_a_stream_adds_up_to_the_whole_text(smollm2: Tokenizer) -> None:
    draw = random.Random(0)
    answers = [smollm2.encode(text) for text in TEXTS]
    answers += [[draw.choice([draw.randrange(49152), draw.randrange(300)]) for _ in range(30)] for _ in range(100)]
    for ids in answers:
        for skip in (True, False):
            stream = smollm2.stream(skip)
            pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
            assert "".join(pieces) == smollm2.decode(ids, skip)


def test_a_stream_holds_back_half_a_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a🙂")
    assert len(ids) > 2
    stream = smollm2.stream()
    assert [stream.push(token_id) for token_id in ids] == ["a"] + [""] * (len(ids) - 2) + ["🙂"]
    assert stream.flush() == ""
    stream = smollm2.stream()
    assert "".join([stream.push(token_id) for token_id in ids[:-1]]) == "a"
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<s>", "</s>", "<|end|>"]


def save_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_level({token: index for index, token in enumerate([*SPECIALS, *ALPHABET])}, [])
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    base = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


def test_a_folder_equals_transformers(tmp_path: Path) -> None:
    import transformers

    template = "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content | tojson }}\n  {% endif %}\n{% endfor %}|"
    folder = save_folder(tmp_path, chat_template=template)
    ours, theirs = load_tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text, add_special=True) == theirs.encode(text)
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.chat(CONVERSATION) == theirs.apply_chat_template(CONVERSATION, tokenize=False)
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, (1,))


def test_end_tokens_come_from_every_file_that_names_some(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert load_tokenizer(tmp_path).eos_token_ids == (1, 2)


def test_where_a_folders_template_comes_from(tmp_path: Path) -> None:
    folder = save_folder(
        tmp_path, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    )
    assert load_tokenizer(folder).chat(CONVERSATION) == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(folder).chat(CONVERSATION) == "J"
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(save_folder(tmp_path / "none")).chat(CONVERSATION)


@pytest.mark.parametrize(
    ("template", "messages", "error", "named"),
    [
        ("x", [], RequestError, "messages is empty"),
        ("x", [{"content": "a"}], RequestError, r"messages\[0\]"),
        ("x", ["hello"], RequestError, r"messages\[0\]"),
        ("{{ raise_exception('roles must alternate') }}", CONVERSATION, RequestError, "roles must alternate"),
        ("{{ messages[0].content + nothing }}", CONVERSATION, RequestError, "nothing"),
        ("{{ messages[0].content + 1 }}", CONVERSATION, RequestError, "refuses these messages"),
        ("{% for %}", CONVERSATION, CheckpointError, "malformed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CONVERSATION, RequestError, "unsafe"),
        ("{{ messages.append(1) }}", CONVERSATION, RequestError, "unsafe"),
    ],
)
def test_templates_and_messages_that_fail(
    tmp_path: Path, template: str, messages: Any, error: type[Exception], named: str
) -> None:
    tokenizer = load_tokenizer(save_folder(tmp_path, chat_template=template))
    with pytest.raises(error, match=named):
        tokenizer.chat(messages)


def test_a_template_has_the_helpers_that_published_ones_use(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
        " {{ strftime_now('%Y') }} {{ x }}"
    )
    text = load_tokenizer(save_folder(tmp_path, chat_template=template)).chat(CONVERSATION, x="kept")
    assert text.startswith("system 2")
    assert text.endswith(" kept")


def test_a_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        smollm2.encode("a\ud83d")


def test_folders_without_a_tokenizer_or_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def write_gguf(path: Path, model: str = "gpt2", pre: str = "qwen2", **more: Any) -> Path:
    """A tokenizer alone: the byte alphabet, a few merges, one special and one user-defined token."""
    tokens = ["<s>", "<tool>", *ALPHABET, "12", "123", "Ġa", "é".encode().decode("latin-1")]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 4] + [1] * (len(tokens) - 2))
    writer.add_token_merges(more.pop("merges", ["1 2", "12 3", "Ġ a", "Ã ©"]))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for key, value in more.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spelled(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(token_id) for token_id in tokenizer.encode(text)]


def test_the_table_of_pre_tokenizers(tmp_path: Path) -> None:
    """Digits alone (smollm, qwen2) or in threes (llama-bpe), composed characters (qwen2), whole tokens (llama-bpe)."""
    by_name = {pre: load_tokenizer(write_gguf(tmp_path / pre, pre=pre)) for pre in ("smollm", "llama-bpe", "qwen2")}
    assert spelled(by_name["smollm"], "1234") == spelled(by_name["qwen2"], "1234") == ["1", "2", "3", "4"]
    assert spelled(by_name["llama-bpe"], "1234") == ["123", "4"]
    assert spelled(by_name["qwen2"], "e\u0301") == ["Ã©"]
    assert spelled(by_name["llama-bpe"], "e\u0301") == ["e", "Ì", "ģ"]
    for pre, tokenizer in by_name.items():
        assert spelled(tokenizer, "x a\n\n<tool><s>") == ["x", "Ġa", "Ċ", "Ċ", "<tool>", "<s>"], pre
        ids = tokenizer.encode("x<tool><s>")
        assert tokenizer.decode(ids) == "x<tool>"  # user-defined tokens are text, control tokens are not


def test_a_begin_token_goes_first_where_the_model_wants_it(tmp_path: Path) -> None:
    plain = load_tokenizer(write_gguf(tmp_path / "a"))
    assert plain.encode("x", add_special=True) == plain.encode("x")
    asked = load_tokenizer(write_gguf(tmp_path / "b", add_bos_token=True))
    assert asked.encode("x", add_special=True) == [0, *plain.encode("x")]
    llama = load_tokenizer(write_gguf(tmp_path / "c", pre="llama-bpe"))
    assert llama.encode("x", add_special=True) == [0, *plain.encode("x")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"model": "llama"}, "'llama'"), ({"pre": "tekken"}, "tekken"), ({"merges": ["x y"]}, "do not fit together")],
)
def test_other_tokenizers_are_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_tokenizer(write_gguf(tmp_path / "t.gguf", **changes))


def test_tokenizing_loads_neither_torch_nor_transformers() -> None:
    import subprocess

    code = (
        "import sys; from slipstream.models.locate import resolve_target; from slipstream.models.tokenizer import load_tokenizer; "
        "assert load_tokenizer(resolve_target('smollm2-135m')).encode('a'); "
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------------ bytes of tokens


def test_the_pieces_of_a_text_are_its_bytes(smollm2: Tokenizer) -> None:
    pieces = smollm2.pieces(smollm2.vocab_size + 3)
    assert pieces[-3:] == [b""] * 3, "ids without a token"
    for text in TEXTS:
        assert b"".join(pieces[token] for token in smollm2.encode(text)) == text.encode()
    assert pieces[2] == b"<|im_end|>"
    assert smollm2.pieces(100) == pieces[:100]


def test_pieces_of_a_gguf_with_text_tokens_of_its_own(tmp_path: Path) -> None:
    """A user-defined token is spelled as it is, not in the alphabet of bytes."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "t", pre="qwen2"))
    pieces = tokenizer.pieces(tokenizer.vocab_size)
    for text in ("x a\n\n<tool>", "12 é"):
        assert b"".join(pieces[token] for token in tokenizer.encode(text)) == text.encode()


def test_pieces_of_tokens_for_single_bytes() -> None:
    """As SentencePiece has them; a text's first blank is the tokenizer's own."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁a": 256,
        "b": 257,
        "é": 258,
        "▁": 259,
        "<0x>": 260,
        "<0xZZ>": 261,
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([tokenizers.AddedToken("<▁x>", normalized=False)])
    tokenizer = Tokenizer(source="bytes", backend=backend, vocab_size=263, special_ids=frozenset())
    pieces = tokenizer.pieces(263)
    assert pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert pieces[256:] == [b" a", b"b", "é".encode(), b" ", b"<0x>", b"<0xZZ>", "<▁x>".encode()]
    for ids in ([256, 257, 0xC3, 0xA9, 259, 10], [258, 259, 256]):
        assert b"".join(pieces[token] for token in ids) == tokenizer.decode(ids).encode()


def test_tokens_that_are_words_have_no_pieces() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            backend.decoder = decoder
        tokenizer = Tokenizer(source="words", backend=backend, vocab_size=2, special_ids=frozenset())
        with pytest.raises(RequestError, match="words has a tokenizer whose tokens are not made of bytes"):
            tokenizer.pieces(2)
