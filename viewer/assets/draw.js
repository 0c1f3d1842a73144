"use strict";
// Colours and strokes that the views share.

const LOG_DECADES = 4; // the log scale reaches from 1e-4 to 1
const MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

function shorten(text, size) {
  const signs = Array.from(text);
  return signs.length > size ? `${signs.slice(0, size - 1).join("")}…` : text;
}

/** A weight in words: six digits after the point, or four in all when it is small. */
function weightText(weight) {
  if (weight === undefined) return "…";
  if (weight < 0) return "masked";
  return weight >= 1e-4 || weight === 0 ? weight.toFixed(6) : weight.toExponential(3);
}

/** How far along the colour scale a weight is, 0..1. */
function shade(weight, log) {
  const share = log ? 1 + Math.log10(Math.max(weight, 1e-30)) / LOG_DECADES : weight;
  return Math.min(Math.max(share, 0), 1);
}

/** The colours of the page's theme: `steps` are 256 [red, green, blue] of one hue, the rest CSS colours. */
function readPalette() {
  const probe = document.getElementById("probe");
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const stops = [0, 1, 2, 3, 4].map((stop) => colour(`map-${stop}`).match(/\d+/g).map(Number));
  const steps = Array.from({ length: 256 }, (_, step) => {
    const low = Math.min(Math.floor((step / 255) * 4), 3);
    return stops[low].map((part, c) => Math.round(part + (stops[low + 1][c] - part) * ((step / 255) * 4 - low)));
  });
  const names = ["masked", "text", "muted", "line", "accent", "panel", "border"];
  return { steps, ...Object.fromEntries(names.map((name) => [name, colour(name)])) };
}

const rgb = (palette, share) => `rgb(${palette.steps[Math.round(share * 255)].join(" ")})`;

/** Black or white, whichever is read on this step of the scale. */
function inkOn(palette, share) {
  const [red, green, blue] = palette.steps[Math.round(share * 255)];
  return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#101828" : "#ffffff";
}

/** A canvas with one pixel for each value. */
function paint(values, rows, columns, palette, log, hideFirst = false) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  const image = new ImageData(columns, rows);
  for (let cell = 0; cell < values.length; cell++) {
    if (values[cell] < 0 || (hideFirst && cell % columns === 0)) continue; // the grey below shows through
    image.data.set(palette.steps[Math.round(shade(values[cell], log) * 255)], cell * 4);
    image.data[cell * 4 + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** A view on a canvas: `show` changes what it says, and it is drawn anew before the next frame. */
class CanvasView {
  /** on: {hover(cell or null), pick(cell), moved(), failed(error)}. */
  constructor(canvas, source, on) {
    Object.assign(this, { canvas, source, on, n: source.n });
    this.head = null; // {step, layer, head}
    this.focus = null; // {row, column}
    this.log = this.hideFirst = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(changes) {
    Object.assign(this, changes);
    this.draw();
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.head && this.canvas.clientWidth) this.drawNow();
    });
  }
}

/** Fits a canvas to its box and the screen's pixels; returns its context in CSS pixels, and the box's size. */
function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  return { context, width, height, ratio };
}

/** Hairlines between the cells of a map and, when there is room, the weight in each. */
function drawCells(context, map, area) {
  const { zoom, palette, plot } = map;
  context.fillStyle = palette.line;
  context.globalAlpha = 0.5;
  for (let j = Math.ceil(area.x0); j < area.x1; j++) context.fillRect(map.snap(map.screenX(j)), plot.y, 1, plot.height);
  for (let i = Math.ceil(area.y0); i < area.y1; i++) context.fillRect(plot.x, map.snap(map.screenY(i)), plot.width, 1);
  context.globalAlpha = 1;
  if (zoom < VALUE_ZOOM) return;
  context.font = `${Math.min(zoom / 3.4, 12)}px ${MONO}`;
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  for (let i = Math.floor(area.y0); i < area.y1; i++) {
    for (let j = Math.floor(area.x0); j < area.x1; j++) {
      const [x, y] = [map.screenX(j) + zoom / 2, map.screenY(i) + zoom / 2];
      const value = map.valueAt(i, j);
      if (value === undefined || value < 0 || (map.hideFirst && j === 0)) continue;
      context.fillStyle = inkOn(palette, shade(value, map.log));
      context.fillText(value.toFixed(2).replace(/^0/, ""), x, y + 1);
    }
  }
}

