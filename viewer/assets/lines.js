"use strict";
// The second view: two columns of tokens, queries left and keys right, with a line for each weight.

const LINE_ROW = 20; // pixels between two tokens
const FAINTEST = 0.03; // lines below this share of the scale are left out

class LinesView extends CanvasView {
  constructor(canvas, source, on) {
    super(canvas, source, on);
    this.top = 0; // the first token shown
    this.labels = source.first.tokens.labels.map((label) => shorten(label, 14));
    canvas.addEventListener("wheel", (event) => {
      const before = this.top;
      this.scrollTo(this.top + Math.sign(event.deltaY) * Math.max(1, Math.round(Math.abs(event.deltaY) / 30)));
      if (this.top !== before) event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("pointermove", (event) => this.on.hover(this.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.on.hover(null));
    canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event.offsetX, event.offsetY);
      if (cell) this.on.pick(cell);
    });
  }

  get nShown() {
    return Math.min(this.n, Math.floor((this.canvas.clientHeight - 30) / LINE_ROW));
  }

  scrollTo(top) {
    this.top = Math.max(0, Math.min(Math.round(top), this.n - this.nShown));
    this.draw();
  }

  reveal({ row }) {
    if (row < this.top || row >= this.top + this.nShown) this.scrollTo(row - this.nShown / 2);
  }

  y(index) {
    return 36 + (index - this.top) * LINE_ROW;
  }

  /** The row of weights of query i, or undefined while it is under way. */
  weights(i) {
    const { step, layer, head } = this.head;
    const row = this.source.peek(`row/${step}/${layer}/${head}/${i}`);
    if (!row) this.source.row(step, layer, head, i).then(() => this.draw(), this.on.failed);
    return row;
  }

  /** Left: that query and its brightest key. Right: that key and the query on screen that looks at it most. */
  cellAt(x, y) {
    const index = Math.floor((y - 26) / LINE_ROW) + this.top;
    if (!this.head || y < 26 || index >= Math.min(this.top + this.nShown, this.n)) return null;
    const isQuery = x < this.canvas.clientWidth / 2;
    let best = { row: index, column: index, span: 1, value: -1, x, y, isQuery };
    const queries = isQuery ? [index] : Array.from({ length: this.nShown }, (_, i) => this.top + i);
    for (const row of queries) {
      const weights = this.weights(row) ?? [];
      for (const column of isQuery ? weights.keys() : [index]) {
        if (weights[column] > best.value && !(this.hideFirst && column === 0)) best = { ...best, row, column, value: weights[column] };
      }
    }
    return best;
  }

  drawNow() {
    const { context, width, height } = prepare(this.canvas);
    const { palette, focus, top } = this;
    const bottom = Math.min(top + this.nShown, this.n);
    const side = Math.min(170, width * 0.34);
    const [left, right] = [side, width - side];
    const direction = this.direction === "destination" ? "column" : "row";
    context.save();
    context.beginPath();
    context.rect(0, 24, width, height - 24);
    context.clip();
    for (let i = top; i < bottom; i++) {
      const weights = this.weights(i);
      for (let j = this.hideFirst ? 1 : 0; weights && j < this.n; j++) {
        const share = shade(weights[j], this.log);
        if (share < FAINTEST) continue;
        const isFocused = focus && (direction === "row" ? i === focus.row : j === focus.column);
        context.strokeStyle = isFocused ? palette.accent : rgb(palette, 0.8);
        context.globalAlpha = Math.sqrt(share) * (focus && !isFocused ? 0.2 : 1);
        context.lineWidth = isFocused ? 1 + 4 * share : 1 + share;
        context.beginPath();
        context.moveTo(left, this.y(i));
        context.bezierCurveTo((left + right) / 2, this.y(i), (left + right) / 2, this.y(j), right, this.y(j));
        context.stroke();
      }
    }
    context.restore();
    this.drawTokens(context, left - 8, "right", focus?.row, bottom);
    this.drawTokens(context, right + 8, "left", focus?.column, bottom);
    context.fillStyle = palette.muted;
    context.font = "600 11px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillText("query", left - 8, 10);
    context.textAlign = "left";
    context.fillText("key", right + 8, 10);
    this.drawBeyond(context, right, height);
  }

  drawTokens(context, x, align, focused, bottom) {
    const away = align === "right" ? -1 : 1;
    [context.textAlign, context.textBaseline] = [align, "middle"];
    for (let index = this.top; index < bottom; index++) {
      context.fillStyle = index === focused ? this.palette.accent : this.palette.text;
      context.font = `${index === focused ? 700 : 400} 12px ${MONO}`;
      context.fillText(this.labels[index], x, this.y(index), 104);
      const width = Math.min(context.measureText(this.labels[index]).width, 104);
      context.fillStyle = this.palette.muted;
      context.font = `9px ${MONO}`;
      context.fillText(String(index), x + away * (width + 6), this.y(index));
    }
  }

  /** How much of the focused query's attention goes to keys above and below those on screen. */
  drawBeyond(context, right, height) {
    const weights = this.focus && this.weights(this.focus.row);
    if (!weights) return;
    const mass = (from, to) => weights.slice(from, to).reduce((sum, weight) => sum + Math.max(weight, 0), 0);
    const [above, below] = [mass(0, this.top), mass(this.top + this.nShown, this.n)];
    [context.fillStyle, context.textAlign, context.font] = [this.palette.accent, "left", `11px ${MONO}`];
    if (above > 0.005) context.fillText(`↑ ${above.toFixed(2)}`, right + 38, 10);
    if (below > 0.005) context.fillText(`↓ ${below.toFixed(2)}`, right + 38, height - 8);
  }
}
