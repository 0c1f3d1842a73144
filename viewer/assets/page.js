"use strict";
// What is shown, and how everything on the page follows it.

const STRIP_TOKENS = 600; // tokens of the strip at once
const byId = (id) => document.getElementById(id);
let content = JSON.parse(byId("content").textContent);
const source = content.source === "server" ? new ServerSource(content) : new EmbeddedSource(content);
const labels = content.tokens.labels;
const n = content.n_tokens;

const state = {
  step: content.step,
  ...firstHead(),
  focus: null, // {row, column}
  isLocked: false,
  log: false,
  hideFirst: false,
  direction: "source",
  view: "map",
};

const looks = { hover, pick, failed, moved: () => saveLink() };
const map = new MapView(byId("map"), byId("minimap"), source, looks);
const lines = new LinesView(byId("lines"), source, looks);
const grid = new HeadGrid(byId("heads"), source, { choose: (layer, head) => update({ layer, head }), failed });
const scatter = new Scatter(byId("scatter"), [byId("score-x"), byId("score-y")], grid.on);
const strip = { start: -1, spans: [], hits: [] };

/** An induction head if there is one, else one with a role, else the first. */
function firstHead() {
  const names = Object.keys(content.roles);
  const name = names.find((name) => content.roles[name].startsWith("induction")) ?? names[0];
  const [layer, head] = name ? name.split(".").map(Number) : [content.layers[0].index, source.heads[0]];
  return { layer, head };
}

/** Sets a part of the state and draws what depends on it. */
async function update(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  const changed = (...names) => names.some((name) => state[name] !== before[name]);
  if (changed("step")) {
    const wanted = state.step;
    const found = await source.content(wanted).catch(failed);
    if (!found || wanted !== state.step) return;
    content = found;
  }
  render(changed("step", "log", "hideFirst"));
  if (state.focus && state.isLocked && changed("focus", "view")) view().reveal(state.focus);
}

const view = () => (state.view === "map" ? map : lines);

function render(withHeads) {
  const { step, layer, head, focus, isLocked, log, hideFirst, direction } = state;
  const palette = (map.palette ??= readPalette());
  const shown = { head: { step, layer, head }, focus, isLocked, log, hideFirst, palette, direction };
  byId("map").hidden = state.view !== "map";
  byId("lines").hidden = state.view !== "lines";
  byId("minimap").hidden ||= state.view !== "map";
  map.show(shown);
  lines.show(shown);
  if (withHeads) grid.show({ step, palette, log, hideFirst, content });
  grid.select(layer, head);
  if (withHeads || scatter.chosen !== `${layer}.${head}`) scatter.show({ content, chosen: `${layer}.${head}` });
  for (const [id, isOn] of [["source", direction === "source"], ["destination", direction !== "source"], ["show-map", state.view === "map"], ["show-lines", state.view === "lines"]]) byId(id).setAttribute("aria-pressed", String(isOn));
  [byId("log").checked, byId("hide-first").checked] = [log, hideFirst];
  renderLabels();
  renderFocus();
  saveLink();
}

/** What is known of the step and of the head. */
function renderLabels() {
  const { layer, head } = state;
  const name = `${layer}.${head}`;
  const info = source.layers.get(layer);
  const { dtype, step, checkpoint } = content.model;
  define(byId("about"), { path: info.path, kernel: info.kernel, dtype, step, checkpoint: checkpoint.slice(0, 8) }, true);
  byId("head-name").textContent = name;
  byId("step").value = content.steps.indexOf(state.step);
  byId("step-shown").textContent = state.step;
  byId("ticks").replaceChildren(...(state.log ? ["≤10⁻⁴", "0.001", "0.01", "0.1", "1"] : ["0", "0.25", "0.5", "0.75", "1"]).map((text) => make("span", text)));
  const { rule } = info;
  const limits = [rule.window && `window ${rule.window}`, rule.n_global && `${rule.n_global} global`, rule.documents && "documents"];
  const facts = { role: content.roles[name], "ablating it": undefined, mask: [rule.causal ? "causal" : "both ways", ...limits].filter(Boolean).join(", ") };
  const { ablation } = content;
  if (ablation?.change[name] !== undefined) facts["ablating it"] = `loss ${signed(ablation.change[name])} (${ablation.how}, ${ablation.tokens} tokens)`;
  const scores = content.scores[name] ?? {};
  const shown = content.score_names.filter((score) => score in scores);
  define(byId("head-scores"), { ...facts, ...Object.fromEntries(shown.map((score) => [score, scores[score].toFixed(3)])) });
}

