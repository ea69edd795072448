// The page of a comparison: what differs, a picture of steps by units, the settings, and tensors.

const DIFF = JSON.parse(document.getElementById("data").textContent);
const COLORS = { gradients: "state-gradients", moments: "state-optimizer", parameters: "state-parameters" };
const ROW = { least: 6, most: 16, total: 900 };

function color(kind) {
  return `var(--${COLORS[kind]})`;
}

function stepsOf(column) {
  const { first, last } = DIFF.heat;
  return first[column] === last[column]
    ? `step ${formatStep(first[column])}`
    : `steps ${formatStep(first[column])} to ${formatStep(last[column])}`;
}

// Units by steps. A cell has the color of the first kind of state that differs at the first different step in it.
class DiffHeat {
  constructor() {
    this.canvas = h("canvas", {
      role: "img",
      "aria-label": "Units by steps: what differs first is said in words above",
      style: "width:100%;display:block;background:var(--soft);touch-action:pan-y",
      onpointermove: (event) => this.point(event),
      onpointerdown: (event) => this.point(event),
      onpointerleave: () => tip.hide(),
    });
    const legend = h(
      "div",
      { class: "legend" },
      h("span", {}, h("i", { style: "background:var(--soft);border:1px solid var(--line)" }), "equal"),
      DIFF.heat.kinds.map((kind) => h("span", {}, h("i", { style: `background:${color(kind)}` }), kind)),
      h("span", {}, "the first of them that differs, as a step computes them"),
    );
    this.element = card("Units by steps", null, true, legend, h("div", { style: "margin-top:8px" }, this.canvas));
  }

  draw() {
    const { units, rows, first, last, kinds } = DIFF.heat,
      styles = getComputedStyle(document.documentElement),
      value = (name) => styles.getPropertyValue(`--${name}`).trim();
    const width = this.canvas.parentElement.clientWidth,
      row = Math.max(ROW.least, Math.min(ROW.most, ROW.total / units.length)),
      height = row * units.length;
    const scale = Math.min(2, window.devicePixelRatio || 1),
      context = this.canvas.getContext("2d");
    Object.assign(this.canvas, { width: width * scale, height: (height + 22) * scale });
    this.canvas.style.height = `${height + 22}px`;
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    const longest = Math.max(...units.map((name) => context.measureText(name).width));
    this.left = Math.min(longest + 8, width * 0.3);
    this.row = row;
    this.column = (width - this.left) / first.length;
    context.fillStyle = value("surface");
    context.fillRect(0, 0, this.left, height + 22);
    context.fillRect(0, height, width, 22);
    rows.forEach((codes, unit) => {
      for (let begin = 0, end; begin < codes.length; begin = end) {
        // Neighbors of one color are one rectangle.
        for (end = begin + 1; codes[end] === codes[begin]; ) end++;
        if (codes[begin] === "0") continue;
        context.fillStyle = value(COLORS[kinds[codes[begin] - 1]]);
        const x = this.left + begin * this.column;
        context.fillRect(x, unit * row, Math.max(1.5, (end - begin) * this.column), row - (row > 8 ? 1 : 0));
      }
    });
    context.fillStyle = value("muted");
    context.textAlign = "right";
    const every = Math.ceil(13 / row);
    units.forEach((name, unit) => {
      if (unit % every === 0) context.fillText(this.fit(context, name), this.left - 6, (unit + 0.5) * row + 4);
    });
    context.textAlign = "left";
    context.fillText("step", 0, height + 16);
    // A round step is marked in the middle of the column that has it; the first and the last are always marked.
    const round = ticks(first[0], last.at(-1), Math.max(2, (width - this.left) / 90), "steps");
    let free = this.left;
    for (const step of [first[0], ...round.filter((step) => step > first[0] && step < last.at(-1)), last.at(-1)]) {
      const at = this.left + (last.findIndex((end) => end >= step) + 0.5) * this.column,
        half = context.measureText(formatStep(step)).width / 2,
        middle = Math.max(this.left + half, Math.min(width - half, at));
      const isLast = step === last.at(-1);
      if (middle - half < free || (!isLast && middle + half > width - 60)) continue;
      context.textAlign = "center";
      context.fillText(formatStep(step), middle, height + 16);
      context.fillRect(at, height, 1, 4);
      free = middle + half + 12;
    }
  }

  // The ends of names tell units apart.
  fit(context, name) {
    let text = name;
    while (text.length > 4 && context.measureText(text).width > this.left - 8) text = `…${text.slice(2)}`;
    return text;
  }

  point(event) {
    const { units, rows, first, kinds } = DIFF.heat,
      box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.column),
      unit = Math.floor((event.clientY - box.top) / this.row);
    if (!(column >= 0 && column < first.length && unit >= 0 && unit < units.length)) return tip.hide();
    const code = rows[unit][column],
      kind = kinds[code - 1];
    const line = kind ? [`${kind} differ`, "", color(kind)] : ["equal", ""];
    tip.show(event.clientX, event.clientY, [[units[unit]], [stepsOf(column)], line]);
  }
}

function settingText(value) {
  return value == null ? MISSING : typeof value === "string" ? value : JSON.stringify(value);
}

function main() {
  setTheme(storedTheme());
  const heat = DIFF.heat && DIFF.heat.units.length ? new DiffHeat() : null,
    draw = () => {
      if (heat) heat.draw();
      view.changed();
    };
  const theme = choice("Colors", THEMES, storedTheme(), (chosen) => {
    setTheme(chosen);
    draw();
  });
  const [a, b] = DIFF.names,
    state = DIFF.differences.length === 0 ? h("span", { class: "state ended" }, "equal") : h("span", { class: "state failed" }, "different");
  document.getElementById("tools").remove();
  document
    .getElementById("head")
    .append(
      h(
        "div",
        { class: "title" },
        h("div", { class: "run" }, h("h1", {}, `${a} and ${b}`, state), DIFF.coverage.map((text) => h("p", {}, text))),
        theme,
      ),
    );
  const rows = (list, cells) => list.map((row) => ({ cells: cells(row) }));
  const sentences = DIFF.differences.map((text) => h("p", { style: "color:var(--text)" }, text));
  document.getElementById("main").append(
    ...[
      sentences.length && card("What differs", null, true, sentences),
      has("loss") && lossCard(),
      has("lr.0") && ratesCard(),
      has("grad_norm") && lineCard("Gradient norm", "before clipping", "grad_norm", formatNumber),
      heat && heat.element,
      DIFF.settings.length &&
        card(
          "Settings that differ",
          null,
          true,
          table(
            ["", a, b],
            rows(DIFF.settings, ([key, ...values]) => [key, ...values.map(settingText)]),
            { label: "Settings" },
          ),
        ),
      DIFF.tensors.length &&
        card(
          "Tensors that differ",
          null,
          true,
          table(
            ["Tensor", "Elements", "Differing", "Largest", "Relative", "ULPs"],
            rows(DIFF.tensors, (t) => [
              t.name,
              formatStep(t.elements),
              formatStep(t.differing),
              t.absolute == null ? "not finite" : formatNumber(t.absolute),
              t.relative == null ? "not finite" : formatNumber(t.relative),
              formatStep(t.ulps),
            ]),
            { label: "Tensors" },
          ),
        ),
      RUNS.length && factsCard("Configuration", (facts) => facts.config),
    ].filter(Boolean),
  );
  // A card beside a hole takes the whole row.
  const half = document.querySelectorAll(".card:not(.wide)");
  if (half.length % 2) half[half.length - 1].classList.add("wide");
  draw();
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

main();
