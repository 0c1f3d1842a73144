"use strict";
// The large map: rows are queries, columns are keys. It draws only the tiles that are on screen, at the finest level
// whose cells are not smaller than a pixel. Cells are pooled by their maximum, so a single bright weight is seen at any zoom.

const MAX_ZOOM = 64; // pixels of a cell
const LABEL_ZOOM = 11; // from here on every token is named
const VALUE_ZOOM = 34; // from here on every weight is printed

class MapView extends CanvasView {
  /** A cell, as `on` gets it, is {row, column, span, value, x, y}. */
  constructor(canvas, minimap, source, on) {
    super(canvas, source, on);
    this.minimap = minimap;
    this.isLocked = false;
    this.hits = new Set(); // tokens that a search found
    this.view = { x: 0, y: 0, zoom: 0 }; // the first key and query in the plot; zoom 0: fits
    this.painted = new WeakMap();
    this.labels = source.first.tokens.labels.map((label) => shorten(label, 9));
    this.listen();
  }

  /** The part of the canvas that holds cells. */
  get plot() {
    const { clientWidth, clientHeight } = this.canvas;
    const gutter = clientWidth < 480 ? 68 : 84;
    return { x: gutter, y: gutter, width: clientWidth - gutter - 1, height: clientHeight - gutter - 1 };
  }

  get fitZoom() {
    return Math.min(this.plot.width / this.n, this.plot.height / this.n, MAX_ZOOM);
  }

  get zoom() {
    return this.view.zoom || this.fitZoom;
  }

  get isFitted() {
    return this.zoom <= this.fitZoom * 1.001;
  }

  /** How often cells are pooled two by two: none of them may be smaller than a pixel. */
  get level() {
    return Math.min(this.source.topLevel, Math.max(0, Math.ceil(Math.log2(1.01 / this.zoom))));
  }

  screenX(column) { return this.plot.x + (column - this.view.x) * this.zoom; } // prettier-ignore
  screenY(row) { return this.plot.y + (row - this.view.y) * this.zoom; } // prettier-ignore

  /** Moves the view; zoom about the point (x, y) of the canvas, by default the plot's middle. */
  zoomTo(zoom, x = this.plot.x + this.plot.width / 2, y = this.plot.y + this.plot.height / 2) {
    const column = this.view.x + (x - this.plot.x) / this.zoom;
    const row = this.view.y + (y - this.plot.y) / this.zoom;
    this.view.zoom = zoom <= this.fitZoom ? 0 : Math.min(zoom, MAX_ZOOM);
    this.moveTo(column - (x - this.plot.x) / this.zoom, row - (y - this.plot.y) / this.zoom);
  }

  moveTo(x, y) {
    const clamp = (start, size) => Math.max(0, Math.min(start, this.n - size / this.zoom));
    this.view.x = clamp(x, this.plot.width);
    this.view.y = clamp(y, this.plot.height);
    this.canvas.classList.toggle("zoomed", !this.isFitted);
    this.draw();
    this.on.moved();
  }

  centre(row, column, zoom = this.zoom) {
    this.view.zoom = zoom <= this.fitZoom ? 0 : Math.min(zoom, MAX_ZOOM);
    this.moveTo(column + 0.5 - this.plot.width / 2 / this.zoom, row + 0.5 - this.plot.height / 2 / this.zoom);
  }

  /** Moves no more than is needed to show a cell. */
  reveal({ row, column }) {
    const near = (start, at, size) => Math.min(Math.max(start, at + 1.5 - size / this.zoom), at - 0.5);
    this.moveTo(near(this.view.x, column, this.plot.width), near(this.view.y, row, this.plot.height));
  }

  /** The cell under a point of the canvas, or null; several pairs when they are pooled. */
  cellAt(x, y) {
    const { plot, level } = this;
    const column = Math.floor(this.view.x + (x - plot.x) / this.zoom);
    const row = Math.floor(this.view.y + (y - plot.y) / this.zoom);
    if (x < plot.x || y < plot.y || column >= this.n || row >= this.n) return null;
    const span = 2 ** level;
    const [a, b] = [Math.floor(row / span), Math.floor(column / span)];
    return { row: a * span, column: b * span, span, value: this.valueAt(a, b), x, y };
  }

