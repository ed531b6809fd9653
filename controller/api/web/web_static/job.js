// The timeline of a job: tokens per second, step time and the slowest rank, by the clock.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("timeline");
  let plots = null, told = null;
  const spans = () => told.incidents.filter((one) => !one.kind.endsWith("_imbalance"))
    .map((one) => [one.opened_unix_s, one.closed_unix_s]);
  const marks = () => pk.changes(told.timeline.generation, told.timeline.unix_s);

  pk.follow(place.dataset.url, 2000, (answer) => {
    told = answer;
    const job = told.timeline, ms = (values) => values.map((v) => v === null ? null : v * 1e3);
    const rows = [job.tokens_per_s, ms(job.step_s), job.slowest];
    if (plots) {
      plots.forEach((plot, i) => plot.setData([job.unix_s, rows[i]]));
      return;
    }
    if (!job.unix_s.length) { document.getElementById("pace").textContent = "No step is complete yet."; return; }
    const line = (label, colour, text) => ({ label, stroke: pk.colour(colour), width: 1.6, points: { show: false },
      value: (u, v) => v === null ? "" : text(v) });
    plots = [
      ["pace", "tokens/s", line("tokens/s", "accent", (v) => Math.round(v).toLocaleString("en")), true, 190],
      ["step", "step, ms", line("step", "expected", pk.ms), true, 150],
      ["slowest", "slowest rank", line("slowest rank", "observed", (v) => v.toFixed(2) + "\u00d7"), false, 130],
    ].map(([id, label, series, fromZero, height], i) => pk.plot(document.getElementById(id), {
      height, label, series: [series], data: [job.unix_s, rows[i]], isTime: true, spans, marks, fromZero,
    }));
  });
});
