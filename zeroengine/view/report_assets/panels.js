// How pointers and keys reach a chart; the events; the bars of units; the heat map of ranks.

function listenToPointer(chart) {
  let from = null;
  chart.svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = chart.point(event);
    view.cursor = chart.valueAt(from);
  });
  chart.svg.addEventListener("pointermove", (event) => {
    const pixel = chart.point(event);
    view.cursor = chart.valueAt(pixel);
    // A small movement of a finger or a hand is no selection.
    if (from != null && Math.abs(pixel - from) > 6) {
      if (!view.selecting) chart.svg.setPointerCapture(event.pointerId);
      view.selecting = [chart.valueAt(from), view.cursor];
    }
    view.moved();
    chart.showTip(event.clientX, event.clientY, event.pointerType === "touch");
  });
  chart.svg.addEventListener("pointerup", (event) => {
    const selecting = view.selecting;
    from = null;
    if (selecting) view.setRange(selecting);
    else {
      view.moved();
      chart.showTip(event.clientX, event.clientY, event.pointerType === "touch");
    }
  });
  const leave = () => {
    from = view.cursor = view.selecting = null;
    tip.hide();
    view.moved();
  };
  chart.svg.addEventListener("pointercancel", leave);
  chart.svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && from == null && leave());
  chart.svg.addEventListener("dblclick", () => view.setRange(null));
}

function listenToKeys(chart) {
  const show = () => {
    view.moved();
    const box = chart.svg.getBoundingClientRect();
    chart.showTip(box.left + chart.x(view.cursor), box.top + 20);
    tip.say(chart.tipLines());
  };
  chart.svg.addEventListener("keydown", (event) => {
    const run = RUNS.find((r) => indicesIn(r.points, view.domain()).length);
    if (!run) return;
    const inside = indicesIn(run.points, view.domain());
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const at = view.cursor == null ? -1 : inside.indexOf(nearest(run.points, view.cursor));
      const next = inside[Math.max(0, Math.min(inside.length - 1, at + moves[event.key]))];
      const old = view.cursor == null ? middleOf(run.points, next) : view.cursor;
      view.cursor = middleOf(run.points, next);
      view.selecting = event.shiftKey ? [view.selecting ? view.selecting[0] : old, view.cursor] : null;
      show();
    } else if (event.key === "Enter" && view.selecting) view.setRange(view.selecting);
    else if (event.key === "Escape") {
      view.cursor = null;
      view.setRange(view.selecting ? view.range : null);
    } else return;
    event.preventDefault();
  });
  chart.svg.addEventListener("blur", () => {
    view.cursor = view.selecting = null;
    tip.hide();
    view.moved();
  });
}

function eventX(event) {
  return view.axis === "step" ? event.step : event.time;
}

function eventsIn(run) {
  return run.events.rows.filter((event) => eventX(event) != null && !view.hiddenEvents.has(event.kind));
}

const EVENT_KINDS = [
  "start",
  "resume",
  "checkpoint",
  "skip",
  "restart",
  "eviction",
  "warning",
  "error",
  "trace",
  "end",
];

function eventColor(kind) {
  return `var(--event-${EVENT_KINDS.includes(kind) ? kind : "start"})`;
}

// The mean of each unit over the columns in the range, weighted by their steps.
function unitRows(run) {
  const { columns } = run,
    { names } = columns.units,
    inside = indicesIn(columns, view.domain());
  const steps = inside.reduce((sum, i) => sum + columns.steps[i], 0) || 1;
  const mean = (rows, unit) => inside.reduce((sum, i) => sum + (rows[i][unit] || 0) * columns.steps[i], 0) / steps;
  return names.map((name, unit) => ({
    name,
    order: unit,
    gather: mean(columns.units.gather, unit),
    reduce: mean(columns.units.reduce, unit),
  }));
}

class UnitBars {
  constructor() {
    this.all = false;
    this.byOrder = false;
    this.list = h("ol", { class: "units" });
    this.more = h("button", {
      type: "button",
      class: "more",
      onclick: () => {
        this.all = !this.all;
        this.draw();
      },
    });
    const order = choice("Order of units", { wait: "Longest first", model: "Model order" }, "wait", (value) => {
      this.byOrder = value === "model";
      this.draw();
    });
    const legend = h(
      "div",
      { class: "legend" },
      ["gather", "reduce"].map((kind) => h("span", {}, h("i", { style: `background:var(--split-${kind})` }), kind)),
    );
    this.element = card(
      "Exposed wait by unit",
      "seconds a step, mean over ranks",
      false,
      order,
      legend,
      this.list,
      this.more,
    );
    view.listeners.push(() => this.draw());
  }

