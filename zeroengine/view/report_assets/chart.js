// Charts over steps or time. All share one range and one cursor, which live in `view`.

const RUNS = JSON.parse(document.getElementById("data").textContent).runs;

const view = {
  axis: "step",
  smoothing: 1, // the points over which lines are averaged
  range: null, // [low, high] in the axis' units, or null for everything
  cursor: null, // a value of the axis, or null
  selecting: null, // [from, to] while a range is being chosen
  hiddenEvents: new Set(),
  charts: [],
  listeners: [],
  changed() {
    for (const chart of this.charts) chart.draw();
    for (const listener of this.listeners) listener();
  },
  moved() {
    for (const chart of this.charts) chart.drawCursor();
  },
  setRange(range) {
    if (range) {
      const [low, high] = [Math.min(...range), Math.max(...range)];
      const [least, most] = this.extent();
      this.range = [Math.max(low, least), Math.min(high, most)];
      if (!(this.range[0] < this.range[1]) || (this.range[0] <= least && this.range[1] >= most)) this.range = null;
    } else this.range = null;
    this.selecting = null;
    tip.hide();
    this.changed();
    this.moved();
  },
  setAxis(axis) {
    // The range of the new axis has the same points of the first run that has any.
    const run = RUNS.find((r) => r.points.first.length);
    const inside = run && this.range ? indicesIn(run.points, this.range) : [];
    this.axis = axis;
    this.cursor = null;
    this.setRange(inside.length ? [startOf(run.points, inside[0]), endOf(run.points, inside.at(-1))] : null);
  },
  extent() {
    let low = Infinity,
      high = -Infinity;
    for (const { points } of RUNS)
      if (points.first.length) {
        low = Math.min(low, startOf(points, 0));
        high = Math.max(high, endOf(points, points.first.length - 1));
      }
    return low < high ? [low, high] : low === high ? [low - 0.5, high + 0.5] : [0, 1];
  },
  domain() {
    return this.range || this.extent();
  },
};

// A group of steps reaches from the end of the step before its first one to the end of its last one.
function startOf(points, index) {
  return view.axis === "step" ? points.first[index] - 1 : points.start[index];
}

function endOf(points, index) {
  return view.axis === "step" ? points.last[index] : points.end[index];
}

function middleOf(points, index) {
  return points.steps[index] === 1 ? endOf(points, index) : (startOf(points, index) + endOf(points, index)) / 2;
}

function indicesIn(points, [low, high]) {
  const out = [];
  for (let i = 0; i < points.first.length; i++) if (endOf(points, i) > low && startOf(points, i) < high) out.push(i);
  return out;
}

function nearest(points, x) {
  let best = -1,
    distance = Infinity;
  for (let i = 0; i < points.first.length; i++) {
    const d = Math.abs(middleOf(points, i) - x);
    if (d < distance) [best, distance] = [i, d];
  }
  return best;
}

function formatX(x) {
  return view.axis === "step" ? formatStep(x) : formatSeconds(x);
}

function positionOf(points, index) {
  const [first, last] = [points.first[index], points.last[index]];
  const steps = first === last ? `step ${formatStep(first)}` : `steps ${formatStep(first)} to ${formatStep(last)}`;
  return `${steps}, after ${formatSeconds(points.end[index])}`;
}

const EVENT_TALL = new Set(["restart", "eviction", "error", "resume", "warning"]);
const MARGIN = { top: 14, right: 10, bottom: 22, left: 58 };

