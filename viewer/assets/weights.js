"use strict";
// Where weights come from. A page's file embeds q, k and the log-sum-exp of each row, and a weight is computed from them:
//     A[i, j] = exp(score(q_i, k_j) - lse_i)    where the mask rule allows (i, j), else exactly 0
// A server sends the same numbers as tiles. Both sources answer the same questions, so the rest of the page knows neither.

const TILE = 256; // cells along a side of a tile
const THUMB = 64; // cells along a side of a thumbnail, at most
const MASKED = -1; // stands for the weight of a pair that the mask forbids

/** May query i see key j? As probes/metadata.py has it. */
function isAllowed(rule, i, j) {
  if (rule.causal && j > i) return false;
  const isGlobal = i < rule.n_global || j < rule.n_global;
  if (rule.window !== null && Math.abs(i - j) >= rule.window && !isGlobal) return false;
  return rule.documents === null || rule.documents[i] === rule.documents[j];
}

class Source {
  constructor(content) {
    this.first = content;
    this.n = content.n_tokens;
    this.heads = Array.from({ length: content.n_head }, (_, head) => head);
    this.layers = new Map(content.layers.map((layer) => [layer.index, layer]));
    this.kept = new Map(); // least recently used first
    this.onProgress = () => {};
  }

  /** The coarsest level: all of the map in one thumbnail. */
  get topLevel() {
    return Math.max(0, Math.ceil(Math.log2(this.n / THUMB)));
  }

  /** {values, rows, columns}: the largest weight in each cell of 2^level × 2^level pairs; MASKED where none is allowed. */
  tile(step, layer, head, level, row, column) {
    return this.keep(`tile/${step}/${layer}/${head}/${level}/${row}/${column}`, (signal) =>
      this.makeTile(step, layer, head, level, row, column, signal));
  }

  /** {values, size}: the top level, the whole map in at most 64 × 64 cells. */
  thumb(step, layer, head) {
    return this.keep(`thumb/${step}/${layer}/${head}`, (signal) => this.makeThumb(step, layer, head, signal));
  }

  /** The weights of query i on all keys. */
  row(step, layer, head, i) {
    return this.keep(`row/${step}/${layer}/${head}/${i}`, () => this.makeRow(step, layer, head, i));
  }

  /** The weights of all queries on key j. */
  column(step, layer, head, j) {
    return this.keep(`column/${step}/${layer}/${head}/${j}`, () => this.makeColumn(step, layer, head, j));
  }

  /** What is already here, or undefined; starts nothing. */
  peek(key) {
    return this.kept.get(key)?.value;
  }

  /** Tiles that were asked for and are not `wanted` any more are given up. */
  forget(wanted) {
    for (const [key, entry] of this.kept) {
      if (!key.startsWith("tile/") || entry.value !== undefined || wanted.has(key)) continue;
      entry.abort.abort();
      this.kept.delete(key);
    }
  }

  keep(key, make) {
    let entry = this.kept.get(key);
    if (!entry) {
      entry = { abort: new AbortController() };
      entry.promise = make(entry.abort.signal).then(
        (value) => (entry.value = value),
        (error) => {
          if (this.kept.get(key) === entry) this.kept.delete(key);
          throw error;
        },
      );
    }
    this.kept.delete(key);
    this.kept.set(key, entry);
    if (this.kept.size > 300) this.kept.delete(this.kept.keys().next().value);
    return entry.promise;
  }
}

/** Computes weights from the tensors that the page's own file holds. */
class EmbeddedSource extends Source {
  constructor(content) {
    super(content);
    this.tensors = new Map();
  }

  async content(step) {
    const other = document.querySelector(`script[data-key="${step}/content"]`);
    return other ? JSON.parse(other.textContent) : this.first;
  }

  /** Everything that the weights of one head need. */
  head(step, layer, head) {
    const { n_head, n_kv_head } = this.first;
    const info = this.layers.get(layer);
    const group = Math.floor(head / (n_head / n_kv_head));
    const [q, k, lse] = ["q", "k", "lse"].map((name) => this.tensor(`${step}/${layer}/${name}`));
    return { info, q: q[head], k: k[group], lse: lse[head], slope: info.alibi_slopes ? info.alibi_slopes[head] : 0 };
  }

  /** A tensor as a list with one typed array for each of its heads. */
  tensor(key) {
    if (!this.tensors.has(key)) {
      const element = document.querySelector(`script[data-key="${key}"]`);
      const values = decode(element.textContent.trim(), element.dataset.dtype);
      const shape = element.dataset.shape.split(",").map(Number);
      const size = values.length / shape[0];
      this.tensors.set(key, Array.from({ length: shape[0] }, (_, h) => values.subarray(h * size, (h + 1) * size)));
    }
    return this.tensors.get(key);
  }

