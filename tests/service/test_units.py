"""Sizes and times mean what people write, or are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.units import counted, format_bytes, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8Gi", 8 << 30),
        ("8 gib", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("8GB", 8 * 10**9),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
    ],
)
def test_a_size_is_read_as_it_is_written(text: object, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["8G", "8M", "GiB", "-1GiB", "", "8GiB8", "eight", None, True, "0x10", "1e9"])
def test_a_size_with_two_meanings_or_none_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"8GiB.*units: B, KiB, MiB, GiB, TiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("10s", 10), ("2m", 120), ("1h", 3600), ("3", 3), (2, 2)]
)
def test_a_time_is_read_as_it_is_written(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["10x", "s", "-1s", True, None])
def test_a_strange_time_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"500ms.*units: us, ms, s, m"):
        parse_seconds(text)


@given(st.integers(0, 1 << 50))
def test_a_size_that_is_shown_can_be_read_back_within_its_rounding(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= max(1, num_bytes // 20)


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (0, ("job",), "0 jobs"),
        (1, ("job",), "1 job"),
        (2345, ("job",), "2,345 jobs"),
        (1, ("store was", "stores were"), "1 store was"),
        (2, ("store was", "stores were"), "2 stores were"),
    ],
)
def test_one_is_one_and_not_ones(number: int, words: tuple[str, ...], said: str) -> None:
    assert counted(number, *words) == said
