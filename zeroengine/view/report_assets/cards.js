// The cards of the page: charts of a run's numbers, slow ranks, events, configuration.

const WORK = ["forward", "backward", "gather", "reduce", "exchange", "update", "offload"];
const SPLIT = [...WORK, "checkpoint", "evaluation", "other"];
const STATES = ["parameters", "gradients", "master", "optimizer", "buckets", "gathered", "staging", "checkpoint"];
const STATE_TEXTS = {
  running: "It was running when this page was written.",
  ended: "The run has ended.",
  failed: "A rank has failed.",
  silent: "The run has not ended, and has written nothing for a while.",
  starting: "No step has been taken yet.",
};
const PLACES = { device: "Memory of the device", cpu: "CPU memory", nvme: "NVMe" };

function runColor(index) {
  return `var(--run-${index})`;
}

function series(run, name) {
  return run.points.series[name];
}

function withPrefix(prefix) {
  return [
    ...new Set(
      RUNS.flatMap((run) =>
        Object.keys(run.points.series)
          .filter((name) => name.startsWith(`${prefix}.`))
          .map((name) => name.slice(prefix.length + 1)),
      ),
    ),
  ];
}

// The lines of one number, one for each run that has it.
function linesOf(name, label, more = () => ({})) {
  return RUNS.map((run, index) => ({
    run,
    name: RUNS.length > 1 ? run.name : label,
    color: runColor(index),
    dashed: index > 0,
    values: series(run, name) || [],
    ...more(run),
  })).filter((line) => line.values.some((v) => v != null));
}

function has(name) {
  return RUNS.some((run) => (series(run, name) || []).some((v) => v != null));
}

// Losses that the user has logged, such as of held-out data, which only some steps have.
function loggedLosses() {
  return withPrefix("user").filter((name) => /loss/i.test(name));
}

function lineCard(title, note, name, format, more = {}) {
  const { band, controls, ...spec } = more;
  const chart = new Chart({ title, format, ...spec, lines: () => linesOf(name, title, band) });
  return card(title, note, false, controls, chart.element);
}

function lossCard() {
  let log = false;
  const band = (run) => ({ low: series(run, "loss.least"), high: series(run, "loss.most") });
  const redraw = (on) => {
    log = on;
    view.changed();
  };
  const lines = () => [
    ...linesOf("loss", "Loss", band),
    ...loggedLosses().flatMap((name, position) =>
      linesOf(`user.${name}`, name).map((line) => ({
        ...line,
        name: RUNS.length > 1 ? `${line.name}: ${name}` : name,
        color: RUNS.length > 1 ? line.color : `var(--extra-${position % 4})`,
        sparse: true,
      })),
    ),
  ];
  const chart = new Chart({ title: "Loss", format: formatNumber, log: () => log, height: 240, lines });
  return card("Loss", "mean over ranks and micro-steps", false, checkbox("log scale", redraw), chart.element);
}

function ratesCard() {
  const groups = withPrefix("lr");
  const lines = () =>
    groups.flatMap((group, position) =>
      linesOf(`lr.${group}`, groups.length > 1 ? `group ${group}` : "rate").map((line) => ({
        ...line,
        name: groups.length > 1 && RUNS.length > 1 ? `${line.name}, group ${group}` : line.name,
        color: position ? `var(--extra-${(position - 1) % 4})` : line.color,
      })),
    );
  return card(
    "Learning rate",
    null,
    false,
    new Chart({ title: "Learning rate", format: formatNumber, zero: true, exact: true, lines }).element,
  );
}

function smoothingChoice() {
  const sizes = { 1: "Points", 11: "Mean of 11", 51: "Mean of 51" };
  return choice("Smoothing of lines", sizes, "1", (points) => {
    view.smoothing = Number(points);
    view.changed();
  });
}

function splitCards() {
  let share = false;
  const names = [...SPLIT, ...withPrefix("split").filter((name) => !SPLIT.includes(name))].filter((name) =>
    has(`split.${name}`),
  );
  const charts = RUNS.map(
    (run) =>
      new Chart({
        title: `Where a step's time goes, ${run.name}`,
        run,
        scale: "split",
        stacked: true,
        legend: true,
        cut: true,
        height: 250,
        unit: "seconds",
        format: (v) => (share ? formatShare(v) : formatSeconds(v)),
        lines: () =>
          names
            .map((name) => ({
              run,
              name,
              color: `var(--split-${SPLIT.includes(name) ? name : "other"})`,
              values: (series(run, `split.${name}`) || []).map((v, i) => (share ? v / series(run, "seconds")[i] : v)),
            }))
            .filter((line) => line.values.some(Boolean)),
      }),
  );
  const redraw = (value) => {
    share = value === "share";
    view.changed();
  };
  return card(
    "Where a step's time goes",
    "mean over ranks",
    true,
    choice("Unit", { seconds: "Seconds", share: "Share" }, "seconds", redraw),
    perRun(charts),
  );
}

// One chart below another, each under the name of its run.
function perRun(charts) {
  return charts.map(
    (chart, index) =>
      chart && [RUNS.length > 1 && h("h3", { style: `color:${runColor(index)}` }, RUNS[index].name), chart.element],
  );
}

