// What all pages share: asking for data, what the last act came to, colours, sizes.
"use strict";
const pk = {};

pk.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

pk.ask = async (url) => {
  const answer = await fetch(url, { headers: { accept: "application/json" } });
  if (answer.status === 401) { location.href = "/login"; throw new Error("logged out"); }
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
};

pk.say = (text, isWrong) => {
  const said = document.getElementById("said");
  if (!said) return;
  said.textContent = text;
  said.classList.toggle("wrong", Boolean(isWrong));
};

// A page that is not renewed any more must not pass for what is: it says since when, and fades.
pk.failures = new Map();
pk.answered = (what, why) => {
  if (!why) pk.failures.delete(what);
  else if (!pk.failures.has(what)) pk.failures.set(what, { since: Date.now() / 1e3, why });
  else pk.failures.get(what).why = why;
  const place = document.getElementById("connection"), [first] = pk.failures.values();
  document.body.classList.toggle("stale", Boolean(first));
  place.hidden = !first;
  if (first) place.textContent = `No answer since ${pk.clock(first.since)}: what is shown here is from before. (${first.why})`;
};

// Now, and every few seconds while somebody looks; a controller that does not answer is said.
pk.follow = (url, periodMs, draw) => {
  const once = async () => {
    if (document.hidden) return;
    try {
      draw(await pk.ask(url));
      pk.answered(url, "");
    } catch (error) {
      pk.answered(url, error.message);
    }
  };
  once();
  if (periodMs) setInterval(once, periodMs);
};

pk.tip = (text, event) => {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
};

// A canvas as wide as its place, sharp on any screen.
pk.canvas = (canvas, heightPx) => {
  const ratio = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(heightPx * ratio);
  canvas.style.height = heightPx + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, heightPx);
  return pen;
};

pk.clock = (unixS) => new Date(unixS * 1e3).toLocaleTimeString("en-GB");

pk.short = (value) => value >= 1e6 ? `${+(value / 1e6).toFixed(2)} M` : value >= 1e4 ? `${+(value / 1e3).toFixed(1)} k`
  : value.toLocaleString("en");

pk.ms = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 }) + " ms";

pk.axis = (more) => Object.assign({
  stroke: pk.colour("soft"), grid: { stroke: pk.colour("line"), width: 1 },
  ticks: { stroke: pk.colour("line"), width: 1 }, font: "12px system-ui, sans-serif",
}, more);

// Spans of time without what they have in common: fifty incidents at once are no redder than one.
pk.merged = (spans) => {
  const found = [];
  for (const [from, to] of spans.map(([a, b]) => [a, b === null ? Infinity : b]).sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else found.push([from, to]);
  }
  return found;
};

// Shades the spans [from, to] (to null: still open) and draws a dashed line at each mark.
pk.marks = (spansOf, marksOf) => ({
  hooks: {
    drawClear: [(plot) => {
      const pen = plot.ctx, box = plot.bbox;
      pen.save();
      pen.beginPath();
      pen.rect(box.left, box.top, box.width, box.height);
      pen.clip();
      pen.fillStyle = pk.colour("open");
      for (const [from, to] of pk.merged(spansOf())) {
        const left = plot.valToPos(from, "x", true);
        const right = to === Infinity ? box.left + box.width : plot.valToPos(to, "x", true);
        pen.fillRect(left, box.top, Math.max(2, right - left), box.height);
      }
      pen.strokeStyle = pk.colour("plan");
      pen.lineWidth = 1.5 * devicePixelRatio;
      pen.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      for (const at of marksOf()) {
        const x = plot.valToPos(at, "x", true);
        pen.beginPath();
        pen.moveTo(x, box.top);
        pen.lineTo(x, box.top + box.height);
        pen.stroke();
      }
      pen.restore();
    }],
  },
});

// Where the generation changes: the x of the first row of each new one.
pk.changes = (generations, xs) => xs.filter((x, i) => i > 0 && generations[i] !== generations[i - 1]);