/** The pairs of a description list; those without a value are left out. */
function define(list, facts, inPairs = false) {
  const pairs = Object.entries(facts).filter(([, value]) => value !== undefined && value !== "");
  const made = pairs.map(([name, value]) => [make("dt", name), make("dd", String(value))]);
  list.replaceChildren(...(inPairs ? made.map((pair) => { const div = make("div"); div.append(...pair); return div; }) : made.flat()));
}

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

let focusTicket = 0;

/** The focused cell in words, the brightest cells of its row or column, the strip's colours. */
async function renderFocus() {
  const ticket = ++focusTicket;
  const { step, layer, head, focus, isLocked, direction } = state;
  byId("lock").textContent = isLocked ? "locked, Esc unlocks" : focus ? "click to lock" : "";
  const at = focus ? (direction === "source" ? focus.row : focus.column) : null;
  showStrip(at ?? Math.max(strip.start, 0));
  if (!focus) {
    colourStrip(null, null);
    define(byId("focus"), { "": "Point at a cell of the map or at a token." });
    for (const id of ["brightest", "next", "brightest-title", "next-title"]) byId(id).replaceChildren();
    return;
  }
  showPredictions(focus.row);
  if (source instanceof ServerSource) await new Promise((resume) => setTimeout(resume, isLocked ? 0 : 60));
  if (ticket !== focusTicket) return;
  try {
    const row = await source.row(step, layer, head, focus.row);
    const values = direction === "source" ? row : await source.column(step, layer, head, focus.column);
    if (ticket !== focusTicket) return;
    const weight = row[focus.column];
    define(byId("focus"), { query: `${focus.row} ${labels[focus.row]}`, key: `${focus.column} ${labels[focus.column]}`, weight: weightText(weight) });
    byId("focus").lastElementChild.className = "weight";
    colourStrip(at, values);
    showBrightest(at, values);
    if (isLocked) byId("live").textContent = `query ${focus.row} ${labels[focus.row]}, key ${focus.column} ${labels[focus.column]}, weight ${weightText(weight)}`;
  } catch (error) {
    failed(error);
  }
}

function bar(share, ...parts) {
  const item = make("li");
  const fill = make("i");
  fill.style.width = `${Math.min(share, 1) * 100}%`;
  item.append(fill, ...parts);
  return item;
}

function showBrightest(at, values) {
  const isSource = state.direction === "source";
  byId("brightest-title").textContent = isSource ? `Token ${at} looks most at` : `Token ${at} is looked at most by`;
  const order = Array.from(values.keys()).filter((index) => values[index] > 0).sort((a, b) => values[b] - values[a]);
  byId("brightest").replaceChildren(...order.slice(0, 8).map((index) => {
    const item = bar(values[index], make("small", index), make("b", labels[index]), make("span", values[index].toFixed(3)));
    item.addEventListener("click", () => lock(isSource ? { row: at, column: index } : { row: index, column: at }));
    return item;
  }));
}

function showPredictions(at) {
  const predictions = content.predictions?.[at];
  byId("next-title").textContent = predictions ? `Expected after token ${at}` : "";
  byId("next").replaceChildren(...(predictions ?? []).map(([label, p]) => {
    const item = bar(p, make("b", label), make("span", p.toFixed(3)));
    item.classList.toggle("true", labels[at + 1] === label);
    return item;
  }));
}

const repeated = new Set();
{
  const seen = new Set();
  for (const label of labels) (seen.has(label) ? repeated : seen).add(label);
}

