"use strict";
// Buttons, keys, search, theme and the address; then everything starts.

const ZOOM_STEP = 1.5;
const THEMES = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  byId("theme").setAttribute("aria-label", `Theme: ${theme}; press for the next`);
  repaint();
}

function repaint() {
  map.palette = null;
  render();
}

function search(text, isNext) {
  if (!isNext || strip.searched !== text) {
    strip.searched = text;
    strip.find(text);
    map.show({ hits: strip.found });
    renderFocus();
  }
  if (isNext && strip.hits.length) goTo(strip.next());
  const place = strip.hit < 0 ? "" : `${strip.hit + 1} of `;
  byId("found").textContent = text && `${place}${strip.hits.length} found`;
}

let linkTimer;

/** Keeps the address up to date, so that a link leads back to what is shown. */
function saveLink() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => {
    const { step, layer, head, focus, isLocked } = state;
    const parts = { step, layer, head };
    if (isLocked) Object.assign(parts, { row: focus.row, col: focus.column });
    if (!map.isFitted) {
      const middle = (start, size) => Math.round((start + size / map.zoom / 2) * 10) / 10;
      const [x, y] = [middle(map.view.x, map.plot.width), middle(map.view.y, map.plot.height)];
      Object.assign(parts, { x, y, zoom: Number(map.zoom.toPrecision(4)) });
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

/** Shows what the address says; what is out of range in it is left as it is. */
async function followLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const number = (name, isFine) => {
    const value = link.has(name) ? Number(link.get(name)) : NaN;
    return isFine(value) ? value : undefined;
  };
  const isToken = (value) => Number.isInteger(value) && value >= 0 && value < n;
  const [row, column] = [number("row", isToken), number("col", isToken)];
  const focus = row !== undefined && column !== undefined ? { row, column } : null;
  await update({
    step: number("step", (value) => content.steps.includes(value)) ?? state.step,
    layer: number("layer", (value) => source.layers.has(value)) ?? state.layer,
    head: number("head", (value) => source.heads.includes(value)) ?? state.head,
    focus,
    isLocked: focus !== null,
    log: link.get("log") === "1",
    hideFirst: link.get("first") === "0",
    view: link.get("view") === "lines" ? "lines" : "map",
  });
  const isInMap = (value) => value >= 0 && value <= n;
  const [x, y, zoom] = [number("x", isInMap), number("y", isInMap), number("zoom", (value) => value > 0)];
  if (x !== undefined && y !== undefined && zoom !== undefined) map.centre(y - 0.5, x - 0.5, zoom);
  else map.zoomTo(0);
}

/** The head that comes so many places after this one. */
function headAfter(by) {
  const all = [...source.layers.keys()].flatMap((layer) => source.heads.map((head) => ({ layer, head })));
  const now = all.findIndex(({ layer, head }) => layer === state.layer && head === state.head);
  return all[(now + by + all.length) % all.length];
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const KEYS = {
  "+": () => map.zoomTo(map.zoom * ZOOM_STEP),
  "=": () => map.zoomTo(map.zoom * ZOOM_STEP),
  "-": () => map.zoomTo(map.zoom / ZOOM_STEP),
  0: () => map.zoomTo(0),
  "[": () => update(headAfter(-1)),
  "]": () => update(headAfter(1)),
  l: () => update({ log: !state.log }),
  f: () => update({ hideFirst: !state.hideFirst }),
  v: () => update({ view: state.view === "map" ? "lines" : "map" }),
  s: () => update({ direction: "source" }),
  d: () => update({ direction: "destination" }),
};

function onKey(event) {
  if (event.key === "Escape") return unlock();
  const isTyping = event.target.matches("input:not([type=checkbox]), select, summary");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const arrow = ARROWS[event.key];
  let act = KEYS[event.key];
  if (event.target.matches("#map, #lines")) {
    if (event.key === "Enter" && state.focus) act = () => lock(state.focus);
    if (arrow) act = () => moveFocus(...arrow.map((by) => by * (event.shiftKey ? 10 : 1)));
  }
  if (event.target.matches("#strip") && arrow) act = () => moveToken(arrow[0] + arrow[1]);
  if (!act) return undefined;
  event.preventDefault();
  return act();
}

const inText = (at) => Math.min(Math.max(at, 0), n - 1);

function moveFocus(down, right) {
  const from = state.focus ?? { row: -down, column: -right };
  showTooltip(null);
  lock({ row: inText(from.row + down), column: inText(from.column + right) });
}

function moveToken(by) {
  const { row, column } = state.focus ?? { row: -by, column: -by };
  lookAt(inText((state.direction === "source" ? row : column) + by));
}

function listen() {
  const click = (id, act) => byId(id).addEventListener("click", act);
  click("source", KEYS.s);
  click("destination", KEYS.d);
  click("show-map", () => update({ view: "map" }));
  click("show-lines", () => update({ view: "lines" }));
  click("log", KEYS.l);
  click("hide-first", KEYS.f);
  click("zoom-in", KEYS["+"]);
  click("zoom-out", KEYS["-"]);
  click("zoom-fit", KEYS[0]);
  click("earlier", () => showStrip(strip.start - 1));
  click("later", () => showStrip(strip.stop));
  const themes = Object.keys(THEMES);
  click("theme", () => setTheme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]));
  byId("step").addEventListener("input", (event) => update({ step: content.steps[event.target.value] }));
  byId("go").addEventListener("submit", (event) => {
    event.preventDefault();
    if (byId("go-to").value.trim()) goTo(inText(Number.parseInt(byId("go-to").value, 10) || 0));
  });
  byId("search").addEventListener("input", (event) => search(event.target.value, false));
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    search(byId("search").value, true);
  });
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", followLink);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  source.onProgress = (share) => {
    byId("status").textContent = share < 1 ? `pooling the map: ${Math.round(share * 100)} %` : "";
  };
}

document.documentElement.style.setProperty("--digits", String(n).length);
byId("title").textContent = content.title;
byId("heads-say").textContent = content.ablation ? "± loss when ablated" : "";
byId("training").hidden = content.steps.length < 2;
byId("step").max = content.steps.length - 1;
listen();
setTheme("auto");
followLink();
