"""The report's page: what it says, that it stays inert, and how a browser shows it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from models.files import TEMPORARY_SUFFIX
from pipelines.html_report import render, write_html_report
from pipelines.manifest import InputEntry, LossEntry, Manifest
from pipelines.report_figures import look_at_shards
from tests.pipelines.mining import NO_LANGUAGE_FILTER, run
from tests.pipelines.report_crawl import HOSTILE, page, write_crawl
from tests.pipelines.shown_pages import Shown
from tests.pipelines.wet_files import Page, write_wet

pytest.importorskip("vl_convert", reason="the report needs the extra 'report'")

OVERRIDE = "\u202e"
ARABIC = "هذه صفحة عن الطاحونة القديمة على ضفة النهر."
BENGALI = "নদীর ধারে পুরোনো কল, সেখানে গম পেষা হত।"
PAGES = [
    *(page(n, "bn", "head", text=BENGALI, perplexity=20.0 + n) for n in range(12)),
    *(page(n, "bn", "middle", perplexity=40.0 + n) for n in range(12, 20)),
    *(page(n, "bn", "tail", perplexity=80.0 + 9 * n) for n in range(20, 29)),
    *(page(n, "ar", "all", text=f"{ARABIC}\n{ARABIC}") for n in range(40, 43)),
    page(50, "en", "all", text=HOSTILE, title=HOSTILE, url="javascript:alert(1)", host=HOSTILE),
    page(51, "en", "all", text=f"nul\x00 {OVERRIDE}desrever\n" + "w" * 3000, title=HOSTILE,
         url=f"https://x.example/{OVERRIDE}gpj.exe", host=f"{OVERRIDE}{HOSTILE}"),
    page(52, HOSTILE.replace("/", ""), "all", text="strange", url='https://x.example/"onclick="x'),
]  # fmt: skip
LOSS = LossEntry(name=f"{HOSTILE}{OVERRIDE}", offset=7, bytes=1_234_567, reason=HOSTILE)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path]:
    """A crawl in which every text that can be hostile is."""
    folder = tmp_path_factory.mktemp("crawl")
    manifest = write_crawl(
        folder, PAGES, dropped={"too_short": 1_000, "language_below_threshold": 7, HOSTILE: 3},
        losses=(LOSS, LOSS), cutoffs={"bn": (40.0, 70.0)},
        inputs=(InputEntry(name=HOSTILE, bytes=5, xxh3="", shard=0, failed=HOSTILE),
                InputEntry(name="b.wet.gz", bytes=9_000_000, xxh3="ab", shard=1)),
    )  # fmt: skip
    return manifest, folder


def written(crawl: tuple[Manifest, Path], target: Path) -> Path:
    manifest, folder = crawl
    size = write_html_report(manifest, str(folder), str(target))
    assert target.stat().st_size == size < 2_000_000
    return target


@pytest.fixture(scope="module")
def path(crawl: tuple[Manifest, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(crawl, tmp_path_factory.mktemp("page") / "report.html")


def test_the_page_opens_in_silence_and_asks_for_nothing(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    assert shown.said == []
    assert shown.asked == [path.as_uri()]


def test_numbers_are_those_of_the_manifest(
    browser: Any, path: Path, crawl: tuple[Manifest, Path]
) -> None:
    manifest, shown = crawl[0], Shown(browser, path)
    counts = manifest.counts
    pages = shown.table("Pages")
    assert list(pages) == ["read", "too_short", "language_below_threshold", HOSTILE, "written"]
    assert pages["read"][0] == f"{counts.pages.read:,}" == "1,045"
    assert pages["written"][:2] == ["35", "3.3 %"]
    assert {name: int(cells[0].replace(",", "")) for name, cells in pages.items()} == {
        "read": counts.pages.read, "written": counts.pages.written, **counts.pages.dropped,
    }  # fmt: skip
    paragraphs = shown.table("Paragraphs")
    assert {name: int(cells[0]) for name, cells in paragraphs.items()} == {
        "read": counts.paragraphs.read, "kept": counts.paragraphs.kept,
        **counts.paragraphs.dropped,
    }  # fmt: skip
    assert [cells[0] for cells in shown.table("Records").values()] == ["1,045", "1", "2", "3"]
    languages = shown.table("Languages (4)")
    assert languages["Bengali (bn)"][:1] == ["29"]
    assert languages["Bengali (bn)"][2] == f"{counts.by_language['bn'].chars:,}"
    assert languages["Bengali (bn)"][4:] == ["12", "8", "9", "0", "40.00", "70.00"]
    assert languages["Arabic (ar)"][4:] == ["0", "0", "0", "3", "", ""]
    reasons = shown.table("Lost bytes by reason")
    assert reasons == {HOSTILE: ["2", "2,469,134"]}
    bins = shown.table("Perplexity, Bengali (bn)")
    assert bins["20.00 to 22.40"] == ["3", "0", "0"]
    assert [sum(map(int, column)) for column in zip(*bins.values(), strict=True)] == [12, 8, 9]
    lengths = shown.table("Pages by length in characters")
    assert sum(int(cell) for cells in lengths.values() for cell in cells) == 35
    assert shown.table("Run")["recipe digest"] == ["0123456789abcdef"]
    settings = shown.table("Recipe, every setting")
    for section, values in manifest.recipe.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            expected = "not set" if value is None else value
            text = expected if isinstance(expected, str) else json.dumps(expected)
            assert settings[f"{section}.{name}"][0] == text
    tiles = shown.tab.locator(".tiles dd").all_inner_texts()
    assert tiles[0] == "1,045"
    assert tiles[1].split() == ["35", "3.3", "%"]
    chart = shown.tab.locator("#funnel svg.wide")
    assert "written 35 (3.3 %)" in chart.get_attribute("aria-label")
    assert "1,000 (95.7 %)" in chart.text_content()
    assert "head < 40.00" in shown.tab.locator("#perplexity svg").first.text_content()


def test_hostile_text_stays_text(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    tab = shown.tab
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("script").count() == 1
    assert tab.locator("img, iframe, object, embed, link, form, base").count() == 0
    attributes = tab.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on") or name == "style"]
    links = tab.locator("main a").evaluate_all("all => all.map(a => [a.href, a.rel])")
    assert links
    for address, relation in links:
        assert re.match(r"https://[hx]\d*\.example/", address)
        assert relation == "noopener noreferrer nofollow"
    # Addresses that are not to be followed stand as text, with what is invisible made visible.
    texts = tab.locator(".address").all_text_contents()
    assert "javascript:alert(1)" in texts
    assert "https://x.example/\\u202egpj.exe" in texts
    articles = " ".join(tab.locator("article .text").all_text_contents())
    assert HOSTILE in articles
    assert "nul\ufffd" in articles
    # What turns text around is left in page text only, each line of which is isolated.
    turned = tab.evaluate("""() => {
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
        while (walk.nextNode())
            if (walk.currentNode.data.includes('\\u202e'))
                found.push(getComputedStyle(walk.currentNode.parentElement).unicodeBidi);
        return found;
    }""")
    assert turned == ["isolate"]
    # The policy is in force: what someone would slip in does not run.
    tab.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.hacked = 3';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.hacked=4">');
    }""")
    tab.wait_for_timeout(50)
    assert tab.evaluate("window.hacked") is None
    assert any("Content Security Policy" in line for line in shown.said)