  /** The weight of one pair, or MASKED. */
  weight({ info, q, k, lse, slope }, i, j) {
    if (!isAllowed(info.rule, i, j)) return MASKED;
    const size = q.length / this.n;
    let product = 0;
    for (let d = 0, a = i * size, b = j * size; d < size; d++) product += q[a + d] * k[b + d];
    if (info.kind === "linear") return product * Math.exp(-lse[i]);
    let score = product * info.scale;
    if (info.softcap > 0) score = info.softcap * Math.tanh(score / info.softcap);
    return Math.exp(score - slope * Math.abs(i - j) - lse[i]);
  }

  /** The pairs of `rows` and `columns` (each {start, stop}) pooled by `stride`, with pauses so that the page stays quick. */
  async pool(head, rows, columns, stride, signal) {
    const nRows = Math.ceil((rows.stop - rows.start) / stride);
    const nColumns = Math.ceil((columns.stop - columns.start) / stride);
    const values = new Float32Array(nRows * nColumns).fill(MASKED);
    let since = performance.now();
    for (let i = rows.start; i < rows.stop; i++) {
      const start = Math.floor((i - rows.start) / stride) * nColumns;
      const stop = head.info.rule.causal ? Math.min(i + 1, columns.stop) : columns.stop;
      for (let j = columns.start; j < stop; j++) {
        const cell = start + Math.floor((j - columns.start) / stride);
        values[cell] = Math.max(values[cell], this.weight(head, i, j));
      }
      if (performance.now() - since > 10) {
        await new Promise((resume) => setTimeout(resume));
        signal?.throwIfAborted();
        since = performance.now();
      }
    }
    return { values, rows: nRows, columns: nColumns };
  }

  async makeTile(step, layer, head, level, row, column, signal) {
    const stride = 2 ** level;
    const span = (index) => ({ start: index * TILE * stride, stop: Math.min((index + 1) * TILE * stride, this.n) });
    return this.pool(this.head(step, layer, head), span(row), span(column), stride, signal);
  }

  async makeThumb(step, layer, head, signal) {
    const all = { start: 0, stop: this.n };
    const pooled = await this.pool(this.head(step, layer, head), all, all, 2 ** this.topLevel, signal);
    return { values: pooled.values, size: pooled.rows };
  }

  async makeRow(step, layer, head, i) {
    const parts = this.head(step, layer, head);
    return Float32Array.from({ length: this.n }, (_, j) => this.weight(parts, i, j));
  }

  async makeColumn(step, layer, head, j) {
    const parts = this.head(step, layer, head);
    return Float32Array.from({ length: this.n }, (_, i) => this.weight(parts, i, j));
  }
}

/** Asks a server for weights. */
class ServerSource extends Source {
  async content(step) {
    return step === this.first.step ? this.first : (await this.ask(`content.json?step=${step}`)).json();
  }

  async makeTile(step, layer, head, level, row, column, signal) {
    const answer = await this.ask(`tile/${step}/${layer}/${head}/${level}/${row}/${column}`, signal);
    const size = (name) => Number(answer.headers.get(name));
    return { values: await floats(answer), rows: size("X-Rows"), columns: size("X-Columns") };
  }

  async makeThumb(step, layer, head, signal) {
    const answer = await this.ask(`thumb/${step}/${layer}/${head}`, signal);
    return { values: await floats(answer), size: Number(answer.headers.get("X-Size")) };
  }

  async makeRow(step, layer, head, i) {
    return floats(await this.ask(`row/${step}/${layer}/${head}/${i}`));
  }

  async makeColumn(step, layer, head, j) {
    return floats(await this.ask(`column/${step}/${layer}/${head}/${j}`));
  }

  /** The answer, after as many tries as the server needs to make a head's coarse levels (status 202). */
  async ask(address, signal) {
    for (let tries = 0; ; tries++) {
      const answer = await fetch(address, { signal });
      const isMaking = answer.status === 202;
      if (!isMaking && !answer.ok) throw new Error((await answer.text()).split("\n")[0] || `status ${answer.status}`);
      if (address.startsWith("tile") && (isMaking || tries > 0)) this.onProgress(isMaking ? (await answer.json()).progress : 1);
      if (!isMaking) return answer;
      await new Promise((resume) => setTimeout(resume, 300));
      signal?.throwIfAborted();
    }
  }
}

const floats = async (answer) => new Float32Array(await answer.arrayBuffer());

/** The numbers of a base64 text, little endian: float32, or bfloat16, which is the upper half of a float32. */
function decode(text, dtype) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  if (dtype === "float32") return new Float32Array(bytes.buffer);
  return new Float32Array(Uint32Array.from(new Uint16Array(bytes.buffer), (half) => half << 16).buffer);
}
