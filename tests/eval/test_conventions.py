"""Conventions: which tokens are fed, which of the predictions count, and in which unit they are told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from neuzip.errors import UsageError
from neuzip.eval.measures import conventions
from neuzip.eval.measures.convention_names import NAMES
from neuzip.eval.measures.conventions import Tokenised, TooShort
from neuzip.eval.measures.text_units import detokenised
from neuzip.eval.measures.texts import Document, Text, of_content, read_text
from neuzip.eval.measures.windows import TokenWindow, blocks_of, cut, rolling, scored_places, strided

BOS = 256
TEXT = Text("made up", (Document("a", "Ein Bär, zwei Bären.\n"), Document("b", "The quick brown fox.")))
BYTES = len(TEXT.content.encode())


def tokenizer(adds_bos: bool = False, bos: bool = True) -> PreTrainedTokenizerFast:
    """Tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate([*alphabet, "<s>"])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if adds_bos:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>" if bos else None)


def tokenised(text: Text = TEXT, **options: Any) -> Tokenised:
    adds_bos, bos = options.pop("adds_bos", False), options.pop("bos", True)
    return Tokenised(text, tokenizer(adds_bos, bos), **options)


# Windows


@pytest.mark.parametrize(
    ("tokens", "window", "expected"),
    [
        (0, 4, []),
        (1, 4, []),
        (2, 4, [(0, 1, 1)]),
        (5, 4, [(0, 4, 4)]),
        (6, 4, [(0, 4, 4), (4, 5, 1)]),
        (9, 4, [(0, 4, 4), (4, 8, 4)]),
        (4, 1, [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
    ],
)
def test_windows_without_overlap(tokens, window, expected):
    assert list(cut(tokens, window)) == [TokenWindow(*w) for w in expected]


def guide(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """The loop of the guide of transformers: where a window begins and ends, and how many labels are left."""
    found, done = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        found.append((begin, end, end - done))
        done = end
        if end == tokens:
            break
    return found


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("tokens", [2, 3, 8, 9, 10, 16, 17, 18, 100])
def test_strided_windows_are_those_of_the_guide(tokens, stride):
    windows = list(strided(tokens, 8, stride))
    expected = []
    for begin, end, labels in guide(tokens, 8, stride):
        labels = min(labels, end - begin - 1)  # a window's first token has nothing before it
        if labels:
            expected.append(TokenWindow(begin, end - 1, labels))
    assert windows == expected


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_to_predict(tokens):
    assert not list(strided(tokens, 8, 4)) and not list(cut(tokens, 8))


@pytest.mark.parametrize("stride", [1, 3, 7])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 17, 100])
def test_every_token_but_the_first_is_predicted_once(tokens, stride):
    for windows in (list(cut(tokens, 8)), list(strided(tokens, 8, stride))):
        assert list(scored_places(windows)) == list(range(1, tokens))
        assert all(w.scored <= w.stop - w.start <= 8 for w in windows)


def harness_windows(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """What lm-evaluation-harness feeds, and which tokens it then scores, worked out from its documentation:
    as many new tokens as fit each time, with as many before them as fill the window up."""
    row, found, done = [prefix, *tokens], [], 0
    while done < len(tokens):
        new = tokens[done : done + length]
        end = done + len(new)
        fed = row[max(0, end - length) : end] if done else row[:end]
        found.append((fed, new))
        done = end
    return found


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 23])
def test_rolling_windows_are_those_of_lm_eval(count):
    row = [-9, *range(count)]
    at = 5
    ids = [77] * at + row
    found = [(ids[w.start : w.stop], ids[w.stop - w.scored + 1 : w.stop + 1]) for w in rolling(at, count, 4)]
    assert found == harness_windows(row[1:], -9, 4)


# A text under each of them


