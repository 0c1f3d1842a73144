"use strict";
// All heads at a glance: a thumbnail of each, and each as a point on two scores.

const soon = window.requestIdleCallback ?? ((work) => setTimeout(work, 1));

class HeadGrid {
  /** on: {choose(layer, head), failed(error)}. */
  constructor(container, source, on) {
    Object.assign(this, { container, source, on, buttons: new Map(), waiting: new Set(), isBusy: false });
    for (const layer of source.layers.keys()) {
      const title = document.createElement("h3");
      title.textContent = `Layer ${layer}`;
      const row = document.createElement("div");
      row.className = "layer";
      row.append(...source.heads.map((head) => this.makeButton(layer, head)));
      container.append(title, row);
    }
    container.addEventListener("keydown", (event) => this.onKey(event));
    this.watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.waiting.add(target);
        else this.waiting.delete(target);
      }
      this.work();
    }, { root: container, rootMargin: "100px" });
  }

  makeButton(layer, head) {
    const button = document.createElement("button");
    button.type = "button";
    button.tabIndex = -1;
    button.dataset.head = `${layer}.${head}`;
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const parts = ["name", "effect", "role"].map((name) => {
      const part = document.createElement("span");
      part.className = name;
      return part;
    });
    parts[0].textContent = `${layer}.${head}`;
    button.append(canvas, ...parts);
    button.addEventListener("click", () => this.on.choose(layer, head));
    this.buttons.set(`${layer}.${head}`, { button, canvas, layer, head, parts });
    return button;
  }

  /** Thumbnails of another step, with its roles and effects. */
  show({ step, palette, log, hideFirst, content }) {
    Object.assign(this, { step, palette, log, hideFirst });
    this.watcher.disconnect();
    for (const [name, { button, parts }] of this.buttons) {
      const role = content.roles[name] ?? "";
      const change = content.ablation?.change[name];
      parts[1].textContent = change === undefined ? "" : signed(change);
      parts[2].textContent = role;
      const effect = change === undefined ? "" : `, ablating it changes the loss by ${signed(change)}`;
      button.setAttribute("aria-label", `Head ${name}${role && `, ${role}`}${effect}`);
      button.title = `${name} ${role}${effect}`;
      this.watcher.observe(button);
    }
  }

  select(layer, head) {
    for (const [name, { button }] of this.buttons) {
      const isChosen = name === `${layer}.${head}`;
      button.setAttribute("aria-pressed", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
      if (isChosen) {
        const [box, frame] = [button.getBoundingClientRect(), this.container.getBoundingClientRect()];
        if (box.top < frame.top + 24) this.container.scrollTop += box.top - frame.top - 24;
        else if (box.bottom > frame.bottom) this.container.scrollTop += box.bottom - frame.bottom + 6;
      }
    }
  }

  /** Makes the thumbnails that are on screen, one after the other, while nothing else is to be done. */
  work() {
    if (this.isBusy || this.waiting.size === 0) return;
    this.isBusy = true;
    soon(async () => {
      const [target] = this.waiting;
      this.waiting.delete(target);
      if (target) await this.drawThumb(this.buttons.get(target.dataset.head));
      this.isBusy = false;
      this.work();
    });
  }

  async drawThumb({ canvas, layer, head }) {
    const { step } = this;
    try {
      const { values, size } = await this.source.thumb(step, layer, head);
      if (step !== this.step) return;
      const image = paint(values, size, size, this.palette, this.log, this.hideFirst);
      canvas.width = canvas.height = size;
      canvas.getContext("2d").drawImage(image, 0, 0);
      canvas.dataset.step = step;
    } catch (error) {
      this.on.failed(error);
    }
  }

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.source.heads.length, ArrowDown: this.source.heads.length };
    const all = [...this.buttons.values()];
    const now = all.findIndex(({ button }) => button === document.activeElement);
    const next = all[now + moves[event.key]];
    if (!next) return;
    event.preventDefault();
    next.button.focus();
    this.on.choose(next.layer, next.head);
  }
}

