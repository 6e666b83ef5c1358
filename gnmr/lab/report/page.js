"use strict";
const $ = id => document.getElementById(id);
addEventListener("error", event => fail(event.message));
addEventListener("unhandledrejection", event => fail(event.reason));
function fail(what) {
  $("failure").hidden = false;
  $("failure").textContent = `This page could not be drawn in full: ${what}`;
}
const DATA = JSON.parse($("data").textContent);
const MANY = 8;  // arms that one plot can show
const narrow = () => innerWidth < 700;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- elements and numbers ----

const maker = space => (name, attributes = {}, ...children) => {
  const node = document.createElementNS(`http://www.w3.org/${space}`, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
};
const el = maker("1999/xhtml"), svg = maker("2000/svg");
const whole = number => number.toLocaleString("en-US");
const percent = share => `${Number((100 * share).toPrecision(3))}%`;
function figures(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  return value === 0 ? "0" : size >= 1e4 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
function options(select, labels, chosen) {
  select.replaceChildren(...labels.map((label, place) => el("option", { value: place, selected: place === chosen ? "" : null }, label)));
}
function toggle(labels, chosen, act) {
  return el("span", { class: "toggle" }, ...labels.map((label, place) => el("button", { "aria-pressed": place === chosen, onclick: () => act(place) }, label)));
}
function originOf({ seeds, commits, machines, commands }) {
  return el("div", { class: "origin" }, `seed${seeds.length > 1 ? "s" : ""} ${seeds.join(", ")} · commit ${commits.join(", ")} · ${machines.join("; ")} · `, el("code", {}, commands.join("\n")));
}
const words = (name, cell) => cell.length > 60 ? "text long" : ["to blame", "units", "cause", "ended by"].includes(name) ? "text" : null;
function tableOf(title, columns, rows) {
  return el("div", {}, el("h3", {}, title), el("div", { class: "scroll" }, el("table", { class: "cards" }, el("thead", {}, el("tr", {}, ...columns.map(name => el("th", { class: words(name, "") }, name)))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map((cell, place) => el("td", { "data-name": columns[place], class: words(columns[place], cell) }, cell))))))));
}
function tip(event, title, pairs) {
  const box = $("tip");
  box.replaceChildren(el("b", {}, title), el("dl", {}, ...pairs.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect(), { clientX: x, clientY: y } = event;
  box.style.left = `${x + 18 + width > innerWidth ? Math.max(4, x - 18 - width) : x + 18}px`;
  box.style.top = `${Math.max(6, Math.min(y + 14, innerHeight - height - 6))}px`;
}

/** A click on a heading sorts its table: numbers by size, "-" last. */
function sortable(table) {
  const key = text => { const number = text.match(/^[+-]?[\d,]*\.?\d+(e[+-]?\d+)?/); return text === "-" ? null : number ? Number(number[0].replace(/,/g, "")) : text; };
  const heads = [...table.querySelectorAll("th")], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const keyed = [...body.rows].map(row => [key(row.cells[column].textContent), row]);
    keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null)
      : (up ? 1 : -1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
    body.append(...keyed.map(([, row]) => row));
  }));
}

// ---- plots ----

function ticks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most || 1)), step = [1, 2, 5, 10].find(factor => factor * power >= (high - low) / most) * power, places = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at++) places.push(Number((at * step).toPrecision(12)));
  return places;
}
/** Multiples of 1, 2 and 5 in every decade, or only powers of ten where there are many; of logarithms. */
function logTicks(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 4)), places = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++)
    if (power % every === 0) for (const part of high - low < 2.5 ? [1, 2, 5] : [1]) places.push(Math.log10(part) + power);
  const inside = places.filter(at => at >= low && at <= high);
  return inside.length > 1 ? inside : ticks(10 ** low, 10 ** high, 3).map(Math.log10);
}
let clips = 0;
/** An empty plot with its axis of steps. A drag zooms (`zoomed` gets the range), a double click zooms out. `over` and `click` get step, height (0 at the top, 1 at
    the bottom) and the event. */
