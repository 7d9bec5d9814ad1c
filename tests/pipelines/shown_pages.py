"""A report's page in headless Chromium, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LOW_CONTRAST = """() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => {
        const [r, g, b] = numbers(colour).map(
            v => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor;
            if (numbers(colour)[3] !== 0) return colour;
        }
    };
    const found = [];
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
        if (!own || !element.getClientRects().length || element.closest('script')) continue;
        const style = getComputedStyle(element);
        const colour = element.closest('svg') ? style.fill : style.color;
        const [a, b] = [light(colour), light(behind(element))].sort((x, y) => y - x);
        if ((a + .05) / (b + .05) < 4.5) found.push([element.textContent, colour]);
    }
    return found;
}"""


class Shown:
    """The page in a browser, and what it said and asked for meanwhile."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, theme: str = "light") -> None:
        self.tab = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(path.as_uri())

    def table(self, caption: str) -> dict[str, list[str]]:
        """Cells by row heading."""
        script = """caption => {
            const all = [...document.querySelectorAll('table')];
            const found = all.filter(t => t.caption.textContent === caption);
            return found[0] && [...found[0].tBodies[0].rows].map(
                row => [...row.cells].map(cell => cell.textContent));
        }"""
        rows = self.tab.evaluate(script, caption)
        assert rows is not None, f"no table '{caption}'"
        return {row[0]: row[1:] for row in rows}

    def low_contrast(self) -> list[list[str]]:
        """Texts, with their colours, that stand out from what is behind them by less than 4.5."""
        found: list[list[str]] = self.tab.evaluate(_LOW_CONTRAST)
        return found