def test_token_and_strided():
    text = tokenised()
    reading = text.read("token", 16)
    c = reading.convention
    assert reading.ids.tolist() == text.ids and len(text.ids) == BYTES
    assert (c.window, c.stride, c.windows, c.tokens) == (16, None, -(-(BYTES - 1) // 16), BYTES - 1)
    # Nothing predicts the first byte, but the word that it is of does not end with it.
    assert (c.words, c.bytes, c.special_tokens, c.documents) == (8, BYTES - 1, "none", 2)
    c = text.read("strided", 16, 5).convention
    assert (c.window, c.stride, c.tokens) == (16, 5, BYTES - 1)
    assert c.rule == "windows of 16 tokens, stride 5"


@pytest.mark.parametrize(
    ("positions", "window", "expected"),
    [
        (None, None, (1024, 512)),
        (2048, None, (1024, 512)),
        (600, None, (600, 300)),
        (600, 9, (9, 4)),
        (2, 2, (2, 1)),
    ],
)
def test_windows_if_nothing_else_is_asked_for(positions, window, expected):
    c = tokenised(positions=positions).read("strided", window).convention
    assert (c.window, c.stride) == expected


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [
        (33, None, "`window=33`: the model was made for 32 tokens"),
        (4, 5, "`stride=5` is larger than the window, 4"),
        (None, 64, "`stride=64` is larger than the window, 32"),
    ],
)
def test_windows_that_cannot_be(window, stride, message):
    with pytest.raises(UsageError, match=message):
        tokenised(positions=32).read("strided", window, stride)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_second_halves(adds_bos, monkeypatch):
    monkeypatch.setattr(conventions, "LLAMA_CPP_WINDOW", 10)
    text = tokenised(adds_bos=adds_bos)
    reading = text.read("llama.cpp")
    ids = [BOS, *text.ids] if adds_bos else text.ids
    assert len(reading.windows) == len(ids) // 10
    for number, w in enumerate(reading.windows):
        fed = reading.ids[w.start : w.stop].tolist()
        chunk = ids[10 * number : 10 * number + 10]
        assert fed == [BOS if adds_bos else chunk[0], *chunk[1:9]]
        assert reading.ids[w.stop - w.scored + 1 : w.stop + 1].tolist() == chunk[6:]
    c = reading.convention
    assert (c.tokens, c.words, c.bytes) == (4 * (len(ids) // 10), None, None)
    assert c.special_tokens == ("the first one BOS" if adds_bos else "none")


def test_second_halves_of_512_are_255_tokens():
    reading = tokenised(of_content("long", "x" * 1500)).read("llama.cpp")
    assert [(w.start, w.stop, w.scored) for w in reading.windows] == [(0, 511, 255), (512, 1023, 255)]
    assert tokenised(of_content("long", "x" * 1500), positions=100).read("llama.cpp").convention.window == 100


@pytest.mark.parametrize("adds_bos", [False, True])
def test_documents_of_lm_eval(adds_bos):
    reading = tokenised(positions=8, adds_bos=adds_bos).read("lm-eval")
    place, scored = 0, 0
    for document in TEXT.documents:
        own = tokenizer(adds_bos)(document.content)["input_ids"]
        assert (own[0] == BOS) == adds_bos
        for fed, new in harness_windows(own, BOS, 8):
            w = reading.windows[place]
            assert reading.ids[w.start : w.stop].tolist() == fed
            assert reading.ids[w.stop - w.scored + 1 : w.stop + 1].tolist() == new
            place, scored = place + 1, scored + len(new)
    c = reading.convention
    assert (place, scored) == (c.windows, c.tokens)
    words = sum(len(re.split(r"\s+", d.content)) for d in TEXT.documents)  # the end of "Bären.\n" is one
    assert (c.words, c.bytes, c.documents) == (words, BYTES - 2, 2)
    assert c.special_tokens == "BOS in front"


def test_words_and_bytes_are_those_before_detokenising():
    page = " = Du Fu = \n \n Du Fu wrote 1 @,@ 500 poems . \n"
    text = of_content("wiki", page)
    reading = tokenised(text, positions=100).read("lm-eval")
    assert (reading.convention.words, reading.convention.bytes) == (len(re.split(r"\s+", page)), len(page))
    assert bytes(reading.ids[1:].tolist()) != page.encode()
    expected = tokenizer()("= Du Fu = \n \nDu Fu wrote 1,500 poems.\n"[0:])["input_ids"]
    assert reading.convention.tokens == len(tokenizer()(detokenised(page))["input_ids"])
    assert len(expected) < len(page)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a 1 @.@ 5 @-@ inch , well @,@ yes", "a 1.5-inch, well,yes"),
        ("he said : go ; now . Why ? Because ! So", "he said: go; now. Why? Because! So"),
        (
            "( in brackets ) [ square ] { curly } \" quoted \" ' one '",
            "(in brackets) [square] {curly} \"quoted\" 'one'",
        ),
        (" = = Life = = \n ", " == Life ==\n"),
        ("= = = Early = = =", "=== Early ==="),
        ("20 ° C", "20°C"),
        ("the dogs ' tails", "the dogs' tails"),
        ("the dogs ' tails and Fu 's", "the dogs'tails and Fu's"),  # taken for a quotation
        ("N N N", "N 1 N"),
    ],
)
def test_detokenising(raw, expected):
    assert detokenised(raw) == expected


def test_without_bos_and_eos_there_is_nothing_to_begin_with():
    with pytest.raises(TooShort, match="neither BOS nor EOS"):
        tokenised(bos=False).read("lm-eval")


# Bounds


@pytest.mark.parametrize(
    ("count", "words", "size"),
    [
        (1, 1, 1),  # [E]i
        (15, 4, 15),  # [E]in Bär, zwei B
        (16, 4, 17),  # [E]in Bär, zwei Bä: half a character counts as all of it
        (17, 4, 17),
        (10_000, 8, BYTES - 1),
    ],
)
def test_max_tokens_bounds_predictions_words_and_bytes(count, words, size):
    c = tokenised(max_tokens=count).read("token", 16).convention
    assert c.tokens == min(count, BYTES - 1)
    assert (c.words, c.bytes) == (words, size)


@pytest.mark.parametrize("count", [1, 5, 8, 9, 22, 23, 24, 30, 1000])
def test_max_tokens_of_documents_ends_with_a_word(count):
    text = tokenised(max_tokens=count)
    if count < 3:
        with pytest.raises(TooShort):
            text.read("lm-eval")
        return
    c = text.read("lm-eval").convention
    first = TEXT.documents[0].content
    assert c.tokens <= count
    if count >= BYTES:
        assert c.tokens == BYTES - 2
    elif count < len(first.encode()):
        expected = max(
            (first[: m.end()] for m in re.finditer(r"\S+", first) if len(first[: m.end()].encode()) <= count),
            key=len,
        )
        assert (c.bytes, c.words) == (len(expected.encode()), len(expected.split()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["", "a"])
def test_text_without_a_token_to_predict(content: str, name):
    text = tokenised(Text("short", (Document("short", content),)))
    if name == "lm-eval" and content:  # it predicts the first token too
        assert text.read(name).convention.tokens == 1
    else:
        with pytest.raises(TooShort, match="short: "):
            text.read(name)


# Blocks


def several(*lengths: int) -> Text:
    """Documents of so many bytes, the two of what stands between them included."""
    return Text("several", tuple(Document(str(n), ("ab " * n)[: n - 2]) for n in lengths))


def test_blocks_are_documents_where_there_are_enough():
    reading = tokenised(several(*[20] * 9)).read("token", 16)
    assert (reading.blocks.kind, reading.blocks.count, reading.blocks.text) == ("document", 9, "9 documents")
    # The joint belongs to the document before it; the very first token is not predicted.
    assert np.bincount(reading.blocks.of).tolist() == [19, *[20] * 7, 18]
    assert tokenised(several(*[20] * 8)).read("token", 16).blocks.kind == "window"


def test_a_long_document_among_many_is_cut_at_windows():
    """Its tokens would be nearly all, and a mean's residual over them nearly zero."""
    blocks = tokenised(several(*[3] * 20, 100)).read("token", 16).blocks
    assert (blocks.kind, blocks.documents) == ("window", 21)
    # 59 tokens of short documents, of which windows cut some, then the rest of a window, and 5 whole ones.
    assert np.bincount(blocks.of)[-7:].tolist() == [5, 16, 16, 16, 16, 16, 13]
    assert blocks.text == f"{blocks.count} windows of 21 documents"


def test_blocks_of_few_documents_are_what_windows_have_of_them():
    reading = tokenised().read("token", 16)
    first = len(TEXT.documents[0].content.encode()) + 2 - 1
    place = np.arange(BYTES - 1)
    _, expected = np.unique(place // 16 + 100 * (place >= first), return_inverse=True)
    assert np.array_equal(reading.blocks.of, expected)
    assert reading.blocks.text == "4 windows of 2 documents"


def test_words_and_bytes_of_blocks():
    """Each block's are those of its tokens, a word's where it begins; together they are the convention's."""
    text = several(*[20] * 9)
    for name in ("token", "strided"):
        reading = tokenised(text).read(name, 16)  # type: ignore[arg-type]
        assert reading.words is not None and reading.bytes is not None
        assert reading.bytes.tolist() == [19, *[20] * 7, 18]
        # "ab ab ab ab ab ab " is a document.
        assert reading.words.tolist() == [6] * 9
        assert (reading.convention.words, reading.convention.bytes) == (54, 177)
    reading = tokenised(text, positions=64).read("lm-eval")
    assert reading.words is not None and reading.bytes is not None
    assert (reading.words.tolist(), reading.bytes.tolist()) == ([7] * 9, [18] * 9)


def test_words_and_bytes_of_windows():
    reading = tokenised(of_content("one", "Ein Bär, zwei Bären.")).read("token", 8)
    assert reading.words is not None and reading.bytes is not None
    # [E]in Bär,| zwei Bä|ren.: the last window predicts the other half of 'ä' too.
    assert (reading.words.tolist(), reading.bytes.tolist()) == ([2, 2, 0], [8, 9, 4])
    text = of_content("one", " Ein Bär, zwei Bären.\n")
    reading = tokenised(text, positions=8).read("lm-eval")
    assert reading.words is not None and reading.bytes is not None
    assert (reading.words.tolist(), reading.bytes.tolist()) == ([2, 1, 3], [8, 8, 8])
    assert reading.convention.words == len(re.split(r"\s+", text.content)) == 6


def test_units_of_detokenised_pages_are_not_known_in_part():
    page = " = Du Fu = \n \n Du Fu wrote 1 @,@ 500 poems . \n"
    reading = tokenised(of_content("wiki", page), positions=8).read("lm-eval")
    assert (reading.words, reading.bytes, reading.convention.bytes) == (None, None, len(page))
    reading = tokenised(of_content("wiki", page + page), positions=100).read("lm-eval")
    assert reading.words is not None and reading.bytes is not None
    assert reading.bytes.tolist() == [len(page) - 1, len(page)]


def test_units_are_not_told_where_tokens_are_left_out():
    """With windows side by side nothing predicts the first of each."""
    c = tokenised().read("strided", 16, 16).convention
    assert c.tokens == BYTES - 3 and (c.words, c.bytes) == (None, None)
    assert tokenised().read("strided", 16, 15).convention.bytes == BYTES - 1


def test_blocks_are_windows_where_there_is_one_document():
    reading = tokenised(of_content("one", "x" * 40)).read("token", 16)
    assert (reading.blocks.kind, reading.blocks.count) == ("window", 3)
    assert np.array_equal(np.bincount(reading.blocks.of), [16, 16, 7])
    assert tokenised(max_tokens=10).read("token", 4).blocks.text == "3 windows"
    assert tokenised().read("token").blocks.text == "2 documents"  # in one window


def test_a_blank_document_is_none(monkeypatch):
    wiki = of_content("wiki", " \n = A B = \n x . \n = C D = \n y . \n")
    assert len(wiki.documents) == 3
    blocks = tokenised(wiki).read("token").blocks
    assert blocks.count == 2
    reading = tokenised(wiki).read("lm-eval")
    assert reading.convention.documents == 2


def test_blocks_of_the_second_halves_belong_to_what_they_predict(monkeypatch):
    """Also where a document begins among what is scored, at any place."""
    monkeypatch.setattr(conventions, "LLAMA_CPP_WINDOW", 10)
    for adds_bos in (False, True):
        for first in range(12, 22):
            text = several(first, 30)
            reading = tokenised(text, adds_bos=adds_bos).read("llama.cpp")
            places = scored_places(reading.windows)
            parts = places // 10 + 100 * (places - adds_bos >= first)
            assert np.array_equal(reading.blocks.of, np.unique(parts, return_inverse=True)[1])


def test_blocks_of_windows_without_documents():
    blocks = blocks_of([TokenWindow(0, 4, 4), TokenWindow(2, 6, 2)])
    assert (blocks.kind, blocks.of.tolist()) == ("window", [0, 0, 0, 0, 1, 1])


def test_wikitext_has_its_articles_as_blocks(neuzip_data: Path):
    text = read_text(str(neuzip_data / "wikitext-2" / "wiki.test.raw"))
    reading = Tokenised(text, tokenizer()).read("token")
    sizes = [len(d.content.encode()) for d in text.documents]
    # The blank line before the first article is of it; its very first byte is not predicted.
    expected = [sizes[0] + 1 + sizes[1] + 1 - 1, *(size + 1 for size in sizes[2:-1]), sizes[-1]]
    assert np.array_equal(np.bincount(reading.blocks.of), expected)