function frame(host, { height, left = narrow() ? 56 : 62, top = 8, steps, whole: all, title = "", zoomed, over, click }) {
  const bottom = title === null ? 8 : title ? 42 : 24, width = Math.max(host.clientWidth, 200), w = width - left - 20, h = height - top - bottom, [first, last] = steps;
  const px = step => left + w * (step - first) / (last - first || 1), id = `clip${++clips}`;
  const inside = svg("g", { "clip-path": `url(#${id})` }), below = svg("g"), above = svg("g");
  const root = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, width, height }, svg("clipPath", { id }, svg("rect", { x: left, y: top, width: w, height: h })), below, inside,
    svg("path", { d: `M${left},${top}V${top + h}H${left + w}` }), above);
  if (title !== null) for (const at of ticks(first, last, narrow() ? 5 : 9).filter(Number.isInteger)) {
    below.append(svg("line", { class: "grid", x1: px(at), x2: px(at), y1: top, y2: top + h }), svg("line", { x1: px(at), x2: px(at), y1: top + h, y2: top + h + 4 }));
    above.append(svg("text", { x: px(at), y: top + h + 17, "text-anchor": "middle" }, whole(at)));
  }
  if (title) above.append(svg("text", { x: left + w / 2, y: height - 6, "text-anchor": "middle" }, title));
  const at = event => { const box = root.getBoundingClientRect(), scale = width / box.width; return [first + (last - first) * ((event.clientX - box.left) * scale - left) / w, ((event.clientY - box.top) * scale - top) / h]; };
  let began = null, moved = false, waiting = 0;
  const drag = svg("rect", { y: top, height: h, fill: "var(--band)", width: 0 });
  const pane = svg("rect", { class: "over", x: left, y: top, width: w, height: h,
    onpointerdown: event => { began = event.pointerType === "mouse" ? event : null; moved = false; },
    onpointermove: event => {
      if (began && Math.abs(event.clientX - began.clientX) > 8) {
        const ends = [at(began)[0], at(event)[0]].map(px).sort((a, b) => a - b);
        drag.setAttribute("x", ends[0]); drag.setAttribute("width", ends[1] - ends[0]); moved = true;
      } else if (over) over(...at(event), event);
    },
    onpointerup: event => { if (began && moved) zoomed([at(began)[0], at(event)[0]].sort((a, b) => a - b)); began = null; },
    onpointerleave: () => { $("tip").hidden = true; began = null; drag.setAttribute("width", 0); },
    onclick: event => { if (click && !moved && event.detail === 1) waiting = setTimeout(click, 250, ...at(event)); },  // unless a second click follows
    ondblclick: () => { clearTimeout(waiting); zoomed(all); } });
  root.append(drag, pane);
  host.replaceChildren(root);
  return { root, below, inside, above, px, left, top, w, h };
}
const known = values => values.filter(y => y !== null && Number.isFinite(y));
/** Lines over steps; `marks` are levels across, `bands` ranges of steps. `legend` has texts and their colours, above the plot, where no line runs through them. */
function chart(host, { lines, range, log = false, yTitle, heading, marks = [], bands = [], frames = [], legend = [], sparse = false, ...rest }) {
  const every = lines.flatMap(line => known(line.y)).concat(marks.map(mark => mark.y)), scale = y => log ? Math.log10(y) : y;
  let [low, high] = (range ?? [Math.min(...every), Math.max(...every)]).map(scale);
  if (!range) { const room = .06 * (high - low) || .05 * Math.abs(high) || .1; low -= room; high += room; }
  const nearest = (step, height, event) => {
    let best = null;
    for (const line of lines) line.x.forEach((x, place) => {
      if (line.y[place] === null) return;
      const apart = Math.hypot(plot.px(x) - plot.px(step), py(line.y[place]) - plot.top - height * plot.h);
      if (apart < (best?.apart ?? 40)) best = { apart, line, x, y: line.y[place] };
    });
    spot.setAttribute("r", best ? 3.5 : 0);
    if (!best) { $("tip").hidden = true; return; }
    for (const [key, value] of [["cx", plot.px(best.x)], ["cy", py(best.y)], ["fill", best.line.colour]]) spot.setAttribute(key, value);
    tip(event, best.line.name, [["step", figures(best.x)], [best.line.what ?? yTitle, figures(best.y)]]);
  };
  const plot = frame(host, { ...rest, top: heading || legend.length ? 26 : 8, over: nearest }), { below, inside, above, px, left, top, w, h } = plot, py = y => top + h * (high - scale(y)) / (high - low);
  const spot = svg("circle", { r: 0 });
  for (const at of log ? logTicks(low, high) : ticks(low, high, h < 150 ? 3 : 6)) {
    const y = top + h * (high - at) / (high - low);
    below.append(svg("line", { class: "grid", x1: left, x2: left + w, y1: y, y2: y }), svg("line", { x1: left - 4, x2: left, y1: y, y2: y }));
    above.append(svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, figures(log ? Number((10 ** at).toPrecision(3)) : at)));
  }
  if (yTitle) above.append(svg("text", { transform: `translate(12 ${top + h / 2}) rotate(-90)`, "text-anchor": "middle" }, yTitle));
  if (heading) above.append(svg("text", { x: left, y: 16, "font-weight": 650 }, heading));
  for (const [from, to] of bands) below.append(svg("rect", { x: px(Math.max(from, rest.steps[0])), width: Math.max(0, px(Math.min(to, rest.steps[1])) - px(Math.max(from, rest.steps[0]))), y: top, height: h, fill: "var(--band)" }));
  for (const [from, to] of frames) inside.append(svg("rect", { x: px(from), width: px(to) - px(from), y: top, height: h, fill: "none", stroke: "var(--ink)", "stroke-width": 1.4 }));
  for (const { y, colour = "var(--axis)", from = -Infinity, to = Infinity, dash = "5 4" } of marks) {
    inside.append(svg("line", { x1: px(Math.max(from, rest.steps[0])), x2: px(Math.min(to, rest.steps[1])), y1: py(y), y2: py(y), style: `stroke:${colour};stroke-width:1.3`, "stroke-dasharray": dash }));
  }
  for (const { x, y, colour, width = 1.3, dash = "", opacity = 1, points, name, cross } of lines) {
    let d = "", pen = "M";
    if (!sparse) x.forEach((step, place) => { const value = y[place]; if (value === null || !Number.isFinite(value) || log && value <= 0) { pen = "M"; return; } d += `${pen}${px(step).toFixed(1)},${py(value).toFixed(1)}`; pen = "L"; });
    inside.append(svg("path", { d, "data-name": name, style: `stroke:${colour};stroke-width:${width};opacity:${opacity}`, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
    const last = y.findLastIndex(value => value !== null);
    if (cross && last >= 0) inside.append(svg("path", { d: `M${px(x[last]) - 4},${py(y[last]) - 4}l8,8m0,-8l-8,8`, style: `stroke:${colour};stroke-width:1.8` }));
    if (points || sparse) x.forEach((step, place) => { if (y[place] !== null) inside.append(svg("circle", { cx: px(step), cy: py(y[place]), r: points && sparse ? 4 : 2.6, fill: colour, opacity })); });
  }
  if (legend.length) above.append(svg("text", { x: left + w, y: 16, "text-anchor": "end", "font-size": 11 }, ...legend.map(([text, colour]) => svg("tspan", { fill: colour, dx: 12 }, text))));
  above.append(spot);
}

// ---- losses ----

let current = 0, relativeChosen = null, hidden = new Set(), zooms = {};
function drawLoss() {
  const { arms, loss, tokens } = DATA[current], covered = new Set(loss.relative.map(line => line.arm)).size;
  const to = loss.references.length === 1 ? loss.references[0] : "16 bits", without = arms.length - covered - loss.references.length;
  const relative = Boolean(covered) && (relativeChosen ?? 2 * covered + 1 >= arms.length), every = relative ? loss.relative : loss.plain;
  const names = ["train", "val"].filter(name => every.some(line => line.of === name && known(line.y).length > (name === "val"))), many = arms.length > MANY;
  $("loss").hidden = !names.length;
  if (!names.length) return;
  $("loss-controls").replaceChildren(...covered ? [toggle([`minus ${to}`, "as it is"], relative ? 0 : 1, place => { relativeChosen = !place; zooms = {}; drawLoss(); })] : []);
  const missing = without > 0 ? ` ${without} arm${without === 1 ? " has" : "s have"} no such reference and ${without === 1 ? "is" : "are"} not shown.` : "";
  const what = relative ? `Difference to ${to} with the same seed: 0 is 16 bits, below is better.${missing}` : covered ? "" : "There is no 16-bit arm with the same seeds, so the losses are shown as they are.";
  $("loss-plots").replaceChildren(); $("loss-multiples").replaceChildren(); $("loss-legend").replaceChildren();
  if (many) {
    const of = names.includes("val") && every.some(line => line.of === "val" && line.x.length > 2) ? "val" : names[0];
    $("loss-lead").textContent = `${of === "val" ? "Validation" : "Training"} loss of each arm, nats per token. ${what} ${multiples(arms, every.filter(line => line.of === of), relative)}`;
    return;
  }
  $("loss-lead").textContent = `${what} Drag to zoom, double-click to zoom out; click an arm below to hide it, double-click to see it alone.`;
  const hosts = names.map(name => el("div", { id: `loss-${name}` }));
  $("loss-plots").append(...hosts);  // both before one is drawn: they share the width
  names.forEach((name, number) => {
    const mine = every.filter(line => line.of === name), shown = mine.filter(line => !hidden.has(line.arm));
    const means = mine.filter(line => line.seeds || !mine.some(other => other.arm === line.arm && other.seeds)), last = Math.max(...mine.flatMap(line => line.x)), first = Math.min(...mine.flatMap(line => line.x));
    // Two evaluations are points, since a line between them would look like a trend.
    const sparse = name === "val" && mine.every(line => line.x.length < 3), room = sparse ? .05 * (last - first) : 0, all = first < last ? [first - room, last + room] : [first - .5, last + .5];
    chart(hosts[number], { height: narrow() ? 280 : 370, sparse, steps: zooms[name] ?? all, whole: all, range: relative ? around(means) : under(mine), title: `step${tokens === "-" ? "" : ` (${tokens} tokens each)`}`,
      heading: name === "val" ? "Validation loss" : `Training loss${loss.width > 1 ? `, mean of ${loss.width} steps` : ""}`, yTitle: relative ? "difference [nats per token]" : "cross-entropy [nats per token]",
      marks: relative ? [{ y: 0, dash: "" }] : [], zoomed: steps => { zooms[name] = steps; drawLoss(); },
      lines: shown.filter(line => line.seeds || !shown.some(other => other.arm === line.arm && other.seeds === 1 && line.status === "done")).map(line => {
        const { colour, dash, short } = arms[line.arm], own = shown.some(other => other.arm === line.arm && other.seeds);
        return { ...line, colour, dash, what: "loss", name: `${short}, ${line.seeds ? `mean of ${line.seeds}` : `seed ${line.seed}${line.status === "done" ? "" : ` (${line.status === "running" ? "unfinished" : line.status})`}`}`,
                 width: line.seeds ? 2.2 : .8, opacity: line.seeds ? 1 : own ? .45 : .9, points: name === "val" && (line.seeds || !own), cross: !line.seeds && line.status !== "done" };
      }) });
  });
  const drawn = arms.map((_, place) => place).filter(place => every.some(line => line.arm === place));
  $("loss-legend").replaceChildren(...drawn.length < 2 ? [] : drawn.map(place => el("button", { "aria-pressed": !hidden.has(place), title: arms[place].label,
    onclick: () => { hidden.has(place) ? hidden.delete(place) : hidden.add(place); drawLoss(); },
    ondblclick: () => { const alone = drawn.every(other => hidden.has(other) === (other !== place)); hidden = new Set(alone ? [] : drawn.filter(other => other !== place)); drawLoss(); } },
    svg("svg", { width: 22, height: 8 }, svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: arms[place].colour, "stroke-width": 2.4, "stroke-dasharray": arms[place].dash })), arms[place].short)));
}
const sorted = lines => known(lines.flatMap(line => line.y)).sort((a, b) => a - b), at = (values, share) => values[Math.round(share * (values.length - 1))];
/** A range around 0 that a few steps at the start, or a run that diverged, do not stretch. */
function around(lines) {
  const values = sorted(lines), most = Math.max(0, at(values, .97)), low = Math.min(0, at(values, .01)), high = values.at(-1) > 2 * most ? most : Math.max(0, values.at(-1)), room = .12 * (high - low) || .01;
  return [low - room, high + room];
}
/** Up to the highest first value, or a last one within half above it: a run that diverged leaves the plot. */
function under(lines) {
  const low = sorted(lines)[0], ends = lines.map(line => known(line.y)).filter(values => values.length), first = Math.max(...ends.map(values => values[0]));
  const high = 1.03 * Math.max(first, ...ends.map(values => values.at(-1)).filter(last => last <= 1.5 * first));
  return low < high ? [low - .03 * (high - low), high] : [low - .5, low + .5];
}
/** A small panel for each arm, the lowest end first: its mean before the median of all. */
function multiples(arms, lines, relative) {
  const means = arms.map((arm, place) => ({ arm, line: lines.filter(line => line.arm === place).at(-1) })).filter(({ line }) => line && known(line.y).length), by = new Map();
  for (const { line } of means) line.x.forEach((x, place) => { if (line.y[place] !== null) by.set(x, [...by.get(x) ?? [], line.y[place]]); });
  const middle = [...by].sort(([a], [b]) => a - b).map(([x, values]) => [x, values.sort((a, b) => a - b)[values.length >> 1]]), end = line => line.y.findLast(y => y !== null);
  const [low, high] = relative ? around(means.map(({ line }) => line)) : under(means.map(({ line }) => line)), begin = middle[0][0], last = middle.at(-1)[0] - begin || 1;
  const py = y => 60 * (high - Math.max(low, Math.min(high, y))) / (high - low), path = points => "M" + points.map(([x, y]) => `${(100 * (x - begin) / last).toFixed(2)},${py(y).toFixed(2)}`).join("L");
  const line = (d, colour, width) => svg("path", { d, fill: "none", stroke: colour, "stroke-width": width, "vector-effect": "non-scaling-stroke" });
  $("loss-multiples").replaceChildren(...means.sort((a, b) => end(a.line) - end(b.line)).map(({ arm, line: own }) => el("figure", { title: arm.label },
    el("figcaption", {}, el("span", {}, arm.short), el("b", {}, (relative && end(own) > 0 ? "+" : "") + figures(end(own)))),
    svg("svg", { viewBox: "0 0 100 60", preserveAspectRatio: "none" }, ...relative ? [line(`M0,${py(0)}H100`, "var(--axis)", 1)] : [], line(path(middle), "var(--edge)", 2.5),
        line(path(own.x.map((x, place) => [x, own.y[place]]).filter(([, y]) => y !== null)), "var(--accent)", 1.6)))));
  return `Panels reach from ${figures(low)} to ${figures(high)}; grey is the median of all ${means.length}, the number the last value.`;
}

