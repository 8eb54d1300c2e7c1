"""Text of sampled ids: multi-byte characters, and stop strings across token borders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from instep.chat.stream import Detokenizer, TextStream

CORPUS = ["the answer is 42 stop here, please", "wörter und 日本語 and 👩‍👩‍👧 family"]


def _byte_level() -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def _sentence_piece() -> Any:
    """Llama 2's form: `▁` for a space, one token a byte, a space taken off the start of a text."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁ans",
        "wer",
        "s",
        "st",
    ]
    words += ["op", "▁stop", "ö", "日"]
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return _byte_level()


@pytest.fixture(scope="module")
def sentence_piece() -> Any:
    return _sentence_piece()


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    decoder = Detokenizer(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_together_are_the_whole_text(byte_level: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(byte_level) - 1), max_size=40))
    assert "".join(_pieces(byte_level, ids)) == byte_level.decode(ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_no_half_character_is_ever_shown(byte_level: Any, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    pieces = _pieces(byte_level, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_four_tokens_appears_once_it_is_whole(byte_level: Any) -> None:
    ids = [byte_level.convert_tokens_to_ids(letter) for letter in "ðŁĺĢ"]  # the four bytes of 😀
    assert _pieces(byte_level, ids) == ["", "", "", "😀", ""]
    assert "".join(_pieces(byte_level, ids[:3])) == "\ufffd"


@pytest.mark.parametrize(
    "words",
    [
        ["▁the", "▁ans", "wer"],
        ["▁the", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁stop", "ö", "日"],
        ["<0xE6>", "<0x97>", "<0xA5>", "▁the", "▁the"],
        ["▁the", "<0xE6>", "<0x97>"],
    ],
)
def test_spaces_and_bytes_of_sentencepiece(sentence_piece: Any, words: list[str]) -> None:
    ids = [sentence_piece.convert_tokens_to_ids(word) for word in words]
    assert "".join(_pieces(sentence_piece, ids)) == sentence_piece.decode(ids, skip_special_tokens=False)


def _streamed(tokenizer: Any, ids: list[int], stops: tuple[str, ...]) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stops, (tokenizer.eos_token_id,))
    shown = []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    shown.append(stream.finish())
    return shown, stream


def test_a_stop_string_across_tokens_is_held_back_and_never_shown(sentence_piece: Any) -> None:
    ids = [sentence_piece.convert_tokens_to_ids(word) for word in ["▁ans", "wer", "▁", "st", "op", "▁the"]]
    shown, stream = _streamed(sentence_piece, ids, (" stop",))
    assert shown == ["ans", "wer", "", "", "", ""]
    assert stream.stopped and stream.text == "answer"


def test_what_was_held_back_for_nothing_is_shown(sentence_piece: Any) -> None:
    ids = [sentence_piece.convert_tokens_to_ids(word) for word in ["▁ans", "st", "▁the", "st"]]
    shown, stream = _streamed(sentence_piece, ids, ("stop",))
    assert shown == ["an", "s", "st the", "", "st"]
    assert not stream.stopped and stream.text == "ansst thest"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "é", "aab"]), max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_stop_string_that_comes_first(
    byte_level: Any, words: list[str], stops: list[str]
) -> None:
    ids = [token for word in words for token in byte_level.encode(word, add_special_tokens=False)]
    shown, stream = _streamed(byte_level, ids, tuple(stops))
    whole = byte_level.decode(ids)
    first = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    assert "".join(shown) == stream.text
    # A token may complete two stop strings at once; the text is then cut at the earlier one.
    assert stream.text == whole[:first] or (stream.stopped and whole.startswith(stream.text))
    assert not any(stop in stream.text for stop in stops)
    assert stream.stopped == any(stop in whole for stop in stops)


def test_stop_tokens_are_no_text(byte_level: Any) -> None:
    ids = [*byte_level.encode("the answer"), byte_level.eos_token_id]
    shown, stream = _streamed(byte_level, ids, ())
    assert "".join(shown) == stream.text == "the answer"
