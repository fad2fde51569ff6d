"""Stop strings are found at the token that completes them, from the newest tokens alone."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from treadle.engines.torch.batch import Decode, StopStrings

# Pieces of characters, as a byte-level vocabulary has them; a broken character decodes as U+FFFD.
PIECES = (b"a", b"b", b"ab", b"<", b"/", b"</a", b">", b" ", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"")


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def spaced(tokens: Sequence[int]) -> str:
    """Like SentencePiece: no space at the start of what is decoded."""
    return decode(tokens).removeprefix(" ")


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=25)
STOPS = st.lists(st.sampled_from(["</a>", "ab", "a", "é", "€<", "b a", " b"]), min_size=1, max_size=3)


@given(TOKENS, STOPS, st.sampled_from([decode, spaced]))
def test_it_finds_what_decoding_everything_after_each_token_finds(
    tokens: list[int], stop: list[str], read: Decode
) -> None:
    found = StopStrings(stop, read)
    for number, token in enumerate(tokens):
        wanted = any(s in read(tokens[: number + 1]) for s in stop)
        assert found.completes(token) == wanted
        if wanted:
            return


def test_a_long_completion_is_not_decoded_again() -> None:
    decoded = 0

    def counting(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    stops = StopStrings(["never"], counting)
    assert not any(stops.completes(number % 8) for number in range(1000))
    assert decoded < 5000
