"use strict";
// Shows the chosen drafter, domain, law and draft length: cards, plots and a reply. Numbers arrive
// as ready-made text beside their values (page_data.py); here they only find their place.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const maker = (space) => (tag, attributes = {}, ...children) => {
    const made = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const html = maker("http://www.w3.org/1999/xhtml");
  const svg = maker("http://www.w3.org/2000/svg");

  // ------------------------------------------------------------------------- what is chosen

  const many = data.entries.length > 1;
  const union = (lists) => [...new Set(lists.flat())];
  const cells = data.entries.flatMap((entry) => entry.cells);
  const lines = { domain: "domains", law: "laws", ...(many && { drafter: "drafters" }) };
  const options = {
    drafter: data.entries.map((entry) => entry.name),
    domain: union(cells.map((cell) => cell.domain)),
    law: union(cells.map((cell) => cell.law)),
    length: union(data.entries.map((entry) => entry.lengths)).sort((a, b) => a - b),
    lines: Object.keys(lines),
  };
  const chosen = { drafter: 0, domain: 0, law: 0, reply: 0, lines: many ? 2 : 0 };
  const served = () => options.length.indexOf(data.entries[chosen.drafter].served);
  chosen.length = served();
  const named = (control) => options[control][chosen[control]];
  const cellOf = (drafter, domain, law) =>
    data.entries[drafter].cells.find((cell) => cell.domain === domain && cell.law === law);

  /** What is drawn side by side: all values of one control, the others as chosen. */
  function series(law) {
    const along = named("lines");
    return options[along]
      .map((name, index) => {
        const at = { drafter: chosen.drafter, domain: named("domain"), law };
        at[along] = along === "drafter" ? index : name;
        const emphasis = name === (along === "law" ? law : named(along));
        return { name, index, emphasis, cell: cellOf(at.drafter, at.domain, at.law) };
      })
      .filter((one) => one.cell);
  }

  function fill(control) {
    const texts = options[control].map((value) => (control === "lines" ? lines[value] : value));
    byId(control).replaceChildren(...texts.map((text, i) => html("option", { value: i }, text)));
    byId(control).closest("label").hidden = texts.length < 2;
    byId(control).addEventListener("change", (event) => {
      chosen[control] = Number(event.target.value);
      chosen.reply = 0;
      if (control === "drafter") chosen.length = served();
      remember();
      show();
    });
  }

  /** The address keeps the choice, so that a link points at it. */
  function remember() {
    const kept = Object.keys(options).map((control) => [control, named(control)]);
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  }

  function recall() {
    for (const [control, value] of new URLSearchParams(location.hash.slice(1))) {
      const known = Object.hasOwn(options, control) ? options[control] : [];
      const index = known.map(String).indexOf(value);
      if (index >= 0) chosen[control] = index;
    }
  }

  // ------------------------------------------------------------------------- plots

  const LINE = 17, AXIS = 34, PAPER = 360;  // pixels: a row of text, the strip below axes, a printed plot
  const COLOURS = 8, MARKS = 4;
  const look = (one) => `series c${one.index % COLOURS}${one.emphasis ? " emphasis" : ""}`;
  const mark = (one) => (one.index + Math.floor(one.index / COLOURS)) % MARKS;
  /** Beginning and end of a long name: benchmarks tell their parts apart by the end. */
  function short(text, most) {
    const half = Math.floor((most - 1) / 2);
    return text.length > most ? `${text.slice(0, half)}…${text.slice(-half)}` : text;
  }
  const tip = (one, text) => svg("title", {}, `${one.name}: ${text}`);

  function scale(from, to, low, high) {
    return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  }

  /** Round numbers that cover [low, high], about `count` of them. */
  function ticks(low, high, count) {
    const rough = (high - low || 1) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
    const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toFixed(9)));
  }

  function shape(kind, x, y, size) {
    const around = [
      `M${x - size} ${y}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0Z`,
      `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}Z`,
      `M${x} ${y - 1.2 * size}L${x + 1.2 * size} ${y + size}H${x - 1.2 * size}Z`,
      `M${x} ${y - 1.3 * size}L${x + 1.3 * size} ${y}L${x} ${y + 1.3 * size}L${x - 1.3 * size} ${y}Z`,
    ];
    return around[kind];
  }

  function picture(plot, width, height, parts) {
    const label = `${plot.title}. ${plot.caption} The tables below hold the numbers.`;
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    return svg("svg", { ...size, role: "img", "aria-label": label }, ...parts.flat());
  }

  const reaching = (values, plot) => {
    const found = [...values, ...plot.include].filter((value) => value !== null);
    return ticks(Math.min(...found), Math.max(...found), 5);
  };

  /** One row for each of the series: a mark with its interval, hollow where it is predicted. */
  function ranges(plot, rows, width) {
    const found = rows
      .map((one) => {
        const curve = one.cell.curves[plot.source], x = plot.by_length ? named("length") : 0;
        const at = (list) => list.find((point) => point[0] === x);
        return { ...one, point: at(curve.points), foreseen: at(curve.line) };
      })
      .filter((one) => one.point || one.foreseen);
    if (!found.length) return null;
    const left = Math.min(150, width * 0.27), right = width - 150, row = 26;
    const bottom = 8 + row * found.length;
    const values = found.flatMap((one) => [...(one.point ?? []).slice(1, 4), one.foreseen?.[1] ?? null]);
    const marks = reaching(values, plot), x = scale(left, right, marks[0], marks.at(-1));
    const grid = marks.map((value, i) => [
      svg("path", { class: "grid", d: `M${x(value)} 4V${bottom}` }),
      i % (right - left < 170 ? 2 : 1) ? "" :
        svg("text", { x: x(value), y: bottom + LINE, "text-anchor": "middle" }, String(value)),
    ]);
    if (plot.reference !== null) {
      grid.push([svg("path", { class: "reference", d: `M${x(plot.reference)} 4V${bottom}` })]);
    }
    const drawn = found.map((one, i) => {
      const y = 8 + row * (i + 0.5), [, value, low, high, text] = one.point ?? [];
      const name = svg("text", { x: 0, y: y + 4 }, short(one.name, Math.floor(left / 7.6)));
      const told = svg("text", { x: right + 10, y: y + 4 }, text ?? one.foreseen[2]);
      const parts = [name, told, tip(one, [text, one.foreseen?.[2]].filter(Boolean).join(", predicted "))];
      if (one.point) {
        if (low !== null) parts.push(svg("path", { class: "line", d: `M${x(low)} ${y}H${x(high)}` }));
        parts.push(svg("path", { class: "mark", d: shape(mark(one), x(value), y, 4.5) }));
      }
      if (one.foreseen) {
        parts.push(svg("path", { class: "hollow", d: shape(3, x(one.foreseen[1]), y, 4.5) }));
      }
      return svg("g", { class: look(one) }, ...parts);
    });
    const axis = svg("text", { x: (left + right) / 2, y: bottom + AXIS, "text-anchor": "middle" }, plot.y);
    return picture(plot, width, bottom + AXIS + 6, [...grid.flat(), ...drawn, axis]);
  }

  /** Lines with bands, and measured points with their intervals, over whole numbers. */
  function curves(plot, all, width) {
    const found = all.filter((one) => one.curve && one.curve.line.length + one.curve.points.length);
    if (!found.length) return null;
    const height = 250, left = 44, bottom = height - AXIS - 8;
    const every = found.flatMap((one) => [...one.curve.line, ...one.curve.points]);
    const xs = union(every.map((point) => point[0])).sort((a, b) => a - b);
    const bounds = (one) => [...one.curve.points, ...(one.emphasis ? one.curve.band : [])]
      .flatMap((point) => (point.length === 3 ? point.slice(1) : point.slice(2, 4)));
    const values = [...every.map((point) => point[1]), ...found.flatMap(bounds)];
    const marks = reaching(values, plot), y = scale(bottom, 10, marks[0], marks.at(-1));
    const apart = xs.length > 1 ? 0 : 1;
    const x = scale(left + 14, width - 16, xs[0] - apart, xs.at(-1) + apart);
    const thinned = Math.ceil(xs.length / ((width - left) / 30));
    const grid = [
      ...marks.flatMap((value) => [
        svg("path", { class: "grid", d: `M${left} ${y(value)}H${width}` }),
        svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)),
      ]),
      ...xs.map((value, i) => i % thinned ? "" :
        svg("text", { x: x(value), y: bottom + LINE, "text-anchor": "middle" }, String(value))),
      svg("text", { x: (left + width) / 2, y: bottom + AXIS, "text-anchor": "middle" }, plot.x),
    ];
    if (plot.reference !== null) {
      grid.push(svg("path", { class: "reference", d: `M${left} ${y(plot.reference)}H${width}` }));
    }
    if (plot.by_length && xs.includes(named("length"))) {
      grid.unshift(svg("path", { class: "here", d: `M${x(named("length"))} 10V${bottom}` }));
    }
    const drawn = found.map((one, i) => {
      const { line, band, points } = one.curve, parts = [];
      if (one.emphasis && band.length > 1) {
        const edge = [...band.map(([at, low]) => [at, low]), ...band.toReversed().map(([at, , high]) => [at, high])];
        parts.push(svg("path", { class: "band", d: `M${edge.map(([at, v]) => `${x(at)} ${y(v)}`).join("L")}Z` }));
      }
      if (line.length > 1) {
        const along = line.map(([at, value]) => `${x(at)} ${y(value)}`).join("L");
        parts.push(svg("path", { class: `line d${mark(one)}`, d: `M${along}` }, tip(one, plot.y)));
      } else if (line.length) {
        const only = { class: "hollow", d: shape(3, x(line[0][0]), y(line[0][1]), 4.5) };
        parts.push(svg("path", only, tip(one, line[0][2])));
      }
      const aside = (i - (found.length - 1) / 2) * Math.min(5, 30 / found.length);
      for (const [at, value, low, high, text] of points) {
        const place = x(at) + (points.some((point) => point[2] !== null) ? aside : 0);
        if (low !== null) parts.push(svg("path", { class: "line", d: `M${place} ${y(low)}V${y(high)}` }));
        const dot = { class: "mark", d: shape(mark(one), place, y(value), 3.5) };
        parts.push(svg("path", dot, tip(one, `${plot.x} ${at}: ${text}`)));
      }
      return svg("g", { class: look(one) }, ...parts);
    });
    // The chosen one is drawn last, above the others.
    drawn.sort((a, b) => a.classList.contains("emphasis") - b.classList.contains("emphasis"));
    return { image: picture(plot, width, height, [...grid, ...drawn]), found };
  }

  function legend(found) {
    const item = (one) => html(
      "li", { title: one.name, class: one.emphasis ? "emphasis" : "" },
      svg("svg", { viewBox: "0 0 14 14", width: 14, height: 14, class: look(one), "aria-hidden": "true" },
        svg("path", { class: "mark", d: shape(mark(one), 7, 7, 4) })),
      short(one.name, 32),
    );
    return html("ul", { class: "legend" }, ...found.map(item));
  }

  function figure(plot, law, width) {
    const own = data.entries[chosen.drafter].curves[plot.source];
    const drawn = plot.kind === "ranges"
      ? { image: ranges(plot, series(law), width) }
      : curves(plot, own
        ? own.map((curve, index) => ({ name: curve.name, curve, index, emphasis: true }))
        : series(law).map((one) => ({ ...one, curve: one.cell.curves[plot.source] })), width);
    if (!drawn?.image) return null;
    const parts = [html("h3", {}, plot.title), drawn.image];
    if (drawn.found?.length > 1) parts.push(legend(drawn.found));
    return html("figure", { "data-plot": plot.key }, ...parts, html("figcaption", {}, plot.caption));
  }

  function figures(law, width) {
    return data.plots.map((plot) => figure(plot, law, width)).filter(Boolean);
  }

  // ------------------------------------------------------------------------- cards and replies

  function card({ key, label, value, interval, note, tone }) {
    return html(
      "div", { class: `card ${tone}`, "data-key": key },
      html("h3", {}, label),
      html("p", { class: "value" }, value),
      html("p", { class: "interval" }, interval),
      html("p", { class: "note" }, note),
    );
  }

  function showCards() {
    const cell = cellOf(chosen.drafter, named("domain"), named("law"));
    const told = cell?.cards[named("length")] ?? [];
    const none = html("p", {}, "This drafter was not measured on this domain under this law at this γ.");
    byId("cards").replaceChildren(...(told.length ? told.map(card) : [none]));
    const drafter = many ? `${named("drafter")}, ` : "";
    byId("selection").textContent = `${drafter}${named("domain")}, ${named("law")}, γ = ${named("length")}`;
  }

  function token([text, kind, position], index) {
    const about = `token ${index + 1}, ${data.kinds[kind]}` + (position ? `, place ${position} in its round` : "");
    return html("span", { class: `token ${kind}${position === 1 ? " opens" : ""}`, title: about }, text);
  }

  function showReplies() {
    const found = data.replies.filter((reply) =>
      reply.domain === named("domain") && reply.law === named("law") &&
      (!many || reply.entry === named("drafter")));
    byId("replies").hidden = !data.replies.length;
    byId("reply").closest("label").hidden = !found.length;
    byId("reply").replaceChildren(...found.map((reply, i) => html("option", { value: i }, reply.prompt_id)));
    byId("reply").value = chosen.reply;
    const reply = found[chosen.reply], pieces = reply?.pieces ?? [];
    byId("tokens").replaceChildren(...pieces.map(token));
    const count = (kind) => pieces.filter((piece) => piece[1] === kind).length;
    byId("kinds").hidden = byId("tokens").hidden = !reply;
    byId("kinds").replaceChildren(...Object.entries(data.kinds).map(([kind, meaning]) => html(
      "li", {}, html("span", { class: `token ${kind}` }, kind), ` ${count(kind)}: ${meaning}`)));
    byId("told").textContent = reply
      ? `${pieces.length} tokens; a thin line opens each round.`
      : "No reply of this selection was kept.";
  }

  function showFigures() {
    const width = Number.parseFloat(getComputedStyle(byId("figures")).gridTemplateColumns);
    byId("figures").replaceChildren(...figures(named("law"), Math.max(width, 280)));
    byId("elsewhere").replaceChildren();
  }

  function show() {
    for (const control of Object.keys(options)) byId(control).value = chosen[control];
    for (const [index, part] of [...document.querySelectorAll(".entry")].entries()) {
      part.hidden = index !== chosen.drafter;
    }
    showCards();
    showFigures();
    showReplies();
  }

  // ------------------------------------------------------------------------- beginning, printing

  /** Paper cannot be asked for another law: it gets the plots of all. */
  function unfold() {
    const others = options.law.filter((law) => law !== named("law"));
    byId("figures").replaceChildren(...figures(named("law"), PAPER));
    byId("elsewhere").replaceChildren(...others.map((law) => html(
      "section", {}, html("h2", {}, `Plots, ${law}`), html("div", { class: "figures" }, ...figures(law, PAPER)))));
  }

  async function copy(button) {
    const source = byId(button.dataset.copies);
    getSelection().selectAllChildren(source);  // what a browser without a clipboard leaves to do
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      document.execCommand("copy");
    }
    button.textContent = "Copied";
  }

  byId("explore").hidden = false;
  Object.keys(options).forEach(fill);
  byId("reply").addEventListener("change", (event) => {
    chosen.reply = Number(event.target.value);
    showReplies();
  });
  for (const button of document.querySelectorAll("button[data-copies]")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }
  addEventListener("hashchange", () => { recall(); show(); });
  addEventListener("resize", showFigures);
  addEventListener("beforeprint", unfold);
  addEventListener("afterprint", showFigures);
  recall();
  show();
})();
