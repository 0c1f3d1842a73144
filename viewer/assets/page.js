"use strict";
// What is shown, and how everything on the page follows it.

const byId = (id) => document.getElementById(id);
let content = JSON.parse(byId("content").textContent); // of the step that is shown
const source = content.source === "server" ? new ServerSource(content) : new EmbeddedSource(content);
const { labels } = content.tokens;
const n = content.n_tokens;

const state = {
  step: content.step,
  ...firstHead(),
  focus: null, // {row, column}: the query and the key that are looked at
  isLocked: false,
  log: false,
  hideFirst: false,
  direction: "source", // or "destination"
  view: "map", // or "lines"
};

const looks = { hover, pick, failed, moved: () => saveLink() };
const map = new MapView(byId("map"), byId("minimap"), source, looks);
const lines = new LinesView(byId("lines"), source, looks);
const grid = new HeadGrid(byId("heads"), source, { choose: (layer, head) => update({ layer, head }), failed });
const scatter = new Scatter(byId("scatter"), [byId("score-x"), byId("score-y")], grid.on);
const strip = new TokenStrip(byId("strip"), content.tokens, { look: (at, isLocked) => (isLocked || !state.isLocked) && lookAt(at, isLocked) });
const view = () => (state.view === "map" ? map : lines);

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
    const found = await source.content(state.step).catch(failed);
    if (found?.step !== state.step) return; // another step was chosen meanwhile
    content = found;
  }
  render(changed("step", "log", "hideFirst"), changed("step", "log", "layer", "head", "view", "direction"));
  if (state.isLocked && changed("focus", "view")) view().reveal(state.focus);
}

/** withHeads: also the thumbnails; withLabels: also what stays when only the focus moves. */
function render(withHeads = true, withLabels = true) {
  const { step, layer, head, focus, isLocked, log, hideFirst, direction } = state;
  const palette = (map.palette ??= readPalette());
  const shown = { head: { step, layer, head }, focus, isLocked, log, hideFirst, palette, direction };
  map.show(shown);
  lines.show(shown);
  if (withHeads) grid.show({ step, palette, log, hideFirst, content });
  if (withHeads || withLabels) renderLabels();
  renderFocus();
  saveLink();
}

/** The controls, and what is known of the step and of the head. */
function renderLabels() {
  const { layer, head, direction } = state;
  const name = `${layer}.${head}`;
  const isMap = state.view === "map";
  byId("map").hidden = !isMap;
  byId("lines").hidden = isMap;
  byId("minimap").hidden ||= !isMap;
  byId("zoom").hidden = !isMap;
  grid.select(layer, head);
  scatter.show({ content, chosen: name });
  const pressed = { source: direction === "source", destination: direction !== "source", "show-map": isMap, "show-lines": !isMap };
  for (const [id, isOn] of Object.entries(pressed)) byId(id).setAttribute("aria-pressed", String(isOn));
  [byId("log").checked, byId("hide-first").checked] = [state.log, state.hideFirst];
  const { path, kernel, rule } = source.layers.get(layer);
  const { dtype, step, checkpoint } = content.model;
  define(byId("about"), { path, kernel, dtype, step, checkpoint: checkpoint.slice(0, 8) });
  byId("head-name").textContent = name;
  byId("step").value = content.steps.indexOf(state.step);
  byId("step-shown").textContent = state.step;
  const ticks = state.log ? ["≤1e-4", "0.001", "0.01", "0.1", "1"] : ["0", "0.25", "0.5", "0.75", "1"];
  byId("ticks").replaceChildren(...ticks.map((text) => make("span", text)));
  const mask = [
    rule.causal ? "causal" : "both ways",
    rule.window && `window ${rule.window}`,
    rule.window && rule.n_global && `${rule.n_global} global`,
    rule.documents && "documents",
  ];
  byId("scored").textContent = content.scored ? `Head; scores of ${content.scored}` : "Head";
  const change = content.ablation?.change[name];
  const scores = content.scores[name] ?? {};
  const shown = content.score_names.filter((score) => score in scores);
  define(byId("head-scores"), {
    role: content.roles[name],
    "ablating it": change === undefined ? "" : `loss ${signed(change)} (${content.ablation.how}, ${content.ablation.tokens} tokens)`,
    mask: mask.filter(Boolean).join(", "),
    ...Object.fromEntries(shown.map((score) => [score.replace("_", " "), scores[score].toFixed(3)])),
  });
}

/** Fills a description list; facts without a value are left out. */
function define(list, facts) {
  const pairs = Object.entries(facts).filter(([, value]) => value !== undefined && value !== "");
  list.replaceChildren(...pairs.map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", String(value)));
    return pair;
  }));
}

let focusTicket = 0;
let isSettled = false; // whether the words beside the map say what the state says