  draw() {
    const tables = RUNS.map((run) => new Map(unitRows(run).map((row) => [row.name, row])));
    const total = (name) => Math.max(...tables.map((t) => (t.has(name) ? t.get(name).gather + t.get(name).reduce : 0)));
    const names = [...new Set(tables.flatMap((t) => [...t.keys()]))].filter((name) => total(name) > 0);
    const most = Math.max(...names.map(total), 1e-12);
    if (!this.byOrder) names.sort((a, b) => total(b) - total(a));
    const shown = this.all ? names : names.slice(0, 12);
    this.list.replaceChildren(
      ...(shown.length
        ? shown.map((name) =>
            h(
              "li",
              {},
              h("span", { class: "unit" }, name),
              h(
                "span",
                { class: "bars" },
                tables.map((t, index) => this.bar(t.get(name), most, index)),
              ),
            ),
          )
        : [h("li", { class: "empty" }, "No unit was waited for.")]),
    );
    this.more.hidden = names.length <= 12;
    this.more.textContent = this.all ? "Show 12 units" : `Show all ${names.length} units`;
  }

  bar(row, most, index) {
    const { gather, reduce } = row || { gather: 0, reduce: 0 };
    const label = `${RUNS[index].name}: gather ${formatSeconds(gather)}, reduce ${formatSeconds(reduce)}`;
    const part = (kind, value) => h("i", { style: `width:${(100 * value) / most}%;background:var(--split-${kind})` });
    return h(
      "span",
      { class: "bar", title: label },
      RUNS.length > 1 && h("em", { style: `color:${runColor(index)}` }, "AB"[index]),
      h("span", { class: "track" }, part("gather", gather), part("reduce", reduce)),
      h("b", {}, formatSeconds(gather + reduce)),
    );
  }
}

const DELAY_NAMES = { own: "Own time", compute: "Compute", offload: "Offload", other: "Other", wait: "Waiting" };

// Ranks by steps: the darker, the longer than the median rank. It is a chart without lines.
class HeatMap extends Chart {
  constructor(run) {
    const rows = run.columns.ranks.rows.length;
    super({
      title: `Slow ranks of ${run.name}`,
      run,
      lines: () => [],
      format: formatSeconds,
      height: Math.round(Math.max(90, Math.min(420, rows * 16)) + MARGIN.top + MARGIN.bottom),
    });
    this.run = run;
    this.kind = "own";
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.element.classList.add("heat");
    this.element.prepend(this.canvas);
    this.note = h("div", { class: "legend" });
    this.element.append(this.note);
    this.delays = h("div");
  }

  draw() {
    super.draw();
    const { left, right, top, bottom } = this.inner,
      { columns } = this.run,
      { ranks } = columns;
    const values = ranks[this.kind] || [],
      inside = indicesIn(columns, view.domain()),
      rows = ranks.rows.length;
    const scale = Math.min(2, window.devicePixelRatio || 1),
      [width, height] = [right - left, bottom - top];
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    Object.assign(this.canvas.style, {
      left: `${left}px`,
      top: `${top}px`,
      width: `${width}px`,
      height: `${height}px`,
    });
    this.most = Math.max(...view.charts.filter((chart) => chart.kind === this.kind).map((chart) => chart.darkest()));
    const mean = this.run.summary.run.seconds_per_step || 0,
      isCut = inside.some((i) => (values[i] || []).some((v) => v > this.most));
    const context = this.canvas.getContext("2d"),
      color = getComputedStyle(document.documentElement).getPropertyValue("--heat");
    context.scale(scale, scale);
    context.fillStyle = color.trim();
    for (const i of inside) {
      const x = this.x(startOf(columns, i)) - left,
        w = Math.max(1, this.x(endOf(columns, i)) - left - x);
      for (let row = 0; row < rows; row++) {
        const v = (values[i] || [])[row] || 0;
        if (v <= 0) continue;
        context.globalAlpha = Math.min(1, v / this.most);
        context.fillRect(x, (row * height) / rows, w + 0.3, Math.max(1, height / rows - (rows <= 32 ? 1 : 0)));
      }
    }
    const every = Math.max(1, Math.ceil((rows * 12) / height));
    this.plot.append(
      ...ranks.rows.flatMap(([first], row) =>
        row % every
          ? []
          : [
              svg(
                "text",
                { class: "tick", x: left - 6, y: top + ((row + 0.5) * height) / rows + 4, "text-anchor": "end" },
                `rank ${first}`,
              ),
            ],
      ),
    );
    this.note.replaceChildren(
      h(
        "span",
        {},
        h("i", { class: "ramp" }),
        `0 to ${formatSeconds(this.most)}${isCut ? " or more" : ""} a step above the median rank` +
          (mean ? ` (${formatShare(this.most / mean)} of a mean step)` : ""),
      ),
    );
    this.drawDelays(inside);
  }