/** The tokens around a position. */
function showStrip(at) {
  if (strip.start >= 0 && at >= strip.start && at < strip.start + strip.spans.length) return;
  strip.start = Math.min(Math.max(0, Math.floor(at / STRIP_TOKENS) * STRIP_TOKENS), n - 1);
  const stop = Math.min(strip.start + STRIP_TOKENS, n);
  strip.spans = labels.slice(strip.start, stop).map((label, offset) => {
    const span = make("span", label);
    const index = strip.start + offset;
    span.setAttribute("role", "option");
    span.id = `token-${index}`;
    span.dataset.index = index;
    span.title = `token ${index}, id ${content.tokens.ids[index]}`;
    if (repeated.has(label)) span.append(make("sub", index)); // tells equal tokens apart
    return span;
  });
  byId("strip").replaceChildren(...strip.spans);
  byId("earlier").hidden = strip.start === 0;
  byId("later").hidden = stop === n;
}

function colourStrip(at, values) {
  const isSource = state.direction === "source";
  byId("strip-says").textContent = at === null ? `${n} tokens` : isSource ? `token ${at} looks at the dark ones` : `the dark ones look at token ${at}`;
  for (const [offset, span] of strip.spans.entries()) {
    const index = strip.start + offset;
    const isShown = values && values[index] >= 0 && !(state.hideFirst && isSource && index === 0);
    const share = isShown ? shade(values[index], state.log) : 0;
    span.style.background = isShown ? rgb(map.palette, share) : "";
    span.style.color = isShown ? inkOn(map.palette, share) : "";
    span.setAttribute("aria-selected", String(index === at));
    span.classList.toggle("found", map.hits.has(index));
  }
  byId("strip").setAttribute("aria-activedescendant", at === null ? "" : `token-${at}`);
}

/** A look that lasts while the pointer is there; a locked cell stays in focus. */
function hover(cell) {
  showTooltip(cell);
  if (state.isLocked) return;
  const focus = cell && { row: cell.row, column: cell.column };
  if (focus?.row !== state.focus?.row || focus?.column !== state.focus?.column) update({ focus });
}

async function pick(cell) {
  try {
    lock(cell.span > 1 ? await map.brightest(cell) : cell, cell.isQuery === undefined ? {} : { direction: cell.isQuery ? "source" : "destination" });
  } catch (error) {
    failed(error);
  }
}

const lock = ({ row, column }, more = {}) => update({ focus: { row, column }, isLocked: true, ...more });

function unlock() {
  update({ focus: null, isLocked: false });
  showTooltip(null);
}

function showTooltip(cell) {
  const tooltip = byId("tooltip");
  tooltip.hidden = !cell;
  if (!cell) return;
  const { row, column, span, value } = cell;
  const word = (index) => (span === 1 ? `${index} ${labels[index]}` : `${index}–${Math.min(index + span, n) - 1}`);
  tooltip.replaceChildren(
    `query ${word(row)}\nkey   ${word(column)}\n${span === 1 ? "weight " : "largest weight "}`,
    make("b", weightText(value)),
  );
  const box = byId(state.view).getBoundingClientRect();
  const place = (at, size, limit) => (at + 16 + size > limit ? Math.max(at - 12 - size, 4) : at + 16);
  tooltip.style.left = `${place(box.left + cell.x, tooltip.offsetWidth, innerWidth)}px`;
  tooltip.style.top = `${place(box.top + cell.y, tooltip.offsetHeight, innerHeight)}px`;
}

function failed(error) {
  if (error.name !== "AbortError") byId("status").textContent = `not loaded: ${error.message}`;
}

/** Focuses a token as a query, on the key that it looks at most; as a key when the strip shows destinations. */
async function lookAt(index, isLocked = true) {
  const { step, layer, head, direction } = state;
  try {
    const values = await source[direction === "source" ? "row" : "column"](step, layer, head, index);
    const best = values.reduce((best, value, at) => (value > values[best] ? at : best), 0);
    await update({ focus: direction === "source" ? { row: index, column: best } : { row: best, column: index }, isLocked });
  } catch (error) {
    failed(error);
  }
}

