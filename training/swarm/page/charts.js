// Charts drawn as SVG at the size that they have on the screen. No text becomes markup.

const SVG = "http://www.w3.org/2000/svg";
export const OTHERS = "others";
const ORDER = ["0", "1", "2", "3", "4", "5", "6", "7", OTHERS];

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function decimal(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) {
    return value.toExponential(2);
  }
  const most = Math.abs(value) >= 1000 ? 0 : digits;
  return value.toLocaleString("en", { maximumFractionDigits: most, minimumFractionDigits: Math.min(most, 1) });
}

// Never "100 %" for less than all.
export function percent(part, digits = 1) {
  if (part === null || part === undefined) return "";
  const factor = 10 ** digits;
  const shown = part < 1 ? Math.min(Math.round(part * 100 * factor) / factor, 100 - 1 / factor) : part * 100;
  return `${shown.toFixed(part >= 1 ? 0 : digits)} %`;
}

export function make(name, attributes = {}, ...children) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value));
  found.append(...children);
  return found;
}

export function element(name, className = "", ...children) {
  const found = document.createElement(name);
  if (className) found.className = className;
  found.append(...children);
  return found;
}

export function swatch(colour) {
  return element("i", `swatch ${colour === null || colour === undefined ? "c-others" : `c${colour}`}`);
}

export function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  for (const factor of [1, 2, 2.5, 5, 10, 20, 25, 50, 100]) {
    const step = factor * power;
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    if (last - first + 1 <= most) {
      return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
    }
  }
  return [low];
}

function path(points, close = false) {
  return points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") + (close ? "Z" : "");
}

// Runs of neighbouring bins with a value.
function runs(bins, value) {
  const found = [];
  let open = null;
  bins.forEach((bin, place) => {
    if (value(bin) === null || value(bin) === undefined) open = null;
    else if (open) open.push(place);
    else found.push((open = [place]));
  });
  return found;
}

const epochs = (bin) => (bin.first === bin.last ? `Epoch ${whole.format(bin.first)}` : `Epochs ${whole.format(bin.first)} to ${whole.format(bin.last)}`);

class Chart {
  constructor(host) {
    this.host = host;
    this.bins = [];
    this.place = null;
    new ResizeObserver(() => this.draw()).observe(host);
  }

  show(bins, more = {}) {
    const at = this.place === null ? null : this.bins[this.place]?.first;
    this.bins = bins;
    Object.assign(this, more);
    const place = bins.findIndex((bin) => bin.first <= at && at <= bin.last);
    this.place = at !== null && at !== undefined && place >= 0 ? place : null;
    this.draw();
  }

  empty(text) {
    this.host.replaceChildren(element("p", "empty", text));
    this.svg = null;
  }

  frame(low, high, label, left) {
    const width = Math.max(this.host.clientWidth, 120);
    const height = Math.max(this.host.clientHeight, 80);
    const box = { left, right: width - 8, top: 8, bottom: height - 22 };
    const focused = this.svg !== null && document.activeElement === this.svg;
    this.svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.describe(), tabindex: 0 });
    const first = this.bins[0].first;
    const last = Math.max(this.bins.at(-1).last, first + 1);
    this.x = (bin) => box.left + ((((bin.first + bin.last) / 2 - first) / (last - first)) || 0) * (box.right - box.left);
    this.y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
    this.box = box;
    for (const tick of ticks(low, high, Math.max(2, Math.floor((box.bottom - box.top) / 40)))) {
      const y = this.y(tick);
      this.svg.append(make("line", { x1: box.left, x2: box.right, y1: y, y2: y, class: "gridline" }));
      this.svg.append(make("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, label(tick)));
    }
    const room = Math.max(2, Math.floor((box.right - box.left) / 75));
    for (const tick of ticks(first, last, room).filter(Number.isInteger)) {
      const x = box.left + ((tick - first) / (last - first)) * (box.right - box.left);
      const anchor = x < box.left + 20 ? "start" : x > box.right - 20 ? "end" : "middle";
      this.svg.append(make("text", { x, y: height - 6, "text-anchor": anchor }, whole.format(tick)));
    }
    this.floor = make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "zero" });
    this.refocus = focused;
  }

  finish() {
    this.marks = make("g");
    this.tip = element("div", "tip");
    this.tip.setAttribute("role", "status");
    this.svg.append(this.floor, this.marks);
    this.host.replaceChildren(this.svg, this.tip);
    const nearest = (event) => {
      const at = event.clientX - this.svg.getBoundingClientRect().left;
      let best = 0;
      this.bins.forEach((bin, place) => {
        if (Math.abs(this.x(bin) - at) < Math.abs(this.x(this.bins[best]) - at)) best = place;
      });
      this.point(best);
    };
    this.svg.addEventListener("pointermove", nearest);
    this.svg.addEventListener("pointerdown", nearest);
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const last = this.bins.length - 1;
      const from = this.place ?? last;
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.point(to === null ? null : Math.min(last, Math.max(0, to)));
    });
    if (this.refocus) this.svg.focus({ preventScroll: true });
    this.point(this.place);
  }

  point(place) {
    this.place = place;
    this.tip.hidden = place === null;
    this.marks.replaceChildren();
    if (place === null) return;
    const bin = this.bins[place];
    const x = this.x(bin);
    const value = this.value(bin);
    this.marks.append(make("line", { x1: x, x2: x, y1: this.box.top, y2: this.box.bottom, class: "cursor" }));
    if (value !== null && value !== undefined) {
      this.marks.append(make("circle", { cx: x, cy: this.y(value), r: 4.5, class: "point" }));
    }
    this.tip.replaceChildren(...this.tell(bin));
    const width = this.tip.offsetWidth;
    const left = x + 14 + width < this.box.right ? x + 14 : x - 14 - width;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}

