from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draftsmith.decoding import TokenText

INCOMPLETE = "\ufffd"


def ids_of(tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def random_ids(seed: int, count: int = 20) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(63) for _ in range(count)]


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces as a mark, unknown characters byte by byte, no space at the start."""
    tokens = ["<unk>", "▁the", "the", "▁", "<0xE2>", "<0x82>", "<0xAC>", "<0x41>", INCOMPLETE]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_piece() -> PreTrainedTokenizerFast:
    vocabulary = {"[UNK]": 0, "stop": 1, "##s": 2}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_bytes_of_tokens_join_to_what_the_tokenizer_decodes(tokenizer, token_text):
    for seed in range(200):
        token_ids = random_ids(seed)
        joined = b"".join(map(token_text.spelled, token_ids))
        assert joined.decode(errors="replace") == tokenizer.decode(token_ids)


def test_pieces_of_a_character_keep_their_bytes(tokenizer, token_text):
    pieces = [token_text.spelled(i) for i in ids_of(tokenizer, "eâ", "Ĥ", "¬e", "Ĥ¬")]
    assert pieces == [b"e\xe2", b"\x82", b"\xace", b"\x82\xac"]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            sentence_piece,
            [
                b"<unk>",
                b" the",
                b"the",
                b" ",
                b"\xe2",
                b"\x82",
                b"\xac",
                b"A",
                INCOMPLETE.encode(),
            ],
        ),
        (word_piece, [b" [UNK]", b" stop", b"s"]),
    ],
)
def test_other_vocabularies_spell_a_token_as_it_stands_inside_a_text(build, expected):
    text = TokenText(build())
    assert [text.spelled(token_id) for token_id in range(len(expected))] == expected


def test_an_id_that_the_tokenizer_does_not_know_spells_nothing(token_text):
    assert token_text.spelled(1000) == b""
    assert token_text.text([0, 1000, 1]) == "ab"


@pytest.mark.parametrize("build", [sentence_piece, None])
def test_hidden_bytes_are_left_out_at_the_end_wherever_they_fall_in_tokens(build, token_text):
    text = token_text if build is None else TokenText(build())
    for seed in range(100):
        token_ids = random_ids(seed) if build is None else [i % 9 for i in random_ids(seed)]
        whole = text.text(token_ids)
        for num_hidden in range(1, 8):
            end = whole[-num_hidden:]
            if INCOMPLETE not in end and end.isascii():
                assert text.text(token_ids, num_hidden=num_hidden) == whole[:-num_hidden]


def test_a_character_in_pieces_is_hidden_whole(tokenizer, token_text):
    token_ids = ids_of(tokenizer, "th", "eâ", "Ĥ", "¬e")
    assert token_text.text(token_ids) == "the€e"
    assert token_text.text(token_ids, num_hidden=1) == "the€"
    assert token_text.text(token_ids, num_hidden=4) == "the"


def test_special_tokens_are_hidden_by_their_names_and_never_shown(tokenizer, token_text):
    token_ids = ids_of(tokenizer, "th", "<end>", "a")
    assert token_text.spelled(63) == b"<end>"
    assert token_text.text(token_ids) == "tha"
    assert token_text.text(token_ids, num_hidden=3) == "th"  # "d>a"
    assert token_text.text(token_ids, num_hidden=7) == "t"
