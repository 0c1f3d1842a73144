"use strict";
// The text as a strip of tokens, coloured by what the focused token looks at, or by what looks at it.

const STRIP_TOKENS = 600; // at once, of a long text

class TokenStrip {
  /** on: {look(index, isLocked)}: a token was pointed at, or clicked. */
  constructor(container, tokens, on) {
    Object.assign(this, { container, tokens, start: -1, spans: [], hits: [], found: new Set() });
    const seen = new Set();
    this.repeated = new Set(tokens.labels.filter((label) => seen.has(label) || !seen.add(label)));
    const indexOf = (event) => Number(event.target.closest("[data-index]")?.dataset.index ?? NaN);
    for (const [type, isLocked] of [["click", true], ["pointerover", false]]) {
      container.addEventListener(type, (event) => indexOf(event) >= 0 && on.look(indexOf(event), isLocked));
    }
  }

  get stop() {
    return Math.min(this.start + STRIP_TOKENS, this.tokens.labels.length);
  }

  /** Shows the part of the text that holds this token. */
  show(at) {
    if (this.start >= 0 && at >= this.start && at < this.stop) return;
    this.start = Math.floor(at / STRIP_TOKENS) * STRIP_TOKENS;
    this.spans = this.tokens.labels.slice(this.start, this.stop).map((label, offset) => {
      const index = this.start + offset;
      const span = make("span", label);
      span.setAttribute("role", "option");
      span.id = `token-${index}`;
      span.dataset.index = index;
      span.title = `token ${index}, id ${this.tokens.ids[index]}`;
      if (this.repeated.has(label)) span.append(make("sub", index)); // tells equal tokens apart
      return span;
    });
    this.container.replaceChildren(...this.spans);
    this.container.scrollTop = 0;
    if (this.last) this.colour(...this.last);
  }

  /** Colours each token by its weight; `at` is the focused one, null for none. */
  colour(at, values, look) {
    const { palette, log, hidesFirst } = look;
    this.last = [at, values, look];
    this.container.setAttribute("aria-activedescendant", at === null ? "" : `token-${at}`);
    for (const [offset, span] of this.spans.entries()) {
      const index = this.start + offset;
      const isShown = values !== null && values[index] >= 0 && !(hidesFirst && index === 0);
      const share = isShown ? shade(values[index], log) : 0;
      const colour = isShown ? rgb(palette, share) : "";
      if (colour !== span.colour) {
        Object.assign(span.style, { background: colour, color: isShown ? inkOn(palette, share) : "" });
        span.colour = colour; // asking the style itself would be slow
      }
      span.classList.toggle("found", this.found.has(index));
    }
    this.selected?.removeAttribute("aria-selected");
    this.selected = this.spans[at - this.start];
    if (at === null || !this.selected) return;
    this.selected.setAttribute("aria-selected", "true");
    const box = this.container;
    const { offsetTop: top } = this.selected;
    if (top < box.scrollTop || top + 24 > box.scrollTop + box.clientHeight) box.scrollTop = top - 24;
  }

  /** Finds a text, in any case and across tokens: `hits` are its places' first tokens, `found` all tokens that hold it. */
  find(text) {
    [this.hits, this.found, this.hit] = [[], new Set(), -1];
    const ends = [];
    let length = 0;
    for (const token of this.tokens.texts) ends.push((length += token.length));
    const pattern = new RegExp(text.replace(/[.*+?^${}()|[\]\\\/]/g, "\\$&"), "giu");
    let token = 0;
    for (const match of text ? this.tokens.texts.join("").matchAll(pattern) : []) {
      while (ends[token] <= match.index) token++;
      this.hits.push(token);
      for (let last = token; last === token || ends[last - 1] < match.index + match[0].length; last++) this.found.add(last);
    }
  }

  /** The first token of the next place, or undefined. */
  next() {
    this.hit = (this.hit + 1) % Math.max(this.hits.length, 1);
    return this.hits[this.hit];
  }
}

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}