// ---- units ----

async function unpack({ type, data }) {
  const bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0)), stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new { uint16: Uint16Array, float32: Float32Array }[type](await new Response(stream).arrayBuffer());
}
/** A run's map with its arrays. */
async function opened(map) {
  map.open ??= (async () => {
    const values = await Promise.all(Object.entries(map.values).map(async ([name, column]) => [name, await unpack(column)]));
    const [step, active, recorded] = await Promise.all([map.step, map.active, map.recorded].map(unpack));
    return { ...map, step, active, recorded, values: Object.fromEntries(values) };
  })();
  return map.open;
}
const stepsOf = (m, bin) => [bin * m.width + 1, Math.min((bin + 1) * m.width, m.last)];
const briefly = name => narrow() ? name.replace(/^(model\.)?layers\./, "").replace(/\.(self_attn|attn|mlp)\./, ".").replace(/_proj$/, "").slice(0, 11) : name;
let shown = null, order = [], byCost = true, steps = null, openUnitNumber = null;

/** A picture of eight rows per unit: its risk, in two of them its time on the recovery path, and one that is blank, so that a strip belongs to one unit. */
function picture(m) {
  const canvas = el("canvas", { width: m.bins, height: 8 * order.length }), context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const rgb = name => css(name).match(/\w\w/g).map(part => parseInt(part, 16)), ramp = [0, 1, 2, 3, 4, 5].map(place => rgb(`--r${place}`)), recovery = rgb("--recovery"), unseen = rgb("--unseen");
  const colourOf = value => {
    if (Number.isNaN(value)) return [...unseen, 255];
    if (value <= m.limit) return [0, 0, 0, 0];
    const place = 5 * Math.min(1, Math.log2(value / m.limit) / 2), from = Math.min(4, Math.floor(place));
    return [...ramp[from].map((part, channel) => part + (place - from) * (ramp[from + 1][channel] - part)), 255];
  };
  order.forEach((unit, row) => {
    for (let bin = 0; bin < m.bins; bin++) {
      const cell = unit * m.bins + bin, colour = colourOf(m.values.risk[cell]), share = m.active[cell] / (m.recorded[bin] || 1), mix = .45 + .55 * share;
      const blue = recovery.map((part, channel) => colour[3] ? part * mix + colour[channel] * (1 - mix) : part);
      for (let line = 0; line < 7; line++) image.data.set(share && line > 4 ? [...blue, colour[3] ? 255 : 255 * mix] : colour, 4 * ((8 * row + line) * m.bins + bin));
    }
  });
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}
function drawMap(m) {
  shown = m;
  order = m.units.map((_, unit) => unit);
  if (byCost) order.sort((a, b) => m.cost[b] - m.cost[a] || a - b);
  const all = [.5, m.last + .5], units = order.length, number = [...m.recorded].map((recorded, bin) => recorded ? order.reduce((sum, unit) => sum + m.active[unit * m.bins + bin], 0) / recorded : 0);
  const peak = Math.max(...number), left = narrow() ? 62 : Math.min(220, 16 + 6.4 * Math.max(...m.units.map(name => name.length))), host = el("div"), strip = el("div");
  steps ??= all;
  const zoomed = range => { steps = [Math.max(all[0], range[0]), Math.min(all[1], range[1])]; drawMap(m); if (openUnitNumber !== null) drawUnit(m, openUnitNumber); };
  $("map").replaceChildren(...peak ? [strip] : [], host);
  if (peak) {
    const plot = frame(strip, { height: 66, left, top: 12, steps, whole: all, title: null, zoomed, over: (step, _, event) => { const bin = binAt(m, step); tip(event, `step ${whole(stepsOf(m, bin)[0])}`, [["units on the recovery path", figures(number[bin])]]); } });
    const py = value => plot.top + plot.h * (1 - value / peak);
    plot.inside.append(svg("path", { d: `M${plot.px(.5)},${py(0)}` + number.map((value, bin) => `L${plot.px(stepsOf(m, bin)[0] - .5).toFixed(1)},${py(value)}H${plot.px(stepsOf(m, bin)[1] + .5).toFixed(1)}`).join("") + `V${py(0)}Z`, style: "stroke:none;fill:var(--recovery)" }));
    plot.above.append(svg("text", { x: left - 7, y: py(0) + 2, "text-anchor": "end" }, "0"), svg("text", { x: left - 7, y: py(peak) + 6, "text-anchor": "end" }, figures(peak)));
    if (!narrow()) plot.above.append(svg("text", { x: left - 30, y: py(peak / 2) + 4, "text-anchor": "end", "font-size": 11 }, "in recovery"));
  }
  const rowAt = height => Math.max(0, Math.min(units - 1, Math.floor(height * units)));
  const plot = frame(host, { height: Math.max(220, Math.min(860, units * 17)) + 50, left, steps, whole: all, title: "step", zoomed,
    over: (step, height, event) => { const unit = order[rowAt(height)]; tip(event, m.units[unit], cellFacts(m, unit, binAt(m, step))); },
    click: (_, height) => { location.hash = ["unit", current, $("run").value, encodeURIComponent(m.units[order[rowAt(height)]])].join("/"); } });
  const py = row => plot.top + plot.h * row / units, end = m.bins * m.width + .5;
  plot.below.replaceChildren(...[...plot.below.children].filter(line => line.getAttribute("class") !== "grid"));
  plot.inside.append(svg("image", { href: picture(m), x: plot.px(.5), y: plot.top, width: plot.px(end) - plot.px(.5), height: plot.h, preserveAspectRatio: "none" }));
  for (const fault of m.faults.slice(0, 1000)) plot.inside.append(svg("rect", { class: "fault", x: plot.px(fault.start - .5), width: plot.px(fault.end + .5) - plot.px(fault.start - .5), y: py(order.indexOf(fault.unit)), height: plot.h / units, fill: "none", stroke: "var(--ink)", "stroke-width": 1.6 }));
  for (const [step] of m.verdicts) plot.inside.append(svg("line", { class: "spike", x1: plot.px(step), x2: plot.px(step), y1: plot.top, y2: plot.top + plot.h, style: "stroke:var(--ink);stroke-width:1.2", "stroke-dasharray": "2 3" }));
  const apart = Math.max(1, Math.ceil(units / (narrow() ? 40 : 60)));
  order.forEach((unit, row) => { if (row % apart === 0) plot.above.append(svg("text", { class: "unit-name", x: left - 7, y: py(row + .5) + 3.5, "text-anchor": "end", "font-size": narrow() ? 10 : 10.5 }, briefly(m.units[unit]))); });
  $("map-lead").textContent = `Every unit by step. A cell is blank below the ${m.limit_name}; the blue strip in a row is its time on the recovery path. ` +
    (byCost ? `The units with the highest mean ${m.cost_name} come first. ` : "") + "Hover over a cell for its values; click a row to open its unit.";
  $("map-order").replaceChildren(toggle([`by ${m.cost_name}`, "by place"], byCost ? 0 : 1, place => { byCost = !place; drawMap(m); }));
  $("risk-key").textContent = `risk: blank below the ${m.limit_name}, orange to red above it, strongest at 4x or more`;
  $("recovery-key").hidden = !peak; $("fault-key").hidden = !m.faults.length; $("verdict-key").hidden = !m.verdicts.length;
  $("verdicts").replaceChildren(...m.verdicts.length ? [tableOf("Blamed for spikes", ["step", "to blame", "units"], m.verdicts.map(([step, cause, names]) => [whole(step), cause, names || "-"]))] : []);
  $("map-notes").textContent = (m.values.risk.some(value => value > m.limit) ? "" : `No unit was ever above the ${m.limit_name}. `) + (m.routed && !peak ? "No unit was ever on the recovery path. " : "") +
    (m.width > 1 ? `A cell is ${m.width} steps; its colour and values are those of its step of highest risk.` : "");
  $("map-origin").replaceChildren(originOf(m.origin));
}
const binAt = (m, step) => Math.max(0, Math.min(m.bins - 1, Math.floor((step - .5) / m.width)));
/** What there is to say about a cell, as pairs of name and text. */
function cellFacts(m, unit, bin) {
  const cell = unit * m.bins + bin, [first, last] = stepsOf(m, bin), step = first + m.step[cell], active = m.active[cell], recorded = m.recorded[bin];
  const facts = [["step", m.width === 1 ? whole(step) : `${whole(step)} (highest risk of ${whole(first)}–${whole(last)})`]];
  for (const name in m.values) facts.push([name, figures(m.values[name][cell]) + (/^price/.test(name) && !Number.isNaN(m.values[name][cell]) ? " nats" : "")]);
  if (/^price/.test(m.cost_name)) facts.push([`${m.cost_name}, mean`, `${figures(m.cost[unit])} nats`]);
  facts.push(["on recovery path", recorded > 1 ? active ? `${active} of ${recorded} steps` : "no" : active ? "yes" : "no"]);
  const promoted = m.promotions.findLast(([of, from, to]) => of === unit && from <= last && to >= first);
  if (promoted) facts.push(["cause of promotion", promoted[3]]);
  for (const [at, cause, names] of m.verdicts) if (at >= first && at <= last) facts.push([`spike in step ${whole(at)}`, cause === "precision" && names.split(" ").includes(m.units[unit]) ? "precision: this unit" : cause]);
  for (const fault of m.faults) if (fault.unit === unit && fault.start <= last && fault.end >= first) facts.push(["fault injected", [fault.kind, fault.magnitude].filter(part => part !== null && part !== "").join(" ") || "yes"]);
  return facts;
}
function drawUnit(m, unit) {
  openUnitNumber = unit;
  const panel = $("unit"), row = flat => Array.from(flat.subarray(m.bins * unit, m.bins * (unit + 1))), risk = row(m.values.risk), active = row(m.active), x = row(m.step).map((offset, bin) => bin * m.width + 1 + offset);
  const promotions = m.promotions.filter(([of]) => of === unit), share = active.reduce((sum, steps) => sum + steps, 0) / m.recorded.reduce((sum, steps) => sum + steps, 0);
  const peak = risk.reduce((best, value, bin) => value > risk[best] || Number.isNaN(risk[best]) ? bin : best, 0), other = el("select", { onchange: event => { location.hash = ["unit", current, $("run").value, encodeURIComponent(m.units[event.target.value])].join("/"); } });
  options(other, m.units, unit);
  const columns = Object.keys(m.values).filter(name => name !== "norm" && name !== "risk"), tracks = [["gradient norm", ["norm"]], ...columns.length ? [[columns.length > 1 ? "signal and evidence" : columns[0], columns]] : [], ["risk", ["risk"]]];
  const hosts = tracks.map(() => el("div"));
  panel.replaceChildren(el("div", { class: "controls" }, el("h3", {}, m.units[unit]), el("label", {}, "unit ", other),
      el("button", { class: "close", "aria-label": "close", onclick: () => { history.replaceState(null, "", "#units"); close(); } }, "×")),
    el("p", { class: "lead" }, `${m.label}. On the recovery path in ${percent(share)} of the recorded steps, ${whole(promotions.length)} promotion${promotions.length === 1 ? "" : "s"}; highest risk ${figures(risk[peak])} ` +
      `at step ${whole(x[peak])}. Shaded: on the recovery path.${m.width > 1 ? ` A point is the step of highest risk in ${m.width} steps.` : ""}`), el("div", { id: "unit-plot" }, ...hosts));
  if (promotions.length) panel.append(tableOf(promotions.length > 1000 ? `Promotions, the first 1,000 of ${whole(promotions.length)}` : "Promotions", ["decided after step", "in force", "cause", "risk", "ended by"], promotions.slice(0, 1000).map(([, step, end, cause, by, value]) =>
    [whole(step), `${whole(cause === "retry" ? step : step + 1)}–${by ? whole(end) : "the end"}`, cause, figures(value), by ?? "-"])));  // a step that is tried again is itself in force
  panel.hidden = false;
  const bands = active.map((steps, bin) => steps ? [stepsOf(m, bin)[0] - .5, stepsOf(m, bin)[1] + .5] : null).filter(Boolean), frames = m.faults.filter(fault => fault.unit === unit).map(fault => [fault.start - .5, fault.end + .5]);
  tracks.forEach(([title, names], track) => {
    const lines = names.map((name, place) => ({ x, y: row(m.values[name]).map(value => Number.isFinite(value) ? value : null), name, what: "value", colour: title === "risk" ? "var(--sign)" : track ? `var(--c${place % 7})` : "var(--ink)" }));
    const levels = name => m.thresholds[name] ?? [], marks = names.flatMap((name, place) => levels(name).map(([from, y], stage, every) => ({ from: from - .5, to: every[stage + 1]?.[0] - .5 || Infinity, y, colour: lines[place].colour })));
    const legend = lines.filter(({ name }) => names.length > 1 || levels(name).length).map(({ name, colour }) => [levels(name).length ? `${name} (threshold ${levels(name).map(([, y]) => figures(y)).join(", then ")})` : name, colour]);
    if (title === "risk") { marks.push({ y: m.limit }); legend.push([`dashed: ${m.limit_name}`, "var(--faint)"]); }
    const values = lines.flatMap(line => known(line.y)), low = Math.min(...values);
    if (!values.length) return;
    chart(hosts[track], { height: track === tracks.length - 1 ? 190 : 150, lines, marks, bands, frames, legend, log: low > 0, yTitle: title, steps, whole: [.5, m.last + .5], title: track === tracks.length - 1 ? "step" : "", zoomed: range => { steps = range; drawMap(m); drawUnit(m, unit); } });
  });
  const infinite = x.filter((_, bin) => risk[bin] === Infinity);
  if (infinite.length) panel.querySelector(".lead").append(` The norm was not finite at step ${infinite.slice(0, 5).map(whole).join(", ")}${infinite.length > 5 ? ` and ${infinite.length - 5} more` : ""}.`);
}
function close() { $("unit").hidden = true; openUnitNumber = null; }
async function chooseRun(place) {
  close(); steps = null; $("run").value = place;
  drawMap(await opened(DATA[current].maps[place]));
}