async function goTo(index) {
  await lookAt(index);
  if (!state.focus) return;
  if (map.zoom < LABEL_ZOOM) map.centre(state.focus.row, state.focus.column, 18);
  else view().reveal(state.focus);
}

/** Tokens that hold a part of each place where the text is found. */
function findText(text) {
  if (!text) return [];
  const ends = [];
  let length = 0;
  for (const token of content.tokens.texts) ends.push((length += token.length));
  const pattern = new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
  const places = [];
  let token = 0;
  for (const match of content.tokens.texts.join("").matchAll(pattern)) {
    while (ends[token] <= match.index) token++;
    let last = token;
    while (ends[last] < match.index + match[0].length) last++;
    places.push({ first: token, last });
  }
  return places;
}

function search(text, isNext) {
  if (!isNext || strip.searched !== text) {
    Object.assign(strip, { searched: text, hits: findText(text), hit: -1 });
    const all = strip.hits.flatMap(({ first, last }) => Array.from({ length: last - first + 1 }, (_, i) => first + i));
    map.show({ hits: new Set(all) });
    colourOnly();
  }
  if (isNext && strip.hits.length) {
    strip.hit = (strip.hit + 1) % strip.hits.length;
    goTo(strip.hits[strip.hit].first);
  }
  const found = strip.hits.length;
  byId("found").textContent = text ? (strip.hit >= 0 ? `${strip.hit + 1} of ${found}` : `${found} found`) : "";
}

const colourOnly = () => strip.spans.forEach((span, offset) => span.classList.toggle("found", map.hits.has(strip.start + offset)));

/** The address of what is shown, so that a link leads back to it. */
let linkTimer;
function saveLink() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => {
    const { step, layer, head, focus, isLocked } = state;
    const parts = { step, layer, head };
    if (focus && isLocked) Object.assign(parts, { row: focus.row, col: focus.column });
    if (!map.isFitted) {
      const middle = (start, size) => Math.round((start + size / map.zoom / 2) * 10) / 10;
      Object.assign(parts, { x: middle(map.view.x, map.plot.width), y: middle(map.view.y, map.plot.height), zoom: Number(map.zoom.toPrecision(4)) });
    }
    if (state.view === "lines") parts.view = "lines";
    if (state.log) parts.log = 1;
    if (state.hideFirst) parts.first = 0;
    try {
      history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
    } catch {
      // A page inside a notebook has no address of its own.
    }
  }, 250);
}

async function followLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const number = (name, allowed) => {
    const value = link.has(name) ? Number(link.get(name)) : NaN;
    return allowed(value) ? value : undefined;
  };
  const isToken = (value) => Number.isInteger(value) && value >= 0 && value < n;
  const step = number("step", (value) => content.steps.includes(value)) ?? state.step;
  const layer = number("layer", (value) => source.layers.has(value)) ?? state.layer;
  const head = number("head", (value) => source.heads.includes(value)) ?? state.head;
  const [row, column] = [number("row", isToken), number("col", isToken)];
  const focus = row !== undefined && column !== undefined ? { row, column } : null;
  const shown = { log: link.get("log") === "1", hideFirst: link.get("first") === "0", view: link.get("view") === "lines" ? "lines" : "map" };
  await update({ step, layer, head, focus, isLocked: focus !== null, ...shown });
  const inMap = (value) => value >= 0 && value <= n;
  const [x, y, zoom] = [number("x", inMap), number("y", inMap), number("zoom", (value) => value > 0)];
  if (x !== undefined && y !== undefined && zoom !== undefined) map.centre(y - 0.5, x - 0.5, zoom);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[theme];
  byId("theme").setAttribute("aria-label", `Theme: ${theme}; press for the next`);
  map.palette = null;
}

