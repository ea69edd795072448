// The page: figures at the top, the tools, and the cards in their order.

function figures() {
  const tiles = {
    Step: (s) => [
      s.progress.step == null ? MISSING : formatStep(s.progress.step),
      [
        s.progress.planned ? `of ${formatStep(s.progress.planned)}` : "",
        s.progress.skipped ? `${s.progress.skipped} skipped` : "",
        s.progress.repeated ? `${s.progress.repeated} taken again` : "",
      ]
        .filter(Boolean)
        .join(", "),
    ],
    Loss: (s) => [formatNumber(s.loss.last), s.loss.least == null ? "" : `least ${formatNumber(s.loss.least)}`],
    "Tokens per second": (s) => [
      formatCount(s.run.tokens_per_second),
      `newest steps ${formatCount(s.recent.tokens_per_second)}`,
    ],
    MFU: (s) => [formatShare(s.run.mfu), "of the peak rate"],
    "A step": (s) => [formatSeconds(s.run.seconds_per_step), `longest ${formatSeconds(s.run.longest_step_seconds)}`],
    "Exposed waits": (s) => {
      const wait = ["gather", "reduce", "exchange"].reduce((sum, kind) => sum + (s.run.split[kind] || 0), 0);
      return [
        s.run.seconds_per_step ? formatShare(wait / s.run.seconds_per_step) : MISSING,
        `${formatSeconds(wait)} a step`,
      ];
    },
    "Peak memory": (s) => [formatBytes(s.peak_memory), "of a rank"],
  };
  return h(
    "div",
    { class: "tiles" },
    Object.entries(tiles).map(([name, make]) => {
      const values = RUNS.map((run) => make(run.summary));
      return values.every(([value]) => value === MISSING)
        ? null
        : h(
            "div",
            { class: "tile" },
            h("span", {}, name),
            values.map(([value, note], index) =>
              h(
                "div",
                {},
                h("b", { style: RUNS.length > 1 && `color:${runColor(index)}` }, value),
                note && h("small", {}, note),
              ),
            ),
          );
    }),
  );
}

function head() {
  const title = RUNS.map((run, index) => {
    const { facts, summary } = run,
      model = facts.model || {};
    const words = [
      model.class,
      model.parameters && `${formatCount(model.parameters)} parameters`,
      facts.world_size && `${facts.world_size} rank${facts.world_size === 1 ? "" : "s"}`,
      facts.device,
      facts.started && formatMoment(facts.started),
      `${formatSeconds(summary.progress.seconds)} of steps`,
    ].filter(Boolean);
    const key = RUNS.length > 1 && h("em", { class: "run-key", style: `background:${runColor(index)}` }, "AB"[index]);
    return h(
      "div",
      { class: "run" },
      h(
        "h1",
        {},
        key,
        run.name,
        h("span", { class: `state ${summary.state}`, title: STATE_TEXTS[summary.state] }, summary.state),
      ),
      h("p", {}, words.join(" · ")),
      summary.notices.map((notice) => h("p", { class: "notice" }, notice)),
    );
  });
  const theme = choice("Colors", THEMES, storedTheme(), (value) => {
    setTheme(value);
    view.changed();
  });
  document
    .getElementById("head")
    .append(h("div", { class: "title" }, h("div", { class: "runs" }, title), theme), figures());
}

function tools() {
  const inputs = ["First", "Last"].map((name) =>
    h("input", {
      type: "number",
      "aria-label": `${name} of the range`,
      onchange: () => {
        const [low, high] = inputs.map((input, i) => (input.value === "" ? view.extent()[i] : Number(input.value)));
        view.setRange([low, high]);
      },
    }),
  );
  const all = h("button", { type: "button", onclick: () => view.setRange(null) }, "Show all");
  const unit = h("span"),
    note = h("small");
  const update = () => {
    const range = view.domain().map((v) => (view.axis === "step" ? Math.round(v) : Number(v.toPrecision(6))));
    inputs.forEach((input, i) => {
      input.value = range[i];
    });
    unit.textContent = view.axis === "step" ? "steps" : "seconds";
    all.disabled = !view.range;
    const most = Math.max(...RUNS.flatMap((run) => run.points.steps), 1);
    note.textContent = (most > 1 ? `A point is the mean of ${most} steps. ` : "") + "Drag over a chart to zoom.";
  };
  view.listeners.push(update);
  document.getElementById("tools").append(
    choice("Axis", { step: "Steps", time: "Time" }, "step", (axis) => view.setAxis(axis)),
    smoothingChoice(),
    h("span", { class: "range" }, unit, inputs[0], "to", inputs[1]),
    all,
    note,
  );
}

function main() {
  const body = document.getElementById("main"),
    facts = (run) => {
      const { config, versions, model, ...rest } = run;
      return { ...rest, model };
    };
  setTheme(storedTheme());
  head();
  tools();
  if (RUNS.some((run) => run.points.first.length)) {
    const number = (title, note, name, format, more) => has(name) && lineCard(title, note, name, format, more);
    body.append(
      ...[
        has("loss") && lossCard(),
        has("lr.0") && ratesCard(),
        withPrefix("split").length && splitCards(),
        RUNS.some((run) => run.columns.units.names.length) && new UnitBars().element,
        number("Tokens per second", "over all ranks", "tokens_per_second", formatCount, { zero: true }),
        memoryCards(),
        heatCards(),
        number("Gradient norm", "before clipping", "grad_norm", formatNumber),
        number("MFU", "share of the peak rate", "mfu", formatShare, { zero: true }),
        RUNS.some((run) => new Set(series(run, "loss_scale")).size > 1) &&
          number("Loss scale", null, "loss_scale", formatCount),
        withPrefix("user")
          .filter((name) => !loggedLosses().includes(name))
          .map((name) => number(name, "engine.log", `user.${name}`, formatNumber)),
      ]
        .flat()
        .filter(Boolean),
    );
  } else
    body.append(
      card("No steps yet", null, true, h("p", {}, "The run folder has no step so far. Write the page again later.")),
    );
  body.append(
    ...[
      eventsCard(),
      factsCard("Configuration", (f) => f.config),
      factsCard("Versions and machine", (f) => ({ ...f.versions, ...facts(f) })),
    ].filter(Boolean),
  );
  // A card beside a hole takes the whole row.
  const half = body.querySelectorAll(".card:not(.wide)"),
    charts = [...half].filter((one) => one.querySelector(".chart"));
  if (half.length % 2 && charts.length) charts.at(-1).classList.add("wide");
  view.changed();
  let width = innerWidth;
  addEventListener("resize", () => {
    // Phones change the height as the address bar comes and goes.
    if (innerWidth !== width) view.changed();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.changed());
}

main();
