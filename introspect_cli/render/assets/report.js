"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  // What the keyboard can reach has a name to be read aloud.
  const named = (box, name) => { box.tabIndex = 0; box.setAttribute("role", "group"); box.setAttribute("aria-label", name); };
  const data = JSON.parse($("data").textContent);
  const NS = "http://www.w3.org/2000/svg";

  // Values are zlib-compressed little-endian arrays in base64; of floats, the first bytes of all come first.
  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  function floats(bytes) {
    const count = bytes.length / 4, out = new Uint8Array(bytes.length);
    for (let byte = 0; byte < 4; byte++) for (let at = 0; at < count; at++) out[4 * at + byte] = bytes[byte * count + at];
    return new Float32Array(out.buffer);
  }

  // ---- small helpers

  function make(name, attributes, parent, text) {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }
  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
  const short = (value, digits = 5) => !known(value) ? (value === null || value === undefined || Number.isNaN(value) ? "" : String(value)) : String(Number(value.toPrecision(digits)));
  // A float32 is told in the fewest digits that read back as it.
  const single = (value) => Math.fround(value) !== value ? short(value, 9) : [1, 2, 3, 4, 5, 6, 7, 8, 9].map((digits) => short(value, digits)).find((text) => Math.fround(Number(text)) === value);
  const times = (value) => value >= 0.001 && value < 1000 ? short(value, 3) : value.toExponential(1).replace("e+", "e");
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  function rgb(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  }
  const paint = ([r, g, b]) => `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;
  function ramp(names, share) {
    const stops = names.map(rgb), place = share * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((own, at) => own + (stops[low + 1][at] - own) * (place - low));
  }
  const redraws = [];
  // Names without the root that all dotted ones share.
  function plainly(names) {
    const root = (names.find((own) => own.includes(".")) || ".").split(".")[0] + ".";
    const shared = names.every((own) => own.startsWith(root) || !own.includes("."));
    return (name) => shared && name.startsWith(root) ? name.slice(root.length) : name;
  }
  function nice(low, high, most) {
    const raw = (high - low) / Math.max(most, 1) || 1, power = 10 ** Math.floor(Math.log10(raw));
    const stride = [1, 2, 5, 10].map((own) => own * power).find((own) => own >= raw);
    const out = [];
    for (let at = Math.ceil(low / stride) * stride; at <= high + stride * 1e-9; at += stride) out.push(Number(at.toPrecision(12)));
    return out.length > 1 || most > 50 ? out : nice(low, high, 2 * most);
  }
  const tick = (own) => own && (Math.abs(own) >= 1e5 || Math.abs(own) < 1e-4) ? own.toExponential().replace("e+", "e") : short(own, 12);
  const wholeSteps = (low, high, most) => [...new Set(nice(low, high, most).map(Math.round))].filter((own) => own >= low && own <= high);

  // ---- one chart for all lines over steps

  // spec: { lines: [{name, xs, ys, colour, dash, width}], bands: [{ys, xs, colour, to}], log, height, marks: [{x, name}], label, read, floors: [{value, name}] }
  function chart(target, spec) {
    const box = $(target) || target;
    let picked = null;
    function draw() {
      const width = Math.max(box.clientWidth, 240), height = spec.height || 200;
      const values = spec.lines.flatMap((line) => Array.from(line.ys)).filter((own) => known(own) && (!spec.log || own > 0));
      const xs = spec.lines.flatMap((line) => [line.xs[0], line.xs[line.xs.length - 1]]).filter(known);
      box.replaceChildren();
      const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, box);
      make("title", {}, svg, spec.label);
      if (!values.length) { make("text", { x: 8, y: 20 }, svg, "Nothing here can be drawn."); return; }
      let [low, high] = values.reduce(([least, most], own) => [Math.min(least, own), Math.max(most, own)], [Infinity, -Infinity]);
      for (const floor of spec.floors || []) if (spec.log) { low = Math.min(low, floor.value / 2); }
      const scale = spec.log ? Math.log10 : (own) => own;
      let [bottom, top] = [scale(low), scale(high)];
      if (top - bottom < 1e-12 * Math.max(Math.abs(top), 1)) { const pad = spec.log ? 1 : Math.abs(top) * 0.1 || 1; bottom -= pad; top += pad; }
      else { const pad = (top - bottom) * 0.05; bottom -= pad; top += pad; }
      const decades = spec.log && Math.floor(top) > Math.ceil(bottom);
      const ticks = decades ? nice(Math.ceil(bottom), Math.floor(top), Math.max(2, height / 38)).filter(Number.isInteger).map((own) => Number(`1e${own}`))
        : nice(spec.log ? 10 ** bottom : bottom, spec.log ? 10 ** top : top, Math.max(2, height / 45)).filter((own) => own > 0 || !spec.log);
      const named = ticks.map(tick);
      const left = 12 + 6.4 * Math.max(...named.map((own) => own.length), 3), right = width - 10, head = spec.marks && spec.marks.length ? 18 : 8, foot = height - 22;
      const [first, last] = [Math.min(...xs), Math.max(...xs)];
      const px = (x) => last > first ? left + (x - first) / (last - first) * (right - left) : (left + right) / 2;
      const py = (y) => foot - (scale(y) - bottom) / (top - bottom) * (foot - head);
      ticks.forEach((own, at) => {
        const y = py(own);
        make("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }, svg);
        make("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, svg, named[at]);
      });
      for (const own of wholeSteps(first, last, Math.max(2, (right - left) / 90))) make("text", { x: px(own), y: height - 6, "text-anchor": "middle" }, svg, own);
      make("text", { x: left - 6, y: height - 6, "text-anchor": "end" }, svg, "step");
      for (const floor of spec.floors || []) {
        const y = Math.min(py(floor.value), foot);
        make("rect", { x: left, y, width: right - left, height: Math.max(foot - y, 0), fill: "var(--quiet)", opacity: 0.09 }, svg);
        make("text", { x: right - 4, y: y - 3, "text-anchor": "end" }, svg, floor.name);
      }
      const lonely = []; // a value with none before or after it is no line, but a dot
      const path = (line) => {
        let text = "", pen = false;
        for (let at = 0; at < line.xs.length; at++) {
          const value = line.ys[at];
          if (!known(value) || (spec.log && !(value > 0))) { pen = false; continue; }
          if (!pen && !known(line.ys[at + 1])) { lonely.push([line, px(line.xs[at]).toFixed(1), py(value).toFixed(1)]); continue; }
          text += `${pen ? "L" : "M"}${px(line.xs[at]).toFixed(1)} ${py(value).toFixed(1)}`;
          pen = true;
        }
        return text;
      };
      for (const band of spec.bands || []) {
        const seen = [...band.xs.keys()].filter((at) => known(band.high[at]) && (!spec.log || band.high[at] > 0));
        if (!seen.length) continue;
        const above = seen.map((at) => `${px(band.xs[at]).toFixed(1)} ${py(band.high[at]).toFixed(1)}`);
        const below = seen.map((at) => `${px(band.xs[at]).toFixed(1)} ${(band.low ? Math.min(py(band.low[at]), foot) : foot).toFixed(1)}`).reverse();
        make("path", { d: `M${above.join("L")}L${below.join("L")}Z`, style: "fill:var(--noise)", opacity: 0.3 }, svg).append(make("title", {}, null, band.name));
      }
      for (const line of spec.lines) make("path", { d: path(line), style: `stroke:${line.colour}`, "stroke-width": line.width || 2, "stroke-dasharray": line.dash || "none", opacity: line.opacity || 1 }, svg);
      for (const mark of spec.marks || []) {
        if (mark.x < first || mark.x > last) continue;
        const x = px(mark.x), end = x > width * 0.6;
        make("line", { class: "mark", x1: x, x2: x, y1: head - 4, y2: foot }, svg);
        make("text", { class: "markname", x: x + (end ? -5 : 5), y: 11, "text-anchor": end ? "end" : "start" }, svg, mark.name);
      }
      for (const [line, cx, cy] of lonely) make("circle", { cx, cy, r: 3, style: `fill:${line.colour}`, opacity: line.opacity || 1 }, svg);
      const pick = make("line", { class: "pick", y1: head, y2: foot, visibility: "hidden" }, svg);
      box.showAt = (x, y) => {
        picked = x;
        pick.setAttribute("x1", px(x)); pick.setAttribute("x2", px(x)); pick.setAttribute("visibility", "visible");
        if (spec.read) $(spec.read).textContent = spec.told(x, y);
      };
      box.stepAt = (clientX, clientY) => {
        const area = svg.getBoundingClientRect(), shown = area.width / width;
        const x = first + ((clientX - area.left) / shown - left) / (right - left) * (last - first);
        const value = bottom + (foot - (clientY - area.top) / shown) / (foot - head) * (top - bottom);
        return [x, spec.log ? 10 ** value : value];
      };
      if (picked !== null) box.showAt(picked);
      else if (first === last) box.showAt(first); // one step is all there is to read
    }
    box.spec = spec;
    if (!box.wired) {
      box.wired = true;
      const all = () => [...new Set(box.spec.lines.flatMap((line) => Array.from(line.xs)))].sort((one, two) => one - two);
      const nearest = (x) => all().reduce((best, own) => Math.abs(own - x) < Math.abs(best - x) ? own : best, Infinity);
      box.addEventListener("pointermove", (event) => { if (box.stepAt && box.spec.read) { const [x, y] = box.stepAt(event.clientX, event.clientY); box.showAt(nearest(x), y); } });
      box.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key], steps = all();
        if (!move && event.key !== "Home") return;
        event.preventDefault();
        const at = box.at === undefined || event.key === "Home" ? 0 : Math.max(0, Math.min(steps.length - 1, box.at + move));
        box.at = at;
        box.showAt(steps[at]);
      });
      redraws.push(() => box.redraw());
    }
    box.redraw = draw;
    draw();
  }
  const valueAt = (line, x) => { const at = Array.prototype.indexOf.call(line.xs, x); return at < 0 ? undefined : line.ys[at]; };
  const sided = (lines) => (x) => `step ${x}: ` + lines.map((line) => `${data.two ? `${line.name} ` : ""}${single(valueAt(line, x)) || "not finite, or none"}`).join(", ");
  const marks = data.first === null ? [] : [{ x: data.first, name: `first divergence: step ${data.first}` }];

  // ---- loss and other curves

  function twoLines(pair) {
    return pair.flatMap((own, run) => own ? [{ name: "ab"[run], xs: own[0], ys: own[1], colour: `var(--${"ab"[run]})`, dash: run ? "5 3" : "", width: run ? 1.8 : 2.2 }] : []);
  }
  const curves = data.curves.slice(), loss = curves.findIndex((own) => own.kind === "loss");
  const sick = (pair) => pair.flatMap((own, run) => { const at = own ? own[1].findIndex((value) => value === null) : -1; return at < 0 ? [] : [{ x: own[0][at], name: `${data.two ? `${"ab"[run]} ` : ""}not finite from step ${own[0][at]}` }]; });
  if (loss >= 0) {
    const [own] = curves.splice(loss, 1), lines = twoLines(own.lines);
    $("loss-name").textContent = own.name[0].toUpperCase() + own.name.slice(1);
    const bad = sick(own.lines);
    chart("loss-plot", { lines, height: 190, marks: [...marks, ...(marks.length ? [] : bad)], label: `${own.name} over the steps`, read: "loss-read", told: sided(lines) });
    if (bad.length) { $("loss-read").textContent = bad.map((mark) => mark.name).join("; "); $("loss-read").classList.add("bad"); }
  }
  const small = curves.slice(0, 6).map((own, at) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), plot = document.createElement("div"), read = document.createElement("p");
    caption.textContent = own.name;
    plot.className = "plot"; named(plot, `${own.name} over the steps`);
    read.className = "read"; read.id = `curve-${at}`;
    figure.append(caption, plot, read);
    $("curves").append(figure);
    return [own, plot, read];
  });
  small.forEach(([own, plot, read]) => { // when all have found their width
    const lines = twoLines(own.lines);
    const ys = lines.flatMap((line) => line.ys).filter(known);
    chart(plot, { lines, height: 130, log: ys.length && Math.min(...ys) > 0 && Math.max(...ys) > 100 * Math.min(...ys), label: own.name, read: read.id, told: sided(lines) });
  });

  // ---- the map and the lines above it

  const map = data.map, levels = map ? await inflate(map.levels) : null;
  const HEAT = ["h0", "h1", "h2", "h3", "h4"];
  const distanceOf = (level) => level < 3 || level > 253 ? NaN : 10 ** (map.low + (level - 3) / 250 * (map.high - map.low));
  const meaning = (level) => level === 0 ? "not compared" : level === 1 ? "equal" : level === 2 ? "forward pass equal, tensors or gradients differ" : level === 255 ? "in one run only" : level === 254 ? "differs, by an unknown distance (not finite, or no sketch)" : `relative distance about ${distanceOf(level).toExponential(0)}`;

  function distances() {
    const width = map.steps.length, height = map.names.length, origin = map.origin ? map.origin[0] : -1;
    const fold = Math.max(1, Math.ceil(width * height / 120000)), lines = [];
    const xs = []; for (let at = 0; at < width; at += fold) xs.push(map.steps[Math.min(width, at + fold) - 1]); // never before what it shows
    for (let row = 0; row < height; row++) {
      const ys = xs.map((_, at) => { let most = NaN; for (let own = at * fold; own < Math.min(width, (at + 1) * fold); own++) { const value = distanceOf(levels[row * width + own]); if (!(value <= most)) most = value; } return most; });
      if (!ys.some(known)) continue;
      const share = height > 1 ? row / (height - 1) : 0;
      lines.push({ name: map.names[row], row, xs, ys, share, width: row === origin ? 3.2 : 1.1, opacity: row === origin ? 1 : height > 80 ? 0.45 : 0.75 });
    }
    lines.sort((one, two) => (one.row === origin) - (two.row === origin));
    const floors = data.rounding.map(([name, value]) => ({ value, name: `rounding of ${name}` })).filter((own) => own.value < 10 ** map.high);
    const spec = {
      lines, log: true, height: 300, marks, floors, label: "relative distance of every module over the steps", read: "distances-read",
      bands: map.noise.some((own) => own > 0) ? [{ name: "noise runs", xs: map.steps, high: map.noise }] : [],
      told: (x, y) => {
        const there = lines.map((line) => [valueAt(line, x), line.name]).filter(([value]) => known(value)).sort((one, two) => two[0] - one[0]);
        if (!there.length) return `step ${x}: no distance`;
        const near = y > 0 ? there.reduce((best, own) => Math.abs(Math.log(own[0] / y)) < Math.abs(Math.log(best[0] / y)) ? own : best) : there[0];
        return `step ${x}: ${near[1]} about ${times(near[0])}; largest ${there[0][1]}, about ${times(there[0][0])}; ${there.length} of ${height} modules differ measurably`;
      },
    };
    redraws.push(colour);
    function colour() { for (const line of lines) line.colour = line.row === origin ? "var(--bad)" : paint(ramp(["early", "late"], line.share)); }
    colour();
    if (lines.length) chart("distances-plot", spec);
    else $("distances").hidden = true;
  }

  // What the runs recorded, at the steps that are kept; checksums decide what differs.
  const kept = data.steps, values32 = floats(await inflate(data.values)), states = await inflate(data.states);
  const STATES = ["", "equal", "differs", "only in a", "only in b"];
  const stateAt = (site, at) => states.length ? states[site * kept.length + at] : 0;
  function series(site, stat, run) {
    const entry = (data.series[site][stat] || [])[run], points = kept.length;
    if (entry === undefined || entry === -1) return null;
    if (Array.isArray(entry)) return new Float64Array(points).fill(entry[0] === null ? NaN : Number(entry[0]));
    return values32.subarray(entry * points, (entry + 1) * points);
  }
  function statistic(site, stat, run) {
    if (stat !== "l2") return series(site, stat, run);
    const mean = series(site, "mean", run), std = series(site, "std", run), bad = series(site, "bad", run), size = data.sites[site][8];
    return mean && std ? Float64Array.from(mean, (value, at) => Math.sqrt((value * value + std[at] * std[at]) * size * (1 - (bad && bad[at] || 0)))) : null;
  }

  const label = ([phase, kind, fqn, call, path]) => `${kind === fqn ? kind : `${kind} ${fqn}`}${path && path[0] !== "[" ? " " : ""}${path}${call ? ` call ${call}` : ""}${["start", "eval", "recompute"].includes(phase) ? ` (${phase})` : ""}`;
  const labels = data.sites.map(label);
  const ownerOf = ([, kind, fqn]) => ["param", "buffer", "grad", "optimizer_state"].includes(kind) ? fqn.slice(0, Math.max(fqn.lastIndexOf("."), 0)) || fqn : kind === "rng" ? `random state: ${fqn}` : fqn;
  const byModule = new Map();
  data.sites.forEach((site, at) => {
    const owner = ownerOf(site);
    if (!byModule.has(owner)) byModule.set(owner, []);
    byModule.get(owner).push(at);
  });

  function tableOf(caption, head, body) {
    const table = document.createElement("table");
    table.createCaption().textContent = caption;
    const top = table.createTHead().insertRow();
    for (const text of head) { const th = document.createElement("th"); th.scope = "col"; th.textContent = text; top.append(th); }
    const rest = table.createTBody();
    for (const { cells, differs } of body) {
      const row = rest.insertRow();
      if (differs) row.className = "differs";
      cells.forEach((text, at) => {
        const td = document.createElement(at ? "td" : "th");
        if (!at) td.scope = "row";
        td.textContent = text;
        row.append(td);
      });
    }
    const box = document.createElement("div");
    box.className = "scroll"; named(box, caption);
    box.append(table);
    return box;
  }

  let cell = null;
  const CELL = { high: 17, name: 0, wide: 4, axis: 24 };

  function drawMap() {
    const box = $("map-box"), canvas = $("map-canvas"), width = map.steps.length, height = map.names.length;
    const pen = canvas.getContext("2d"), dense = devicePixelRatio || 1;
    const plain = plainly(map.names);
    pen.font = "11px ui-monospace, Menlo, Consolas, monospace";
    const wide = box.clientWidth;
    CELL.name = Math.min(Math.ceil(Math.max(...map.names.map((own) => pen.measureText(plain(own)).width))) + 16, Math.floor(wide * 0.6));
    CELL.wide = Math.max(wide < 600 ? 5 : 4, Math.min((wide - CELL.name - 2) / width, 60));
    const full = CELL.name + CELL.wide * width, tall = CELL.axis + CELL.high * height;
    const shown = Math.min(tall, parseFloat(getComputedStyle(box).maxHeight) || tall);
    canvas.width = wide * dense; canvas.height = shown * dense;
    canvas.style.width = `${wide}px`; canvas.style.height = `${shown}px`;
    $("map-space").style.cssText = `width:${full}px;height:${tall}px;margin-top:-${shown}px`;
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    const colours = [paint(rgb("un")), paint(rgb("eq")), ""], behind = rgb("a"), pale = rgb("eq");
    colours[2] = paint(pale.map((own, at) => own + (behind[at] - own) * 0.22));
    for (let level = 3; level < 254; level++) colours.push(paint(ramp(HEAT, (level - 3) / 250)));
    colours.push(paint(rgb("far")), paint(rgb("one")));
    const back = paint(rgb("back")), front = paint(rgb("front")), quiet = paint(rgb("quiet")), bad = paint(rgb("bad"));
    pen.fillStyle = back; pen.fillRect(0, 0, wide, shown);
    const dx = box.scrollLeft, dy = box.scrollTop, top = CELL.axis;
    const firstRow = Math.floor(dy / CELL.high), lastRow = Math.min(height, Math.ceil((dy + shown) / CELL.high));
    const firstColumn = Math.max(0, Math.floor(dx / CELL.wide)), lastColumn = Math.min(width, Math.ceil((dx + wide - CELL.name) / CELL.wide));
    const x = (column) => CELL.name + column * CELL.wide - dx, y = (row) => top + row * CELL.high - dy;
    for (let row = firstRow; row < lastRow; row++) for (let column = firstColumn; column < lastColumn; column++) {
      pen.fillStyle = colours[levels[row * width + column]];
      pen.fillRect(x(column), y(row), CELL.wide + (CELL.wide < 8 ? 0.6 : -1), CELL.high - 1);
    }
    const frame = (at, colour, thick) => { pen.strokeStyle = colour; pen.lineWidth = thick; pen.strokeRect(x(at[1]) - 0.5, y(at[0]) - 0.5, Math.max(CELL.wide, 5), CELL.high); };
    if (map.origin) { frame(map.origin, back, 5); frame(map.origin, bad, 2.5); }
    if (cell && !(map.origin && cell[0] === map.origin[0] && cell[1] === map.origin[1])) { frame(cell, back, 4); frame(cell, front, 1.8); }
    pen.fillStyle = back; pen.fillRect(0, 0, wide, top); pen.fillRect(0, 0, CELL.name, shown);
    pen.textBaseline = "middle";
    pen.save(); pen.beginPath(); pen.rect(0, top, CELL.name, shown - top); pen.clip();
    for (let row = firstRow; row < lastRow; row++) {
      const isOrigin = map.origin && map.origin[0] === row;
      pen.fillStyle = isOrigin ? bad : quiet;
      pen.font = `${isOrigin ? "bold " : ""}11px ui-monospace, Menlo, Consolas, monospace`;
      let name = plain(map.names[row]);
      if (pen.measureText(name).width > CELL.name - 12) { while (pen.measureText("\u2026" + name).width > CELL.name - 12) name = name.slice(1); name = "\u2026" + name; }
      pen.fillText(name, 8, y(row) + CELL.high / 2);
    }
    pen.restore();
    pen.save(); pen.beginPath(); pen.rect(CELL.name - 4, 0, wide - CELL.name + 4, top); pen.clip();
    pen.font = "11px system-ui, sans-serif"; pen.fillStyle = quiet; pen.textAlign = "center";
    const stride = Math.max(1, nice(0, width, Math.max(2, (CELL.wide * width) / 80))[1] || 1);
    const middle = (column) => x(column) + CELL.wide / 2, mark = map.origin && `\u25bc${data.first}`;
    const clear = (text, at) => !mark || Math.abs(at - middle(map.origin[1])) > (pen.measureText(text).width + pen.measureText(mark).width) / 2 + 8;
    for (let column = 0; column < width; column += stride) {
      const place = Math.round(column);
      if (place < width && clear(map.steps[place], middle(place))) pen.fillText(map.steps[place], middle(place), top / 2);
    }
    if (mark) { pen.fillStyle = bad; pen.font = "bold 11px system-ui, sans-serif"; pen.fillText(mark, middle(map.origin[1]), top / 2); }
    pen.restore();
    pen.fillStyle = quiet; pen.font = "11px system-ui, sans-serif"; pen.textAlign = "end"; pen.fillText("step", CELL.name - 10, top / 2); pen.textAlign = "start";
  }

  function legend() {
    const list = $("map-legend");
    list.replaceChildren();
    const item = (style, text) => { const own = document.createElement("span"), swatch = document.createElement("i"); swatch.className = "swatch"; swatch.style.background = style; own.append(swatch, text); list.append(own); };
    item("var(--eq)", "equal");
    if (levels.includes(0)) item("var(--un)", "not compared");
    if (levels.includes(2)) item("color-mix(in srgb, var(--eq), var(--a) 22%)", "forward pass equal, tensors or gradients differ");
    if (levels.some((own) => own > 2 && own < 254)) {
      const own = document.createElement("span"), bar = document.createElement("i");
      bar.className = "ramp";
      bar.style.background = `linear-gradient(to right, ${HEAT.map((name) => `var(--${name})`).join(",")})`;
      own.append(`relative L2 1e${map.low} and less`, bar, `${map.high > 0 ? 10 ** map.high : map.high === 0 ? 1 : `1e${map.high}`}`);
      list.append(own);
    }
    if (levels.includes(254)) item("var(--far)", "differs, distance unknown (NaN, Inf)");
    if (levels.includes(255)) item("var(--one)", "in one run only");
  }

  function openCell(row, column, quietly) {
    row = Math.max(0, Math.min(map.names.length - 1, row));
    column = Math.max(0, Math.min(map.steps.length - 1, column));
    cell = [row, column];
    const name = map.names[row], from = map.steps[column], until = map.steps[column + 1];
    const span = until !== undefined && until - from > 1 ? `steps ${from} to ${until - 1}` : `step ${from}`;
    $("map-cell").textContent = `${name}, ${span}: ${meaning(levels[row * map.steps.length + column])}`;
    const inside = (step) => step >= from && (until === undefined || step < until);
    const listed = data.divergences.filter((own) => inside(own.step) && ownerOf(own.site) === name).map((own) => {
      const side = (one, key) => one ? (key === "checksum" ? one.text || one.checksum : short(one.stats[key])) : "not there";
      return { differs: true, cells: [`step ${own.step}: ${label(own.site)}`, own.role, own.rel === null ? "" : times(own.rel), side(own.a, "checksum"), side(own.b, "checksum"), side(own.a, "mean"), side(own.b, "mean"), side(own.a, "std"), side(own.b, "std")] };
    });
    const body = [], absent = new Set();
    for (const site of byModule.get(name) || []) {
      const at = kept.findIndex(inside);
      if (at < 0) { absent.add(site); continue; }
      const state = stateAt(site, at), runs = data.two ? [0, 1] : [0];
      const numbers = ["mean", "std", "absmax"].flatMap((stat) => runs.map((run) => { const values = series(site, stat, run); return values ? single(values[at]) : ""; }));
      if (state || numbers.some(Boolean)) body.push({ differs: state > 1, cells: [labels[site], String(kept[at]), STATES[state], ...numbers] });
    }
    const shown = [];
    if (listed.length) shown.push(tableOf("Divergences listed", ["record", "role", "rel. L2", "a", "b", "mean a", "mean b", "std a", "std b"], listed));
    if (body.length) shown.push(tableOf("Records, as their checksums compare", ["record", "step", "", "mean a", "mean b", "std a", "std b", "largest a", "largest b"], body.slice(0, 200)));
    if (absent.size) { const note = document.createElement("p"); note.className = "quiet"; note.textContent = `${absent.size} records of this step are not in the page: introspect show step ${from} prints them.`; shown.push(note); }
    $("map-records").replaceChildren(...shown);
    const box = $("map-box"), x = column * CELL.wide, y = row * CELL.high;
    if (!quietly) {
      if (x < box.scrollLeft) box.scrollLeft = x; else if (x + CELL.wide + CELL.name > box.scrollLeft + box.clientWidth) box.scrollLeft = x + CELL.wide + CELL.name - box.clientWidth;
      if (y < box.scrollTop) box.scrollTop = y; else if (y + CELL.high + CELL.axis > box.scrollTop + box.clientHeight) box.scrollTop = y + CELL.high + CELL.axis - box.clientHeight;
    }
    drawMap();
    const site = (byModule.get(name) || [])[0];
    if (site !== undefined) choose(site);
  }

  function firstCell() {
    if (map.origin) return map.origin;
    const width = map.steps.length;
    for (let column = 0; column < width; column++) for (let row = 0; row < map.names.length; row++) if (levels[row * width + column] > 1) return [row, column];
    return [0, 0];
  }

  // ---- histories

  const TITLES = { mean: "mean", std: "standard deviation", absmax: "largest absolute value", l2: "L2 norm", bad: "share not finite" };
  let chosen = 0;
  function plotHistory() {
    if (!data.sites.length) { $("history").hidden = true; return; }
    const stat = $("stat").value, runs = data.two ? 2 : 1;
    const lines = [];
    for (let run = 0; run < runs; run++) {
      const ys = statistic(chosen, stat, run);
      if (ys) lines.push({ name: "ab"[run], xs: kept, ys, colour: `var(--${"ab"[run]})`, dash: run ? "5 3" : "", width: run ? 1.8 : 2.2 });
    }
    const others = [];
    for (let run = runs; (data.series[chosen].mean || data.series[chosen][Object.keys(data.series[chosen])[0]] || []).length > run; run++) { const ys = statistic(chosen, stat, run); if (ys) others.push(ys); }
    if (others.length && lines.length) others.push(lines[0].ys);
    const bands = others.length > 1 ? [{ name: "noise runs", xs: kept, high: kept.map((_, at) => Math.max(...others.map((own) => own[at]))), low: kept.map((_, at) => Math.min(...others.map((own) => own[at]))) }] : [];
    const [, , , , , owner, dtype, shape] = data.sites[chosen];
    const name = `${TITLES[stat]} of ${labels[chosen]}${owner ? ` (${owner})` : ""}${dtype ? `, ${shape.join("x") || "scalar"} ${dtype}` : ""}`;
    $("history-name").textContent = name;
    const told = (x) => { const at = kept.indexOf(x), state = at < 0 ? 0 : stateAt(chosen, at); return sided(lines)(x) + (state ? `; checksums: ${STATES[state]}` : ""); };
    chart("history-plot", { lines, bands, log: $("log").checked, height: 240, marks, label: name, read: "history-read", told });
    $("history-sick").textContent = [0, 1].slice(0, runs).flatMap((run) => {
      const bad = series(chosen, "bad", run), where = bad ? kept.filter((_, at) => bad[at] > 0) : [];
      return where.length ? [`${data.two ? `${"ab"[run]}: ` : ""}not finite at ${where.length} of ${kept.length} steps, from step ${where[0]} on`] : [];
    }).join("; ");
    if ($("history-values").open) valuesTable();
  }
  function valuesTable() {
    const stat = $("stat").value, runs = data.two ? [0, 1] : [0], own = runs.map((run) => statistic(chosen, stat, run));
    const body = kept.map((step, at) => ({ differs: stateAt(chosen, at) > 1, cells: [String(step), ...own.map((values) => values ? single(values[at]) : ""), ...(data.two ? [STATES[stateAt(chosen, at)]] : [])] }));
    $("history-table").replaceChildren(tableOf($("history-name").textContent, ["step", ...(data.two ? ["a", "b", "checksums"] : [TITLES[stat]])], body));
  }
  function listSites() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), found = [];
    let count = 0;
    labels.forEach((text, at) => { const lower = text.toLowerCase(); if (words.every((word) => lower.includes(word))) { if (++count <= 300) found.push(at); } });
    $("sites").replaceChildren(...found.map((at) => new Option(labels[at], String(at), false, at === chosen)));
    $("found").textContent = `${count.toLocaleString("en")} of ${labels.length.toLocaleString("en")} sites${count > 300 ? ", the first 300 listed" : ""}`;
    if (found.length && !found.includes(chosen)) choose(found[0]);
  }
  function choose(site) {
    chosen = site;
    $("sites").value = String(site);
    plotHistory();
  }

  // ---- scales along the depth

  const LIMITS = { float16: [[6e-8, "float16 least"], [6.1e-5, "float16 normal"], [65504, "float16 max"]], bfloat16: [[1.2e-38, "bfloat16 normal"], [3.4e38, "bfloat16 max"]], float32: [[1.2e-38, "float32 normal"], [3.4e38, "float32 max"]], float64: [[2.2e-308, "float64 normal"], [1.8e308, "float64 max"]], float8_e4m3fn: [[0.0156, "e4m3 normal"], [448, "e4m3 max"]], float8_e5m2: [[6.1e-5, "e5m2 normal"], [57344, "e5m2 max"]] };
  function depthPlot(box, title, shown) {
    const width = Math.max(box.clientWidth, 300), high = 16, top = 50, names = shown[0].modules;
    const values = shown.flatMap((own) => [...own.low, ...own.high]).filter((own) => own > 0);
    box.replaceChildren();
    if (!values.length) return;
    let low = Math.floor(Math.log10(Math.min(...values))) - 0.2, up = Math.ceil(Math.log10(Math.max(...values))) + 0.2;
    const dtypes = [...new Set(shown.flatMap((own) => own.dtypes)), "float16"];
    const limits = [...new Map(dtypes.flatMap((own) => LIMITS[own] || []).map((own) => [own[1], own])).values()];
    const near = limits.filter(([value]) => { const at = Math.log10(value); return at > low - 3 && at < up + 3; });
    for (const [value] of near) { low = Math.min(low, Math.log10(value) - 0.3); up = Math.max(up, Math.log10(value) + 0.3); }
    const plain = plainly(names);
    const left = Math.min(16 + 6.7 * Math.max(...names.map((own) => plain(own).length)), width * 0.48), right = width - 12, height = top + names.length * high + 22;
    const px = (value) => left + (Math.log10(value) - low) / (up - low) * (right - left);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, box);
    make("title", {}, svg, title);
    make("text", { class: "strong", x: 0, y: 12 }, svg, title);
    for (const own of nice(Math.ceil(low), Math.floor(up), Math.max(2, (right - left) / 60)).filter(Number.isInteger)) {
      const x = px(10 ** own);
      make("line", { class: "grid", x1: x, x2: x, y1: top, y2: height - 20 }, svg);
      for (const y of [top - 6, height - 6]) make("text", { x, y, "text-anchor": "middle" }, svg, own > -4 && own < 4 ? short(10 ** own, 3) : `1e${own}`);
    }
    let edge = -Infinity, lift = 0;
    for (const [value, name] of near.sort((one, two) => one[0] - two[0])) {
      const x = px(value), end = x > (left + right) / 2, wide = name.length * 5.8;
      make("line", { class: "limit", x1: x, x2: x, y1: top - 18, y2: height - 20 }, svg);
      lift = (end ? x - wide : x) < edge ? 1 - lift : 0;
      make("text", { class: "limitname", x: end ? x + 2 : x - 2, y: 27 - lift * 12, "text-anchor": end ? "end" : "start" }, svg, name);
      edge = end ? x : x + wide;
    }
    names.forEach((name, row) => {
      const y = top + row * high + high / 2, text = plain(name), most = Math.floor((left - 14) / 6.7);
      const label = make("text", { x: left - 8, y: y + 4, "text-anchor": "end", style: "font-family:ui-monospace,Menlo,Consolas,monospace" }, svg, text.length > most ? "\u2026" + text.slice(-most + 1) : text);
      make("title", {}, label, name);
      shown.forEach((own, run) => {
        const at = own.modules.indexOf(name);
        if (at < 0 || !(own.middle[at] > 0)) return;
        const colour = `var(--${own.name[0]})`, off = y + (shown.length > 1 ? (run ? 2.5 : -2.5) : 0);
        const span = make("g", {}, svg);
        make("title", {}, span, `${own.name}: ${name} ${short(own.middle[at], 3)} (${short(own.low[at], 3)} to ${short(own.high[at], 3)}), ${own.dtypes[at]}`);
        make("line", { x1: px(Math.max(own.low[at], 10 ** low)), x2: Math.max(px(own.high[at]), px(Math.max(own.low[at], 10 ** low)) + 1), y1: off, y2: off, style: `stroke:${colour}`, "stroke-width": 3, opacity: 0.45 }, span);
        make("circle", { cx: px(own.middle[at]), cy: off, r: 2.8, style: `fill:${colour}` }, span);
      });
    });
    const held = new Set(shown.flatMap((own) => own.dtypes).flatMap((own) => LIMITS[own] || []).map((own) => own[1]));
    const away = limits.filter((own) => !near.includes(own) && held.has(own[1])).map(([value, name]) => `${name} ${value}`);
    if (shown[0].total > names.length) { const note = document.createElement("p"); note.className = "quiet"; note.textContent = `${names.length} of ${shown[0].total} modules, evenly along the depth.`; box.append(note); }
    if (away.length) { const note = document.createElement("p"); note.className = "quiet"; note.textContent = `Outside this scale: ${away.join(", ")}.`; box.append(note); }
  }
  const depths = [];
  for (const [direction, title] of [["forward", "Outputs"], ["gradient", "Gradients at the outputs"]]) {
    const shown = data.depth.filter((own) => own.name.endsWith(direction));
    if (!shown.length) continue;
    const box = document.createElement("div");
    named(box, `${title}, along the depth`);
    $("depth-plots").append(box);
    const draw = () => depthPlot(box, title, shown);
    redraws.push(draw);
    depths.push(draw);
  }
  for (const draw of depths) draw(); // when all have found their width

  // ---- wiring

  for (const stat of Object.keys(TITLES)) $("stat").add(new Option(TITLES[stat], stat));
  $("stat").addEventListener("change", plotHistory);
  $("log").addEventListener("change", plotHistory);
  $("search").addEventListener("input", listSites);
  $("sites").addEventListener("change", () => choose(Number($("sites").value)));
  $("history-values").addEventListener("toggle", () => { if ($("history-values").open) valuesTable(); });

  if (map) {
    legend();
    distances();
    const box = $("map-box");
    drawMap();
    const at = (event) => {
      const area = box.getBoundingClientRect(), x = event.clientX - area.left - CELL.name + box.scrollLeft, y = event.clientY - area.top - CELL.axis + box.scrollTop;
      const row = Math.floor(y / CELL.high), column = Math.floor(x / CELL.wide);
      return event.clientX - area.left < CELL.name || row < 0 || row >= map.names.length || column < 0 || column >= map.steps.length ? null : [row, column];
    };
    box.addEventListener("scroll", () => requestAnimationFrame(drawMap));
    box.addEventListener("click", (event) => { const place = at(event); if (place) openCell(...place, true); });
    box.addEventListener("pointermove", (event) => {
      const place = at(event);
      box.title = place ? `${map.names[place[0]]}, step ${map.steps[place[1]]}: ${meaning(levels[place[0] * map.steps.length + place[1]])}` : "";
    });
    box.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0] };
      if (event.key === "Home") openCell(...firstCell());
      else if (moves[event.key]) { const [row, column] = cell || firstCell(); openCell(row + moves[event.key][0], column + moves[event.key][1]); }
      else return;
      event.preventDefault();
    });
    redraws.push(drawMap);
    openCell(...firstCell());
  }
  listSites();
  plotHistory();

  const graph = $("graph"), red = graph && (graph.querySelector(".origin") || graph.querySelector("g.n, g.g"));
  if (red) {
    const area = graph.getBoundingClientRect(), own = red.getBoundingClientRect();
    graph.scrollLeft += own.left - area.left - area.width / 2 + own.width / 2;
    graph.scrollTop += own.top - area.top - area.height / 3;
  }

  const system = matchMedia("(prefers-color-scheme: dark)");
  function theme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").textContent = dark ? "Light" : "Dark";
    $("theme").setAttribute("aria-pressed", String(dark));
    for (const own of redraws) own();
  }
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
  system.addEventListener("change", (event) => theme(event.matches));
  $("theme").textContent = system.matches ? "Light" : "Dark";
  document.documentElement.dataset.theme = system.matches ? "dark" : "light";
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; for (const own of redraws) own(); } });
  let shown = null;
  addEventListener("beforeprint", () => {  // paper is light, and scrolls nothing
    shown = document.documentElement.dataset.theme;
    document.documentElement.classList.add("printing");
    theme(false);
  });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); theme(shown === "dark"); });
  document.documentElement.dataset.ready = "true";
})();
