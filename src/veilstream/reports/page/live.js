/* Keeps a page up to date: reads server-sent events and hands them to veilstream.update. The page's
   state says where they are (state.live.events) and which it has already (state.live.after). */
(function () {
  "use strict";
  var page = window.veilstream, live = page.state.live, last = live.after, source = null;
  var waiting = [], lostAt = null, over = false;
  var MOST_HELD = 120, RETRY_MS = 3000, QUIET_MS = 2500;  // a short break is not shown

  var status = document.createElement("span");
  status.id = "live"; status.className = "live"; status.setAttribute("role", "status");
  document.querySelector(".top").insertBefore(status, document.getElementById("theme"));
  document.querySelector("footer p").firstChild.data = "A live page of veilstream. It connects only to the server that it came from.";

  function say(state, text) {
    if (status.dataset.state === state && status.textContent === text) return;
    status.dataset.state = state;
    status.textContent = text;
  }

  function tell() {
    if (over) say("over", "The run is over");
    else if (lostAt !== null && Date.now() - lostAt > QUIET_MS) say("lost", "No connection; trying again");
    else if (waiting.length && reading()) say("held", "Live, paused while you read a value");
    else if (lostAt === null) say("open", "Live");
  }

  /* Whether someone is reading a value, which a redraw would take away. */
  function reading() {
    var on = document.activeElement, mouse = window.matchMedia("(hover: hover)").matches;  // a finger never leaves
    if (waiting.length > MOST_HELD) return false;
    return Boolean(mouse && document.querySelector(".plot:hover")) || Boolean(on && on.type === "range");
  }

  function apply() {
    if (!waiting.length || reading()) { tell(); return; }
    var focus = focused(), scrolled = Array.from(document.querySelectorAll(".wide"), function (node) { return node.scrollLeft; });
    waiting.splice(0).forEach(function (given) {
      var first = given.patch && given.patch.methods && !page.state.methods.length;
      if (given.whole) page.render(given.whole); else page.update(given.patch);
      if (first) page.render(page.state);  // which methods are hidden at first depends on all of them
    });
    document.querySelectorAll(".wide").forEach(function (node, i) { node.scrollLeft = scrolled[i] || 0; });
    var again = focus && document.querySelector(focus);
    if (again && again !== document.activeElement) again.focus({ preventScroll: true });
    tell();
  }

  /* A selector for what has the focus, since it may be replaced by its like. */
  function focused() {
    var node = document.activeElement;
    if (!node || node === document.body) return null;
    if (node.id) return "#" + CSS.escape(node.id);
    if (node.dataset.method) return '.chip[data-method="' + CSS.escape(node.dataset.method) + '"]';
    if (node.classList.contains("wide")) return "#results .wide";
    return null;
  }

  function connect() {
    source = new EventSource(live.events + "?after=" + encodeURIComponent(last));
    source.onopen = function () { lostAt = null; tell(); };
    source.addEventListener("patch", function (event) { last = event.lastEventId; waiting.push({ patch: JSON.parse(event.data) }); apply(); });
    source.addEventListener("state", function (event) { last = event.lastEventId; waiting = [{ whole: JSON.parse(event.data) }]; apply(); });
    source.addEventListener("end", function () { over = true; source.close(); apply(); });
    source.onerror = function () {
      if (over) return;
      if (lostAt === null) lostAt = Date.now();
      setTimeout(tell, QUIET_MS + 100);
      // The browser reconnects by itself, unless it was refused.
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
    };
  }

  document.addEventListener("pointerout", function (event) { if (event.target.closest && event.target.closest(".plot")) setTimeout(apply, 50); });
  document.addEventListener("focusout", function () { setTimeout(apply, 50); });
  say("open", "Connecting");
  connect();
})();
