"use strict";
// The page's own script. It evaluates the search space's formulas, so that what fits here is what the search would try.
const D = JSON.parse(document.getElementById("data").textContent);
const KIB = 1024, LIMITS = Object.keys(D.limits), STEPS = 7;
const $ = (id) => document.getElementById(id);
const state = { capacity: D.device.shared_bytes_per_cta, step: D.lengths.indexOf(D.problem.length), family: 0, metric: "us", picked: null,
  sort: ["us", 1] };

// ---- words

const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const count = (n) => Number(n).toLocaleString("en-US");
const digits = (n, d = 3) => (n === 0 ? "0" : Number(Number(n).toPrecision(d)).toLocaleString("en-US", { maximumFractionDigits: 6 }));
function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return `${digits(n, n < 10 ? 3 : 4)} ${unit}`;
    n /= 1024;
  }
  return `${digits(n, 4)} TiB`;
}
function time(us) {
  if (us < 1000) return `${digits(us)} µs`;
  return us < 1e6 ? `${digits(us / 1000)} ms` : `${digits(us / 1e6)} s`;
}
const rate = (us) => `${digits(D.flops[state.step] / us / 1e6)} TFLOP/s`;
const short = (us) => (us < 1000 ? digits(us) : us < 1e6 ? `${digits(us / 1000, 2)}ms` : `${digits(us / 1e6, 2)}s`);
const words = (name) => name.replace(/_bytes$/, "").replace(/_/g, " ");

// ---- formulas: the same integers as in Python

function value(node, at) {
  if (typeof node === "number") return node;
  if (typeof node === "string") return at[node];
  const [op, ...rest] = node, v = rest.map((each) => value(each, at));
  if (op === "+") return v[0] + v[1];
  if (op === "-") return v[0] - v[1];
  if (op === "*") return v[0] * v[1];
  if (op === "//") return Math.floor(v[0] / v[1]);
  if (op === "%") return v[0] - v[1] * Math.floor(v[0] / v[1]);
  if (op === "ceil_div") return Math.ceil(v[0] / v[1]);
  return op === "min" ? Math.min(...v) : Math.max(...v);
}
function seqlens(length) {
  return [D.problem.square ? length : D.problem.seqlen_q, length];
}
function perSm(capacity) {
  return capacity === D.device.shared_bytes_per_cta ? D.device.shared_bytes_per_sm : capacity + KIB;
}
function base(family, capacity, length) {
  const [q, kv] = seqlens(length);
  return { ...family.names, "problem.seqlen_q": q, "problem.seqlen_kv": kv, "device.shared_bytes_per_cta": capacity,
    "device.shared_bytes_per_sm": perSm(capacity) };
}
for (const family of D.families) {
  const width = family.read.length;
  family.points = [];
  for (let i = 0; i < family.shapes.length; i += width)
    family.points.push(family.read.map((_, k) => family.choices[k][parseInt(family.shapes[i + k], 36)]));
}
// Every name of one shape. Parameters that no resource reads stay 0: no formula that decides what fits uses them.
function names(family, point, given) {
  const at = { ...given };
  family.free.forEach((name) => (at[name] = 0));
  family.read.forEach((name, k) => (at[name] = point[k]));
  for (const [name, , tree] of family.derived) at[name] = value(tree, at);
  return at;
}
function failures(family, at) {
  const found = [];
  for (const rule of family.constraints) {
    const left = value(rule.left, at), right = value(rule.right, at);
    if (left > right) found.push({ rule, left, right, by: (left - right) / Math.max(1, Math.abs(right)) });
  }
  return found;
}
function residents(run, shared, capacity) {
  const one = Math.ceil(shared / 128) * 128 + D.device.reserved;
  const by = shared > capacity ? 0 : Math.floor(perSm(capacity) / one);
  return Math.min(by, run.needs[2]);
}

// One cell per tile: the fastest shape that fits, or the one nearest to fitting.
function grid(index, capacity, step) {
  const family = D.families[index], given = base(family, capacity, D.lengths[step]), cells = new Map();
  family.points.forEach((point, place) => {
    const at = names(family, point, given), failed = failures(family, at);
    const tile = ["block_q", "block_kv", "num_stages"].map((name) => at[name] ?? family.defaults[name]);
    const cell = { tile, place, at, failed, by: failed.reduce((sum, each) => sum + each.by, 0), fits: false };
    const run = failed.length ? null : family.runs[place];
    if (run) {
      const ctas = residents(run, at.shared_bytes, capacity), record = run.at[ctas] && run.at[ctas][step];
      if (record) Object.assign(cell, { fits: true, ctas, run, us: record[0], limit: LIMITS[record[1]], dram: record[2] * KIB, l2: record[3] * KIB,
        traffic: record[4] * KIB, free: record[5], measured: (run.measured || [])[step] || null });
    }
    if (!cell.fits && !failed.length) return; // slower than another shape of its tile at every capacity
    const key = tile.join(), old = cells.get(key);
    const better = !old || (cell.fits ? !old.fits || cell.us < old.us : !old.fits && cell.by < old.by);
    if (better) cells.set(key, cell);
  });
  return [...cells.values()].sort((a, b) => a.tile[0] - b.tile[0] || a.tile[1] - b.tile[1] || a.tile[2] - b.tile[2]);
}