@pytest.mark.parametrize(("width", "theme"), [*itertools.product((360, 1440), ("light", "dark"))])
def test_layout_contrast_and_names(browser: Any, path: Path, width: int, theme: str) -> None:
    shown = Shown(browser, path, width, theme)
    tab = shown.tab
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    low = shown.low_contrast()
    assert low == []
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(252, 252, 250)", "dark": "rgb(20, 23, 26)"}[theme]
    charts = tab.locator("svg:visible")
    names = charts.evaluate_all("all => all.map(s => [s.getAttribute('role'), s.ariaLabel])")
    # Pages, paragraphs, languages, shares, one perplexity, lengths, hosts.
    assert len(names) == 7
    assert all(role == "img" and name for role, name in names)
    assert len({name for _, name in names}) == 7
    identifiers = tab.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(identifiers) == len(set(identifiers))
    targets = tab.locator("nav a").evaluate_all("all => all.map(a => a.hash.slice(1))")
    assert targets
    assert set(targets) <= set(identifiers)
    assert tab.locator("h1").count() == 1
    assert tab.evaluate("document.documentElement.lang") == "en"


def test_scripts_read_in_their_direction(browser: Any, path: Path) -> None:
    tab = Shown(browser, path).tab
    for code, direction in (("ar", "rtl"), ("bn", "ltr")):
        lines = tab.locator(f".text[lang={code}] p")
        found = lines.evaluate_all("all => all.map(p => getComputedStyle(p).direction)")
        assert found
        assert set(found) == {direction}


def test_the_theme_switch(browser: Any, path: Path) -> None:
    tab = Shown(browser, path, theme="dark").tab
    button = tab.get_by_role("button", name="Dark theme")

    def state() -> tuple[str, str]:
        colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return button.get_attribute("aria-pressed"), colour

    assert state() == ("true", "rgb(20, 23, 26)")
    button.focus()
    tab.keyboard.press("Enter")
    assert state() == ("false", "rgb(252, 252, 250)")
    outline = "e => getComputedStyle(e).outlineStyle + getComputedStyle(e).outlineWidth"
    assert button.evaluate(outline) == "solid2px"
    button.click()
    assert state() == ("true", "rgb(20, 23, 26)")