pk.plot = (place, { height, series, data, isTime, label, spans, marks, fromZero }) => {
  const options = {
    width: place.clientWidth, height, padding: [8, 26, 0, 0], plugins: [pk.marks(spans, marks)],
    cursor: { points: { size: 7 }, drag: { x: true, y: false } },
    scales: { x: { time: Boolean(isTime) }, y: { range: (u, low, high) => {
      if (low === null) return [0, 1];
      const room = 0.08 * (high - low || high || 1);
      return [fromZero ? 0 : Math.max(0, low - room), high + room];
    } } },
    series: [isTime ? { label: "time", value: (u, v) => v === null ? "" : pk.clock(v) } : { label: "step" }, ...series],
    axes: [
      pk.axis(isTime ? { space: 90, values: (u, at) => at.map(pk.clock) } : { space: 60 }),
      pk.axis({ label, labelSize: 20, size: 58, labelFont: "12px system-ui, sans-serif", values: (u, at) => at.map(pk.short) }),
    ],
    legend: { live: true },
  };
  place.replaceChildren();
  const plot = new uPlot(options, data, place);
  new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height })).observe(place);
  place.dataset.drawn = String(data[0].length);
  return plot;
};

// Moments in the reader's time zone; the page itself has them in UTC.
pk.moments = (place) => {
  for (const one of place.querySelectorAll("time.moment")) {
    const at = new Date(one.dateTime);
    if (!one.title) one.title = one.textContent;
    one.textContent = (one.classList.contains("of-day") ? "" : at.toLocaleDateString("sv-SE") + " ") + at.toLocaleTimeString("en-GB");
  }
};
document.addEventListener("DOMContentLoaded", () => pk.moments(document));

// A part that is renewed every few seconds shall not take the keyboard's place, what is being
// selected or how far a table was moved sideways away from its reader.
pk.FOCUSABLE = "a[href], button, input, [tabindex]";
pk.keyOf = (one) => one.tagName + (one.getAttribute("href") || "") + (one.getAttribute("hx-vals") || "") + one.textContent;
pk.places = new WeakMap();
document.addEventListener("htmx:beforeSwap", (event) => {
  const place = event.detail.target, chosen = getSelection();
  if (event.detail.requestConfig.verb !== "get" || !event.detail.xhr.responseText) return;
  const isHeld = !chosen.isCollapsed && place.contains(chosen.anchorNode);
  if (isHeld || place.told === event.detail.xhr.responseText) { event.detail.shouldSwap = false; return; }
  if (event.detail.shouldSwap) place.told = event.detail.xhr.responseText;
  const at = place.contains(document.activeElement) ? document.activeElement : null;
  pk.places.set(place, {
    left: [...place.querySelectorAll(".scroll")].map((one) => one.scrollLeft),
    key: at && pk.keyOf(at),
    nth: at ? [...place.querySelectorAll(pk.FOCUSABLE)].filter((one) => pk.keyOf(one) === pk.keyOf(at)).indexOf(at) : -1,
  });
});
document.addEventListener("htmx:afterSwap", (event) => {
  const place = event.detail.target, was = pk.places.get(place);
  pk.moments(place);
  if (!was) return;
  place.querySelectorAll(".scroll").forEach((one, i) => { one.scrollLeft = was.left[i] || 0; });
  if (was.key === null) return;
  const same = [...place.querySelectorAll(pk.FOCUSABLE)].filter((one) => pk.keyOf(one) === was.key);
  (same[was.nth] || same[0])?.focus({ preventScroll: true });
});

document.addEventListener("htmx:afterRequest", (event) => {
  const request = event.detail.xhr, path = event.detail.pathInfo.requestPath;
  if (!path.startsWith("/act/")) {
    if (request.status === 401) { location.href = "/login"; return; }
    let why = event.detail.successful ? "" : request.status ? `${request.status} ${request.statusText}` : "the controller can not be reached";
    try { why = JSON.parse(request.responseText).error || why; } catch { /* a part of a page */ }
    pk.answered(path, why);
    return;
  }
  let told = {};
  try { told = JSON.parse(request.responseText); } catch { /* no answer at all */ }
  pk.say(told.done || told.error || "no answer", !told.done);
});
