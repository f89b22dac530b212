import random

import pytest

from paceline.errors import PacelineError
from paceline.text.stop import StopScanner


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """All the text released, and whether a stop string was found."""
    scanner, released, found = StopScanner(stops), "", False
    for piece in pieces:
        text, found = scanner.push(piece)
        released += text
    return released + scanner.flush(), found


def test_without_stop_strings_everything_is_released_at_once() -> None:
    assert StopScanner([]).push("abc") == ("abc", False)


def test_only_the_text_before_the_stop_string_is_released() -> None:
    assert StopScanner(["END"]).push("abENDcd") == ("ab", True)


def test_a_suffix_that_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["</s>"])
    assert scanner.push("ab<") == ("ab", False)
    assert scanner.push("/") == ("", False)
    assert scanner.push("s>x") == ("", True)
    assert scanner.flush() == ""


def test_held_text_is_released_when_it_turns_out_harmless() -> None:
    scanner = StopScanner(["</s>"])
    assert scanner.push("a<") == ("a", False)
    assert scanner.push("b") == ("<b", False)
    assert scanner.push("</") == ("", False)
    assert scanner.flush() == "</"
    assert scanner.flush() == ""


def test_a_hit_inside_a_failed_longer_start_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b", "c"]) == ("a", True)


def test_the_stop_string_complete_first_wins() -> None:
    assert StopScanner(["abcd", "c"]).push("xabcd") == ("xab", True)


def test_the_longest_of_those_that_end_together_wins() -> None:
    assert StopScanner(["c", "bc"]).push("abc") == ("a", True)


def test_nothing_is_released_after_a_hit() -> None:
    scanner = StopScanner(["x"])
    assert scanner.push("ax") == ("a", True)
    assert scanner.push("more") == ("", True)
    assert scanner.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(PacelineError, match="empty"):
        StopScanner(["a", ""])


def test_the_result_does_not_depend_on_how_the_text_is_cut() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(500):
        text = "".join(draw.choice("abc") for _ in range(draw.randrange(1, 12)))
        stops = ["".join(draw.choice("abc") for _ in range(draw.randrange(1, 5))) for _ in range(draw.randrange(4))]
        whole = run(stops, [text])
        cut = draw.randrange(len(text) + 1)
        assert run(stops, list(text)) == run(stops, [text[:cut], text[cut:]]) == whole
        ends = [text[:end] for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
        expected = min(ends[0].removesuffix(stop) for stop in stops if ends[0].endswith(stop)) if ends else text
        assert whole == (expected, bool(ends))
        hits += whole[1]
    assert 50 < hits < 450