function memoryCards() {
  return Object.entries(PLACES).map(([place, title]) => {
    const states = [...STATES, ...withPrefix(`memory.${place}`).filter((name) => !STATES.includes(name))];
    const charts = RUNS.map((run) => {
      const lines = () =>
        states
          .map((name, i) => ({
            run,
            name,
            color: STATES.includes(name) ? `var(--state-${name})` : `var(--extra-${i % 4})`,
            values: series(run, `memory.${place}.${name}`) || [],
          }))
          .filter((line) => line.values.some(Boolean));
      return lines().length
        ? new Chart({
            title: `${title}, ${run.name}`,
            run,
            scale: place,
            stacked: true,
            legend: true,
            unit: "bytes",
            format: formatBytes,
            lines,
          })
        : null;
    });
    return charts.some(Boolean) && card(title, "most over ranks, by state", false, perRun(charts));
  });
}

function heatCards() {
  return RUNS.filter((run) => run.columns.ranks.rows.length).map((run, index) => {
    const kinds = Object.keys(DELAY_NAMES).filter((kind) => run.columns.ranks[kind]);
    const map = new HeatMap(run);
    const options = Object.fromEntries(kinds.map((kind) => [kind, DELAY_NAMES[kind]]));
    const pick = choice("Time", options, "own", (kind) => {
      map.kind = kind;
      map.draw();
    });
    return card(
      RUNS.length > 1 ? `Slow ranks: ${run.name}` : "Slow ranks",
      "time above that of the median rank",
      true,
      kinds.length > 1 && pick,
      map.element,
      map.delays,
    );
  });
}

function eventsCard() {
  const rows = RUNS.flatMap((run, index) => run.events.rows.map((event) => ({ ...event, run, index })));
  if (!rows.length) return null;
  rows.sort((a, b) => (a.time ?? 0) - (b.time ?? 0));
  const kinds = [...new Set(rows.map((event) => event.kind))],
    body = h("div");
  const draw = () => {
    const [low, high] = view.domain(),
      inRange = (e) => !view.range || (eventX(e) >= low && eventX(e) <= high);
    const shown = rows.filter((event) => !view.hiddenEvents.has(event.kind) && inRange(event));
    body.replaceChildren(
      table(
        [...(RUNS.length > 1 ? ["Run"] : []), "Step", "After", "Kind", "Event"],
        shown.map((event) => ({
          cells: [
            ...(RUNS.length > 1 ? [h("span", { style: `color:${runColor(event.index)}` }, event.run.name)] : []),
            event.step == null ? MISSING : formatStep(event.step),
            formatSeconds(event.time),
            h("span", { class: "kind" }, h("i", { style: `background:${eventColor(event.kind)}` }), event.kind),
            event.text,
          ],
        })),
        { label: "Events", stacked: true },
      ),
    );
  };
  const chips = h(
    "div",
    { class: "chips", role: "group", "aria-label": "Kinds of events" },
    kinds.map((kind) => {
      const count = RUNS.reduce((sum, run) => sum + (run.summary.num_events[kind] || 0), 0);
      return h(
        "button",
        {
          type: "button",
          "aria-pressed": "true",
          onclick: (e) => {
            const hide = !view.hiddenEvents.delete(kind);
            if (hide) view.hiddenEvents.add(kind);
            e.currentTarget.setAttribute("aria-pressed", String(!hide));
            view.changed();
          },
        },
        h("i", { style: `background:${eventColor(kind)}` }),
        `${kind} ${formatStep(count)}`,
      );
    }),
  );
  const hidden = RUNS.reduce((sum, run) => sum + run.events.hidden, 0);
  view.listeners.push(draw);
  return card("Events", hidden ? `${formatStep(hidden)} of the frequent ones are left out` : null, true, chips, body);
}

// Nested objects as rows; of two runs, the keys that differ come first.
function factsCard(title, part) {
  const flat = (tree, prefix, out) => {
    for (const [key, value] of Object.entries(tree || {}))
      if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length)
        flat(value, `${prefix}${key}.`, out);
      else out.set(prefix + key, value);
    return out;
  };
  const maps = RUNS.map((run) => flat(part(run.facts), "", new Map()));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  if (!keys.length) return null;
  const text = (key, value) => {
    if (value === undefined || value === null) return MISSING;
    if (key === "started" && typeof value === "number") return formatMoment(value);
    if (Number.isInteger(value) && Math.abs(value) >= 1e15) return formatNumber(value);
    return typeof value === "string"
      ? value
      : Number.isInteger(value)
        ? value.toLocaleString("en-US")
        : JSON.stringify(value);
  };
  const rows = keys.map((key) => ({ key, cells: [key, ...maps.map((map) => text(key, map.get(key)))] }));
  for (const row of rows) row.changed = new Set(row.cells.slice(1)).size > 1;
  const differing = rows.filter((row) => row.changed);
  const ordered = [...differing, ...rows.filter((row) => !row.changed)];
  const body = h("div", { class: "facts" }),
    draw = (word) =>
      body.replaceChildren(
        table(
          ["Key", ...RUNS.map((run) => (RUNS.length > 1 ? run.name : "Value"))],
          ordered.filter((row) => row.cells.join(" ").toLowerCase().includes(word.toLowerCase())),
          { label: title },
        ),
      );
  draw("");
  const search =
    rows.length > 12 &&
    h("input", {
      type: "search",
      placeholder: "Filter",
      "aria-label": `Filter ${title}`,
      oninput: (e) => draw(e.target.value),
    });
  const note = RUNS.length > 1 ? `${differing.length} of ${rows.length} differ` : null;
  return card(title, note, false, search, body);
}