// ---- metrics of the heat map

const METRICS = {
  us: { name: "predicted time", of: (c) => c.us, text: short, better: "low" },
  ctas: { name: "CTAs per SM", of: (c) => c.ctas, text: String, better: "high" },
  shared: { name: "shared memory", of: (c) => c.at.shared_bytes, text: (n) => `${Math.round(n / KIB)}K`, better: "low" },
  l2: { name: "L2 traffic", of: (c) => c.l2, text: (n) => bytes(n).replace(/ (.)i?B?$/, "$1").replace(/(\.\d).*(.)$/, "$1$2"), better: "low" },
  regs: { name: "registers", of: (c) => c.run.needs[0], text: String, better: "low" },
};
const REASON = { fits_shared: "smem", fits_shared_sm: "smem/SM", fits_registers: "regs", whole_rows: "rows", few_rows: "rows",
  not_oversized: "short", not_oversized_q: "short", bound_binds: "twin", few_threads: "threads", whole_warps: "warps", even_columns: "columns" };

let cells = [];
function recompute() {
  cells = grid(state.family, state.capacity, state.step);
  const fitting = cells.filter((c) => c.fits), best = fitting.reduce((a, b) => (!a || b.us < a.us ? b : a), null);
  cells.best = best;
  const kept = cells.find((c) => c.tile.join() === state.picked);
  cells.picked = kept || best || cells[0];
}

// ---- sections

function drawStatus() {
  const fitting = cells.filter((c) => c.fits).length, b = cells.best;
  $("status").innerHTML = b
    ? `<b>${fitting} of ${cells.length}</b> tiles fit ${bytes(state.capacity)} at length ${count(D.lengths[state.step])}. Fastest by prediction:
       <b>${b.tile[0]} × ${b.tile[1]}</b>, ${b.tile[2]} stage${b.tile[2] > 1 ? "s" : ""}, ${time(b.us)}.`
    : `<b>No tile fits</b> ${bytes(state.capacity)} at length ${count(D.lengths[state.step])}. Least missing: ${escape(cells[0] && why(nearest())[0])}`;
}
const nearest = () => cells.reduce((a, b) => (b.by < a.by ? b : a));
const why = (c) => c.failed.map((f) => `${f.rule.name}: ${f.rule.text} fails, ${count(f.left)} > ${count(f.right)} (${f.rule.why})`);

function shade(metric) {
  const m = METRICS[metric], found = cells.filter((c) => c.fits).map((c) => Math.log(m.of(c) + 1));
  const low = Math.min(...found), span = Math.max(...found) - low || 1;
  return (c) => {
    const t = (Math.log(m.of(c) + 1) - low) / span, good = m.better === "low" ? 1 - t : t;
    return Math.min(STEPS - 1, Math.floor(good * STEPS));
  };
}
function tileName(c) {
  const [q, kv, stages] = c.tile;
  const head = `${q} query rows, ${kv} key rows, ${stages} stage${stages > 1 ? "s" : ""}: `;
  return head + (c.fits ? `${time(c.us)} predicted, ${c.ctas} CTAs per SM, bound by ${D.limits[c.limit]}` : `does not fit. ${why(c)[0] || ""}`);
}
function drawMaps() {
  const stages = [...new Set(cells.map((c) => c.tile[2]))].sort((a, b) => a - b), level = shade(state.metric), m = METRICS[state.metric];
  const rows = [...new Set(cells.map((c) => c.tile[0]))].sort((a, b) => a - b), columns = [...new Set(cells.map((c) => c.tile[1]))].sort((a, b) => a - b);
  const by = new Map(cells.map((c) => [c.tile.join(), c])), dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.tile : null;
  $("maps").className = `maps${stages.length > 1 ? "" : " single"}${columns.length > 8 ? " dense" : ""}`;
  $("maps").innerHTML = stages.map((s) => `<table class="map"><caption>${stages.length > 1 ? `${s} stage${s > 1 ? "s" : ""}` : "query rows × key rows"}</caption>
    <thead><tr><th scope="col"><span aria-label="query rows down, key rows across">q╲kv</span></th>${columns.map((kv) => `<th scope="col">${kv}</th>`).join("")}</tr></thead><tbody>
    ${rows.map((q) => `<tr><th scope="row">${q}</th>${columns.map((kv) => {
      const c = by.get([q, kv, s].join());
      if (!c) return "<td></td>";
      const on = c === cells.picked, key = c.tile.join(), n = c.fits ? level(c) : 0, light = dark ? n >= 5 : n < 3;
      const paint = c.fits ? `style="background:var(--s${n});color:${light ? "#14202b" : "#fff"}"` : "";
      const face = c.fits ? m.text(m.of(c)) : REASON[c.failed[0] && c.failed[0].rule.name] || "no";
      return `<td><button type="button" class="tile${c.fits ? "" : " no"}${c === cells.best ? " best" : ""}" data-tile="${key}" tabindex="${on ? 0 : -1}"
        aria-pressed="${on}" aria-label="${escape(tileName(c))}" ${paint}>${face}</button></td>`;
    }).join("")}</tr>`).join("")}</tbody></table>`).join("");
  const ramp = Array.from({ length: STEPS }, (_, i) => `<i style="background:var(--s${i})"></i>`).join("");
  $("legend").innerHTML = `<span>${m.name}: ${m.better === "low" ? "high" : "low"}</span><span class="ramp">${ramp}</span><span>${m.better}</span><span>★ fastest</span>`;
  if (focused) { const again = document.querySelector(`[data-tile="${focused}"]`); if (again) again.focus(); }
}

