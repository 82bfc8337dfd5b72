// Elements and amounts. Strings reach the page through textContent only.

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? '' : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

const SVG = 'http://www.w3.org/2000/svg';

// The square of a cause: its colour and its pattern, as swatch.py makes it.
function swatch(cause) {
  const made = document.createElementNS(SVG, 'svg');
  const shape = { width: 12, height: 12 };
  const add = (more) => {
    const rect = document.createElementNS(SVG, 'rect');
    for (const [key, value] of Object.entries({ ...shape, ...more })) rect.setAttribute(key, value);
    made.append(rect);
  };
  const whole = { ...shape, viewBox: '0 0 12 12', class: 'swatch', 'aria-hidden': 'true' };
  for (const [key, value] of Object.entries(whole)) made.setAttribute(key, value);
  add({ class: 'k-' + cause.family + ' tone' + cause.tone });
  if (document.getElementById('p-' + cause.family)) add({ fill: 'url(#p-' + cause.family + ')' });
  return made;
}

// As `units.human` writes nanoseconds.
function human(ns) {
  const s = Math.abs(ns) / 1e9;
  const sign = ns < 0 ? '-' : '';
  if (s >= 5400) return sign + (s / 3600).toFixed(1) + ' h';
  if (s >= 90) return sign + (s / 60).toFixed(1) + ' min';
  if (s >= 1) return sign + s.toFixed(2) + ' s';
  if (s >= 1e-3) return sign + (s * 1e3).toFixed(1) + ' ms';
  if (s >= 1e-6) return sign + (s * 1e6).toFixed(1) + ' \u00b5s';
  return sign + (s * 1e9).toFixed(0) + ' ns';
}

function percent(ratio) {
  return (100 * ratio).toFixed(1) + ' %';
}

// Run time as a clock: 0:07, 12:30, 1:02:05, with tenths where they are needed.
function clock(seconds, step) {
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  const whole = Number(Math.max(0, seconds).toFixed(digits));
  const h = Math.floor(whole / 3600);
  const m = Math.floor((whole % 3600) / 60);
  const s = (whole % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, '0');
  return h ? h + ':' + String(m).padStart(2, '0') + ':' + s : m + ':' + s;
}

const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];

function tickStep(span, most) {
  const least = span / Math.max(most, 1);
  const known = TICKS.find((step) => step >= least);
  if (least > 1 && known) return known;
  const power = Math.pow(10, Math.floor(Math.log10(least)));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least * 0.999999);
}

function plural(count, noun) {
  return count.toLocaleString('en-US') + ' ' + noun + (count === 1 ? '' : 's');
}