/** Where a window, its global tokens and documents end. */
function drawBorders(context, map, area) {
  const { causal, window: width, n_global, documents } = map.source.layers.get(map.head.layer).rule;
  const line = (x0, y0, x1, y1) => {
    context.moveTo(map.screenX(x0), map.screenY(y0));
    context.lineTo(map.screenX(x1), map.screenY(y1));
  };
  context.beginPath();
  if (width !== null && width < map.n) {
    line(0, width, map.n - width, map.n);
    if (!causal) line(width, 0, map.n, map.n - width);
    if (n_global) line(n_global, n_global, n_global, map.n);
    if (n_global && !causal) line(n_global, n_global, map.n, n_global);
  }
  const isBorder = (at) => documents !== null && at > 0 && documents[at] !== documents[at - 1];
  for (let i = Math.floor(area.y0); i < area.y1; i++) if (isBorder(i)) line(0, i, causal ? i : map.n, i);
  for (let j = Math.floor(area.x0); j < area.x1; j++) if (isBorder(j)) line(j, causal ? j : 0, j, map.n);
  [context.strokeStyle, context.lineWidth] = [map.palette.border, 1.25];
  context.setLineDash([5, 4]);
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
}

/** Names of the axes; tokens with their index where there is room, else the indices at round numbers. */
function drawAxes(context, map, area) {
  const { plot, zoom, palette } = map;
  const axes = [
    { from: area.y0, to: area.y1, at: (i) => map.screenY(i), focus: map.focus?.row },
    { from: area.x0, to: area.x1, at: (j) => map.screenX(j), focus: map.focus?.column },
  ];
  for (const [turn, axis] of axes.entries()) {
    context.save();
    if (turn) context.transform(0, -1, 1, 0, 0, 0); // along the top everything is written upwards: (x, y) is at (y, -x)
    const edge = turn ? -plot.y + 7 : plot.x - 7; // where labels touch the plot
    context.textBaseline = "middle";
    const room = Math.min(52, plot.x - 24); // beside the name of the axis
    const place = (text, away, position) => {
      context.textAlign = turn ? "left" : "right";
      context.fillText(text, turn ? edge + away : edge - away, position, room);
      return Math.min(context.measureText(text).width, room);
    };
    const step = zoom >= LABEL_ZOOM ? 1 : roundStep(46 / zoom);
    for (let index = Math.ceil(Math.max(axis.from - 0.4, 0) / step) * step; index < axis.to - 0.4; index += step) {
      const position = axis.at(index) + zoom / 2;
      const isNamed = zoom >= LABEL_ZOOM;
      context.fillStyle = index === axis.focus || map.hits.has(index) ? palette.accent : isNamed ? palette.text : palette.muted;
      context.font = `${index === axis.focus ? 700 : 400} ${isNamed ? Math.min(zoom * 0.8, 12) : 11}px ${MONO}`;
      const width = place(isNamed ? map.labels[index] : String(index), 0, position);
      if (!isNamed) context.fillRect(turn ? edge - 6 : edge + 2, position - 0.5, 4, 1);
      context.fillStyle = palette.muted;
      context.font = `9px ${MONO}`;
      if (isNamed && width + 6 * String(index).length < plot.x - 34) place(String(index), width + 5, position);
    }
    context.fillStyle = palette.accent;
    for (const hit of map.hits) {
      if (hit >= axis.from && hit < axis.to) context.fillRect(turn ? edge - 6 : edge + 2, axis.at(hit), 4, Math.max(zoom - 1, 2));
    }
    context.restore();
  }
  drawAxisNames(context, map, area);
}

function drawAxisNames(context, { plot, palette, zoom }, area) {
  const away = zoom >= LABEL_ZOOM ? plot.x - 9 : 50; // from the plot
  context.fillStyle = palette.muted;
  context.font = "600 11px system-ui, sans-serif";
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  context.fillText("key →", plot.x + Math.max((area.x1 - area.x0) * zoom, 40) / 2, plot.y - away);
  context.save();
  context.translate(plot.x - away, plot.y + Math.max((area.y1 - area.y0) * zoom, 40) / 2);
  context.rotate(-Math.PI / 2);
  context.fillText("← query", 0, 0);
  context.restore();
}

/** The next of 1, 2, 5, 10, 20, ... that is not below `least`. */
function roundStep(least) {
  const decade = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * decade).find((step) => step >= least) ?? decade;
}