// ---- the page ----

async function show(place) {
  current = place; hidden = new Set(); zooms = {};
  $("comparison").value = place;
  document.querySelectorAll(".of").forEach(part => { part.hidden = Number(part.dataset.of) !== place; });
  drawLoss();
  const { maps, best } = DATA[place], mine = maps.findIndex(map => map.arm === best);
  $("units").hidden = !maps.length;
  const first = Math.max(0, mine >= 0 ? mine : maps.findIndex(map => map.routed));
  options($("run"), maps.map(map => map.label), first);
  if (maps.length) await chooseRun(first);
}
/** The address says which unit is open, so that it can be kept and the browser's way back closes it. */
async function route() {
  const [what, comparison, run, name] = location.hash.slice(1).split("/"), map = what === "unit" ? DATA[comparison]?.maps[run] : null, unit = map ? map.units.indexOf(decodeURIComponent(name)) : -1;
  if (unit < 0) { if (!location.hash || what === "unit") close(); return; }
  if (Number(comparison) !== current) await show(Number(comparison));
  if ($("run").value !== run) await chooseRun(Number(run));
  drawUnit(await opened(map), unit);
  $("unit").scrollIntoView({ block: "nearest" });
}
function again() {
  drawLoss();
  if (shown && !$("units").hidden) drawMap(shown);
  if (openUnitNumber !== null) drawUnit(shown, openUnitNumber);
}
async function main() {
  document.querySelectorAll("table").forEach(sortable);
  $("comparison").addEventListener("change", event => show(Number(event.target.value)));
  $("run").addEventListener("change", event => chooseRun(Number(event.target.value)));
  await show(Number($("comparison").value));
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; again(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("hashchange", route);
  await route();
  document.body.dataset.ready = "yes";
}
main();