/** The focused cell in words, the brightest cells of its row or column, the strip's colours. */
async function renderFocus() {
  const ticket = ++focusTicket;
  isSettled = false;
  const { step, layer, head, focus, isLocked, direction, log } = state;
  const isSource = direction === "source";
  const at = focus && (isSource ? focus.row : focus.column);
  const colours = { palette: map.palette, log, hidesFirst: state.hideFirst && isSource };
  byId("lock").textContent = isLocked ? "locked; Esc unlocks" : focus ? "click to lock" : "";
  byId("strip-says").textContent = !focus ? `${n} in all` : isSource ? `how much token ${at} looks at each` : `how much each looks at token ${at}`;
  byId("looks").hidden = !focus;
  byId("hint").hidden = Boolean(focus);
  showStrip(at ?? Math.max(strip.start, 0));
  if (!focus) strip.colour(null, null, colours);
  isSettled = !focus;
  if (!focus) return;
  showPredictions(focus.row);
  if (source instanceof ServerSource && !isLocked) await new Promise((resume) => setTimeout(resume, 60)); // the pointer may go on
  if (ticket !== focusTicket) return;
  try {
    const row = await source.row(step, layer, head, focus.row);
    const values = isSource ? row : await source.column(step, layer, head, focus.column);
    if (ticket !== focusTicket) return;
    const [query, key] = [focus.row, focus.column].map((index) => `${index} ${labels[index]}`);
    const weight = weightText(row[focus.column]);
    define(byId("focus"), { query, key, weight });
    strip.colour(at, values, colours);
    showBrightest(at, values);
    if (isLocked) byId("live").textContent = `query ${query}, key ${key}, weight ${weight}`;
  } catch (error) {
    failed(error);
  }
  isSettled = true;
}

function showStrip(at) {
  strip.show(at);
  byId("earlier").hidden = strip.start === 0;
  byId("later").hidden = strip.stop === n;
}

/** An item of a list with a bar behind it as long as its share. */
function bar(share, ...parts) {
  const item = make("li");
  const fill = make("i");
  fill.style.width = `${Math.min(share, 1) * 100}%`;
  item.append(fill, ...parts);
  return item;
}

function showBrightest(at, values) {
  const isSource = state.direction === "source";
  byId("brightest-title").textContent = isSource ? `Token ${at} looks most at` : `Token ${at} is most looked at by`;
  const order = Array.from(values.keys()).sort((a, b) => values[b] - values[a]).slice(0, 8);
  byId("brightest").replaceChildren(...order.filter((index) => values[index] > values[order[0]] / 100).map((index) => {
    const weight = values[index] < 5e-4 ? values[index].toExponential(1) : values[index].toFixed(3);
    const item = bar(values[index], make("small", index), make("b", labels[index]), make("span", weight));
    item.addEventListener("click", () => lock(isSource ? { row: at, column: index } : { row: index, column: at }));
    return item;
  }));
}

function showPredictions(at) {
  const predictions = content.predictions?.[at] ?? [];
  byId("next-title").textContent = predictions.length ? `Expected after token ${at}` : "";
  byId("next").replaceChildren(...predictions.map(([label, share]) => {
    const item = bar(share, make("b", label), make("span", share.toFixed(3)));
    item.classList.toggle("true", labels[at + 1] === label);
    return item;
  }));
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
    const direction = cell.isQuery === undefined ? state.direction : cell.isQuery ? "source" : "destination";
    lock(cell.span > 1 ? await map.brightest(cell) : cell, { direction });
  } catch (error) {
    failed(error);
  }
}

const lock = ({ row, column }, more = {}) => update({ focus: { row, column }, isLocked: true, ...more });

function unlock() {
  showTooltip(null);
  update({ focus: null, isLocked: false });
}

function showTooltip(cell) {
  const tooltip = byId("tooltip");
  tooltip.hidden = !cell;
  if (!cell) return;
  const { row, column, span, value } = cell;
  const word = (index) => (span === 1 ? `${index} ${labels[index]}` : `${index}–${Math.min(index + span, n) - 1}`);
  const title = span === 1 ? "weight" : "largest weight";
  tooltip.replaceChildren(`query ${word(row)}\nkey   ${word(column)}\n${title} `, make("b", weightText(value)));
  const box = byId(state.view).getBoundingClientRect();
  const place = (at, size, limit) => (at + 16 + size > limit ? Math.max(at - 12 - size, 4) : at + 16);
  tooltip.style.left = `${place(box.left + cell.x, tooltip.offsetWidth, innerWidth)}px`;
  tooltip.style.top = `${place(box.top + cell.y, tooltip.offsetHeight, innerHeight)}px`;
}

function failed(error) {
  if (error.name !== "AbortError") byId("status").textContent = `not loaded: ${error.message}`;
}

/** Focuses a token as a query, on the key that it looks at most; as a key where the strip shows destinations. */
async function lookAt(index, isLocked = true) {
  const { step, layer, head, direction } = state;
  try {
    const values = await source[direction === "source" ? "row" : "column"](step, layer, head, index);
    const best = values.reduce((best, value, at) => (value > values[best] ? at : best), 0);
    update({ focus: direction === "source" ? { row: index, column: best } : { row: best, column: index }, isLocked });
  } catch (error) {
    failed(error);
  }
}

/** As lookAt, and near enough to read. */
async function goTo(index) {
  await lookAt(index);
  if (state.focus && map.zoom < LABEL_ZOOM) map.centre(state.focus.row, state.focus.column, 18);
}
