"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const STATS = ["mean", "std", "l2", "amean", "absmax", "min", "max", "zeros", "bad"];
  const TITLES = { zeros: "share of zeros", bad: "share not finite", l2: "L2 norm", amean: "mean of absolutes", std: "standard deviation" };
  const ABSENT = 65535, LEVELS = 65534;

  // Values are zlib-compressed little-endian arrays in base64.
  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  // ---- plots

  const models = {};
  const figures = [];
  async function draw(name, target) {
    const item = data.plots[name];
    if (!item) return null;
    item.target_id = target;
    const views = await Bokeh.embed.embed_item(item, target);
    const view = views.roots ? views.roots[0] : [...views][0];
    figures.push(view.model);
    for (const model of view.model.references()) if (model.name) models[`${name}:${model.name}`] = model;
    return view;
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function ramp(stops) {
    const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const colours = stops.map(parse);
    return (share) => {
      const place = share * (colours.length - 1), low = Math.min(Math.floor(place), colours.length - 2), part = place - low;
      return "#" + colours[low].map((one, at) => Math.round(one + (colours[low + 1][at] - one) * part).toString(16).padStart(2, "0")).join("");
    };
  }

  function palette(dark) {
    const shade = dark ? ramp(["#3d5f94", "#6b4a9e", "#c8508c", "#ff9d5c", "#fff2a8"]) : ramp(["#a9c8ec", "#f7c884", "#e8743b", "#b3261e", "#4a0d16"]);
    const colours = [dark ? "#363d45" : "#e3e6ea", dark ? "#1d2227" : "#f5f7f9", dark ? "#2c3f5c" : "#d3e1f3"];
    for (let at = 3; at < 255; at++) colours.push(shade((at - 3) / 251));
    colours.push(dark ? "#4dd0e1" : "#00838f");
    return colours;
  }

  function legend(colours) {
    const list = $("map-legend");
    list.replaceChildren();
    for (const [level, text] of [[0, "not compared"], [1, "equal"], [2, "forward pass equal, tensors or gradients differ"], [3, "1e-8"], [66, "1e-6"], [129, "1e-4"], [191, "1e-2"], [254, "1 and more"], [255, "in one run only"]]) {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = colours[level];
      item.append(swatch, " " + text);
      list.append(item);
    }
  }

  function paint() {
    const dark = document.documentElement.dataset.theme === "dark";
    const front = css("front"), quiet = css("quiet"), line = css("line");
    const colourOf = (name) => {
      if (name === "noise-band") return css("noise");
      if (/gradient/.test(name)) return css("gradient");
      return css(/(^|-)b($|-)/.test(name) ? "b" : "a");
    };
    for (const plot of figures) {
      for (const model of plot.references()) {
        const type = model.type;
        if (/Axis$/.test(type)) model.setv({ axis_label_text_color: front, major_label_text_color: quiet, axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal" });
        else if (type === "Grid") model.setv({ grid_line_color: line });
        else if (type === "Legend") model.setv({ label_text_color: front });
        else if (type === "GlyphRenderer" && model.name) {
          const colour = colourOf(model.name);
          if (/^(line|dots)-/.test(model.name)) model.glyph.setv(/^line/.test(model.name) ? { line_color: colour } : { fill_color: colour, line_color: colour });
          if (/^(area-|noise-band)/.test(model.name)) model.glyph.setv({ fill_color: colour });
          if (model.name === "map-frame") model.glyph.setv({ line_color: front });
          if (model.name === "map-halo") model.glyph.setv({ line_color: css("back") });
        }
      }
    }
    const colours = palette(dark);
    const mapper = models["map:map-colours"];
    if (mapper) mapper.palette = colours.map((hex) => parseInt(hex.slice(1) + "ff", 16));
    if (mapper) legend(colours);
  }

  function theme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").textContent = dark ? "Light" : "Dark";
    $("theme").setAttribute("aria-pressed", String(dark));
    paint();
  }

  // ---- histories

  const rows = new Uint16Array(await inflate(data.values));
  const points = data.steps.length;

  function series(site, stat, run) {
    const own = data.series[site][stat];
    if (!own || own[3 + run] === undefined || own[3 + run] < 0) return null;
    const [log, low, high] = own, at = own[3 + run] * points;
    const out = new Float64Array(points);
    if (low === high) return out.fill(low);
    for (let place = 0; place < points; place++) {
      const level = rows[at + place];
      out[place] = level === ABSENT ? NaN : log ? low * Math.pow(high / low, level / LEVELS) : low + ((high - low) * level) / LEVELS;
    }
    return out;
  }

  function statistic(site, stat, run) {
    if (stat === "l2") {
      const mean = series(site, "mean", run), std = series(site, "std", run), bad = series(site, "bad", run);
      const finite = (at) => data.sites[site][8] * (1 - (bad && bad[at] || 0));
      return mean && std ? mean.map((value, at) => Math.sqrt((value * value + std[at] * std[at]) * finite(at))) : null;
    }
    if (stat === "absmax") {
      const min = series(site, "min", run), max = series(site, "max", run);
      return min && max ? min.map((value, at) => Math.max(Math.abs(value), Math.abs(max[at]))) : null;
    }
    return series(site, stat, run);
  }

  // What the runs recorded, for some of the steps, and how their checksums compare, for all.
  const states = new Uint8Array(await inflate(data.states)), STATES = ["", "equal", "differs", "only in a", "only in b"];
  const exactly = new Float32Array(await inflate(data.exact.values)), runsKept = data.two ? 2 : 1;
  const recordedAt = new Map(data.exact.steps.map((step, place) => [step, place]));
  function recorded(site, at) {
    const place = recordedAt.get(at), width = 3 * runsKept;
    if (place === undefined) return [];
    const from = (place * data.sites.length + site) * width;
    return Array.from(exactly.subarray(from, from + width));
  }

  const label = ([phase, kind, fqn, call, path]) => `${kind} ${fqn}${path}${call ? ` call ${call}` : ""}${["start", "eval", "recompute"].includes(phase) ? ` (${phase})` : ""}`;
  const labels = data.sites.map(label);
  let chosen = 0;
  const firstRun = 0, second = data.two ? 1 : -1, noiseFrom = data.two ? 2 : 1;

  function plotHistory() {
    if (!data.sites.length) return;
    const stat = $("stat").value, log = $("log").checked, name = log ? "log" : "linear";
    $("history-linear").hidden = log;
    $("history-log").hidden = !log;
    const usable = (values) => Array.from(values, (value) => (log && !(value > 0) ? NaN : value));
    const steps = Array.from(data.steps);
    for (const [run, number] of [["a", firstRun], ["b", second]]) {
      const values = number < 0 ? null : statistic(chosen, stat, number);
      models[`${name}:${name}-${run}`].data = values ? { x: steps, y: usable(values) } : { x: [], y: [] };
      models[`${name}:dots-${run}`].glyph.size = points > 80 ? 2 : 5;
    }
    const bands = [];
    if (data.noise) for (let run = 0; run < noiseFrom + data.noise; run++) {
      if (run === second) continue;
      const values = statistic(chosen, stat, run);
      if (values) bands.push(usable(values));
    }
    const band = models[`${name}:${name}-noise`];
    if (bands.length > 1) band.data = { x: steps, low: steps.map((_, at) => Math.min(...bands.map((own) => own[at]))), high: steps.map((_, at) => Math.max(...bands.map((own) => own[at]))) };
    else band.data = { x: [], low: [], high: [] };
    $("noise-legend").hidden = bands.length < 2;
    const sick = [["a", firstRun], ["b", second]].flatMap(([run, number]) => {
      const bad = number < 0 ? null : series(chosen, "bad", number);
      const where = bad ? steps.filter((_, at) => bad[at] > 0) : [];
      return where.length ? [`${data.two ? `${run}: ` : ""}not finite at ${where.length} of ${points} steps drawn, from step ${where[0]} on`] : [];
    });
    $("history-sick").textContent = sick.join("; ");
    const [, , , , , kind, dtype, shape] = data.sites[chosen];
    $("history-name").textContent = `${TITLES[stat] || stat} of ${labels[chosen]}${kind ? ` (${kind})` : ""}${dtype ? `, ${shape.join("x") || "scalar"} ${dtype}` : ""}`;
    for (const id of ["history-linear", "history-log"]) $(id).setAttribute("aria-label", $("history-name").textContent);
  }

  function listSites() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const list = $("sites"), found = [];
    let count = 0;
    labels.forEach((text, at) => {
      const lower = text.toLowerCase();
      if (words.every((word) => lower.includes(word))) { if (++count <= 300) found.push(at); }
    });
    list.replaceChildren(...found.map((at) => new Option(labels[at], String(at), false, at === chosen)));
    $("found").textContent = `${count.toLocaleString("en")} of ${labels.length.toLocaleString("en")} sites${count > 300 ? ", the first 300 listed" : ""}`;
    if (found.length && !found.includes(chosen)) choose(found[0]);
  }

  function choose(site) {
    chosen = site;
    $("sites").value = String(site);
    plotHistory();
  }

  for (const stat of STATS) $("stat").add(new Option(TITLES[stat] || stat, stat));
  $("stat").addEventListener("change", plotHistory);
  $("log").addEventListener("change", plotHistory);
  $("search").addEventListener("input", listSites);
  $("sites").addEventListener("change", () => choose(Number($("sites").value)));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));

  await draw("linear", "history-linear");
  await draw("log", "history-log");
  await draw("depth", "depth-plot");

  // ---- the map

  const map = data.map;
  let levels = null, cell = null, mapView = null;
  const byModule = new Map();
  const ownerOf = ([, kind, fqn]) => ["param", "buffer", "grad", "optimizer_state"].includes(kind) ? fqn.slice(0, Math.max(fqn.lastIndexOf("."), 0)) || fqn : kind === "rng" ? `random state: ${fqn}` : fqn;
  data.sites.forEach((site, at) => {
    const owner = ownerOf(site);
    if (!byModule.has(owner)) byModule.set(owner, []);
    byModule.get(owner).push(at);
  });

  const short = (value) => value === undefined || value === null || Number.isNaN(value) ? "" : typeof value === "number" ? String(Number(value.toPrecision(5))) : String(value);
  const meaning = (level) => level === 0 ? "not compared" : level === 1 ? "equal" : level === 2 ? "forward pass equal, tensors or gradients differ" : level === 255 ? "in one run only" : `relative distance about ${(10 ** ((level - 3) / 251 * 8 - 8)).toExponential(0)}`;

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
    box.className = "scroll";
    box.tabIndex = 0;
    box.append(table);
    return box;
  }

  function openCell(row, column) {
    row = Math.max(0, Math.min(map.rows - 1, row));
    column = Math.max(0, Math.min(map.steps.length - 1, column));
    cell = [row, column];
    models["map:map-chosen"].data = { x: [column + 0.5], y: [row + 0.5] };
    const names = map.names[row], from = map.steps[column], until = map.steps[column + 1];
    const level = levels[row * map.steps.length + column];
    const name = names.length > 1 ? `${names[0]} to ${names[names.length - 1]}` : names[0];
    const span = until !== undefined && until - from > 1 ? `steps ${from} to ${until - 1}` : `step ${from}`;
    $("map-cell").textContent = `${name}, ${span}: ${meaning(level)}`;
    // A kept step inside the cell, one whose recorded values are here if there is any. Checksums say what differs.
    const inside = [...data.steps.keys()].filter((place) => data.steps[place] >= from && (until === undefined || data.steps[place] < until));
    const at = inside.find((place) => recordedAt.has(place)) ?? inside[0];
    const body = [], exact = [];
    for (const own of data.divergences) {
      if (own.step < from || (until !== undefined && own.step >= until)) continue;
      if (!names.includes(ownerOf(own.site))) continue;
      const side = (s, key) => s ? (key === "checksum" ? s.text || s.checksum : short(s.stats[key])) : "not there";
      exact.push({ differs: true, cells: [`step ${own.step}: ${label(own.site)}`, own.role, own.rel === null ? "" : own.rel.toExponential(1), side(own.a, "checksum"), side(own.b, "checksum"), side(own.a, "mean"), side(own.b, "mean"), side(own.a, "std"), side(own.b, "std")] });
    }
    const own = at === undefined ? [] : names.flatMap((module) => byModule.get(module) || []);
    for (const site of own) {
      const state = states[site * points + at];
      if (state === 0 && !recorded(site, at).some((value) => !Number.isNaN(value))) continue;
      const numbers = recordedAt.has(at) ? recorded(site, at).map((value) => Number.isNaN(value) ? "" : String(Number(value.toPrecision(7)))) : [];
      body.push({ differs: state > 1, cells: [labels[site], STATES[state], ...numbers] });
    }
    const parts = [];
    if (exact.length) parts.push(tableOf("Divergences listed", ["record", "role", "rel. L2", "a", "b", "mean a", "mean b", "std a", "std b"], exact));
    if (body.length) parts.push(tableOf(`Records at step ${data.steps[at]}`, ["record", "", ...(recordedAt.has(at) ? ["mean a", "mean b", "std a", "std b", "largest a", "largest b"] : [])], body.slice(0, 200)));
    if (body.length && !recordedAt.has(at)) { const note = document.createElement("p"); note.className = "quiet"; note.textContent = `The values of this step are not in the page: introspect show --step ${data.steps[at]} prints them.`; parts.push(note); }
    $("map-records").replaceChildren(...parts);
    const site = (byModule.get(names[0]) || [])[0];
    if (site !== undefined) { choose(site); }
  }

  function ticks() {
    const plot = mapView.model, pick = (low, high, most) => {
      const first = Math.max(0, Math.floor(Math.min(low, high))), last = Math.ceil(Math.max(low, high));
      const stride = Math.max(1, Math.ceil((last - first) / most)), out = [];
      for (let at = first; at < last; at += stride) out.push(at);
      return out;
    };
    const down = pick(plot.y_range.start, plot.y_range.end, Math.max(6, Math.floor(plot.height / 18))).filter((at) => at < map.rows);
    const over = pick(plot.x_range.start, plot.x_range.end, 12).filter((at) => at < map.steps.length);
    const cut = (text) => text.length > 38 ? "\u2026" + text.slice(-37) : text;
    const axes = plot.references ? [...plot.references()].filter((model) => /Axis$/.test(model.type)) : [];
    for (const axis of axes) {
      const vertical = plot.left.includes(axis), list = vertical ? down : over;
      axis.major_label_overrides = new Map(list.map((at) => [at + 0.5, vertical ? cut(map.names[at][0]) : String(map.steps[at])]));
      axis.ticker.ticks = list.map((at) => at + 0.5);
    }
  }

  if (map) {
    levels = new Uint8Array(await inflate(map.levels));
    mapView = await draw("map", "map-plot");
    const width = map.steps.length;
    const typed = new Uint8Array(levels);
    typed.shape = [map.rows, width];
    typed.dtype = "uint8";
    typed.dimension = 2;
    models["map:map-image"].data = { image: [typed], x: [0], y: [0], dw: [width], dh: [map.rows] };
    const box = $("map-plot");
    const at = (event) => {
      const area = mapView.el.getBoundingClientRect(), frame = mapView.frame;
      const sx = event.clientX - area.left, sy = event.clientY - area.top;
      if (!frame.bbox.contains(sx, sy)) return null;
      return [Math.floor(frame.y_scale.invert(sy)), Math.floor(frame.x_scale.invert(sx))];
    };
    let down = null;
    box.addEventListener("pointerdown", (event) => { down = [event.clientX, event.clientY]; }, true);
    box.addEventListener("pointerup", (event) => {
      const place = at(event);
      if (down && place && Math.hypot(event.clientX - down[0], event.clientY - down[1]) < 4) openCell(...place);
      down = null;
    }, true);
    box.addEventListener("pointermove", (event) => {
      const place = at(event);
      box.title = place && map.names[place[0]] && map.steps[place[1]] !== undefined
        ? `${map.names[place[0]][0]}, step ${map.steps[place[1]]}: ${meaning(levels[place[0] * width + place[1]])}` : "";
    });
    const firstCell = () => {
      const first = data.divergences.find((own) => own.first);
      if (first) {
        const row = map.names.findIndex((names) => names.includes(ownerOf(first.site)));
        const later = map.steps.findIndex((step) => step > first.step);
        if (row >= 0) return [row, (later < 0 ? width : later) - 1];
      }
      for (let column = 0; column < width; column++) for (let row = 0; row < map.rows; row++) if (levels[row * width + column] > 1) return [row, column];
      return [0, 0];
    };
    box.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0] };
      if (event.key === "Home") openCell(...firstCell());
      else if (moves[event.key]) { const [row, column] = cell || firstCell(); openCell(row + moves[event.key][0], column + moves[event.key][1]); }
      else return;
      event.preventDefault();
    });
    for (const range of [mapView.model.x_range, mapView.model.y_range]) range.change.connect(ticks);
    ticks();
    openCell(...firstCell());
  }

  listSites();
  plotHistory();
  theme(matchMedia("(prefers-color-scheme: dark)").matches);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme(event.matches));
  document.documentElement.dataset.ready = "true";
})();
