// Tables whose rows stay the same elements from one update to the next, so that what somebody
// reads, selects or points at does not jump. Cells are text; a column may add what stands beside it.

import { element } from "./charts.js";

export class Table {
  // columns: {title, kind, text(row), fill(cell, row)?, state(row)?}; the first heads its row.
  // labelled: the heading of a row needs its column's title on a narrow screen, too.
  // limit: rows that are shown at first. cards: on a narrow screen a row is a block of its own.
  constructor(host, columns, { key, empty, caption, limit, cards = false, state = () => "" }) {
    Object.assign(this, { columns, key, state, limit });
    this.open = false;
    this.latest = [];
    this.rows = new Map();
    this.none = element("p", "note", empty);
    this.body = element("tbody");
    const head = element("tr");
    for (const column of columns) {
      const cell = element("th", column.kind ?? "", column.title);
      cell.scope = "col";
      head.append(cell);
    }
    this.table = element("table", cards ? "cards" : "", element("thead", "", head), this.body);
    this.table.setAttribute("aria-label", caption);
    // On a narrow screen the rows are no table for CSS, but they stay one for who listens.
    this.table.setAttribute("role", "table");
    this.more = element("button", "more");
    this.more.type = "button";
    this.more.addEventListener("click", () => {
      this.open = !this.open;
      this.show(this.latest);
    });
    host.append(this.none, this.table, this.more);
    this.show([]);
  }

  show(all) {
    this.latest = all;
    const rows = this.open ? all : all.slice(0, this.limit);
    this.more.hidden = all.length <= this.limit;
    this.more.setAttribute("aria-expanded", String(this.open));
    this.more.textContent = this.open ? `Show the first ${this.limit}` : `Show all ${all.length}`;
    this.none.hidden = rows.length > 0;
    this.table.hidden = rows.length === 0;
    const kept = new Map();
    rows.forEach((row, place) => {
      const key = String(this.key(row));
      const line = this.rows.get(key) ?? this.make();
      kept.set(key, line);
      line.className = this.state(row);
      this.columns.forEach((column, number) => {
        const cell = line.cells[number];
        cell.className = `${column.kind ?? ""} ${column.state?.(row) ?? ""}`.trim();
        if (column.fill) column.fill(cell, row);
        else if (cell.textContent !== column.text(row)) cell.textContent = column.text(row);
      });
      if (this.body.rows[place] !== line) this.body.insertBefore(line, this.body.rows[place] ?? null);
    });
    for (const [key, line] of this.rows) if (!kept.has(key)) line.remove();
    this.rows = kept;
    // A column of which nothing is known in this run only takes room.
    const [head] = this.table.tHead.rows;
    this.columns.forEach((column, number) => {
      const lines = [...kept.values()];
      const hidden = lines.length > 0 && lines.every((line) => line.cells[number].textContent === "");
      for (const line of [head, ...lines]) line.cells[number].hidden = hidden;
    });
  }

  make() {
    const line = element("tr");
    line.setAttribute("role", "row");
    this.columns.forEach((column, number) => {
      const cell = element(number ? "td" : "th");
      if (number || column.labelled) cell.dataset.label = column.title;
      if (!number) cell.scope = "row";
      cell.setAttribute("role", number ? "cell" : "rowheader");
      line.append(cell);
    });
    return line;
  }
}

// A cell that is only made anew when what it shows has changed.
export function refill(cell, signature, build) {
  const text = JSON.stringify(signature);
  if (cell.shown === text) return;
  cell.shown = text;
  cell.replaceChildren(...build());
}