  // The seconds of the darkest color, which all runs share.
  darkest() {
    const values = this.run.columns.ranks[this.kind] || [],
      inside = indicesIn(this.run.columns, view.domain());
    // A few late columns, such as the first step, must not make all others pale.
    const tops = inside.map((i) => Math.max(0, ...(values[i] || []))).sort((first, second) => first - second);
    const usual = tops[Math.floor(tops.length * 0.9)] || 0;
    const isCut = tops.length >= 10 && tops.at(-1) > 3 * usual && usual > 0;
    const most = isCut ? 1.5 * usual : tops.at(-1) || 0;
    // Noise must not look like a straggler: the darkest color means at least a twentieth of a step.
    return Math.max(most, 0.05 * (this.run.summary.run.seconds_per_step || 0)) || 1;
  }

  axes(low, high, log) {
    // The rows are ranks, so the axis has no numbers.
    return super
      .axes(low, high, log)
      .filter((part) => part.getAttribute("x") !== String(MARGIN.left - 6) && !part.classList.contains("grid"));
  }

  drawDelays(inside) {
    const sums = new Map();
    for (const i of inside)
      for (const delay of this.run.columns.delays[i]) {
        const key = `${delay.rank} ${delay.cause}`,
          sum = sums.get(key) || { ...delay, steps: 0, seconds: 0, worst_seconds: -1 };
        sum.steps += delay.steps;
        sum.seconds += delay.seconds;
        if (delay.worst_seconds > sum.worst_seconds)
          Object.assign(sum, { worst_seconds: delay.worst_seconds, worst_step: delay.worst_step, text: delay.text });
        sums.set(key, sum);
      }
    const rows = [...sums.values()]
      .sort((a, b) => b.seconds - a.seconds)
      .slice(0, 8)
      .map((d) => ({
        cells: [
          `${d.rank}`,
          d.host || "",
          d.cause,
          formatStep(d.steps),
          formatSeconds(d.seconds),
          `${d.text || formatSeconds(d.worst_seconds)} (step ${formatStep(d.worst_step)})`,
        ],
      }));
    this.delays.replaceChildren(
      rows.length
        ? table(["Rank", "Host", "Cause", "Steps", "Time lost", "Worst"], rows, {
            label: "Slowest ranks in the range",
            stacked: true,
          })
        : h("p", { class: "empty" }, "No rank stood out in this range."),
    );
  }

  tipLines() {
    const { columns } = this.run,
      i = nearest(columns, view.cursor);
    if (i < 0) return [["no steps"]];
    const lines = [[positionOf(columns, i)]],
      values = (columns.ranks[this.kind] || [])[i] || [];
    const order = values.map((v, row) => [v, row]).sort((a, b) => b[0] - a[0]);
    const label = (row) => columns.ranks.labels[row];
    if (this.row != null && values[this.row] != null)
      lines.push([label(this.row), formatSeconds(values[this.row]), "var(--heat)"]);
    for (const [v, row] of order.slice(0, 3)) if (row !== this.row && v > 0) lines.push([label(row), formatSeconds(v)]);
    return lines;
  }

  point(event) {
    const box = this.svg.getBoundingClientRect(),
      { top, bottom } = this.inner;
    const share = (event.clientY - box.top - top) / (bottom - top);
    this.row = Math.max(
      0,
      Math.min(this.run.columns.ranks.rows.length - 1, Math.floor(share * this.run.columns.ranks.rows.length)),
    );
    return super.point(event);
  }
}