function drawDetail() {
  const c = cells.picked;
  if (!c) return ($("detail").innerHTML = "");
  const family = D.families[state.family], parts = family.parts.map((name) => [words(name), c.at[name]]);
  const sum = parts.reduce((total, [, n]) => total + n, 0), room = Math.max(state.capacity, c.at.shared_bytes), shared = c.at.shared_bytes;
  const scaled = sum > shared ? shared / sum : 1; // parts that share their space, one after the other in time
  const bar = parts.map(([name, n], i) => `<span style="width:${(100 * n * scaled) / room}%;background:var(--p${i % 5})" title="${name} ${bytes(n)}"></span>`).join("");
  const chosen = family.parameters.map((name) => `${name}=${family.read.includes(name) ? c.at[name] : c.free ? c.free[family.free.indexOf(name)] : "any"}`);
  const registers = c.fits ? `${c.run.needs[0]} per thread (${c.run.needs[1] ? "the compiler's" : "estimate"})` : `${c.at.est_registers} per thread (estimate)`;
  const verdict = c.fits ? `<span class="verdict yes">fits</span>` : `<span class="verdict no">does not fit</span>`;
  const facts = [["verdict", verdict], ["variant", `<span class="mono">${chosen.join(" ")}</span>`]];
  if (c.fits) {
    const [q] = seqlens(D.lengths[state.step]), grid = Math.ceil(q / c.tile[0]) * D.problem.batch_heads, waves = grid / (D.device.sm_count * c.ctas);
    facts.push(["time", `<b>${time(c.us)}</b> predicted (${rate(c.us)})${c.measured ? `, <b>${time(c.measured)}</b> measured (${rate(c.measured)})` : ""}`],
      ["bound by", escape(D.limits[c.limit])], ["resident", `${c.ctas} CTAs per SM, ${c.run.needs[3]} threads each, ${digits(waves)} waves`],
      ["registers", registers], ["traffic", `DRAM ${bytes(c.dram)}, L2 ${bytes(c.l2)}, shared ${bytes(c.traffic)}`]);
  } else facts.push(["registers", registers]);
  const left = `<h3>${c.tile[0]} × ${c.tile[1]}, ${c.tile[2]} stage${c.tile[2] > 1 ? "s" : ""}</h3><dl class="facts">${facts.map(([k, v]) => `<dt>${k}</dt><dd>${v}</dd>`).join("")}</dl>`;
  const failed = c.failed.map((f) => `<li><b>${escape(f.rule.name)}</b> ${escape(f.rule.why)}: ${count(f.left)} &gt; ${count(f.right)}, ${digits(100 * f.by)} % too much</li>`);
  const formulas = family.derived.map(([name, text]) => `<tr><td>${name}</td><td>${count(c.at[name])}</td><td>${escape(text)}</td></tr>`).join("");
  const over = shared > state.capacity ? `, <span class="verdict no">${bytes(shared - state.capacity)} too much</span>` : "";
  $("detail").innerHTML = `<div>${left}${failed.length ? `<ul class="reasons">${failed.join("")}</ul>` : ""}</div>
    <div><h3>Shared memory of one CTA: ${bytes(shared)} of ${bytes(state.capacity)}${over}</h3>
    <div class="bar" role="img" aria-label="${escape(parts.map(([name, n]) => `${name} ${bytes(n)}`).join(", "))}">${bar}</div>
    <ul class="keys">${parts.map(([name, n], i) => `<li><i style="background:var(--p${i % 5})"></i>${name} ${bytes(n)}</li>`).join("")}${sum > shared ? "<li>(they share their space in time)</li>" : ""}</ul>
    <p class="note" style="margin:10px 0 0">Scores, probabilities and the output stay in registers; only ${parts.map(([name]) => name).join(", ")} live here.</p>
    <details><summary>Formulas of the search space</summary><table>${formulas}</table></details></div>`;
}

// ---- charts

