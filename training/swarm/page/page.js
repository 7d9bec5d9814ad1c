// The page of a swarm: takes in the server's events and shows them. Whatever a peer has sent
// becomes a text node, never markup, never an address.

import { CourseChart, LossChart, OTHERS, decimal, element, percent, swatch, whole } from "./charts.js";
import { Table, refill } from "./tables.js";

const SILENT_S = 15;
const LOST_S = 8;
const at = (id) => document.getElementById(id);
const set = (id, text) => {
  if (at(id).textContent !== text) at(id).textContent = text;
};

let status = null;
let history = null;
let span = "all";
let skew_s = 0; // the server's clock less ours
let heard_s = -Infinity;
const versions = { all: 0, recent: 0 };

const now = () => Date.now() / 1000 + skew_s;

function duration(seconds) {
  if (seconds < 0) return "0 s";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

const ago = (time) => {
  const age = Math.max(0, now() - time);
  return age < 2 ? "now" : age < 100 ? `${age.toFixed(0)} s ago` : `${duration(age)} ago`;
};

function bytes(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} GB`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(0)} MB` : `${(count / 1e3).toFixed(0)} kB`;
}

function parameters(count) {
  return count >= 1e6 ? `${(count / 1e6).toFixed(1)} M parameters` : `${whole.format(count)} parameters`;
}

const when = (time) => new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
const shortId = (id) => (id.length > 6 ? `…${id.slice(-6)}` : id);

function meter(part) {
  const fill = element("i");
  fill.style.width = `${Math.min(100, part * 100).toFixed(1)}%`;
  return element("span", "meter", fill);
}

function shareCell(cell, part) {
  refill(cell, Math.round(part * 1000), () => [meter(part), percent(part)]);
}

function named(cell, colour, name, beside, below = "") {
  refill(cell, [colour, name, beside, below], () => {
    const label = element("bdi", "", name);
    label.title = name;
    const found = element("div", "", swatch(colour), label);
    if (beside) found.append(element("small", "", beside));
    return below ? [found, element("small", "below", below)] : [found];
  });
}

const counted = (count, what) => `${whole.format(count)} ${what}${count === 1 ? "" : "s"}`;

const peers = new Table(at("peers-table"), [
  { title: "Peer", kind: "name", fill: (cell, peer) => named(cell, peer.colour, peer.name, peer.user ? `${peer.user}, ${shortId(peer.peer_id)}` : shortId(peer.peer_id)) },
  { title: "Role", text: (peer) => peer.role },
  { title: "Device", text: (peer) => peer.device },
  { title: "Epoch", kind: "number", text: (peer) => whole.format(peer.epoch) },
  { title: "Samples", kind: "number", text: (peer) => (peer.role === "auxiliary" ? "" : whole.format(peer.samples)) },
  { title: "Samples/s", kind: "number", text: (peer) => (peer.role === "auxiliary" ? "" : decimal(peer.rate, 1)) },
  { title: "Share of work", kind: "number", fill: (cell, peer) => shareCell(cell, peer.share) },
  { title: "Averages", kind: "number", text: (peer) => percent(peer.part) },
  { title: "Link", kind: "number", text: (peer) => (peer.link_bytes_s === null ? "" : `${decimal((peer.link_bytes_s * 8) / 1e6, 1)} Mbit/s`) },
  { title: "Memory", kind: "number", text: (peer) => (peer.rss_bytes ? bytes(peer.rss_bytes) : "") },
  { title: "Weights", text: (peer) => (peer.agrees === null ? "" : peer.agrees ? "same" : "other"), state: (peer) => (peer.agrees === false ? "bad" : "") },
  { title: "Seen", kind: "number", text: (peer) => ago(peer.last_seen) },
], { key: (peer) => peer.peer_id, empty: "No peer is heard.", caption: "Peers now", limit: 25, cards: true, state: (peer) => (peer.active ? "" : "gone") });

const leaders = new Table(at("leaders-table"), [
  { title: "Contributor", kind: "name", fill: (cell, row) => named(cell, row.colour, row.label, row.owner.startsWith("peer ") ? shortId(row.owner.slice(5)) : "", `${counted(row.rounds, "round")}, ${duration(row.hours * 3600)}`) },
  { title: "Samples", kind: "number", text: (row) => whole.format(row.samples) },
  { title: "Share", kind: "number", fill: (cell, row) => shareCell(cell, row.part) },
], { key: (row) => row.owner, empty: "Nobody has finished an epoch yet.", caption: "Leaderboard", limit: 10 });

const checkpoints = new Table(at("checkpoints-table"), [
  { title: "Epoch", labelled: true, text: (row) => whole.format(row.epoch) },
  { title: "Written", text: (row) => when(row.time) },
  { title: "Agreed", text: (row) => `${row.votes} of ${row.active} peers` },
  { title: "Size", kind: "number", text: (row) => bytes(row.bytes) },
  { title: "Weights", kind: "code", text: (row) => row.state_hash.slice(0, 12) },
], { key: (row) => row.epoch, empty: "None has been written yet.", caption: "Checkpoints", limit: 5, cards: true });