/** Keys that work wherever no text is typed. */
function onKey(event) {
  if (event.key === "Escape") return unlock();
  if (event.target.matches("input, select, summary") || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const { step, layer, head, log, hideFirst } = state;
  const all = [...source.layers.keys()].flatMap((layer) => source.heads.map((head) => ({ layer, head })));
  const next = (by) => all[(all.findIndex((one) => one.layer === layer && one.head === head) + by + all.length) % all.length];
  const keys = {
    "+": () => map.zoomTo(map.zoom * 1.5), "=": () => map.zoomTo(map.zoom * 1.5), "-": () => map.zoomTo(map.zoom / 1.5), 0: () => map.zoomTo(0),
    "[": () => update(next(-1)), "]": () => update(next(1)),
    l: () => update({ log: !log }), f: () => update({ hideFirst: !hideFirst }),
    v: () => update({ view: state.view === "map" ? "lines" : "map" }),
    s: () => update({ direction: "source" }), d: () => update({ direction: "destination" }),
  };
  const isCanvas = event.target.matches("#map, #lines");
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (isCanvas && event.key === "Enter" && state.focus) keys.Enter = () => lock(state.focus);
  if (isCanvas && move) keys[event.key] = () => moveFocus(...move.map((by) => by * (event.shiftKey ? 10 : 1)));
  if (event.target.id === "strip" && move) keys[event.key] = () => moveToken(move[0] + move[1]);
  if (!keys[event.key]) return undefined;
  event.preventDefault();
  return keys[event.key](step);
}

function moveFocus(down, right) {
  const from = state.focus ?? { row: -down, column: -right };
  const inside = (at) => Math.min(Math.max(at, 0), n - 1);
  showTooltip(null);
  lock({ row: inside(from.row + down), column: inside(from.column + right) });
}

function moveToken(by) {
  const at = state.focus ? (state.direction === "source" ? state.focus.row : state.focus.column) : -by;
  lookAt(Math.min(Math.max(at + by, 0), n - 1));
}

function listen() {
  const click = (id, act) => byId(id).addEventListener("click", act);
  document.addEventListener("keydown", onKey);
  click("source", () => update({ direction: "source" }));
  click("destination", () => update({ direction: "destination" }));
  click("show-map", () => update({ view: "map" }));
  click("show-lines", () => update({ view: "lines" }));
  click("log", (event) => update({ log: event.target.checked }));
  click("hide-first", (event) => update({ hideFirst: event.target.checked }));
  click("zoom-in", () => map.zoomTo(map.zoom * 1.5));
  click("zoom-out", () => map.zoomTo(map.zoom / 1.5));
  click("zoom-fit", () => map.zoomTo(0));
  click("earlier", () => showStrip(strip.start - 1) ?? renderFocus);
  click("later", () => showStrip(strip.start + STRIP_TOKENS));
  click("theme", () => {
    const order = ["auto", "light", "dark"];
    setTheme(order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3]);
    render(true);
  });
  byId("step").max = content.steps.length - 1;
  byId("step").addEventListener("input", (event) => update({ step: content.steps[event.target.value] }));
  byId("go").addEventListener("submit", (event) => {
    event.preventDefault();
    const index = Number.parseInt(byId("go-to").value, 10);
    if (index >= 0 && index < n) goTo(index);
  });
  byId("search").addEventListener("input", (event) => search(event.target.value, false));
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    search(byId("search").value, true);
  });
  const tokenAt = (event) => event.target.closest("[data-index]")?.dataset.index;
  click("strip", (event) => tokenAt(event) && lookAt(Number(tokenAt(event))));
  byId("strip").addEventListener("pointerover", (event) => tokenAt(event) && !state.isLocked && lookAt(Number(tokenAt(event)), false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    map.palette = null;
    render(true);
  });
  addEventListener("hashchange", followLink);
  source.onProgress = (share) => (byId("status").textContent = share < 1 ? `pooling the map: ${Math.round(share * 100)} %` : "");
}

byId("title").textContent = content.title;
byId("heads-say").textContent = content.ablation ? `± is the loss when ablated` : "";
byId("training").hidden = content.steps.length < 2;
byId("training").title = `steps ${content.steps.join(", ")}`;
setTheme("auto");
listen();
render(true);
followLink();
