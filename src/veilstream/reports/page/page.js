/* A veilstream page. One state, one way to draw it:
     veilstream.render(state)   draws everything anew
     veilstream.update(patch)   merges what has changed and draws that: objects key by key, lists whole;
                                patch.append = {chart id: {x: [..], series: {name: [one value a seed, a point]}}}
   The state's keys are those of PageState in reports/page_kit.py. */
(function () {
  "use strict";
  var charts = window.veilstreamCharts;
  var state = null, drawn = {}, hiddenNames = new Set(), curves = new Map(), style = {}, selected = {};
  var THEMES = ["auto", "light", "dark"];

  function el(tag, attributes) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) {
      if (key === "text") node.textContent = attributes[key];
      else if (key === "on") Object.keys(attributes.on).forEach(function (event) { node.addEventListener(event, attributes.on[event]); });
      else if (attributes[key] !== null && attributes[key] !== undefined) node.setAttribute(key, attributes[key]);
    });
    for (var i = 2; i < arguments.length; i++) if (arguments[i]) node.append(arguments[i]);
    return node;
  }

  function section(id, title) { return el("section", { id: id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title", text: title })); }

  function replace(id, node) {
    var old = document.getElementById(id);
    if (node && old) old.replaceWith(node);
    else if (node) document.getElementById("page").append(node);
    else if (old) old.remove();
  }

  function remembered() { try { return localStorage.getItem("veilstream-theme") || "auto"; } catch (_) { return "auto"; } }
  var wanted = remembered(), printing = false;
  var system = window.matchMedia("(prefers-color-scheme: dark)");

  function applyTheme() {
    var isDark = !printing && (wanted === "dark" || (wanted === "auto" && system.matches));
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    document.documentElement.style.colorScheme = isDark ? "dark" : "light";
    var button = document.getElementById("theme");
    button.textContent = "Theme: " + wanted;
    if (state) redrawCharts();
  }

  function nextTheme() {
    wanted = THEMES[(THEMES.indexOf(wanted) + 1) % THEMES.length];
    try { localStorage.setItem("veilstream-theme", wanted); } catch (_) { /* a page from disk may not keep it */ }
    applyTheme();
  }

  var SECTIONS = {
    opening: function () {
      var box = el("div", { id: "opening" }, el("h1", { text: state.title }), state.subtitle ? el("p", { class: "subtitle", text: state.subtitle }) : null);
      if (state.headline) box.append(headline(state.headline));
      state.notices.forEach(function (text) { box.append(el("p", { class: "notice", text: text })); });
      return box;
    },
    learning: function () { return chartSection("learning", { comparison: "The runs side by side", learner: "Score before learning" }[state.kind] || "Learning", true); },
    results: function () { return tableSection("results", { federation: "Learners", learner: "Scores" }[state.kind] || "Results", state.results); },
    labels: function () { return tableSection("labels", "Each label", state.labels); },
    facts: function () {
      if (!state.facts.length) return null;
      var box = el("div", { id: "facts" });
      state.facts.forEach(function (group) {
        var list = el("dl", { class: "facts" });
        group.rows.forEach(function (row) { list.append(el("dt", { text: row.label }), value(row.value)); });
        var long = group.rows.some(function (row) { return row.value.length > 60; });
        box.append(el("section", { class: long ? "long" : null }, el("h2", { text: group.title }), list));
      });
      return box;
    },
    promise: function () {
      var promise = state.promise;
      if (!promise) return null;
      var box = section("promise", "The promise");
      box.append(el("p", { class: "symbols", text: promise.symbols }), el("p", { class: "words", text: promise.words }));
      if (promise.formula) box.append(el("p", { class: "formula", text: promise.formula }));
      if (promise.rests.length) box.append(el("details", { open: "" }, el("summary", { text: "What it rests on" }), items(promise.rests)));
      [["What leaves a learner", promise.leaves], ["What is not covered", promise.uncovered]].forEach(function (part) {
        if (part[1].length) box.append(el("details", {}, el("summary", { text: part[0] }), items(part[1])));
      });
      promise.remarks.forEach(function (text) { box.append(el("p", { class: "notice", text: text })); });
      return box;
    },
    telemetry: function () { return chartSection("telemetry", "Private telemetry", false); },
    rounds: function () { return chartSection("rounds", "Rounds", false); },
    noise: function () { return chartSection("noise", "Noise against signal", false); },
    audit: function () {
      var audit = state.audit;
      if (!audit) return null;
      var box = section("audit", "The last audit"), bars = el("div", { class: "bars" }), claim = audit.claimed;
      function bar(label, epsilon, mu, kind) {
        var share = typeof mu === "number" ? Math.max(0, Math.min(1, mu / claim.mu)) : 1, fill = el("i");
        fill.style.width = 100 * share + "%";
        bars.append(el("span", { text: label }), el("span", { class: "bar " + kind, "aria-hidden": "true" }, fill),
          el("span", { text: (kind ? "" : "≥ ") + "ε = " + (typeof epsilon === "number" ? epsilon.toFixed(3) : epsilon) }));
      }
      bar("promised", claim.epsilon, claim.mu, "claim");
      audit.bounds.forEach(function (each) { bar(each.label, each.epsilon, each.mu, ""); });
      var about = (audit.made ? "Made " + audit.made + ". " : "") + (audit.of_this_plan ? "It is for this run’s plan."
        : audit.plan_sha256 ? "It is for another plan (SHA-256 " + audit.plan_sha256.slice(0, 16) + "…)." : "It does not say which plan it is for.");
      box.append(el("p", { class: "verdict" + (audit.kept ? "" : " broken"), text: audit.kept ? "Kept, as far as messages show" : "Broken" }),
        bars, el("p", { class: "note", text: audit.verdict + ". Each bound holds with probability " + 100 * audit.confidence + "%, at δ = " + claim.delta + ". " + about }),
        el("details", {}, el("summary", { text: "What an audit of messages cannot see" }), items(audit.cannot_see)));
      return box;
    },
    provenance: function () {
      var from = state.provenance;
      if (!from) return null;
      var box = section("provenance", "Repeat it"), facts = el("dl", { class: "facts" });
      if (from.command) {
        var said = el("span", { class: "hidden", role: "status" });
        var button = el("button", { type: "button", id: "copy", text: "Copy", on: { click: function () { copy(from.command, button, said); } } });
        box.append(el("div", { class: "command" }, el("code", { id: "command", tabindex: "0", text: from.command }), button, said));
      }
      from.facts.forEach(function (fact) { facts.append(el("dt", { text: fact.label }), value(fact.value)); });
      box.append(facts);
      if (from.plan) box.append(el("details", {}, el("summary", { text: "The plan" }), el("pre", { tabindex: "0", text: from.plan })));
      return box;
    },
    links: function () {
      if (!state.links.length) return null;
      var box = el("p", { id: "links" });
      state.links.forEach(function (link) { box.append(el("a", { href: link.href, text: link.text }), " "); });
      return box;
    }
  };

  /* A federation's telemetry is all that it knows of the model's quality: it comes first. */
  function order() {
    var ids = Object.keys(SECTIONS);
    return state.kind !== "federation" ? ids : ["opening", "telemetry"].concat(ids.filter(function (id) { return id !== "opening" && id !== "telemetry"; }));
  }

  /* How good, how private, compared with what. */
  function headline(head) {
    var box = el("div", { class: "hero" }), figures = el("div", { class: "figures" });
    if (head.sentence) box.append(el("p", { class: "sentence" + (head.better === false ? " worse" : head.better ? " better" : ""), text: head.sentence }));
    head.figures.forEach(function (each, i) { figures.append(figureOf(each.value, each.label, each.compared, i ? "" : "first")); });
    if (state.promise) figures.append(figureOf(state.promise.symbols, state.promise.reach, [], "promised"));
    box.append(figures);
    if (state.absent.length) box.append(absent(state.absent));
    if (head.beside.length) box.append(pairs(head.beside, "beside"));
    return box;
  }

  function figureOf(text, what, compared, kind) {
    return el("div", { class: "figure " + kind }, el("div", { class: "number", id: kind === "first" ? "headline" : null, text: text }), el("div", { class: "what", text: what }),
      compared.length ? pairs(compared, "compared") : null);
  }

  function pairs(list, kind) {
    var box = el("dl", { class: kind });
    list.forEach(function (each) { box.append(el("div", {}, el("dt", { text: each.label }), value(each.value))); });
    return box;
  }

  /* A value in a list: a short one stays on one line, so that no number is broken. */
  function value(text) { return el("dd", { class: text.length <= 26 ? "short" : null, text: text }); }

  function tableSection(id, title, table) {
    if (!table || !table.rows.length) return null;
    var box = section(id, title), head = el("tr"), body = el("tbody");
    table.columns.forEach(function (name) { head.append(el("th", { scope: "col", text: name })); });
    table.rows.forEach(function (row) {
      var line = el("tr", { class: row[0] === table.main ? "main" : null });
      row.forEach(function (each, i) { line.append(cell(each, el(i ? "td" : "th", { scope: i ? null : "row" }))); });
      body.append(line);
    });
    box.append(el("div", { class: "wide", tabindex: "0", role: "region", "aria-labelledby": id + "-title" }, el("table", {}, el("thead", {}, head), body)), el("p", { class: "note", text: table.note }));
    return box;
  }

  /* Text, a state with its mark, or a count with its share of the row. */
  function cell(given, box) {
    if (typeof given === "string") box.textContent = given;
    else if (given.mark) box.append(el("span", { class: "state " + given.mark, text: given.text }));
    else {
      box.textContent = given.text;
      box.style.backgroundColor = "color-mix(in srgb, var(--accent) " + Math.round(30 * given.share) + "%, transparent)";
    }
    return box;
  }

  function moment(since) { return el("time", { datetime: new Date(1000 * since).toISOString(), "data-since": since, text: ago(since) }); }

  /* The time of day here, with the date where it was not today, and how long ago that was. */
  function ago(since) {
    var then = new Date(1000 * since), seconds = Math.max(0, Date.now() / 1000 - since), time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    var day = then.toDateString() === new Date().toDateString() ? "" : then.toLocaleDateString([], { day: "numeric", month: "short" }) + ", ";
    var size = [[86400, "day"], [3600, "hour"], [60, "minute"]].filter(function (each) { return seconds >= each[0]; })[0];
    if (!size) return day + time + " (just now)";
    var count = Math.floor(seconds / size[0]);
    return day + time + " (" + count + " " + size[1] + (count === 1 ? "" : "s") + ")";
  }

  function absent(list) {
    var rows = el("ul", { class: "absent", "aria-label": "Learners that take no part now" });
    list.forEach(function (each) {
      var line = el("li", {}, el("b", { text: each.who }), " " + each.now);
      if (each.since !== null) line.append(" since ", moment(each.since));
      if (each.why) line.append(": " + each.why);
      rows.append(line);
    });
    return rows;
  }

  function items(texts) {
    var ul = el("ul");
    texts.forEach(function (text) { ul.append(el("li", { text: text })); });
    return ul;
  }

  function copy(text, button, said) {
    function done(worked) {
      button.textContent = worked ? "Copied" : "Select it";
      said.textContent = worked ? "Copied to the clipboard" : "Select the command and copy it";
      setTimeout(function () { button.textContent = "Copy"; }, 2000);
    }
    function byHand() {  // pages from disk have no clipboard of their own everywhere
      var area = el("textarea", { class: "hidden", "aria-hidden": "true" });
      area.value = text;
      document.body.append(area);
      area.select();
      var worked = false;
      try { worked = document.execCommand("copy"); } catch (_) { worked = false; }
      area.remove();
      button.focus();
      done(worked);
    }
    if (navigator.clipboard && window.isSecureContext) navigator.clipboard.writeText(text).then(function () { done(true); }, byHand);
    else byHand();
  }

  function legend() {
    var box = el("fieldset", { class: "legend", id: "legend" }, el("legend", { class: "hidden", text: "Methods shown in the charts" }));
    [null].concat(groups()).forEach(function (group) {
      var own = state.methods.filter(function (m) { return m.group === group; });
      if (!own.length) return;
      if (groups().length > 1 || group) {
        box.append(el("div", { class: "group" }, el("span", { text: group || (state.kind === "comparison" ? "" : "no privacy") }),
          group && groups().length > 1 ? el("button", { type: "button", text: "show only these", "aria-label": "show only " + group, on: { click: function () { only(group); } } }) : null));
      }
      own.forEach(function (method) { box.append(chip(method)); });
    });
    return box;
  }

  function groups() { return Array.from(new Set(state.methods.map(function (m) { return m.group; }).filter(Boolean))); }

  function chip(method) {
    var dash = style[method.name].dash, ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), line = document.createElementNS(ns, "path");
    svg.setAttribute("viewBox", "0 0 32 12"); svg.setAttribute("aria-hidden", "true");
    line.setAttribute("d", "M0 6H32"); line.setAttribute("stroke", charts.colour(style[method.name])); line.setAttribute("stroke-width", "3");
    if (dash) line.setAttribute("stroke-dasharray", dash.join(" "));
    svg.append(line);
    return el("button", { type: "button", class: "chip", "data-method": method.name, "aria-pressed": String(!hiddenNames.has(method.name)),
      on: { click: function () { toggle(method.name); } } }, svg, el("span", { text: method.label }));
  }

  function toggle(name) {
    if (hiddenNames.has(name)) hiddenNames.delete(name); else hiddenNames.add(name);
    afterToggle();
  }

  function only(group) {
    state.methods.forEach(function (m) { if (m.group === null || m.group === group) hiddenNames.delete(m.name); else hiddenNames.add(m.name); });
    afterToggle();
  }

  function afterToggle() {
    document.querySelectorAll(".chip").forEach(function (button) { button.setAttribute("aria-pressed", String(!hiddenNames.has(button.dataset.method))); });
    redrawCharts();
  }

  function chartSection(id, title, tabbed) {
    var list = state.charts[id] || [];
    if (!list.length) return null;
    var box = section(id, title);
    if (tabbed && state.methods.length) box.append(legend());
    if (tabbed && list.length > 1) {
      var bar = el("div", { class: "tabs", role: "tablist", "aria-label": title });
      if (!list.some(function (c) { return c.id === selected[id]; })) selected[id] = list[0].id;
      list.forEach(function (chart, place) {
        var on = chart.id === selected[id];
        bar.append(el("button", { type: "button", role: "tab", id: "tab-" + chart.id, "aria-selected": String(on), "aria-controls": "chart-" + chart.id, tabindex: on ? "0" : "-1", text: chart.title,
          on: { click: function () { choose(chart.id); }, keydown: function (event) {
            var step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
            if (step) { event.preventDefault(); choose(list[(place + step + list.length) % list.length].id, true); }
          } } }));
      });
      box.append(bar);
    }
    list.forEach(function (chart) { box.append(figure(chart, tabbed && list.length > 1 ? id : null)); });
    function choose(which, focus) {
      selected[id] = which;
      list.forEach(function (chart) {
        var on = chart.id === which, tab = document.getElementById("tab-" + chart.id);
        tab.setAttribute("aria-selected", String(on)); tab.setAttribute("tabindex", on ? "0" : "-1");
        document.getElementById("chart-" + chart.id).hidden = !on;
        if (on && focus) tab.focus();
      });
      list.forEach(drawChart);
    }
    return box;
  }

  function figure(chart, tabs) {
    var slider = el("input", { type: "range", min: "0", max: String(chart.x.length - 1), value: String(chart.x.length - 1), "aria-label": chart.title + ", " + chart.x_label,
      on: { input: function () { var shown = drawn[chart.id]; if (shown) shown.plot.cursor(Number(slider.value), shown.near); } } });
    var node = el("figure", { class: "chart", id: "chart-" + chart.id, role: tabs ? "tabpanel" : null, "aria-labelledby": tabs ? "tab-" + chart.id : "name-" + chart.id },
      tabs ? null : el("h3", { id: "name-" + chart.id, text: chart.title }),
      el("p", { class: "about", text: chart.about }),
      el("div", { class: "plot", "aria-hidden": "true" }),
      el("div", { class: "under" }, slider, el("output", { text: "" })),
      el("ul", { class: "readout" }));
    node.style.margin = "1.25rem 0";
    node.hidden = Boolean(tabs) && chart.id !== selected[tabs];
    return node;
  }

  function everyChart() { return Object.keys(state.charts).reduce(function (all, key) { return all.concat(state.charts[key]); }, []); }

  function curveOf(chart, name) {
    var key = chart.id + "\n" + name;
    if (!curves.has(key)) curves.set(key, charts.curve(chart.series[name]));
    return curves.get(key);
  }

  function drawChart(chart) {
    var node = document.getElementById("chart-" + chart.id);
    if (drawn[chart.id]) { drawn[chart.id].plot.destroy(); delete drawn[chart.id]; }
    if (!node || node.hidden) return;
    var names = Object.keys(chart.series).filter(function (name) { return !hiddenNames.has(name); });
    var own = {}, slider = node.querySelector("input"), shown = { near: null };
    names.forEach(function (name) { own[name] = curveOf(chart, name); });
    var styles = Object.assign({}, style);  // curves that no method has, as a learner's, get colours by their place
    Object.keys(chart.series).forEach(function (name, i) { if (!styles[name]) styles[name] = charts.styles([{ name: name, colour: i, private: true }])[name]; });
    shown.plot = charts.make(node.querySelector(".plot"), {
      x: chart.x, names: names, curves: own, style: styles, lines: chart.lines, logarithmic: chart.logarithmic, share: chart.share, from_zero: chart.from_zero, whole: chart.whole,
      x_label: chart.x_label, y_label: chart.y_label,
      onCursor: function (index, near) {
        shown.near = near || shown.near;
        if (index !== null) slider.value = String(index);
        readout(node, chart, names, own, styles, index === null ? chart.x.length - 1 : index, near);
      }
    });
    drawn[chart.id] = shown;
    readout(node, chart, names, own, styles, Number(slider.value), null);
  }

  function label(name) {
    var found = state.methods.filter(function (m) { return m.name === name; })[0];
    return found && groups().length < 2 ? found.label : name;
  }

  function readout(node, chart, names, own, styles, index, near) {
    var list = node.querySelector(".readout"), lines = [];
    node.querySelector("output").textContent = chart.x_label + " " + chart.x[index];
    node.querySelector("input").setAttribute("aria-valuetext", chart.x_label + " " + chart.x[index]);
    names.forEach(function (name) {
      var c = own[name], v = c.mean[index], swatch = el("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = charts.colour(styles[name]);
      var spread = v === null || c.seeds.length === 1 ? "" : " ± " + charts.number(c.high[index] - v);
      lines.push(el("li", { "data-name": name }, swatch, el("span", { text: label(name) }), el("b", { text: charts.number(v, chart.whole) + spread })));
    });
    chart.lines.forEach(function (line) {
      lines.push(el("li", {}, el("span", { class: "swatch level", "aria-hidden": "true" }), el("span", { text: line.label }), el("b", { text: charts.number(line.value, chart.whole) })));
    });
    var each = near && own[near] && own[near].seeds.length > 1
      ? label(near) + ", every seed: " + own[near].seeds.map(function (seed, i) { return "#" + state.seeds[i] + " " + charts.number(seed[index]); }).join(" · ")
      : names.some(function (n) { return own[n].seeds.length > 1; }) ? "Hover over a curve to see each seed." : "";
    lines.push(el("li", { class: "each", text: each }));
    list.replaceChildren.apply(list, lines);
  }

  function redrawCharts() {
    everyChart().forEach(drawChart);
    document.querySelectorAll(".chip").forEach(function (button) { button.querySelector("path").setAttribute("stroke", charts.colour(style[button.dataset.method])); });
  }

  function render(next) {
    state = next;
    curves.clear(); hiddenNames.clear();
    style = charts.styles(state.methods);
    var main = state.methods.filter(function (m) { return m.name === state.main; })[0];
    if (main && groups().length > 1) state.methods.forEach(function (m) { if (m.group !== null && m.group !== main.group) hiddenNames.add(m.name); });
    document.title = state.title + " · veilstream";
    document.getElementById("kind").textContent = state.kind;
    document.getElementById("page").replaceChildren();
    order().forEach(function (id) { replace(id, SECTIONS[id]()); });
    everyChart().forEach(drawChart);
  }

  function merge(into, patch) {
    Object.keys(patch).forEach(function (key) {
      var given = patch[key], plain = given && typeof given === "object" && !Array.isArray(given);
      if (plain && into[key] && typeof into[key] === "object" && !Array.isArray(into[key])) merge(into[key], given);
      else into[key] = given;
    });
  }

  function update(patch) {
    var added = patch.append || {}, rest = Object.assign({}, patch);
    delete rest.append;
    merge(state, rest);
    if (rest.charts) curves.clear();
    style = charts.styles(state.methods);
    everyChart().forEach(function (chart) { if (added[chart.id]) append(chart, added[chart.id]); });
    var touched = { title: "opening", subtitle: "opening", headline: "opening", absent: "opening", notices: "opening", promise: "promise", results: "results", labels: "labels", facts: "facts", audit: "audit", provenance: "provenance", methods: "learning", links: "links" };
    var redo = new Set(Object.keys(rest).map(function (key) { return touched[key]; }));
    Object.keys(rest.charts || {}).forEach(function (id) { redo.add(id); });
    if (redo.has("promise")) redo.add("opening");
    order().forEach(function (id) {
      if (!redo.has(id)) return;
      (state.charts[id] || []).forEach(function (chart) { if (drawn[chart.id]) { drawn[chart.id].plot.destroy(); delete drawn[chart.id]; } });
      var there = document.getElementById(id), made = SECTIONS[id]();
      if (there || !made) replace(id, made);
      else {  // a section that was not there yet goes to its place
        var next = order().slice(order().indexOf(id) + 1).map(function (n) { return document.getElementById(n); }).filter(Boolean)[0];
        document.getElementById("page").insertBefore(made, next || null);
      }
      (state.charts[id] || []).forEach(drawChart);
    });
    everyChart().forEach(function (chart) { if (added[chart.id]) drawChart(chart); });
  }

  /* New points at the end of a chart; names that are new begin with nothing. */
  function append(chart, more) {
    var before = chart.x.length;
    Object.keys(more.series).forEach(function (name) {
      if (!chart.series[name]) {
        chart.series[name] = true;
        curves.set(chart.id + "\n" + name, { mean: Array(before).fill(null), low: Array(before).fill(null), high: Array(before).fill(null), seeds: [] });
      }
    });
    Object.keys(chart.series).forEach(function (name) {
      var c = curveOf(chart, name);
      c.seeds = c.seeds.map(function (seed) { return Array.from(seed); });
      more.x.forEach(function (_, i) {
        var point = (more.series[name] || [])[i] || [];
        charts.addPoint(c, point);
        if (!c.seeds.length && point.length) c.seeds = point.map(function () { return Array(c.mean.length - 1).fill(NaN); });
        c.seeds.forEach(function (seed, s) { seed.push(point[s] === undefined || point[s] === null ? NaN : point[s]); });
      });
    });
    chart.x = chart.x.concat(more.x);
    var slider = document.querySelector("#chart-" + CSS.escape(chart.id) + " input");
    if (slider) { slider.max = String(chart.x.length - 1); slider.value = slider.max; }
  }

  setInterval(function () { document.querySelectorAll("time[data-since]").forEach(function (node) { node.textContent = ago(Number(node.dataset.since)); }); }, 15000);
  window.veilstream = { render: render, update: update, get state() { return state; } };
  document.getElementById("theme").addEventListener("click", nextTheme);
  system.addEventListener("change", applyTheme);
  window.addEventListener("beforeprint", function () { printing = true; applyTheme(); });
  window.addEventListener("afterprint", function () { printing = false; applyTheme(); });
  applyTheme();
  document.getElementById("library").textContent = window.uPlot ? " Charts by uPlot (MIT licence)." : " Charts are plain SVG: uPlot was missing when this page was made.";
  render(JSON.parse(document.getElementById("state").textContent));
  performance.mark("veilstream-ready");
})();