  /** The value of a cell of the level that is shown, or undefined while its tile is under way. */
  valueAt(row, column) {
    const { causal } = this.source.layers.get(this.head.layer).rule;
    if (causal && column > row) return MASKED;
    const tile = this.source.peek(this.tileKey(this.level, Math.floor(row / TILE), Math.floor(column / TILE)));
    return tile?.values[(row % TILE) * tile.columns + (column % TILE)];
  }

  /** The brightest pair of a pooled cell. */
  async brightest({ row, column, span }) {
    const { step, layer, head } = this.head;
    const tile = await this.source.tile(step, layer, head, 0, Math.floor(row / TILE), Math.floor(column / TILE));
    let best = { row, column, value: -1 };
    for (let i = row; i < Math.min(row + span, this.n); i++) {
      for (let j = column; j < Math.min(column + span, this.n); j++) {
        const value = tile.values[(i % TILE) * tile.columns + (j % TILE)];
        if (value > best.value) best = { row: i, column: j, value };
      }
    }
    return best;
  }

  tileKey(level, row, column) {
    const { step, layer, head } = this.head;
    return `tile/${step}/${layer}/${head}/${level}/${row}/${column}`;
  }

  drawNow() {
    const { context, ratio } = prepare(this.canvas);
    this.palette ??= readPalette();
    const { plot, zoom, view, palette } = this;
    const [columns, rows] = [Math.min(plot.width / zoom, this.n), Math.min(plot.height / zoom, this.n)];
    const area = { x0: view.x, y0: view.y, x1: Math.min(view.x + columns, this.n), y1: Math.min(view.y + rows, this.n) };
    this.snap = (position) => Math.round(position * ratio) / ratio; // edges on whole pixels are sharp
    context.save();
    context.beginPath();
    context.rect(plot.x, plot.y, this.snap(columns * zoom), this.snap(rows * zoom));
    context.clip();
    context.fillStyle = palette.masked;
    context.fillRect(plot.x, plot.y, plot.width, plot.height);
    this.drawTiles(context, area);
    if (this.hideFirst) {
      context.fillStyle = palette.masked;
      context.fillRect(this.screenX(0), plot.y, Math.max(zoom * 2 ** this.level, 1), plot.height);
    }
    if (zoom >= LABEL_ZOOM) drawCells(context, this, area);
    drawBorders(context, this, area);
    this.drawFocus(context, plot);
    context.restore();
    drawAxes(context, this, area);
    context.strokeStyle = palette.line;
    context.strokeRect(plot.x - 0.5, plot.y - 0.5, this.snap(columns * zoom) + 1, this.snap(rows * zoom) + 1);
    this.drawMinimap(area);
  }

  drawTiles(context, area) {
    const { level, zoom, snap } = this;
    const { step, layer, head } = this.head;
    const { causal } = this.source.layers.get(layer).rule;
    const size = TILE * 2 ** level;
    const wanted = new Set();
    for (let row = Math.floor(area.y0 / size); row * size < area.y1; row++) {
      for (let column = Math.floor(area.x0 / size); column * size < area.x1; column++) {
        if (causal && column > row) continue; // all of it is future
        const key = this.tileKey(level, row, column);
        const [x, y] = [snap(this.screenX(column * size)), snap(this.screenY(row * size))];
        wanted.add(key);
        const tile = this.source.peek(key);
        if (tile) {
          const [right, bottom] = [column * size + tile.columns * 2 ** level, row * size + tile.rows * 2 ** level];
          const image = this.imageOf(tile, tile.rows, tile.columns);
          context.drawImage(image, x, y, snap(this.screenX(right)) - x, snap(this.screenY(bottom)) - y);
        } else {
          this.drawThumb(context, x, y, size * zoom);
          this.source.tile(step, layer, head, level, row, column).then(() => this.draw(), this.on.failed);
        }
      }
    }
    this.source.forget(wanted);
  }

  /** What is known of a tile that is still under way. */
  drawThumb(context, x, y, size) {
    const { step, layer, head } = this.head;
    const thumb = this.source.peek(`thumb/${step}/${layer}/${head}`);
    context.save();
    context.beginPath();
    context.rect(x, y, size, size);
    context.clip();
    const side = thumb && thumb.size * 2 ** this.source.topLevel * this.zoom;
    if (thumb) context.drawImage(this.imageOf(thumb, thumb.size, thumb.size), this.screenX(0), this.screenY(0), side, side);
    context.restore();
  }

