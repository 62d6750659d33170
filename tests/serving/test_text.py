"""Tokens as pieces of text: characters of several tokens, and stop texts that begin in one piece and end in
another.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effcompile.serving.text import Text


def decode(ids: list[int]) -> str:
    """Tokens are bytes: a part of a character is read as U+FFFD, as byte-level tokenizers do."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], Text]:
    made = Text(decode, stops)
    return [made.put(byte) for byte in text.encode()] + [made.rest()], made


@given(st.text(max_size=30).filter(lambda text: "\ufffd" not in text))
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(text)[0]) == text


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop(text: str, stops: list[str]) -> None:
    """Told as soon as a stop is complete, so that the first one to be complete counts: the oracle tries every
    prefix.
    """
    ends = next(
        (end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)), None
    )
    found, made = pieces(text, tuple(stops))
    assert made.stopped == (ends is not None)
    wanted = (
        text
        if ends is None
        else min((text[:ends].removesuffix(stop) for stop in stops if text[:ends].endswith(stop)), key=len)
    )
    assert "".join(found) == wanted


def test_what_may_begin_a_stop_is_held_back() -> None:
    found, _ = pieces("one END", ("ENDS",))
    assert found == ["o", "n", "e", " ", "", "", "", "END"]


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_half_a_character_is_not_told(stops: tuple[str, ...]) -> None:
    assert pieces("é", stops)[0] == ["", "é", ""]
