"""The text format of the sample crawl: what it gives, and that each slip is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.errors import UserError
from scripts.sample_sources import Page, read_faults, read_pages, sources

HEADER = "host: a.example\nlanguage: en\n"


def site(root: Path, text: str, name: str = "en-a.txt") -> Path:
    (root / "sites").mkdir(exist_ok=True)
    (root / "sites" / name).write_text(text, encoding="utf-8")
    return root


def test_a_site_file(tmp_path: Path) -> None:
    text = r"""
# A comment.
host: news.example.org
language: en
scheme: http
identified: eng,fra

== block: menu
Home
\# not a comment

== page: /a?b=1 | The title
! kind: mixed
! language: fr
! identified: none
  @menu
One {brace} paragraph.

\@not a block
\\backslash
\== not a page

== page: /b
@menu
@article news.example.org/a?b=1
"""
    body = ("One {brace} paragraph.", "@not a block", r"\backslash", "== not a page")
    assert read_pages(site(tmp_path, text)) == [
        Page(
            url="http://news.example.org/a?b=1",
            language="fr",
            kind="mixed",
            identified="",
            lines=("The title", "Home", "# not a comment", *body),
        ),
        Page(
            url="http://news.example.org/b",
            language="en",
            kind="good",
            identified="eng,fra",
            lines=("Home", "# not a comment", *body),
        ),
    ]


def test_digits_vary_and_nothing_else(tmp_path: Path) -> None:
    text = HEADER + "== block: f\n© {year} A, no. {number}\n"
    text += "".join(f"== page: /{path}\n@f\n" for path in range(20))
    lines = [page.lines[0] for page in read_pages(site(tmp_path, text))]
    assert len(set(lines)) > 10
    assert {re.sub(r"[0-9]", "0", line) for line in lines} == {"© 0000 A, no. 0000"}
    assert {int(line[2:6]) for line in lines} <= set(range(2019, 2027))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("language: en\n== page: /\nx\n", 1, 'no "host: ..." line'),
        ("host: a.example\n== page: /\nx\n", 1, 'no "language: ..." line'),
        ("host: a.invented.com\nlanguage: en\n", 1, 'host "a.invented.com"'),
        ("host: a.example\nlanguage: de\n", 1, 'language "de" is not what the file name'),
        (HEADER + "colour: red\n", 3, '"colour: red" is not "key: value"'),
        (HEADER + "host: b.example\n", 3, '"host" is given twice'),
        (HEADER + "scheme: ftp\n", 3, 'scheme "ftp"'),
        (HEADER + "identified: en\n", 3, 'identified "en"'),
        (HEADER, 1, "the file has no page"),
        (HEADER + "== side: x\n", 3, '"== side: x" is neither'),
        (HEADER + "== page: a | T\n", 3, '"== page: a | T" is neither'),
        (HEADER + "== page: /ä | T\n", 3, "is neither"),
        (HEADER + "== page: /a | T\n\n# c\n== page: /a | U\n", 6, 'path "/a" has a page already'),
        (HEADER + "== block: m\nx\n== block: m\n", 5, 'block name "m" is taken'),
        (HEADER + "== block: m\n@other\n", 4, '"@other" in a block'),
        (HEADER + "== page: /a | T\n@menu\n", 4, 'no block "menu" stands above'),
        (HEADER + "== page: /a | T\ntext\n! kind: spam\n", 5, "after the text"),
        (HEADER + "== page: /a | T\n! kind: bad\n", 4, 'kind "bad" is not one of good, short'),
        (HEADER + "== page: /a | T\n! colour: red\n", 4, "is not"),
        (HEADER + "== page: /a | T\n! language: English\n", 4, 'language "English"'),
        (HEADER + "== page: /a | T\n@article b.example/x\n", 4, '"b.example/x" is not host/path'),
        (HEADER + "== page: /a\n== page: /b\nx\n", 1, '"https://a.example/a" is empty'),
    ],
)
def test_slips_are_named_with_their_place(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_pages(site(tmp_path, text))
    assert str(caught.value).startswith(f"en-a.txt:{line}: ")


def test_a_host_has_one_file(tmp_path: Path) -> None:
    site(tmp_path, HEADER + "== page: /\nx\n")
    with pytest.raises(UserError, match=r'^en-b.txt:1: the host "a.example" has a file already'):
        read_pages(site(tmp_path, HEADER + "== page: /y\nx\n", name="en-b.txt"))


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    site(tmp_path, "")
    (tmp_path / "sites/en-a.txt").write_bytes(b"host: \xff")
    with pytest.raises(UserError, match=r"^en-a.txt:1: the file is not UTF-8"):
        read_pages(tmp_path)


def test_no_sources_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        read_pages(tmp_path)
    (tmp_path / "sites").mkdir()
    with pytest.raises(UserError, match="no page in"):
        read_pages(tmp_path)


FAULT = '[[fault]]\nurl = "https://a.example/"\nwhy = "-"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[fault]\n", "faults.toml: "),
        ("[[error]]\n", "faults.toml: error"),
        ("[[fault]]\nwhy = '-'\nkind = 'no_url'\n", "fault.0.url"),
        (FAULT + 'kind = "odd"\n', 'fault.0.kind is "odd"'),
        (FAULT + 'kind = "wrong_length"\n', 'short_by_bytes of "https://a.example/" is 0'),
        (FAULT + 'kind = "wrong_length"\nshort_by_bytes = 9\n', "is 9"),
        (FAULT + 'kind = "no_url"\nshort_by_bytes = 1\n', "is 1"),
        (FAULT.replace("a.ex", "b.ex") + 'kind = "no_url"\n', '"https://b.example/" is not a page'),
        ((FAULT + 'kind = "no_url"\n') * 2, "a page is named twice"),
        (
            FAULT + 'kind = "cut_member"\n' + FAULT.replace('/"', '/2"') + 'kind = "cut_member"\n',
            '"cut_member" stands twice',
        ),
    ],
)
def test_slips_in_the_faults(tmp_path: Path, text: str, message: str) -> None:
    site(tmp_path, HEADER + "== page: /\nshort\n== page: /2\nother\n")
    (tmp_path / "faults.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_faults(tmp_path, read_pages(tmp_path))


def test_faults_are_optional(tmp_path: Path) -> None:
    assert read_faults(site(tmp_path, HEADER + "== page: /\nx\n"), []) == []


def test_the_document_names_every_kind() -> None:
    """FORMAT.md is what people write by; it must know what the parser knows."""
    text = sources().joinpath("FORMAT.md").read_text(encoding="utf-8")
    faults = {fault.kind for fault in read_faults(sources(), read_pages())}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == faults
    kinds = {page.kind for page in read_pages()}
    assert {kind for kind in kinds if f"`{kind}`" not in text} == set()