def test_without_script_there_is_no_switch(browser: Any, path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert not tab.locator("#theme").is_visible()
    assert tab.locator("#funnel svg.wide").is_visible()
    context.close()


@pytest.mark.usefixtures("registered_models")
def test_a_mined_crawl(browser: Any, tmp_path: Path) -> None:
    lines = [f"{HOSTILE} {OVERRIDE} line {n} of the hostile page, which is long enough" for n in
             range(9)]  # fmt: skip
    names = (
        "أولا",
        "ثانيا",
        "ثالثا",
        "رابعا",
        "خامسا",
        "سادسا",
        "سابعا",
        "ثامنا",
        "تاسعا",
        "عاشرا",
    )
    arabic = [f"{ARABIC} {name}" for name in names]
    wet = write_wet(tmp_path / "a.warc.wet.gz", [
        Page(f"http://a.example/{HOSTILE}", "\n".join(lines).encode()),
        Page("javascript:alert(1)", "\n".join(line[::-1] for line in lines).encode()),
        Page("http://ar.example/", "\n".join(arabic).encode()),
        Page("http://short.example/", b"short"),
    ])  # fmt: skip
    manifest = run(wet, tmp_path / "out", NO_LANGUAGE_FILTER)
    target = tmp_path / "report.html"
    write_html_report(manifest, str(tmp_path / "out"), str(target))
    shown = Shown(browser, target)
    assert shown.said == []
    assert shown.asked == [target.as_uri()]
    assert shown.tab.evaluate("window.hacked") is None
    assert shown.table("Pages")["written"][0] == f"{manifest.counts.pages.written:,}" == "3"
    assert shown.table("Pages")["too_short"][0] == "1"
    assert set(shown.tab.locator(".text[lang=ar] p").evaluate_all(
        "all => all.map(p => getComputedStyle(p).direction)"
    )) == {"rtl"}  # fmt: skip
    assert shown.tab.evaluate("document.documentElement.scrollWidth") == 1440


def test_same_crawl_same_bytes(crawl: tuple[Manifest, Path], path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(crawl[1], moved)
    again = written((crawl[0], moved), tmp_path / "again.html")
    assert again.read_bytes() == path.read_bytes()


def test_counts_on_an_axis_are_written_out(tmp_path: Path) -> None:
    manifest = write_crawl(tmp_path, [page(n, "bn", "head") for n in range(90)])
    text = written((manifest, tmp_path), tmp_path / "report.html").read_text(encoding="utf-8")
    labels = set(re.findall(r"<text[^>]*>([^<]+)</text>", text))
    assert {"20", "40", "60", "80"} <= labels
    assert not [label for label in labels if re.search(r"\de[+-]?\d", label)]


def test_an_empty_crawl(browser: Any, tmp_path: Path) -> None:
    manifest = write_crawl(tmp_path, [], dropped={"too_short": 4})
    target = written((manifest, tmp_path), tmp_path / "report.html")
    shown = Shown(browser, target, width=360)
    assert shown.said == []
    assert shown.tab.locator(".lead").inner_text() == (
        "4 pages were read; none was kept. The reasons stand below."
    )
    assert shown.table("Pages")["too_short"][:2] == ["4", "100.0 %"]
    assert "There is no page to show." in shown.tab.inner_text("#pages")
    nothing = write_crawl(tmp_path / "nothing", [])
    page_text = render(nothing, look_at_shards(nothing, str(tmp_path), sample_languages=[]))
    assert "No page was read." in page_text


def test_missing_shards_are_said(
    browser: Any, crawl: tuple[Manifest, Path], tmp_path: Path
) -> None:
    target = written((crawl[0], tmp_path / "nowhere"), tmp_path / "report.html")
    shown = Shown(browser, target)
    assert shown.said == []
    assert "6 of 6 Parquet files are missing" in shown.tab.inner_text(".notices")
    assert shown.table("Pages")["written"][0] == "35"
    assert "Not known" in shown.tab.inner_text("#hosts")
    for output in crawl[0].outputs:
        assert output.path in shown.tab.text_content(".notices")


def test_sampling_is_said(tmp_path: Path) -> None:
    pages = [page(n, "bn", "head") for n in range(400)]
    manifest = write_crawl(tmp_path, pages, row_group_pages=10)
    figures = look_at_shards(manifest, str(tmp_path), sample_languages=["bn"], pages=100)
    assert "Estimated from 100 of 400 pages (25.0 %)" in render(manifest, figures)


@pytest.mark.parametrize("name", ["", "manifest.json", "shard.parquet", "new/"])
def test_targets_that_are_refused(
    name: str, crawl: tuple[Manifest, Path], tmp_path: Path
) -> None:  # fmt: skip
    target = f"{tmp_path}/{name}"
    with pytest.raises(UserError, match=f"--html '{re.escape(target)}'"):
        write_html_report(crawl[0], str(crawl[1]), target)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_page_that_cannot_be_written(
    crawl: tuple[Manifest, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/report\.html' cannot be written"):
        write_html_report(crawl[0], str(crawl[1]), f"{tmp_path}/file/report.html")
    (tmp_path / "report.html").write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        write_html_report(crawl[0], str(crawl[1]), f"{tmp_path}/report.html")
    assert (tmp_path / "report.html").read_text() == "before"
    assert not list(tmp_path.glob(f".*{TEMPORARY_SUFFIX}"))


def test_without_the_extra_there_is_one_clear_line(
    crawl: tuple[Manifest, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=re.escape("pip install 'gristmill[report]'")):
        write_html_report(crawl[0], str(crawl[1]), str(tmp_path / "report.html"))