const row = (name, value) => element("div", "", element("bdi", "", name), value);

export class LossChart extends Chart {
  owners = [];

  value(bin) {
    return bin.loss;
  }

  describe() {
    const told = this.bins.filter((bin) => bin.loss !== null);
    if (!told.length) return "Loss by epoch";
    const last = told.at(-1);
    return `Loss by epoch: ${decimal(told[0].loss)} in epoch ${told[0].first}, ${decimal(last.loss)} in epoch ${last.last}`;
  }

  draw() {
    const told = this.bins.filter((bin) => bin.loss !== null);
    if (!told.length) return this.empty("The first epoch with a loss has not ended yet.");
    let low = Math.min(...told.map((bin) => bin.low ?? bin.loss));
    let high = Math.max(...told.map((bin) => bin.high ?? bin.loss));
    const room = high - low || Math.abs(high) * 0.1 || 1;
    // The colours need some height below the lowest point.
    low = Math.max(low - 0.25 * room, low >= 0 ? 0 : -Infinity);
    high += 0.05 * room;
    this.frame(low, high, (value) => decimal(value, room < 1 ? 2 : 1), 44);
    for (const places of runs(this.bins, (bin) => bin.loss)) this.run(places);
    this.finish();
  }

  run(places) {
    const bins = places.map((place) => this.bins[place]);
    const xs = bins.map((bin) => this.x(bin));
    if (bins.length === 1) {
      bins.push(bins[0]);
      xs.splice(0, 1, xs[0] - 3, xs[0] + 3);
    }
    const totals = bins.map((bin) => Object.values(bin.by_colour).reduce((sum, value) => sum + value, 0));
    let below = bins.map(() => 0);
    for (const colour of ORDER) {
      const above = bins.map((bin, n) => below[n] + (totals[n] ? (bin.by_colour[colour] ?? 0) / totals[n] : 0));
      if (above.some((share, n) => share > below[n])) {
        const height = (n, share) => this.box.bottom - share * (this.box.bottom - this.y(bins[n].loss));
        const upper = above.map((share, n) => [xs[n], height(n, share)]);
        const lower = below.map((share, n) => [xs[n], height(n, share)]).reverse();
        this.svg.append(make("path", { d: path([...upper, ...lower], true), class: `area c${colour === OTHERS ? "-others" : colour}` }));
      }
      below = above;
    }
    for (const [n, bin] of bins.entries()) {
      if (bin.first !== bin.last) {
        this.svg.append(make("line", { x1: xs[n], x2: xs[n], y1: this.y(bin.low), y2: this.y(bin.high), class: "spread" }));
      }
    }
    const line = path(bins.map((bin, n) => [xs[n], this.y(bin.loss)]));
    this.svg.append(make("path", { d: line, class: "halo" }), make("path", { d: line, class: "curve" }));
  }

  tell(bin) {
    const total = Object.values(bin.by_colour).reduce((sum, value) => sum + value, 0);
    const found = [element("b", "", epochs(bin)), row("loss", bin.loss === null ? "none" : decimal(bin.loss, 4))];
    if (bin.first !== bin.last && bin.low !== null) found.push(row("lowest, highest", `${decimal(bin.low)}, ${decimal(bin.high)}`));
    found.push(row("samples", whole.format(bin.samples)));
    for (const owner of this.owners) {
      const samples = bin.by_colour[owner.colour ?? OTHERS];
      if (samples) found.push(element("div", "", swatch(owner.colour), element("bdi", "", owner.label), percent(samples / total, 0)));
    }
    return found;
  }
}

export class CourseChart extends Chart {
  constructor(host, { name, value, label, tick = label, top }) {
    super(host);
    Object.assign(this, { name, value, label, tick, top });
  }

  describe() {
    const last = this.bins.filter((bin) => this.value(bin) !== null).at(-1);
    return `${this.name} by epoch${last ? `: ${this.label(this.value(last))} in epoch ${last.last}` : ""}`;
  }

  draw() {
    const told = this.bins.filter((bin) => this.value(bin) !== null);
    if (!told.length) return this.empty("nothing yet");
    const high = this.top ?? (Math.max(...told.map((bin) => this.value(bin))) * 1.1 || 1);
    this.frame(0, high, this.tick, 44);
    for (const places of runs(this.bins, (bin) => this.value(bin))) {
      const points = places.map((place) => [this.x(this.bins[place]), this.y(Math.min(this.value(this.bins[place]), high))]);
      if (points.length === 1) points.push([points[0][0] + 3, points[0][1]]);
      const under = [...points, [points.at(-1)[0], this.box.bottom], [points[0][0], this.box.bottom]];
      this.svg.append(make("path", { d: path(under, true), class: "under" }), make("path", { d: path(points), class: "course" }));
    }
    this.finish();
  }

  tell(bin) {
    const value = this.value(bin);
    return [element("b", "", epochs(bin)), value === null ? "none" : this.label(value)];
  }
}
