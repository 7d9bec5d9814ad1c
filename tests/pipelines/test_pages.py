"""From records to pages: what enters, what is dropped and why; hosts."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.pages import Page, read_page
from pipelines.recipe import Pages
from pipelines.staging import host_of
from pipelines.wet import Record


def page(body: bytes, url: str = "http://a.example/", **settings: object) -> Page:
    record = Record(url, "", "", "", "", 0, body, False)
    return read_page(record, Pages.model_validate({"min_chars": 1, **settings}))


def test_lines_are_stripped_and_blank_last_lines_go() -> None:
    found = page("Title\r\n\u00a0 one \t\n\ntwo\rthree\n\n \n".encode())
    assert found.lines == ["Title", "one", "", "two", "three"]
    assert (found.title, found.dropped) == ("Title", "")
    assert found.chars == len("Title\none\n\ntwo\nthree")


def test_ccnet_takes_the_title_out() -> None:
    found = page(b"Title\none\ntwo\n", profile="ccnet")
    assert (found.title, found.lines) == ("Title", ["one", "two"])


@pytest.mark.parametrize(
    ("body", "url", "dropped"),
    [
        (b"", "http://a.example/", "too_short"),
        (b"\n\n \n", "http://a.example/", "too_short"),
        (b"text", "", "missing_url"),
        (b"\0" * 10 + b"text that is here", "http://a.example/", "not_text"),
        (b"\xff\xfe\xfd text that is here", "http://a.example/", "not_text"),
        (b"a" * 99 + b"\xff", "http://a.example/", ""),
        (b"a" * 100 + b"\0" * 5, "http://a.example/", ""),  # 5 in 105
        (b"a" * 100 + b"\0" * 6, "http://a.example/", "not_text"),  # 6 in 106
        (b"tabs\tand\r\nlines\n", "http://a.example/", ""),
    ],
)
def test_reasons(body: bytes, url: str, dropped: str) -> None:
    assert page(body, url).dropped == dropped


def test_length_is_counted_in_code_points() -> None:
    bengali = "বাংলা" * 20  # 100 code points, 300 bytes
    assert page(bengali.encode(), min_chars=100).dropped == ""
    assert page(bengali.encode(), min_chars=101).dropped == "too_short"
    emoji = "👩‍👩‍👧" * 20  # five code points each
    assert page(emoji.encode(), min_chars=101).dropped == "too_short"


HOSTS = st.sampled_from(
    ["a.example", "A.Example", "xn--p1ai.example", "[::1]", "[bad", "пример.рф", ""]
)
REST = st.sampled_from(["", "/", "/x?y#z", "?q", ":80/", ":80", ":x/", " /", "\\x", "#"])


@given(st.sampled_from(["http://", "https://", "ftp://", "http:/", ""]), HOSTS, REST,
       st.sampled_from(["", "user@", "u:p@"]))  # fmt: skip
def test_host_is_that_of_urlsplit(scheme: str, host: str, rest: str, user: str) -> None:
    url = f"{scheme}{user}{host}{rest}"
    try:
        expected = urlsplit(url).hostname or ""
    except ValueError:
        expected = ""
    assert host_of(url) == expected