  imageOf(part, rows, columns) {
    const made = this.painted.get(part);
    if (made?.palette === this.palette && made.log === this.log) return made.image;
    const image = paint(part.values, rows, columns, this.palette, this.log);
    this.painted.set(part, { palette: this.palette, log: this.log, image });
    return image;
  }

  drawFocus(context, plot) {
    if (!this.focus) return;
    const [x, y] = [this.snap(this.screenX(this.focus.column)), this.snap(this.screenY(this.focus.row))];
    const size = Math.max(this.zoom, 3);
    context.fillStyle = context.strokeStyle = this.palette.accent;
    context.globalAlpha = this.zoom < 6 ? 0.3 : 0.1;
    for (const [from, length] of [[plot.x, x - plot.x], [x + size, plot.width]]) context.fillRect(from, y, length, size);
    for (const [from, length] of [[plot.y, y - plot.y], [y + size, plot.height]]) context.fillRect(x, from, size, length);
    context.globalAlpha = 0.6;
    for (const edge of this.zoom < 6 ? [] : [0, size]) {
      context.fillRect(plot.x, y + edge - 0.5, plot.width, 1);
      context.fillRect(x + edge - 0.5, plot.y, 1, plot.height);
    }
    context.globalAlpha = 1;
    context.lineWidth = this.isLocked ? 2.5 : 1.5;
    context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    context.lineWidth = 1;
  }

  drawMinimap(area) {
    const { step, layer, head } = this.head;
    const thumb = this.source.peek(`thumb/${step}/${layer}/${head}`);
    this.minimap.hidden = this.isFitted;
    if (this.minimap.hidden) return;
    const { context, width } = prepare(this.minimap);
    context.fillStyle = this.palette.masked;
    context.fillRect(0, 0, width, width);
    const scale = width / this.n;
    const side = thumb && thumb.size * 2 ** this.source.topLevel * scale;
    if (thumb) context.drawImage(this.imageOf(thumb, thumb.size, thumb.size), 0, 0, side, side);
    else this.source.thumb(step, layer, head).then(() => this.draw(), this.on.failed);
    [context.strokeStyle, context.lineWidth] = [this.palette.accent, 1.5];
    const [w, h] = [Math.max((area.x1 - area.x0) * scale, 5), Math.max((area.y1 - area.y0) * scale, 5)];
    context.strokeRect(area.x0 * scale, area.y0 * scale, w, h);
  }
  /** Pointers: hover looks, a click picks, a drag moves, two fingers and the wheel zoom. */
  listen() {
    const { canvas } = this;
    const pointers = new Map(); // those that are down: their last places
    let moved = 0; // pixels since the first one came down
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    const lift = (event) => {
      const wasDown = pointers.delete(event.pointerId);
      if (event.type === "pointerup" && wasDown && pointers.size === 0 && moved < 5) {
        const { x, y } = place(event);
        const cell = this.head && this.cellAt(x, y);
        if (cell) this.on.pick(cell);
      }
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (pointers.size === 0) moved = 0;
      pointers.set(event.pointerId, place(event));
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      const before = pointers.get(event.pointerId);
      if (!before) return this.head && this.on.hover(this.cellAt(now.x, now.y));
      moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
      pointers.set(event.pointerId, now);
      if (other) {
        const apart = (point) => Math.hypot(point.x - other.x, point.y - other.y);
        this.zoomTo((this.zoom * apart(now)) / Math.max(apart(before), 1), (now.x + other.x) / 2, (now.y + other.y) / 2);
      } else if (moved >= 5) {
        this.moveTo(this.view.x - (now.x - before.x) / this.zoom, this.view.y - (now.y - before.y) / this.zoom);
      }
    });
    canvas.addEventListener("pointerup", lift);
    canvas.addEventListener("pointercancel", lift);
    canvas.addEventListener("pointerleave", () => this.on.hover(null));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { x, y } = place(event);
      if (event.shiftKey) this.moveTo(this.view.x + event.deltaY / this.zoom, this.view.y);
      else this.zoomTo(this.zoom * Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), x, y);
    }, { passive: false });
    const jump = (event) => {
      const box = this.minimap.getBoundingClientRect();
      const at = (offset) => (offset / box.width) * this.n;
      if (event.buttons) this.centre(at(event.clientY - box.top), at(event.clientX - box.left));
    };
    this.minimap.addEventListener("pointerdown", jump);
    this.minimap.addEventListener("pointermove", jump);
  }
}
