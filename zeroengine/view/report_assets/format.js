// Numbers for people, ticks for axes.

const MISSING = "–";

function digits(value, count = 3) {
  return Number(value.toPrecision(count)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}

function formatCount(value) {
  if (value == null) return MISSING;
  for (const [scale, unit] of [
    [1e15, " P"],
    [1e12, " T"],
    [1e9, " G"],
    [1e6, " M"],
    [1e3, " k"],
  ])
    if (Math.abs(value) >= scale) return digits(value / scale) + unit;
  return formatNumber(value);
}

function formatNumber(value) {
  if (value == null) return MISSING;
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? Number(value.toPrecision(3)).toExponential() : digits(value, 4);
}

function formatSeconds(value) {
  if (value == null) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return digits(value * 1e6) + " µs";
  if (size < 1) return digits(value * 1e3) + " ms";
  if (size < 60) return digits(value) + " s";
  const whole = Math.round(value);
  for (const [large, small, first, second] of [
    [86400, 3600, "d", "h"],
    [3600, 60, "h", "min"],
    [60, 1, "min", "s"],
  ])
    if (whole >= large) {
      const rest = Math.floor((whole % large) / small);
      return `${Math.floor(whole / large)} ${first}` + (rest ? ` ${rest} ${second}` : "");
    }
  return `${whole} s`;
}

function formatBytes(value) {
  if (value == null) return MISSING;
  for (const [power, unit] of [
    [50, "PiB"],
    [40, "TiB"],
    [30, "GiB"],
    [20, "MiB"],
    [10, "KiB"],
  ])
    if (Math.abs(value) >= 2 ** power) return `${digits(value / 2 ** power)} ${unit}`;
  return `${digits(value)} B`;
}

function formatShare(value) {
  return value == null ? MISSING : `${digits(value * 100)} %`;
}

function formatStep(value) {
  return Math.round(value).toLocaleString("en-US");
}

function formatMoment(unixSeconds) {
  return new Date(unixSeconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

// At most about `count` round numbers from low to high: round in powers of two for bytes, in minutes for long times.
function ticks(low, high, count, kind = "number") {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, count);
  let step;
  if (kind === "seconds" && raw > 10) {
    const sizes = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    step = sizes.find((size) => size >= raw) || Math.ceil(raw / 86400) * 86400;
  } else if (kind === "bytes" && raw >= 1) {
    const unit = 1024 ** Math.floor(Math.log(raw) / Math.log(1024));
    step = 2 ** Math.ceil(Math.log2(raw / unit)) * unit;
  } else {
    const power = 10 ** Math.floor(Math.log10(raw));
    step = [1, 2, 5, 10].find((size) => size * power >= raw * 0.999) * power;
    if (kind === "steps") step = Math.max(1, step);
  }
  const out = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++)
    out.push(index * step || 0);
  return out;
}

// Round numbers for an axis of logarithms; low and high are positive.
function logTicks(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const size of [1, 2, 5]) {
      const value = size * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) out.push(value);
    }
  return out.length > 1 ? out : [low, high];
}