const svg = (w, h, label, body) => `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="${escape(label)}">${body}</svg>`;
function decades(low, high, most = 7) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), all = [];
  for (let e = first; e <= last; e++) all.push(10 ** e);
  const each = Math.ceil(all.length / most);
  return all.filter((_, i) => i % each === 0);
}
const logScale = (low, high, from, to) => (v) => from + ((Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
// Charts are as wide as their place, so that their letters keep one size.
const room = (id, most) => Math.max(270, Math.min(most, $(id).clientWidth || most));
function bars(w, rows, unit, label) {
  const high = Math.max(...rows.map((r) => r[1])) || 1, line = 30, from = w < 420 ? 112 : 150, wide = w - from - 84;
  const body = rows.map(([name, n, colour, note], i) => `<text x="0" y="${i * line + 19}" class="${note ? "strong" : ""}">${escape(name)}</text>
    <rect x="${from}" y="${i * line + 5}" width="${Math.max(1, (wide * n) / high)}" height="19" rx="4" fill="${colour}"/>
    <text x="${from + 8 + (wide * n) / high}" y="${i * line + 19}">${unit(n)}</text>`).join("");
  return svg(w, rows.length * line + 4, label, body);
}
const PARTS = { tensor: "tensor cores", exp2: "exp2", fp32: "float32 units", shared: "shared memory", sm: "SMs in all", l2: "L2", dram: "DRAM", launch: "launch" };
function drawLimit() {
  const t = D.traffic[state.step];
  const variant = Object.entries(t.variant).map(([k, v]) => `${k}=${Number(v)}`).join(" ");
  $("limit").innerHTML = `<p class="note" style="margin:0">Length ${count(t.length)} on ${escape(D.device.name)}, the fastest variant by prediction (${time(t.us)}):</p>
    <p class="big">${escape(D.limits[t.limit])}</p><p style="margin:0">${escape(t.evidence)}</p><p class="advice">${escape(t.remedy)}</p>
    <p class="mono" style="color:var(--soft);overflow-wrap:anywhere">${escape(t.family)} ${variant}</p>`;
  const rows = t.parts.map(([name, us]) => [PARTS[name] || name, us, name === "sm" ? "var(--p1)" : "var(--p0)"]);
  $("parts").innerHTML = `<figcaption>What each resource alone would need, of ${time(t.us)}</figcaption>` +
    bars(room("parts", 560), rows, time, `Predicted time per resource: ${rows.map(([n, us]) => `${n} ${time(us)}`).join(", ")}`);
  $("limit-table").innerHTML = `<table class="data"><thead><tr><th class="l">length</th><th>predicted</th><th>TFLOP/s</th><th>waves</th><th class="l">bound by</th><th class="l">tile</th></tr></thead><tbody>
    ${D.traffic.map((each, i) => `<tr class="${i === state.step ? "sel" : ""}"><td class="l">${count(each.length)}</td><td>${time(each.us)}</td><td>${digits(D.flops[i] / each.us / 1e6)}</td>
      <td>${digits(each.waves)}</td><td class="l">${escape(D.limits[each.limit].split(":")[0])}</td><td class="l">${escape(each.family)} ${each.variant.block_q} × ${each.variant.block_kv}</td></tr>`).join("")}</tbody></table>`;
}

function drawBytes() {
  const s = D.passes.standard, f = D.passes.tiled, name = { scores: "S", probabilities: "P" };
  const sum = (rows, k) => rows.reduce((total, r) => total + r[k], 0), matrix = s.filter((r) => name[r[1]]);
  $("bytes-note").innerHTML = `At length ${count(D.problem.length)} one matrix of scores takes <b>${bytes(D.matrix_bytes)}</b> per head, ${bytes(D.matrix_bytes * D.problem.batch_heads)} over all heads.
    Textbook attention walks over such matrices ${matrix.length} times even with an ideal cache (${bytes(sum(matrix, 4))}); tiled attention never writes one. The bytes that threads
    request are exact: the emulated executor counts the same.`;
  const rows = [...s.map((r) => [`${r[2]} ${r[1]}`, r[4], name[r[1]] ? "var(--p4)" : "var(--p0)"])];
  const tiled = f.map((r) => [`${r[2]} ${r[1]}`, r[4], "var(--p0)"]);
  $("passes").innerHTML = `<figcaption>Textbook: every pass, each address once (${bytes(sum(s, 4))}; requested ${bytes(sum(s, 3))})</figcaption>` +
    bars(room("passes", 560), rows, bytes, `Textbook passes: ${rows.map(([n, b]) => `${n} ${bytes(b)}`).join(", ")}`) +
    `<figcaption style="margin-top:14px">Tiled: the same, on its own scale (${bytes(sum(f, 4))}; requested ${bytes(sum(f, 3))})</figcaption>` +
    bars(room("passes", 560), tiled, bytes, `Tiled passes: ${tiled.map(([n, b]) => `${n} ${bytes(b)}`).join(", ")}`);
  const lines = [["textbook, ideal cache", (t) => t.standard[1], "var(--p4)"], ["tiled, requested", (t) => t.tiled[0], "var(--p2)"], ["tiled, DRAM estimate", (t) => t.tiled[2], "var(--p0)"]];
  $("traffic").innerHTML = `<figcaption>Bytes against sequence length</figcaption>` + lineChart(room("traffic", 560), lines, D.traffic, (t) => t.length, bytes, "sequence length");
  $("crossover").innerHTML = `Tiled attention requests K and V once per query tile, ∝ length²/block_q; the textbook needs four matrix passes, ∝ length². They meet at
    <b>block_q = (d + d<sub>v</sub>)/4 = ${digits(D.crossover)}</b> rows: smaller query tiles request more bytes than the matrices would, larger ones fewer.
    The rule B<sub>kv</sub> = ⌈M/4d⌉ of the FlashAttention paper counts M in elements and gives Q, K, V and O a quarter each: ${D.paper} rows for ${bytes(D.device.shared_bytes_per_cta)}.
    These kernels keep O and S in registers, so K and V may take more, or more stages.`;
}
function lineChart(w, lines, points, x, unit, axis) {
  const h = 320, narrow = w < 460, rows = narrow ? [4, 22, 40] : [8, 8, 8], columns = narrow ? [0, 0, 0] : [0, 176, 326], xs = points.map(x), all = lines.flatMap(([, y]) => points.map(y)).filter((v) => v > 0);
  const sx = logScale(Math.min(...xs), Math.max(...xs) * 1.0001, 70, w - 16), low = Math.min(...all) / 1.4, high = Math.max(...all) * 1.4, sy = logScale(low, high, h - 34, narrow ? 70 : 46);
  const ticks = decades(low, high, 6).map((v) => `<line class="axis" x1="70" x2="${w - 16}" y1="${sy(v)}" y2="${sy(v)}"/><text x="62" y="${sy(v) + 4}" text-anchor="end">${axisBytes(v)}</text>`).join("");
  const names = xs.map((v) => `<text x="${sx(v)}" y="${h - 14}" text-anchor="middle">${v >= 1024 ? `${digits(v / 1024)}K` : v}</text>`).join("");
  const drawn = lines.map(([name, y, colour], i) => `<polyline fill="none" stroke="${colour}" stroke-width="2.5" points="${points.map((p) => `${sx(x(p))},${sy(y(p))}`).join(" ")}"/>
    ${points.map((p, k) => `<circle cx="${sx(x(p))}" cy="${sy(y(p))}" r="${k === state.step ? 5 : 3}" fill="${colour}"/>`).join("")}
    <rect x="${columns[i]}" y="${rows[i]}" width="12" height="12" rx="3" fill="${colour}"/><text x="${columns[i] + 18}" y="${rows[i] + 11}">${name}</text>`).join("");
  const label = `${axis}: ${lines.map(([name, y]) => `${name} from ${unit(y(points[0]))} to ${unit(y(points[points.length - 1]))}`).join("; ")}`;
  return svg(w, h, label, `${ticks}${names}${drawn}<text x="${w - 16}" y="${h}" text-anchor="end">${axis}</text>`);
}
const axisBytes = (v) => (v < 1e6 ? `${digits(v / 1e3)} kB` : v < 1e9 ? `${digits(v / 1e6)} MB` : v < 1e12 ? `${digits(v / 1e9)} GB` : `${digits(v / 1e12)} TB`);

function drawRoofline() {
  const w = room("roofline", 1060), h = 340, narrow = w < 600, flops = D.flops[state.step], peak = D.problem.dtype === "float32" ? D.device.fp32_tflops : D.device.tensor_tflops, band = D.device.dram_gb_per_s / 1000;
  const standard = flops / D.traffic[state.step].standard[1], points = cells.filter((c) => c.fits).map((c) => ({ c, x: flops / c.dram, y: flops / c.us / 1e6 }));
  const xs = [standard, peak / band, ...points.map((p) => p.x)], low = Math.min(...xs) / 3, high = Math.max(...xs) * 3;
  const ys = [Math.min(standard, ...xs) * band, ...points.map((p) => p.y)], bottom = Math.min(...ys) / 2.5, top = peak * 1.8;
  const sx = logScale(low, high, 64, w - 20), sy = logScale(bottom, top, h - 44, 20), knee = peak / band, clip = (y) => Math.max(y, bottom);
  const roof = `<polyline fill="none" stroke="var(--ink)" stroke-width="2" points="${sx(low)},${sy(clip(low * band))} ${sx(knee)},${sy(peak)} ${sx(high)},${sy(peak)}"/>
    <text x="${w - 22}" y="${sy(peak) - 8}" text-anchor="end" class="strong">${digits(peak)} TFLOP/s ${D.problem.dtype === "float32" ? "float32" : "tensor cores"}</text>
    <text class="strong" transform="translate(${sx(Math.sqrt(low * knee))},${sy(Math.sqrt(clip(low * band) * peak)) - 10}) rotate(${(-180 / Math.PI) * Math.atan2(sy(clip(low * band)) - sy(peak), sx(knee) - sx(low))})" text-anchor="middle">${count(Math.round(band * 1000))} GB/s</text>`;
  const grid = decades(bottom, top).map((v) => `<line class="axis" x1="64" x2="${w - 20}" y1="${sy(v)}" y2="${sy(v)}"/><text x="56" y="${sy(v) + 4}" text-anchor="end">${digits(v)}</text>`).join("") +
    decades(low, high).map((v) => `<text x="${sx(v)}" y="${h - 22}" text-anchor="middle">${digits(v)}</text>`).join("");
  const dots = points.map((p) => `<circle cx="${sx(p.x)}" cy="${sy(p.y)}" r="${p.c === cells.best ? 7 : 4.5}" fill="${p.c === cells.best ? "var(--warm)" : "var(--accent)"}" fill-opacity=".8"><title>${escape(tileName(p.c))}</title></circle>`).join("");
  const mark = `<line x1="${sx(standard)}" x2="${sx(standard)}" y1="${sy(bottom)}" y2="${sy(standard * band)}" stroke="var(--p4)" stroke-dasharray="5 4" stroke-width="2"/>
    <circle cx="${sx(standard)}" cy="${sy(standard * band)}" r="5" fill="none" stroke="var(--p4)" stroke-width="2.5"/>
    <text x="${sx(standard) + 10}" y="${sy(standard * band) + 22}">textbook${narrow ? " ≤" : ": at most"} ${digits(standard * band)}${narrow ? "" : " TFLOP/s"}</text>`;
  const b = cells.best, best = b ? points.find((p) => p.c === b) : null;
  const left = best && sx(best.x) > w - 300, tagX = best && (narrow ? w - 20 : sx(best.x) + (left ? -12 : 12)), tagY = best && sy(best.y) - 13;
  const shown = b ? `${b.tile[0]} × ${b.tile[1]}: ${digits(best.y)}${narrow ? "" : " TFLOP/s predicted"}` : "";
  const tag = best ? `<text x="${tagX}" y="${tagY}" text-anchor="${left || narrow ? "end" : "start"}" class="strong">${shown}</text>` : "";
  const label = `Roofline at length ${D.lengths[state.step]}: textbook attention at ${digits(standard)} operations per byte, bounded by ${digits(standard * band)} TFLOP/s; fastest tile ${best ? `${digits(best.x)} operations per byte, ${digits(best.y)} TFLOP/s predicted` : "none"}`;
  $("roofline").innerHTML = `<figcaption>TFLOP/s (predicted) against operations per byte of DRAM traffic, every tile that fits</figcaption>` +
    svg(w, h, label, `${grid}${roof}${mark}${dots}${tag}<text x="${w - 20}" y="${h - 4}" text-anchor="end">operations per DRAM byte</text>`);
}

function ranks(values) {
  const order = values.map((v, i) => [v, i]).sort((a, b) => a[0] - b[0]), rank = [];
  order.forEach(([, i], r) => (rank[i] = r));
  return rank;
}
function spearman(pairs) {
  const a = ranks(pairs.map((p) => p[0])), b = ranks(pairs.map((p) => p[1])), mean = (pairs.length - 1) / 2;
  let top = 0, left = 0, right = 0;
  a.forEach((r, i) => { top += (r - mean) * (b[i] - mean); left += (r - mean) ** 2; right += (b[i] - mean) ** 2; });
  return top / Math.sqrt(left * right || 1);
}
function drawScatter() {
  const all = D.scatter;
  if (!all.length) {
    $("scatter").innerHTML = `<p class="note">No measured time is known for this problem. <code>--measured</code> takes a tuned table or a recorded study;
      on a machine with a GPU <code>flashgen tune</code> makes both.</p>`;
    return;
  }
  const w = room("scatter", 700), h = 420, both = all.flatMap((p) => [p[0], p[1]]), low = Math.min(...both) / 1.15, high = Math.max(...both) * 1.15;
  const sx = logScale(low, high, 70, w - 20), sy = logScale(low, high, h - 44, 16), steps = [1, 2, 5].flatMap((k) => [1, 10, 100, 1e3, 1e4, 1e5].map((t) => k * t)).filter((v) => v > low && v < high);
  const grid = steps.map((v) => `<line class="axis" x1="70" x2="${w - 20}" y1="${sy(v)}" y2="${sy(v)}"/><text x="62" y="${sy(v) + 4}" text-anchor="end">${short(v)}</text><text x="${sx(v)}" y="${h - 22}" text-anchor="middle">${short(v)}</text>`).join("");
  const dots = all.map((p) => `<circle cx="${sx(p[1])}" cy="${sy(p[0])}" r="4.5" fill="${p[2].startsWith("simt") ? "var(--p1)" : "var(--accent)"}" fill-opacity=".75"><title>${escape(p[2])}, length ${p[3]}: ${time(p[0])} predicted, ${time(p[1])} measured</title></circle>`).join("");
  const rho = spearman(all);
  $("scatter").innerHTML = `<figure style="max-width:720px"><figcaption>${all.length} variants, measured on ${escape(D.device.name)}: rank correlation ${digits(rho)} (Spearman; known registers and spills count). On the line, prediction and measurement agree.</figcaption>` +
    svg(w, h, `${all.length} points of predicted against measured time, rank correlation ${digits(rho)}`,
      `${grid}<line x1="${sx(low)}" y1="${sy(low)}" x2="${sx(high)}" y2="${sy(high)}" stroke="var(--soft)" stroke-dasharray="5 4"/>${dots}<text x="${w - 20}" y="${h - 2}" text-anchor="end">measured µs</text><text x="70" y="10">predicted µs</text>`) + "</figure>";
}

function drawExact() {
  const c = D.comparison;
  if (c.missing !== undefined) return ($("exact").innerHTML = `<p class="note">Not compared: ${escape(c.missing)}</p>`);
  const groups = [[0, 0, "0"], [1, 1, "1"], [2, 4, "2–4"], [5, 16, "5–16"], [17, 256, "17–256"], [257, Infinity, "more"]];
  const rows = c.methods.map((m) => {
    const total = m.ulp.reduce((sum, b) => sum + b[2], 0), held = groups.map(([lo, hi]) => m.ulp.filter((b) => b[0] >= lo && b[1] <= hi).reduce((sum, b) => sum + b[2], 0) / total);
    held[5] = 1 - held.slice(0, 5).reduce((a, b) => a + b, 0);
    const text = groups.map(([, , n], i) => `${n}: ${digits(Math.max(0, 100 * held[i]))} %`).join(", ");
    const spark = held.map((f, i) => `<rect x="${i * 26}" y="${36 - 34 * f}" width="22" height="${Math.max(1, 34 * f)}" rx="2" fill="${m.kind === "exact" ? "var(--p0)" : "var(--p1)"}"/><text x="${i * 26 + 11}" y="48" text-anchor="middle" style="font-size:8px">${groups[i][2]}</text>`).join("");
    return `<tr><td class="l"><b>${escape(m.name)}</b><br><span style="color:var(--soft)">${escape(m.how)}</span></td><td class="l"><span class="tag ${m.kind}">${m.kind}</span></td>
      <td>${digits(m.max, 2)}</td><td>${digits(m.max / c.plain, 3)}×</td><td><svg class="spark" style="width:156px" viewBox="0 0 156 50" role="img" aria-label="share of elements by ulp distance: ${text}">${spark}</svg></td><td>${bytes(m.bytes)}<br><span style="color:var(--soft)">${m.from}</span></td><td>${digits(m.operations / 1e6)} M</td></tr>`;
  });
  $("exact").innerHTML = `<p class="note">One input (<span class="mono">${escape(c.problem)}</span>), all methods, compared with float64. Tiled attention reorders the same sums, so its error is rounding; the others compute
    something else. “× plain” divides by the error of the plain computation in the same type; the exactness gate allows 2. Textbook attention with its matrices in 16 bits may exceed that.</p>
    <div class="scroll"><table class="data"><thead><tr><th class="l">method</th><th class="l"></th><th>largest error</th><th>× plain</th><th>elements by ulp distance</th><th>bytes</th><th>operations</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
}

const COLUMNS = [
  ["block_q", (c) => c.tile[0]], ["block_kv", (c) => c.tile[1]], ["stages", (c) => c.tile[2]],
  ["shared", (c) => c.at.shared_bytes, bytes], ["registers", (c) => (c.fits ? c.run.needs[0] : c.at.est_registers)], ["CTAs/SM", (c) => (c.fits ? c.ctas : null)],
  ["DRAM", (c) => c.dram ?? null, bytes], ["L2", (c) => c.l2 ?? null, bytes], ["predicted", (c) => c.us ?? null, time, "us"], ["measured", (c) => c.measured ?? null, time],
  ["bound by, or what fails", (c) => (c.fits ? D.limits[c.limit].split(":")[0] : c.failed.map((f) => f.rule.name).join(", "))],
];
function drawTable() {
  const key = (col) => col[3] || col[0], chosen = COLUMNS.find((col) => key(col) === state.sort[0]) || COLUMNS[8], sign = state.sort[1];
  const order = [...cells].sort((a, b) => {
    const x = chosen[1](a), y = chosen[1](b);
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
  const head = COLUMNS.map((col, i) => `<th ${i === COLUMNS.length - 1 ? 'class="l"' : ""} aria-sort="${chosen === col ? (sign > 0 ? "ascending" : "descending") : "none"}"><button type="button" data-sort="${key(col)}">${col[0]}</button></th>`).join("");
  const rows = order.map((c) => `<tr class="${c.fits ? "" : "no"}${c === cells.picked ? " sel" : ""}">${COLUMNS.map(([, of, text], i) => { const v = of(c);
    return `<td ${i === COLUMNS.length - 1 ? 'class="l"' : ""}>${v === null ? "–" : text ? text(v) : escape(v)}</td>`; }).join("")}</tr>`).join("");
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.sort : null;
  $("table").innerHTML = `<table class="data"><thead><tr>${head}</tr></thead><tbody>${rows}</tbody></table>`;
  if (focused) { const again = document.querySelector(`[data-sort="${focused}"]`); if (again) again.focus(); }
}

// ---- controls

function drawControls() {
  const mark = D.marks.find(([size]) => size === state.capacity), length = D.lengths[state.step];
  $("capacity").value = Math.round(state.capacity / KIB);
  $("capacity-text").textContent = bytes(state.capacity);
  $("capacity").setAttribute("aria-valuetext", `${bytes(state.capacity)}${mark ? `, as ${mark[1]}` : ""}`);
  $("length").value = state.step;
  $("length-text").textContent = count(length);
  $("length").setAttribute("aria-valuetext", String(length));
  document.querySelectorAll("#marks button").forEach((each) => each.setAttribute("aria-pressed", String(Number(each.dataset.size) === state.capacity)));
}
function draw() {
  recompute();
  for (const part of [drawControls, drawStatus, drawMaps, drawDetail, drawLimit, drawBytes, drawRoofline, drawTable]) part();
}
function setUp() {
  const d = D.device, p = D.problem, here = D.traffic[state.step], saved = here.standard[1] / here.tiled[2];
  $("lede").innerHTML = `On ${escape(d.name)}, ${escape(p.text)} is bound by <b>${escape(D.limits[here.limit].split(":")[0])}</b>. By estimate, the tiled kernel moves <b>${digits(saved, 2)}× fewer bytes</b>
    through DRAM than textbook attention with an ideal cache, and its result is exact.`;
  $("chips").innerHTML = [[p.dtype, ""], [`d ${p.head_dim}${p.head_dim_v !== p.head_dim ? `/${p.head_dim_v}` : ""}`, "head dim"], [count(p.batch_heads), "batch × heads"], [p.mask, "mask"],
    [d.name, `sm_${d.sm}`], [bytes(d.shared_bytes_per_cta), "shared per CTA"], [d.sm_count, "SMs"]].map(([v, n]) => `<li><b>${escape(v)}</b> ${n}</li>`).join("");
  const best = D.families.map((_, i) => { const found = grid(i, state.capacity, state.step).filter((c) => c.fits); return Math.min(Infinity, ...found.map((c) => c.us)); });
  state.family = best.indexOf(Math.min(...best));
  $("family").innerHTML = D.families.map((f, i) => `<option value="${i}"${i === state.family ? " selected" : ""}>${escape(f.name)}</option>`).join("");
  $("metric").innerHTML = Object.entries(METRICS).map(([k, m]) => `<option value="${k}">${m.name}</option>`).join("");
  $("capacity").max = D.largest / KIB;
  $("length").max = D.lengths.length - 1;
  $("marks").innerHTML = D.marks.map(([size, name]) => `<button type="button" data-size="${size}" title="${escape(name)}">${Math.round(size / KIB)}K ${escape(name)}</button>`).join("");
  $("foot").innerHTML = `flashgen ${escape(D.flashgen)}. Times are predicted by a cost model unless they say measured. Spaces: ${D.families.map((f) => `${escape(f.name)} <span class="mono">${escape(f.digest.slice(0, 19))}</span>`).join(", ")}. This page loads nothing.`;
  $("capacity").addEventListener("input", (e) => { const kib = Number(e.target.value); state.capacity = Math.round(d.shared_bytes_per_cta / KIB) === kib ? d.shared_bytes_per_cta : kib * KIB; draw(); });
  $("length").addEventListener("input", (e) => { state.step = Number(e.target.value); draw(); });
  $("family").addEventListener("change", (e) => { state.family = Number(e.target.value); state.picked = null; draw(); });
  $("metric").addEventListener("change", (e) => { state.metric = e.target.value; draw(); });
  $("marks").addEventListener("click", (e) => { const size = e.target.dataset.size; if (size) { state.capacity = Number(size); draw(); } });
  $("table").addEventListener("click", (e) => { const key = e.target.dataset.sort; if (key) { state.sort = [key, state.sort[0] === key ? -state.sort[1] : 1]; drawTable(); } });
  $("maps").addEventListener("click", (e) => pick(e.target.closest("[data-tile]")));
  $("maps").addEventListener("keydown", move);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { drawScatter(); draw(); }, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);
  drawScatter();
  drawExact();
  draw();
}
function pick(button) {
  if (!button) return;
  state.picked = button.dataset.tile;
  recompute();
  drawMaps(); drawDetail(); drawTable();
  const again = document.querySelector(`[data-tile="${state.picked}"]`);
  if (again) again.focus();
}
function move(e) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key], button = e.target.closest("[data-tile]");
  if (!step || !button) return;
  e.preventDefault();
  const td = button.parentElement, tr = td.parentElement, body = tr.parentElement;
  let row = tr.sectionRowIndex + step[0], column = td.cellIndex + step[1], rows = body.rows;
  if (column < 1 || column >= tr.cells.length) { // on to the neighbouring stage
    const tables = [...document.querySelectorAll("table.map")], next = tables[tables.indexOf(td.closest("table")) + step[1]];
    if (!next) return;
    rows = next.tBodies[0].rows;
    column = step[1] > 0 ? 1 : rows[0].cells.length - 1;
  }
  const target = rows[row] && rows[row].cells[column] && rows[row].cells[column].querySelector("button");
  if (target) pick(target);
}
setUp();
window.flashgenExplorer = { data: D, state, grid, draw };
