// Elements of the page. Text of a run only ever becomes text nodes, so it is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child != null && child !== false) element.append(child);
  return element;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function card(title, note, wide, ...children) {
  return h(
    "section",
    { class: wide ? "card wide" : "card" },
    h("h2", {}, title, note && h("small", {}, note)),
    children,
  );
}

// Buttons of which one is pressed.
function choice(label, options, chosen, onChoose) {
  const group = h("div", { class: "choice", role: "group", "aria-label": label });
  const buttons = Object.entries(options).map(([value, text]) =>
    h(
      "button",
      {
        type: "button",
        "data-value": value,
        "aria-pressed": String(value === chosen),
        onclick: () => {
          for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
          onChoose(value);
        },
      },
      text,
    ),
  );
  group.append(...buttons);
  return group;
}

function checkbox(label, onChange) {
  return h(
    "label",
    { class: "check" },
    h("input", { type: "checkbox", onchange: (e) => onChange(e.target.checked) }),
    label,
  );
}

// A stacked table has a block for each row on a phone.
function table(head, rows, attributes = {}) {
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes.label },
    h(
      "table",
      { class: attributes.stacked && "stacked" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((cell) => h("th", { scope: "col" }, cell)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(({ cells, changed }) =>
          h(
            "tr",
            { class: changed && "changed" },
            cells.map((cell, i) => h("td", { "data-label": head[i] }, cell)),
          ),
        ),
      ),
    ),
  );
}

const tip = {
  element: null,
  // At the right of a point, or above a chart that a finger covers.
  show(x, y, lines, above = null) {
    const box = (this.element ||= document.getElementById("tip"));
    box.replaceChildren(
      ...lines.map(([text, value, color, dashed]) =>
        h(
          "div",
          { class: value == null ? "tip-head" : "tip-row" },
          color && h("i", { class: dashed ? "dashed" : "", style: `background:${color};color:${color}` }),
          h("span", {}, text),
          value != null && h("b", {}, value),
        ),
      ),
    );
    box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = box;
    const left = x + 14 + width > innerWidth - 6 ? x - width - 14 : x + 14;
    box.style.left = `${Math.max(6, Math.min(left, innerWidth - width - 6))}px`;
    box.style.top = `${Math.max(6, above == null ? Math.min(y + 14, innerHeight - height - 6) : above - height)}px`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
  // For screen readers, after a key.
  say(lines) {
    document.getElementById("said").textContent = lines
      .map(([text, value]) => (value == null ? text : `${text} ${value}`))
      .join(", ");
  },
};

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function storedTheme() {
  try {
    const theme = localStorage.getItem("zero-view-theme");
    return theme in THEMES ? theme : "auto";
  } catch {
    return "auto";
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("zero-view-theme", theme);
  } catch {
    // Pages from a file may have no storage; the choice then lasts as long as the page.
  }
}