const signed = (change) => `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)}`;

class Scatter {
  /** svg, and the two select elements that choose its scores. */
  constructor(svg, selects, on) {
    Object.assign(this, { svg, selects, on });
    for (const select of selects) select.addEventListener("change", () => this.draw());
  }

  show({ content, chosen }) {
    Object.assign(this, { content, chosen });
    const names = [...content.score_names, ...(content.ablation ? ["ablation"] : [])];
    this.svg.closest("section").hidden = names.length === 0; // as of a long record
    for (const [which, select] of this.selects.entries()) {
      const before = select.value;
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      const preferred = ["previous", "induction"][which];
      select.value = names.includes(before) ? before : names.includes(preferred) ? preferred : (names[which] ?? names[0] ?? "");
    }
    this.draw();
  }

  /** [{name, x, y}] of the heads that have both scores. */
  get points() {
    const score = (name, { value }) =>
      value === "ablation" ? this.content.ablation.change[name] : this.content.scores[name]?.[value];
    return Object.keys(this.content.scores)
      .map((name) => ({ name, x: score(name, this.selects[0]), y: score(name, this.selects[1]) }))
      .filter(({ x, y }) => x !== undefined && y !== undefined);
  }

  draw() {
    const { points } = this;
    const [width, height, left, bottom] = [300, 166, 34, 144];
    const span = (values) => {
      const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
      const top = high > 0.5 && high < 1 ? 1 : high;
      return { low, high: top - low < 1e-6 ? low + 1 : top };
    };
    const [xs, ys] = [span(points.map((point) => point.x)), span(points.map((point) => point.y))];
    const at = ({ x, y }) => ({
      x: left + ((x - xs.low) / (xs.high - xs.low)) * (width - left - 14),
      y: bottom - ((y - ys.low) / (ys.high - ys.low)) * (bottom - 14),
    });
    const add = (tag, attributes, text = "") => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      element.textContent = text;
      this.svg.append(element);
      return element;
    };
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    add("path", { class: "axis", d: `M${left} 8 V${bottom} H${width - 8}` });
    add("text", { x: left, y: bottom + 15, class: "tick" }, tick(xs.low));
    add("text", { x: width - 14, y: bottom + 15, class: "tick", "text-anchor": "end" }, tick(xs.high));
    add("text", { x: left - 5, y: bottom, class: "tick", "text-anchor": "end" }, tick(ys.low));
    add("text", { x: left - 5, y: 18, class: "tick", "text-anchor": "end" }, tick(ys.high));
    const extremes = new Set(["x", "y"].flatMap((axis) => {
      const order = [...points].sort((a, b) => b[axis] - a[axis]);
      return [...order.slice(0, 3), ...order.slice(-1)];
    }));
    const isChosen = (point) => point.name === this.chosen;
    const order = points.sort((a, b) => isChosen(a) - isChosen(b) || extremes.has(a) - extremes.has(b)); // last is on top
    for (const point of order) {
      const { x, y } = at(point);
      const dot = add("circle", { cx: x, cy: y, r: isChosen(point) ? 5.5 : 4, class: isChosen(point) ? "chosen" : "dot" });
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `${point.name}: ${tick(point.x)}, ${tick(point.y)}`;
      dot.append(title);
      dot.addEventListener("click", () => this.on.choose(...point.name.split(".").map(Number)));
    }
    const labelled = []; // the places of labels, so that none covers another
    for (const point of order.reverse().filter((point) => isChosen(point) || extremes.has(point))) {
      const { x, y } = at(point);
      const left = x > width - 40 ? x - 8 - 6 * point.name.length : x + 8;
      if (labelled.some((other) => Math.abs(other.left - left) < 28 && Math.abs(other.y - y) < 12)) continue;
      labelled.push({ left, y });
      add("text", { x: left, y: y + 4 }, point.name);
    }
    this.svg.setAttribute("aria-label", `${points.length} heads by ${this.selects[0].value} and ${this.selects[1].value}`);
  }
}

const tick = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(0) : String(Number(value.toPrecision(2))));
