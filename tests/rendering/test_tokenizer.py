from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import FAMILIES, tokenizer_of

from instep.errors import InputError
from instep.rendering.marks import Marks
from instep.rendering.tokenizer import PieceEncoder, load_tokenizer, pattern_of


def test_a_saved_tokenizer_loads_with_its_template(tmp_path: Path) -> None:
    tokenizer_of("qwen2.5").save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == FAMILIES["qwen2.5"].template
    assert loaded("a <|im_end|>")["input_ids"] == tokenizer_of("qwen2.5")("a <|im_end|>")["input_ids"]


@pytest.mark.parametrize("case", ["missing", "empty", "broken", "no template"])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    if case != "missing":
        folder.mkdir()
    if case == "broken":
        (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    if case == "no template":
        tokenizer_of("smollm2").save_pretrained(folder)
        (folder / "chat_template.jinja").unlink()
    expected = {
        "missing": "no such folder",
        "empty": "no tokenizer here",
        "broken": "cannot be read",
        "no template": "no chat template",
    }[case]
    with pytest.raises(InputError, match=expected) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2", "llama3.2", "gemma3", "mistral"])
def test_encoding_by_pieces_equals_encoding_the_whole(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    first, second = family.special[1:3]
    text = f"{first}user\n  The file 文 🙂 {second}\n{first}x = 1\n\n\n{second}"
    encoder = PieceEncoder(tokenizer, family.special)
    tokens, starts = encoder.encode(text, text, [])
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert tokens.tolist() == whole["input_ids"]
    assert (starts[1:] >= starts[:-1]).all() and starts[0] == 0


def test_no_token_crosses_a_cut_and_offsets_stay_on_their_side() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    text = "The file is read.   \n\n\n  The end"
    encoder = PieceEncoder(tokenizer, ())
    for cut in range(1, len(text)):
        tokens, starts = encoder.encode(text, text, [cut])
        left = tokenizer.decode(tokens[starts < cut].tolist())
        assert left == text[:cut]


def test_a_token_that_takes_the_white_space_after_it_stops_at_a_cut() -> None:
    tokenizer = tokenizer_of("phi4-mini")
    encoder = PieceEncoder(tokenizer, FAMILIES["phi4-mini"].special)
    text = "<|user|>  a<|end|>\n"
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoder.encode(text, text, [])[0].tolist() == whole
    cut = encoder.encode(text, text, [len("<|user|>")])[0].tolist()
    assert len(cut) > len(whole)


def test_marks_come_out_as_they_went_in() -> None:
    marks = Marks(pattern_of(["<|end|>", "<s>"]), ["text \ufdd0 that holds a noncharacter"])
    shielded = marks.shield("a <|end|> b <s>\ufdd0")
    assert "<|end|>" not in shielded and len(shielded) == len("a <|end|> b <s>\ufdd0")
    assert marks.unshield(shielded) == "a <|end|> b <s>\ufdd0"
    text, items = marks.read(
        "x" + marks.wrap("one", 0) + json.dumps(marks.wrap("two", 70_000), ensure_ascii=False)
    )
    assert text == 'xone"two"'
    assert [(item.ordinal, text[item.start : item.end]) for item in items] == [(0, "one"), (70_000, "two")]
