/* Charts of a veilstream page. `veilstreamCharts.make(host, spec)` draws with uPlot where the page
   carries it, else as plain SVG; both answer to the same calls: cursor(index), destroy(). */
(function () {
  "use strict";

  // One colour per mechanism, as in every figure (Okabe and Ito, and Tol); light page, dark page.
  var COLOURS = {
    optimal: ["#D55E00", "#FF8A3D"], buffered: ["#0072B2", "#4DB1EE"],
    toeplitz_normalised: ["#007A5A", "#2FCB9E"], toeplitz: ["#B0558A", "#E79AC4"],
    tree_full: ["#A66F00", "#F2B134"], tree_online: ["#2E8FC9", "#8FD0F7"],
    tree: ["#8C564B", "#C79486"], banded: ["#6F6F1F", "#C9C95A"],
    independent: ["#5B3FA8", "#B39DF0"]
  };
  var PLAIN = ["#1c1d1f", "#f2f2f2"];
  var MORE = [["#0072B2", "#4DB1EE"], ["#D55E00", "#FF8A3D"], ["#007A5A", "#2FCB9E"], ["#B0558A", "#E79AC4"],
    ["#A66F00", "#F2B134"], ["#2E8FC9", "#8FD0F7"], ["#5B3FA8", "#B39DF0"], ["#8C564B", "#C79486"]];
  var WHOLE = [];  // steps of an axis of counts
  for (var power = 0; power < 13; power++) [1, 2, 5].forEach(function (digit) { WHOLE.push(digit * Math.pow(10, power)); });
  var DASHES = [null, [7, 4], [2, 3], [9, 3, 2, 3], [12, 5], [4, 2, 1, 2]];

  function dark() { return document.documentElement.dataset.theme === "dark"; }

  /* Colours and dashes of methods: by mechanism, and by dash where a mechanism is there again. */
  function styles(methods) {
    var seen = {}, result = {};
    methods.forEach(function (method, place) {
      var key = method.mechanism || (method.colour === undefined ? "plain" : "own" + method.colour);
      var pair = method.colour !== undefined ? MORE[method.colour % MORE.length]
        : method.mechanism ? COLOURS[method.mechanism] || MORE[place % MORE.length] : PLAIN;
      var again = seen[key] || 0;
      seen[key] = again + 1;
      var unprotected = !method.private && method.mechanism ? 2 : 0;
      result[method.name] = { pair: pair, dash: DASHES[(again + unprotected) % DASHES.length] };
    });
    return result;
  }

  function colour(style) { return style.pair[dark() ? 1 : 0]; }

  /* Numbers of an array that Python packed: sixteen bits each, 65535 for none. */
  function unpack(packed) {
    var text = atob(packed.codes), count = text.length / 2, values = new Float64Array(count);
    for (var i = 0; i < count; i++) {
      var code = text.charCodeAt(2 * i) | (text.charCodeAt(2 * i + 1) << 8);
      var value = packed.low + code / 65534 * packed.span;
      values[i] = code === 65535 ? NaN : packed.log ? Math.exp(value) : value;
    }
    return values;
  }

  /* Mean, mean ± standard deviation, and every seed; or an estimate with its error bar. */
  function curve(packed) {
    if (packed.estimate) {
      return { mean: list(unpack(packed.estimate)), low: list(unpack(packed.low)), high: list(unpack(packed.high)), seeds: [] };
    }
    var values = unpack(packed), points = packed.shape[packed.shape.length - 1], count = values.length / points;
    var made = { mean: [], low: [], high: [], seeds: [] };
    for (var s = 0; s < count; s++) made.seeds.push(values.subarray(s * points, (s + 1) * points));
    for (var p = 0; p < points; p++) addPoint(made, made.seeds.map(function (seed) { return seed[p]; }));
    return made;
  }

  /* Adds mean and mean ± standard deviation of one point's seeds; without a number, nothing is drawn. */
  function addPoint(curve, values) {
    var there = values.filter(function (v) { return v !== null && v === v; });
    var mean = there.reduce(function (a, b) { return a + b; }, 0) / there.length;
    var squares = there.reduce(function (a, b) { return a + (b - mean) * (b - mean); }, 0);
    var std = there.length > 1 ? Math.sqrt(squares / (there.length - 1)) : 0;
    curve.mean.push(there.length ? mean : null); curve.low.push(there.length ? mean - std : null); curve.high.push(there.length ? mean + std : null);
  }

  function list(values) { return Array.from(values, function (v) { return v === v ? v : null; }); }

  function number(value, whole) {
    if (value === null || value !== value) return "–";
    if (whole && Math.abs(value - Math.round(value)) < 1e-3) return String(Math.round(value));
    var size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
    return size >= 100 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : value.toFixed(4);
  }

  /* Labels of an axis: as many decimals as tell ticks apart, never an exponent within reach. */
  function ticks(values) {
    var shown = values.filter(function (v) { return v !== null && v !== undefined; });
    for (var digits = 0; digits < 7; digits++) {
      var texts = shown.map(function (v) { return v.toFixed(digits); });
      var exact = shown.every(function (v, i) { return Math.abs(Number(texts[i]) - v) <= 1e-6 * Math.abs(v); });
      if (exact && new Set(texts).size === texts.length) break;
    }
    return values.map(function (v) {
      if (v === null || v === undefined) return "";
      if (Math.abs(v) >= 1e4 && Math.abs(v) < 1e12) return large(v);
      return Math.abs(v) >= 1e12 || (v !== 0 && Math.abs(v) < 1e-5) ? v.toExponential(0) : v.toFixed(Math.min(digits, 6));
    });
  }

  /* 20000 as 20k: an axis has little room. */
  function large(v) {
    var unit = Math.abs(v) >= 1e9 ? [1e9, "G"] : Math.abs(v) >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return Number((v / unit[0]).toPrecision(6)) + unit[1];
  }

  function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  /* spec: x, names, curves (by name), style (by name), lines, logarithmic, share, x_label, y_label,
     onCursor(index or null, nearest name or null) */
  function make(host, spec) { return window.uPlot ? withUPlot(host, spec) : withSvg(host, spec); }

  function bounds(spec) {
    var low = Infinity, high = -Infinity;
    function take(v) { if (v !== null && isFinite(v) && (!spec.logarithmic || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); } }
    spec.names.forEach(function (name) {
      var c = spec.curves[name];
      c.mean.forEach(take); c.high.forEach(take);
      if (!spec.logarithmic) c.low.forEach(take);
    });
    spec.lines.forEach(function (line) { take(line.value); });
    if (spec.from_zero) low = Math.min(low, 0);
    if (!(low <= high)) { low = spec.logarithmic ? 0.1 : 0; high = 1; }
    if (low === high) { low = spec.logarithmic ? low / 1.2 : low - 0.5; high = spec.logarithmic ? high * 1.2 : high + 0.5; }
    if (spec.logarithmic) return [low / 1.06, high * 1.06];
    var pad = 0.04 * (high - low);
    return [low < 0 ? low - pad : Math.max(0, low - pad), spec.share ? Math.min(1, high + pad) : high + pad];
  }

  /* Whether a logarithmic scale helps: less than a factor of three reads better on a plain one. */
  function logarithmic(spec) { var b = bounds(spec); return spec.logarithmic && b[0] > 0 && b[1] / b[0] > 3; }

  function splits(range) {
    var found = [];
    for (var power = Math.floor(Math.log10(range[0])); power <= Math.ceil(Math.log10(range[1])); power++) {
      [1, 2, 5].forEach(function (digit) {
        var v = digit * Math.pow(10, power);
        if (v >= range[0] && v <= range[1]) found.push(Number(v.toPrecision(1)));
      });
    }
    return found.length > 9 ? found.filter(function (v) { return /^1/.test(v.toExponential()); }) : found;
  }

  function withUPlot(host, spec) {
    var logs = logarithmic(spec), range = bounds(Object.assign({}, spec, { logarithmic: logs }));
    var data = [spec.x], series = [{}], bands = [], owner = [null];
    var floor = logs ? range[0] : -Infinity;
    spec.names.forEach(function (name) {
      var c = spec.curves[name], ink = colour(spec.style[name]);
      var clip = function (v) { return v === null ? null : Math.max(v, floor); };
      var several = c.seeds.length !== 1;
      if (several) {
        data.push(c.high.map(clip), c.low.map(clip));
        var edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push(edge, Object.assign({}, edge));
        bands.push({ series: [series.length - 2, series.length - 1], fill: ink + "26" });
        owner.push(name, name);
      }
      data.push(c.mean.map(function (v) { return logs && v !== null && v <= 0 ? null : v; }));
      series.push({ label: name, stroke: ink, width: 1.75, spanGaps: true, dash: spec.style[name].dash || undefined, points: { show: spec.x.length < 2 } });
      owner.push(name);
    });
    spec.lines.forEach(function (line) {
      data.push(spec.x.map(function () { return line.value; }));
      series.push({ label: line.label, stroke: css("--soft"), width: 1, dash: [3, 4], points: { show: false } });
      owner.push(null);
    });
    var near = null;
    var axis = { stroke: css("--soft"), font: "12px " + css("--sans"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), size: 4 } };
    var plot = new window.uPlot({
      width: host.clientWidth, height: host.clientHeight, legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7, show: function (u, i) { return owner[i] && series[i].width ? u.cursor.points && defaultPoint(u, i) : null; } } },
      scales: {
        x: { time: false },
        y: { distr: logs ? 3 : 1, range: function () { return range; } }
      },
      axes: [
        Object.assign({}, axis, { label: spec.x_label, labelFont: axis.font, labelSize: 20, size: 34, incrs: WHOLE, values: function (u, values) { return ticks(values); } }),
        Object.assign({}, axis, {
          label: spec.y_label, labelFont: axis.font, labelSize: 20, size: 58,
          incrs: spec.whole ? WHOLE : undefined,
          splits: logs ? function () { return splits(range); } : undefined,
          filter: logs ? function (u, values) { return values; } : undefined,
          values: function (u, values) { return ticks(values); }
        })
      ],
      series: series, bands: bands,
      hooks: {
        setCursor: [function (u) {
          var i = u.cursor.idx;
          var now = i === null || i === undefined ? null : nearest(u, i);
          if (now !== near) { near = now; u.redraw(false, false); }
          spec.onCursor(i === undefined ? null : i, near);
        }],
        draw: [function (u) { drawLabels(u); if (near) drawSeeds(u, near); }]
      }
    }, data, host);

    function defaultPoint(u, i) {
      var dot = document.createElement("div");
      dot.style.background = colour(spec.style[owner[i]]);
      return dot;
    }

    function nearest(u, i) {
      var best = null, least = Infinity, top = u.cursor.top;
      spec.names.forEach(function (name) {
        var v = spec.curves[name].mean[i];
        if (v === null || (logs && v <= 0)) return;
        var away = Math.abs(u.valToPos(v, "y") - top);
        if (away < least) { least = away; best = name; }
      });
      return best;
    }

    function drawSeeds(u, name) {
      var ink = u.ctx;
      ink.save();
      ink.beginPath(); ink.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); ink.clip();
      ink.strokeStyle = colour(spec.style[name]); ink.globalAlpha = 0.55; ink.lineWidth = window.devicePixelRatio || 1;
      spec.curves[name].seeds.forEach(function (seed) {
        ink.beginPath();
        var down = false;
        for (var i = 0; i < seed.length; i++) {
          var v = seed[i];
          if (v !== v || (logs && v <= 0)) { down = false; continue; }
          var x = u.valToPos(spec.x[i], "x", true), y = u.valToPos(v, "y", true);
          if (down) ink.lineTo(x, y); else ink.moveTo(x, y);
          down = true;
        }
        ink.stroke();
      });
      ink.restore();
    }

    function drawLabels(u) {
      var ink = u.ctx, scale = window.devicePixelRatio || 1;
      ink.save();
      ink.font = 11 * scale + "px " + css("--sans"); ink.fillStyle = css("--soft");
      ink.strokeStyle = css("--paper"); ink.lineWidth = 3 * scale; ink.lineJoin = "round";
      spec.lines.forEach(function (line, i) {  // at the right, then at the left: levels may be close together
        var x = u.bbox.left + (i % 2 ? 4 * scale : u.bbox.width - 4 * scale), y = u.valToPos(line.value, "y", true) - 5 * scale;
        ink.textAlign = i % 2 ? "left" : "right";
        ink.strokeText(line.label, x, y); ink.fillText(line.label, x, y);
      });
      ink.restore();
    }

    var watcher = new ResizeObserver(function () {
      if (host.clientWidth) plot.setSize({ width: host.clientWidth, height: host.clientHeight });
    });
    watcher.observe(host);
    return {
      cursor: function (index, name) {
        var v = name && spec.curves[name] ? spec.curves[name].mean[index] : null;
        plot.setCursor({ left: plot.valToPos(spec.x[index], "x"), top: v === null ? 10 : plot.valToPos(v, "y") });
      },
      destroy: function () { watcher.disconnect(); plot.destroy(); }
    };
  }

  /* Without the library: the same curves as SVG, drawn once; the slider below reads them out. */
  function withSvg(host, spec) {
    var W = host.clientWidth || 900, H = host.clientHeight || 360, L = 56, R = 24, T = 8, B = 40;
    var logs = logarithmic(spec), range = bounds(Object.assign({}, spec, { logarithmic: logs }));
    var f = logs ? Math.log : function (v) { return v; };
    var x0 = spec.x[0], x1 = spec.x[spec.x.length - 1];
    function px(x) { return L + (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0)) * (W - L - R); }
    function py(v) { return T + (1 - (f(Math.max(v, logs ? range[0] : -Infinity)) - f(range[0])) / (f(range[1]) - f(range[0]))) * (H - T - B); }
    function path(values) {
      var text = "", down = false;
      values.forEach(function (v, i) {
        if (v === null || v !== v) { down = false; return; }
        text += (down ? "L" : "M") + px(spec.x[i]).toFixed(1) + " " + py(v).toFixed(1);
        down = true;
      });
      return text;
    }
    function band(c) {
      var there = spec.x.map(function (_, i) { return i; }).filter(function (i) { return c.high[i] !== null; });
      var upper = there.map(function (i) { return px(spec.x[i]).toFixed(1) + " " + py(c.high[i]).toFixed(1); });
      var lower = there.reverse().map(function (i) { return px(spec.x[i]).toFixed(1) + " " + py(c.low[i]).toFixed(1); });
      return upper.length ? "M" + upper.concat(lower).join("L") + "Z" : "";
    }
    var parts = [], marks = logs ? splits(range) : evenly(range, spec.whole), soft = css("--soft"), line = css("--line");
    ticks(marks).forEach(function (text, i) {
      var y = py(marks[i]).toFixed(1);
      parts.push('<path d="M' + L + " " + y + "H" + (W - R) + '" stroke="' + line + '"/><text x="' + (L - 8) + '" y="' + y + '" dy=".35em" text-anchor="end">' + text + "</text>");
    });
    var along = evenly([x0, x1], true);
    ticks(along).forEach(function (text, i) { parts.push('<text x="' + px(along[i]) + '" y="' + (H - 18) + '" text-anchor="middle">' + text + "</text>"); });
    spec.names.forEach(function (name) {
      var c = spec.curves[name], ink = colour(spec.style[name]), dash = spec.style[name].dash;
      if (c.seeds.length !== 1) parts.push('<path d="' + band(c) + '" fill="' + ink + '" fill-opacity=".15"/>');
      parts.push('<path d="' + path(c.mean) + '" fill="none" stroke="' + ink + '" stroke-width="2"' + (dash ? ' stroke-dasharray="' + dash + '"' : "") + "/>");
    });
    spec.lines.forEach(function (each, i) {
      parts.push('<path d="M' + L + " " + py(each.value) + "H" + (W - R) + '" stroke="' + soft + '" stroke-dasharray="3 4"/><text x="' + (i % 2 ? L + 4 : W - R) + '" y="' + (py(each.value) - 5) + '" text-anchor="' + (i % 2 ? "start" : "end") + '">' + escape(each.label) + "</text>");
    });
    parts.push('<path class="cursor" stroke="' + soft + '"/>');
    host.innerHTML = '<svg viewBox="0 0 ' + W + " " + H + '" aria-hidden="true" font-size="12" fill="' + soft + '">' + parts.join("") + "</svg>";
    var hair = host.querySelector(".cursor");
    function show(index) { hair.setAttribute("d", "M" + px(spec.x[index]) + " " + T + "V" + (H - B)); spec.onCursor(index, spec.names[0] || null); }
    return { cursor: show, destroy: function () { host.innerHTML = ""; } };
  }

  function evenly(range, whole) {
    var span = (range[1] - range[0]) || 1, power = Math.pow(10, Math.floor(Math.log10(span)) - 1);
    var steps = [1, 2, 5, 10, 20, 50].map(function (digit) { return digit * power; }).filter(function (step) { return span / step <= 8; });
    var step = whole ? Math.max(1, Math.round(steps[0])) : steps[0], found = [];
    for (var v = Math.ceil(range[0] / step) * step; v <= range[1] + 1e-9; v += step) found.push(Number(v.toPrecision(6)));
    return found;
  }

  function escape(text) { return text.replace(/[&<>"]/g, function (c) { return "&#" + c.charCodeAt(0) + ";"; }); }

  window.veilstreamCharts = { make: make, curve: curve, addPoint: addPoint, styles: styles, colour: colour, number: number };
})();