const past = new Table(at("past-table"), [
  { title: "Alarm", text: (row) => row.text },
  { title: "From", text: (row) => when(row.since) },
  { title: "For", kind: "number", text: (row) => duration(row.until - row.since) },
], { key: (row) => `${row.key} ${row.since}`, empty: "None.", caption: "Past alarms", limit: 5 });

const loss = new LossChart(at("loss-chart"));
const course = {
  rate: new CourseChart(at("rate-chart"), { name: "Samples/s", value: (bin) => bin.rate, label: (value) => decimal(value, 1) }),
  peers: new CourseChart(at("peers-chart"), { name: "Contributing peers", value: (bin) => bin.peers, label: (value) => decimal(value, Number.isInteger(value) ? 0 : 1) }),
  fraction: new CourseChart(at("fraction-chart"), { name: "Fraction averaged", value: (bin) => bin.fraction, label: (value) => percent(value, 1), tick: (value) => percent(value, 0), top: 1 }),
  round: new CourseChart(at("round-chart"), { name: "Seconds of averaging", value: (bin) => bin.round_s, label: (value) => `${decimal(value, 2)} s` }),
};

function showProgress() {
  const { epoch, progress, run } = status;
  if (epoch === null) return;
  const planned = run.epochs === null ? "" : ` of ${whole.format(run.epochs)}`;
  const done = progress.target ? progress.samples / progress.target : 0;
  set("progress-title", `Epoch ${whole.format(epoch)}${planned}`);
  const over = status.finished !== null;
  at("track").hidden = over; // no batch is gathered any more
  set("progress-text", over ? "finished" : `${whole.format(progress.samples)} of ${whole.format(progress.target)} samples (${percent(Math.min(done, 1))})`);
  const full = Math.max(progress.target, progress.samples, 1);
  const parts = Object.entries(progress.by_colour).sort(([a], [b]) => (a === OTHERS) - (b === OTHERS) || a - b);
  const track = at("track");
  track.setAttribute("aria-valuenow", Math.min(100, Math.floor(done * 100)));
  while (track.children.length > parts.length) track.lastChild.remove();
  parts.forEach(([colour, samples], place) => {
    const part = track.children[place] ?? track.appendChild(element("i"));
    part.className = colour === OTHERS ? "c-others" : `c${colour}`;
    part.style.width = `${((samples / full) * 100).toFixed(2)}%`;
  });
  let left = "";
  if (over) left = `Finished ${ago(status.finished)}.`;
  else if (done >= 1) left = "The batch is full: the peers average.";
  else if (progress.left_s !== null) left = `About ${duration(progress.left_s)} until the batch is full.`;
  if (status.epoch_s !== null) left += ` The last epochs took ${duration(status.epoch_s)} each.`;
  set("progress-left", left.trim());
}

function tile(name, number, beside = "", state = "") {
  return { name, number, beside, state };
}

function showTiles() {
  const { roles, run } = status;
  const count = roles.node + roles.client + roles.auxiliary;
  const kinds = [[roles.node, "node"], [roles.client, "client"]].filter(([n]) => n).map(([n, word]) => `${n} ${word}${n === 1 ? "" : "s"}`);
  if (roles.auxiliary) kinds.push(`${roles.auxiliary} auxiliary`);
  const over = status.finished !== null;
  const speed = status.measured_rate === null ? "" : `${decimal(status.measured_rate, 1)} with averaging`;
  const fraction = status.fraction === null ? "none yet" : percent(status.fraction);
  const tiles = [
    tile("Loss", status.loss === null ? "none yet" : decimal(status.loss, 4), status.last_epoch === null ? "" : `epoch ${whole.format(status.last_epoch)}`),
    tile("Peers", whole.format(count), kinds.join(", "), count || over ? "" : "bad"),
    over
      ? tile("Samples/s", decimal(status.measured_rate, 1) || "none", "in the last epochs")
      : tile("Samples/s", decimal(status.rate, 1), speed),
    tile("Averaged", fraction, status.fraction === null ? "" : "of the last epoch's gradients", status.fraction !== null && status.fraction < 1 ? "bad" : ""),
    tile("Samples", whole.format(status.samples), `in ${whole.format(status.epochs_seen)} epochs`),
    tile("Last epoch", status.ended === null ? "none yet" : ago(status.ended), run.epochs && status.epoch_s && !status.finished ? `${duration(Math.max(0, run.epochs - status.epoch) * status.epoch_s)} to the end` : ""),
  ];
  const host = at("tiles");
  while (host.children.length < tiles.length) {
    host.append(element("div", "", element("dt"), element("dd", "", element("span"), element("small"))));
  }
  tiles.forEach(({ name, number, beside, state }, place) => {
    const box = host.children[place];
    const [head, cell] = box.children;
    box.className = state;
    for (const [part, text] of [[head, name], [cell.children[0], number], [cell.children[1], beside]]) {
      if (part.textContent !== text) part.textContent = text;
    }
  });
}