// One chart. `spec.lines()` returns [{run, name, color, values, dashed, low, high}]; those of one run have `spec.run`.
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.height = spec.height || 200;
    this.plot = svg("g");
    this.overlay = svg("g", { "pointer-events": "none" });
    this.svg = svg(
      "svg",
      {
        class: "chart",
        tabindex: 0,
        role: "group",
        "aria-roledescription": "chart",
        "aria-label": `${spec.title}. Arrow keys move, with Shift they select a range, Enter zooms, Escape zooms out.`,
      },
      this.plot,
      this.overlay,
    );
    this.legend = h("div", { class: "legend" });
    this.element = h("div", { class: "chart-box" }, this.svg, this.legend);
    this.listen();
    view.charts.push(this);
  }

  get inner() {
    return {
      left: MARGIN.left,
      right: this.width - MARGIN.right,
      top: MARGIN.top,
      bottom: this.height - MARGIN.bottom,
    };
  }

  x(value) {
    const [low, high] = view.domain();
    return this.inner.left + ((value - low) / (high - low)) * (this.inner.right - this.inner.left);
  }

  valueAt(pixel) {
    const [low, high] = view.domain();
    return low + ((pixel - this.inner.left) / (this.inner.right - this.inner.left)) * (high - low);
  }

  draw() {
    this.width = Math.max(240, this.element.clientWidth || 600);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.height);
    this.measure();
    // Charts of one kind, one for each run, have one scale.
    const group = view.charts.filter((chart) => chart !== this && this.spec.scale && chart.spec.scale === this.spec.scale);
    for (const chart of group) chart.measure();
    const [low, high] = this.extentY([this, ...group].flatMap((chart) => chart.lines));
    const log = this.spec.log && this.spec.log() && low > 0;
    const place = log
      ? (v) => (Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))
      : (v) => (v - low) / (high - low);
    this.y = (v) => this.inner.bottom - place(v) * (this.inner.bottom - this.inner.top);
    this.plot.replaceChildren(...this.axes(low, high, log), ...this.shapes(low), ...this.marks());
    this.legend.replaceChildren(...(this.lines.length > 1 || this.spec.legend ? this.legendItems() : []));
    this.drawCursor();
  }

  measure() {
    this.lines = this.spec.lines().map((line) => this.smoothed(line));
    this.indices = new Map(RUNS.map((run) => [run, indicesIn(run.points, view.domain())]));
    this.stack();
  }

  // The mean of each point and as many on both sides, fewer near the ends. The points themselves stay in `raw`.
  smoothed(line) {
    if (view.smoothing === 1 || this.spec.stacked || this.spec.exact || line.sparse) return line;
    const values = line.values.map((value, i) => {
      const reach = Math.min(Math.floor(view.smoothing / 2), i, line.values.length - 1 - i);
      const near = line.values.slice(i - reach, i + reach + 1).filter((v) => v != null);
      return value == null ? null : near.reduce((sum, v) => sum + v, 0) / near.length;
    });
    return { ...line, values, raw: line.values, low: null, high: null };
  }

  // Turn the values of stacked lines into areas between their sums.
  stack() {
    if (!this.spec.stacked) return;
    const sums = [];
    for (const line of this.lines) {
      line.low = line.values.map((_, i) => sums[i] || 0);
      line.high = line.values.map((v, i) => (sums[i] = (sums[i] || 0) + (v || 0)));
    }
  }

  extentY(lines) {
    let low = Infinity,
      high = -Infinity;
    for (const line of lines)
      for (const i of this.indices.get(line.run))
        for (const v of [line.values[i], line.high && line.high[i], !this.spec.stacked && line.low && line.low[i]])
          if (typeof v === "number") [low, high] = [Math.min(low, v), Math.max(high, v)];
    if (low > high) return [0, 1];
    if (this.spec.zero || this.spec.stacked) low = Math.min(0, low);
    this.cutAt = this.spec.cut ? this.peakCut(high, lines) : null;
    if (this.cutAt) high = this.cutAt;
    const pad = (high - low || Math.abs(high) || 1) * 0.05;
    if (this.spec.log && this.spec.log() && low > 0) return [low * 0.97, high * 1.03];
    return [low === 0 ? 0 : low - pad, high + pad];
  }

  // Where to cut off the few steps that are so long that the others would be flat; null where none are.
  peakCut(most, lines) {
    const sums = RUNS.flatMap((run) => {
      const own = lines.filter((line) => line.run === run).at(-1);
      return own ? this.indices.get(run).map((i) => own.high[i]) : [];
    }).sort((a, b) => a - b);
    const usual = sums[Math.floor(sums.length * 0.9)];
    return sums.length >= 10 && most > 3 * usual ? 1.5 * usual : null;
  }

  axes(low, high, log) {
    const { left, right, top, bottom } = this.inner;
    const rows = log ? logTicks(low, high) : ticks(low, high, Math.max(2, (bottom - top) / 42), this.spec.unit);
    const [first, last] = view.domain();
    const columns = ticks(first, last, Math.max(2, (right - left) / 90), view.axis === "step" ? "steps" : "seconds");
    return [
      rows.map((v) => [
        svg("line", { class: "grid", x1: left, x2: right, y1: this.y(v), y2: this.y(v) }),
        svg("text", { class: "tick", x: left - 6, y: this.y(v) + 4, "text-anchor": "end" }, this.spec.format(v)),
      ]),
      columns.map((v) =>
        svg(
          "text",
          { class: "tick", x: this.x(v), y: bottom + 16, "text-anchor": this.x(v) > right - 20 ? "end" : "middle" },
          formatX(v),
        ),
      ),
      svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    ].flat(3);
  }

  shapes(low) {
    const { left, right, top, bottom } = this.inner;
    const clip = `clip-${view.charts.indexOf(this)}`;
    const group = svg("g", { "clip-path": `url(#${clip})` });
    const frame = svg(
      "clipPath",
      { id: clip },
      svg("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 4 }),
    );
    for (const line of this.lines) {
      const { points } = line.run,
        inside = this.indices.get(line.run);
      if (!inside.length) continue;
      // One more point on each side, so that lines reach the edges of the range.
      const all = [inside[0] - 1, ...inside, inside.at(-1) + 1].filter((i) => i >= 0 && i < points.first.length);
      if (line.high) {
        // An area reaches over the whole span of its steps.
        const upper = all.flatMap((i) => [
          [startOf(points, i), line.high[i]],
          [endOf(points, i), line.high[i]],
        ]);
        const lower = all
          .flatMap((i) => [
            [startOf(points, i), line.low[i]],
            [endOf(points, i), line.low[i]],
          ])
          .reverse();
        const path = [...upper, ...lower]
          .filter(([, v]) => v != null)
          .map(([x, v]) => `${this.x(x).toFixed(1)} ${this.y(v).toFixed(1)}`);
        if (path.length)
          group.append(
            svg("path", {
              class: this.spec.stacked ? "area" : "band",
              style: `fill:${line.color};stroke:${this.spec.stacked ? line.color : "none"}`,
              d: `M${path.join("L")}Z`,
            }),
          );
      }
      if (line.raw) group.append(...this.line({ ...line, values: line.raw, isFaint: true }, all));
      if (!this.spec.stacked) group.append(...this.line(line, all));
    }
    return [frame, group];
  }

  line(line, indices) {
    let path = "",
      begun = false;
    const shown = indices.filter((i) => line.values[i] != null);
    for (const i of indices) {
      const v = line.values[i];
      // A value that is missing interrupts the line, unless only some steps have the number.
      if (v == null) begun = begun && line.sparse;
      else {
        path += `${begun ? "L" : "M"}${this.x(middleOf(line.run.points, i)).toFixed(1)} ${this.y(v).toFixed(1)}`;
        begun = true;
      }
    }
    const style = `stroke:${line.color}`;
    const dots =
      shown.length <= 24 && !line.isFaint
        ? shown.map((i) =>
            svg("circle", {
              style: `fill:${line.color}`,
              r: 2.5,
              cx: this.x(middleOf(line.run.points, i)),
              cy: this.y(line.values[i]),
            }),
          )
        : [];
    return [svg("path", { class: `line${line.dashed ? " dashed" : ""}${line.isFaint ? " faint" : ""}`, style, d: path || "M0 0" }), ...dots];
  }

  marks() {
    const { left, right, top, bottom } = this.inner;
    return (this.spec.run ? [this.spec.run] : RUNS)
      .flatMap((run) =>
        eventsIn(run).map((event) => {
          const x = this.x(eventX(event));
          if (!(x >= left - 1 && x <= right + 1)) return null;
          const tall = EVENT_TALL.has(event.kind);
          return svg("line", {
            class: `event ${tall ? "tall" : ""}`,
            style: `stroke:${eventColor(event.kind)}`,
            x1: x,
            x2: x,
            y1: top - 10,
            y2: tall ? bottom : top - 3,
          });
        }),
      )
      .filter(Boolean);
  }

  legendItems() {
    const items = this.lines.map((line) =>
      h(
        "span",
        {},
        h("i", { class: line.dashed ? "dashed" : "", style: `background:${line.color};color:${line.color}` }),
        line.name,
      ),
    );
    return this.cutAt
      ? [...items, h("span", {}, `(longer steps are cut off at ${this.spec.format(this.cutAt)})`)]
      : items;
  }

  drawCursor() {
    const { left, right, top, bottom } = this.inner,
      parts = [];
    if (view.selecting) {
      const [a, b] = view.selecting.map((v) => Math.max(left, Math.min(right, this.x(v)))).sort((m, n) => m - n);
      parts.push(svg("rect", { class: "selection", x: a, width: b - a, y: top, height: bottom - top }));
    }
    if (view.cursor != null && this.lines) {
      const x = this.x(view.cursor);
      if (x >= left - 1 && x <= right + 1) {
        parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: top, y2: bottom }));
        for (const line of this.spec.stacked ? [] : this.lines) {
          const i = nearest(line.run.points, view.cursor);
          if (i >= 0 && line.values[i] != null)
            parts.push(
              svg("circle", {
                class: "spot",
                style: `fill:${line.color}`,
                r: 3.5,
                cx: this.x(middleOf(line.run.points, i)),
                cy: this.y(line.values[i]),
              }),
            );
        }
      }
    }
    this.overlay.replaceChildren(...parts);
  }

  tipLines() {
    const lines = [];
    for (const run of RUNS) {
      const own = this.lines.filter((line) => line.run === run),
        i = nearest(run.points, view.cursor);
      if (!own.length || i < 0) continue;
      lines.push([(RUNS.length > 1 ? `${run.name}: ` : "") + positionOf(run.points, i)]);
      for (const line of this.spec.stacked ? [...own].reverse() : own)
        lines.push([line.name, this.spec.format(line.values[i]), line.color, line.dashed]);
      if (this.spec.stacked)
        lines.push(["sum", this.spec.format(own.reduce((sum, line) => sum + (line.values[i] || 0), 0))]);
      const close = eventsIn(run).filter((event) => Math.abs(this.x(eventX(event)) - this.x(view.cursor)) <= 4);
      for (const event of close.slice(0, 4)) lines.push([`${event.kind}: ${event.text}`]);
    }
    return lines;
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    return Math.max(this.inner.left, Math.min(this.inner.right, event.clientX - box.left));
  }

  listen() {
    listenToPointer(this);
    listenToKeys(this);
  }

  showTip(x, y, isTouch = false) {
    tip.show(x, y, this.tipLines(), isTouch ? this.svg.getBoundingClientRect().top : null);
  }
}
