"""The page of a swarm: what it says and refuses over HTTP, and how Chromium shows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from models.errors import Fault, UserError
from tests.pipelines.shown_pages import Shown
from tests.training.swarm.watched_runs import BUSY, HOSTILE, Told, announcement, busy, told
from training.swarm import dashboard
from training.swarm.dashboard import Dashboard
from training.swarm.metrics_store import Alarm

WAIT_MS = 20_000
CUT = HOSTILE[:47] + "…"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Told:
    found = busy(tmp_path_factory.mktemp("busy"), now=time.time())
    ringing = [
        Alarm(row["key"], row["level"], row["text"])
        for row in found.store.rows("SELECT key, level, text FROM alarms WHERE until IS NULL")
    ]
    over = Alarm("checkpoint", "warning", f"No checkpoint: {HOSTILE}")
    found.store.set_alarms([*ringing, over], found.now)
    found.store.set_alarms(ringing, found.now + 30)
    return found


@pytest.fixture(scope="module")
def served(run: Told) -> Iterator[str]:
    with Dashboard(run.store.path, active_s=1e6) as page:
        yield page.url


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Told, str]]:
    """A run that has not begun, and its page."""
    run = told(tmp_path, now=time.time())
    with Dashboard(run.store.path) as page:
        yield run, page.url


def shown(browser: Any, url: str, width: int = 1440, theme: str = "light") -> Shown:
    return Shown(browser, SimpleNamespace(as_uri=lambda: url), width, theme)


def drawn(browser: Any, url: str, width: int = 1440, theme: str = "light") -> Shown:
    page = shown(browser, url, width, theme)
    page.tab.wait_for_selector("#loss-chart svg", timeout=WAIT_MS)
    return page


def rows(page: Shown, table: str) -> dict[str, list[str]]:
    """Cells by the first, without the id in it."""
    script = """host => [...document.querySelectorAll(`#${host} tbody tr`)].map(
        row => [row.cells[0].querySelector('bdi')?.textContent ?? row.cells[0].textContent,
                ...[...row.cells].slice(1).map(cell => cell.textContent)])"""
    return {name: cells for name, *cells in page.tab.evaluate(script, table)}


def test_it_opens_in_silence_and_asks_only_its_own_server(browser: Any, served: str) -> None:
    page = drawn(browser, served)
    assert page.said == []
    assert {url.removeprefix(served).partition("?")[0] for url in page.asked} == {
        "", "page.css", "page.js", "charts.js", "tables.js", "icon.svg", "events", "history.json",
    } - ({"icon.svg"} if f"{served}icon.svg" not in page.asked else set())  # fmt: skip
    blocked = page.tab.evaluate("fetch('http://127.0.0.2:9/').then(() => 'sent', e => 'refused')")
    assert blocked == "refused"
    assert "Content Security Policy" in page.said[0]


def test_numbers_are_those_of_the_store(browser: Any, served: str) -> None:
    page = drawn(browser, served)
    status = httpx.get(f"{served}status.json").json()
    tiles = page.tab.evaluate(
        "[...document.querySelectorAll('.tiles div')].map(box => "
        "[box.querySelector('dt').textContent, box.querySelector('dd span').textContent])"
    )
    figures = dict(tiles)
    assert figures["Peers"] == "11"
    assert figures["Samples"] == f"{status['samples']:,}"
    assert figures["Averaged"] == "100 %"
    assert float(figures["Loss"]) == pytest.approx(status["loss"], abs=1e-4)
    assert page.tab.inner_text("#progress-title") == "Epoch 200 of 1,000"
    assert page.tab.inner_text("#progress-text") == "216 of 400 samples (54.0 %)"
    assert page.tab.get_attribute("#track", "aria-valuenow") == "54"
    widths = page.tab.evaluate(
        "[...document.querySelectorAll('#track i')].map(part => part.getBoundingClientRect().width"
        " / document.querySelector('#track').getBoundingClientRect().width)"
    )
    assert sum(widths) == pytest.approx(216 / 400, abs=0.01)
    peers = rows(page, "peers-table")
    assert len(peers) == 11
    assert peers["Asha's lab"][:5] == ["node", "NVIDIA A100", "200", "54", "4.5"]
    assert peers["Asha's lab"][5:9] == ["24.9 %", "11.1 %", "", "700 MB"]
    assert peers["colab-17"][6:10] == ["", "20.0 Mbit/s", "700 MB", "other"]
    assert peers["averager"][:5] == ["auxiliary", "2 x EPYC 7502", "200", "", ""]
    board = httpx.get(f"{served}board.json").json()
    leaders = rows(page, "leaders-table")
    assert len(leaders) == 10
    assert leaders["Asha's lab"] == [f"{board['leaders'][0]['samples']:,}", "25.7 %"]
    page.tab.click("#leaders-table button")
    assert len(rows(page, "leaders-table")) == 11
    assert "no signed receipts" in page.tab.inner_text("#leaders-note")
    assert rows(page, "checkpoints-table")["200"][1:] == [
        "9 of 11 peers", "217 MB", "5f3c5f3c5f3c",
    ]  # fmt: skip
    warnings = page.tab.locator("#alarms li").all_inner_texts()
    assert [text.split("since")[0].strip() for text in warnings] == [
        f"Alarm The loss is not a number at {CUT} (…CVe2Xo)",
        "Warning Other weights than the majority's at colab-17 (…6rPxc8)",
        "Warning The clock of Ravi (…5EmSzd) is 5.5 s ahead",
    ]


def test_what_a_peer_sends_stays_text(browser: Any, served: str) -> None:
    page = drawn(browser, served)
    page.tab.wait_for_selector("#past-table tbody tr", timeout=WAIT_MS)
    assert CUT in rows(page, "peers-table")
    assert rows(page, "peers-table")[CUT][1] == CUT
    assert CUT in rows(page, "leaders-table")
    assert f"No checkpoint: {HOSTILE}" in rows(page, "past-table")
    assert page.tab.inner_text("#name") == f"sahajbert {HOSTILE}"
    assert CUT in page.tab.locator("#legend bdi").all_inner_texts()
    assert page.tab.evaluate("document.querySelectorAll('img, b script, p script').length") == 0
    assert page.tab.evaluate("document.scripts.length") == 1
    # A direction mark stands there by its number and turns nothing around; accents do not pile up.
    assert "\\u202egnp.exe\u0301\u0301" in rows(page, "peers-table")
    assert page.said == []


def test_the_line_is_the_loss_and_the_colours_below_it_are_the_shares(
    browser: Any, served: str
) -> None:
    page = drawn(browser, served)
    bins = httpx.get(f"{served}history.json", params={"range": "all"}).json()["bins"]
    points = page.tab.evaluate(
        """() => {
            const numbers = d => d.match(/[\\d.]+/g).map(Number);
            const svg = document.querySelector('#loss-chart svg');
            const labels = svg.querySelectorAll('text');
            const ticks = [...svg.querySelectorAll('.gridline')].map((line, n) =>
                [Number(line.getAttribute('y1')), Number(labels[n].textContent)]);
            return {
                ticks,
                bottom: Number(svg.querySelector('.zero').getAttribute('y1')),
                curve: numbers(svg.querySelector('.curve').getAttribute('d')),
                areas: [...svg.querySelectorAll('.area')].map(
                    path => [path.getAttribute('class'), numbers(path.getAttribute('d'))]),
            };
        }"""
    )
    (y0, value0), (y1, value1) = points["ticks"][0], points["ticks"][-1]
    curve = list(zip(points["curve"][::2], points["curve"][1::2], strict=True))
    assert len(curve) == len(bins) == 200
    for (_, y), found in zip(curve, bins, strict=True):
        loss = value0 + (y - y0) * (value1 - value0) / (y1 - y0)
        assert loss == pytest.approx(found["loss"], abs=0.03)
    assert [name for name, _ in points["areas"]] == [
        *(f"area c{number}" for number in range(8)), "area c-others",
    ]  # fmt: skip
    for name, numbers in points["areas"]:
        colour = name.removeprefix("area c").removeprefix("-")
        upper = numbers[1 : 2 * len(bins) : 2]
        lower = numbers[2 * len(bins) + 1 :: 2][::-1]
        for place in (0, 50, 199):
            height = points["bottom"] - curve[place][1]
            share = bins[place]["by_colour"].get(colour, 0) / sum(bins[place]["by_colour"].values())
            assert (lower[place] - upper[place]) / height == pytest.approx(share, abs=0.01)


def test_a_place_on_the_curve_tells_its_numbers_by_pointer_and_by_key(
    browser: Any, served: str
) -> None:
    page = drawn(browser, served)
    last = httpx.get(f"{served}history.json").json()["bins"][-1]
    tip = page.tab.locator("#loss-chart .tip")
    assert tip.is_hidden()
    page.tab.focus("#loss-chart svg")
    page.tab.keyboard.press("End")
    text = tip.inner_text()
    assert text.startswith("Epoch 199")
    assert f"{last['samples']:,}" in text
    assert re.search(r"Asha's lab\s+25 %", text) or re.search(r"Asha's lab\s+26 %", text)
    page.tab.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("Epoch 198")
    page.tab.keyboard.press("Escape")
    assert tip.is_hidden()
    page.tab.hover("#loss-chart svg", position={"x": 50, "y": 60})
    assert re.match(r"Epoch \d\b", tip.inner_text())
    page.tab.click("[data-span=last]")
    page.tab.wait_for_selector("#loss-chart svg[aria-label*='epoch 100,']", timeout=WAIT_MS)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_it_fits_and_can_be_read(browser: Any, served: str, width: int, theme: str) -> None:
    page = drawn(browser, served, width, theme)
    page.tab.wait_for_selector("#peers-table tbody tr", timeout=WAIT_MS)
    assert page.tab.evaluate("document.documentElement.scrollWidth") == width
    outside = """() => [...document.querySelectorAll('main *')].filter(element => {
        const box = element.getBoundingClientRect();
        const hidden = element.closest('thead, .skip') || box.width < 2;
        return !hidden && (box.right > innerWidth + 1 || box.left < -1);
    }).map(element => element.outerHTML.slice(0, 90))"""
    assert page.tab.evaluate(outside) == []
    beyond = """() => [...document.querySelectorAll('table')].filter(
        table => table.scrollWidth > table.parentElement.clientWidth + 1).length"""
    assert page.tab.evaluate(beyond) == 0
    assert page.low_contrast() == []
    page.tab.click("#theme")
    assert page.low_contrast() == []
    assert page.said == []


def test_it_moves_by_itself_and_rows_stay(browser: Any, small: tuple[Told, str]) -> None:
    run, url = small
    page = shown(browser, url)
    page.tab.wait_for_function(
        "() => document.querySelector('#name').textContent === 'sahajbert'", timeout=WAIT_MS
    )
    assert page.tab.inner_text("#progress-title") == "Waiting for the first peer"
    assert "has not ended yet" in page.tab.inner_text("#loss-chart")
    assert page.tab.inner_text("#peers-table .note") == "No peer is heard."

    def says(epoch: int, samples: int) -> None:
        now = time.time()
        run.collector.look(
            [announcement(one.peer_id, epoch, samples, name=one.name, time=now)
             for one in BUSY[:2]],
            now,
        )  # fmt: skip

    def wait(text: str) -> None:
        page.tab.wait_for_function(
            "text => document.querySelector('#progress').textContent.includes(text)", arg=text,
            timeout=WAIT_MS,
        )  # fmt: skip

    says(0, 100)
    wait("200 of 400 samples (50.0 %)")
    assert page.tab.inner_text("#live") == "live"
    page.tab.evaluate("document.querySelector('#peers-table tbody tr').marked = true")
    says(1, 10)
    wait("Epoch 1 of 1,000")
    page.tab.wait_for_selector("#loss-chart svg .curve", timeout=WAIT_MS, state="attached")
    assert page.tab.evaluate("document.querySelector('#peers-table tbody tr').marked") is True
    run.collector.finish(time.time())
    page.tab.wait_for_function(
        "() => document.querySelector('#live').textContent === 'finished'", timeout=WAIT_MS
    )
    assert page.tab.inner_text("#progress-text") == "finished"
    assert not page.tab.is_visible("#track")
    assert " · ran for " in page.tab.inner_text("#about")
    # Nobody told of links or shares here: those columns take no room, the others stay.
    heads = page.tab.evaluate(
        "[...document.querySelectorAll('#peers-table th[scope=col]')].filter(c => !c.hidden)"
        ".map(c => c.textContent)"
    )
    assert heads == ["Peer", "Role", "Device", "Epoch", "Samples", "Samples/s", "Share of work",
                     "Memory", "Weights", "Seen"]  # fmt: skip
    assert page.said == []


def test_a_silent_coordinator_and_a_lost_server_are_told(browser: Any, tmp_path: Path) -> None:
    run = told(tmp_path, now=time.time() - 100)
    run.collector.look([announcement("a", 0, 1, time=time.time())], time.time() - 60)
    server = Dashboard(run.store.path).start()
    page = shown(browser, server.url)
    told_state = "text => document.querySelector('#live').textContent.includes(text)"
    page.tab.wait_for_function(told_state, arg="the coordinator is silent for 6", timeout=WAIT_MS)
    server.stop()
    page.tab.wait_for_function(told_state, arg="connection lost", timeout=WAIT_MS)
    port = int(server.url.rsplit(":", 1)[1].strip("/"))
    with Dashboard(run.store.path, port=port):
        page.tab.wait_for_function(told_state, arg="the coordinator is silent", timeout=WAIT_MS)


def test_it_can_only_be_read(served: str) -> None:
    paths = ["", "status.json", "board.json", "history.json", "events", "page.js"]
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        answers = [httpx.request(method, served + path).status_code for path in paths]
        assert answers == [405] * len(paths)
    for path in ("nothing", "page", "../dashboard.py", "%2e%2e/dashboard.py", "metrics.sqlite"):
        assert httpx.get(served + path).status_code == 404
    assert httpx.get(f"{served}history.json", params={"range": "all'--"}).status_code == 400


def test_every_answer_carries_the_policy(served: str) -> None:
    for path in ("", "page.css", "status.json", "nothing"):
        headers = httpx.get(served + path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:8", 200), ("LOCALHOST:1", 200),
        ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421),
    ],
)  # fmt: skip
def test_on_loopback_it_answers_to_no_other_name(served: str, host: str, code: int) -> None:
    assert httpx.get(f"{served}status.json", headers={"Host": host}).status_code == code


def test_events_begin_with_everything_and_go_on(small: tuple[Told, str]) -> None:
    run, url = small
    names: list[str] = []
    data: dict[str, Any] = {}
    with httpx.stream("GET", f"{url}events", timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                data[names[-1]] = json.loads(line.removeprefix("data: "))
                if names[-1] == "status" and data["status"]["epoch"] == 7:
                    break
            elif line == "" and names.count("status") == 1 and len(names) == 4:
                now = time.time()
                run.collector.look([announcement("a", 7, 1, time=now)], now)
    assert names[:4] == ["status", "board", "history", "history"]
    assert data["history"] == {"range": "recent", "version": 1}


def test_a_number_that_json_has_not_does_not_freeze_the_page(small: tuple[Told, str]) -> None:
    run, url = small
    row = {
        "epoch": 0, "started": 0.0, "ended": 1.0, "samples": 1, "loss": float("inf"), "peers": 1,
        "owners": "{}", "fraction": None, "round_s": float("inf"), "failed_rounds": 0,
    }  # fmt: skip
    run.store.write_epoch(row)
    until = time.monotonic() + 20
    run.collector.look([announcement("a", 7, 1, time=time.time())], time.time())
    while (status := httpx.get(f"{url}status.json").json())["epoch"] != 7:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert (status["last_epoch"], status["loss"]) == (0, None)
    with Dashboard(run.store.path) as page:  # after a restart
        (found,) = httpx.get(f"{page.url}history.json").json()["bins"]
    assert (found["loss"], found["round_s"]) == (None, None)


def test_too_many_watchers_are_turned_away(
    small: tuple[Told, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "_MOST_WATCHERS", 1)
    url = f"{small[1]}events"
    with httpx.stream("GET", url, timeout=20) as first:
        lines = first.iter_lines()  # held: the connection goes with it
        next(lines)
        assert httpx.get(url, timeout=20).status_code == 503
        assert httpx.get(f"{small[1]}status.json").status_code == 200


def test_it_stops_at_once_with_watchers_there(tmp_path: Path) -> None:
    run = told(tmp_path, now=time.time())
    page = Dashboard(run.store.path).start()
    with httpx.stream("GET", f"{page.url}events", timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        page.stop()
        assert time.monotonic() - began < 8
        list(lines)
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.url)


def test_other_services_stand_beside_it(tmp_path: Path) -> None:
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def hello(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    run = told(tmp_path)
    with Dashboard(run.store.path, routes=[Route("/run", hello, methods=["GET", "POST"])]) as page:
        assert httpx.post(f"{page.url}run").text == "hello"
        assert httpx.get(page.url).status_code == 200
    with pytest.raises(Fault, match="two services answer to '/events'"):
        Dashboard(run.store.path, routes=[Route("/events", hello)])


def test_a_taken_port_and_a_missing_store_are_told_in_one_line(
    small: tuple[Told, str], tmp_path: Path
) -> None:
    run, url = small
    port = int(url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(UserError, match=f"cannot listen on '127.0.0.1:{port}': Address already"):
        Dashboard(run.store.path, port=port)
    with pytest.raises(UserError, match="port '70000' is none"):
        Dashboard(run.store.path, port=70000)
    with pytest.raises(UserError, match="is not there"):
        Dashboard(tmp_path / "no.sqlite")


def test_an_open_address_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = told(tmp_path)
    with Dashboard(run.store.path, host="0.0.0.0") as page:
        port = page.url.rsplit(":", 1)[1]
        answer = httpx.get(f"http://127.0.0.1:{port}status.json", headers={"Host": "swarm.example"})
        assert answer.status_code == 200
    assert "is open to everyone who reaches this machine" in capsys.readouterr().err


def test_a_swarm_of_thousands_is_cut_to_what_a_page_holds(tmp_path: Path) -> None:
    run = told(tmp_path, facts=replace(told(tmp_path / "x").facts, target_batch=10**6))
    many = [announcement(f"peer{number}", 0, 5, time=1.0, name="n" * 48) for number in range(3000)]
    run.collector.look(many, time.time())
    with Dashboard(run.store.path) as page:
        answer = httpx.get(f"{page.url}status.json")
        status = answer.json()
    assert len(status["peers"]) == 200
    assert status["peers_left_out"] == 1800
    assert len(answer.content) < 150_000