function showAlarms() {
  const box = at("alarms");
  const list = box.firstElementChild;
  const keys = status.alarms.map((alarm) => [alarm.key, alarm.level, alarm.text, alarm.since]);
  box.hidden = keys.length === 0;
  refill(list, keys, () => status.alarms.map((alarm) => {
    const grave = alarm.level === "grave";
    return element("li", grave ? "grave" : "", element("b", "", grave ? "Alarm" : "Warning"), " ", element("bdi", "", alarm.text), " ", element("small", "", `since ${when(alarm.since)}`));
  }));
}

function showStatus() {
  const { run } = status;
  set("name", run.name ?? "unnamed run");
  document.title = `${status.alarms.length ? "(!) " : ""}${run.name ?? "Swarm"}: ${status.epoch === null ? "waiting" : `epoch ${whole.format(status.epoch)}`}`;
  const about = [run.mode];
  if (run.parameters) about.push(parameters(run.parameters));
  about.push(`${whole.format(run.target_batch)} samples an epoch`);
  if (run.recipe_digest) about.push(`recipe ${run.recipe_digest.slice(0, 12)}`);
  if (status.began !== null) about.push(`${status.finished === null ? "running" : "ran"} for ${duration((status.finished ?? now()) - status.began)}`);
  set("about", about.join(" · "));
  showAlarms();
  showProgress();
  showTiles();
  peers.show(status.peers);
  const notes = [];
  if (status.peers_left_out) notes.push(`${whole.format(status.peers_left_out)} more are not shown.`);
  if (status.refused) notes.push(`${status.refused} announcements were refused: their numbers cannot be.`);
  if (status.peers.length) notes.push("Share of work: samples of the last 20 epochs.");
  if (status.peers.some((peer) => peer.part !== null)) notes.push("Averages: the part of the numbers that a peer averages for all.");
  set("peers-note", notes.join(" "));
}

function showBoard(board) {
  leaders.show(board.leaders);
  checkpoints.show(board.checkpoints);
  past.show(board.past_alarms);
  const more = board.contributors > board.leaders.length ? `The first ${board.leaders.length} of ${whole.format(board.contributors)}. ` : "";
  const source = board.source === "receipts"
    ? "Samples that a majority of each round's group signed for. This shows who was in which round with what weight, not that the work was right."
    : "As the peers announce it: no signed receipts are kept in this run.";
  set("leaders-note", more + source);
}

function showHistory() {
  if (history === null) return;
  const bins = span === "last" ? history.bins.slice(-100) : history.bins;
  loss.show(bins, { owners: history.owners });
  for (const [name, chart] of Object.entries(course)) {
    chart.show(bins);
    const last = bins.length ? chart.value(bins.at(-1)) : null;
    set(`${name}-now`, last === null ? "" : chart.label(last));
  }
  refill(at("legend"), history.owners, () => history.owners.map((owner) => element("li", "", swatch(owner.colour), element("bdi", "", owner.label), element("span", "", percent(owner.part)))));
}

let fetching = false;
let again = false;
async function fetchHistory() {
  if (fetching) {
    again = true;
    return;
  }
  fetching = true;
  try {
    const range = span === "all" ? "all" : "recent";
    const answer = await fetch(`/history.json?range=${range}`);
    if (answer.ok) {
      history = await answer.json();
      showHistory();
    }
  } catch {
    // The state of the connection stands at the top of the page; the next event asks again.
  } finally {
    fetching = false;
    if (again) {
      again = false;
      fetchHistory();
    }
  }
}

function showLive() {
  const silence = Date.now() / 1000 - heard_s;
  let [state, text] = ["live", "live"];
  if (status === null) [state, text] = ["", "connecting"];
  else if (silence > LOST_S) [state, text] = ["lost", `connection lost ${duration(silence)} ago, trying again`];
  else if (status.finished !== null) [state, text] = ["", "finished"];
  else if (status.looked === null) [state, text] = ["", "the coordinator has not begun"];
  else if (now() - status.looked > SILENT_S) [state, text] = ["silent", `the coordinator is silent for ${duration(now() - status.looked)}`];
  at("live").dataset.state = state;
  const told = at("live").lastElementChild;
  if (told.textContent !== text) told.textContent = text;
}

function listen() {
  const source = new EventSource("/events");
  const on = (name, act) => source.addEventListener(name, (event) => {
    heard_s = Date.now() / 1000;
    act(JSON.parse(event.data));
    showLive();
  });
  on("status", (found) => {
    skew_s = found.now - Date.now() / 1000;
    status = found;
    showStatus();
  });
  on("board", showBoard);
  on("history", ({ range, version }) => {
    versions[range] = version;
    if (range === (span === "all" ? "all" : "recent")) fetchHistory();
  });
  source.addEventListener("error", () => {
    // The browser tries again by itself, except after an answer that is no stream.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  });
}

function theme() {
  const root = document.documentElement;
  const button = at("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => button.setAttribute("aria-pressed", String(dark()));
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    span = button.dataset.span;
    for (const other of document.querySelectorAll("[data-span]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    fetchHistory();
  });
}

theme();
listen();
setInterval(() => {
  showLive();
  if (status !== null) {
    showTiles();
    peers.show(status.peers);
  }
}, 1000);
