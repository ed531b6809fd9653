// The timeline of an incident: what its rank took against what it should, and the job's step.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("timeline");
  pk.follow(place.dataset.url, 0, (told) => {
    const timeline = told.timeline, one = told.incident;
    if (!timeline.step.length) {
      document.getElementById("compute").textContent = "Nothing was kept of its steps.";
      return;
    }
    const ms = (values) => values.map((v) => v === null ? null : v * 1e3);
    const spans = () => [[one.onset_step, one.closed_step]];
    const marks = () => pk.changes(timeline.generation, timeline.step);
    const line = (label, colour) => ({ label, stroke: pk.colour(colour), width: 1.8, points: { show: false },
      value: (u, v) => v === null ? "" : pk.ms(v) });
    pk.plot(document.getElementById("compute"), {
      height: 230, label: one.rank === null ? "median compute, ms" : `rank ${one.rank}, ms`, spans, marks, fromZero: true,
      series: [line("observed", "observed"), line("expected", "expected")],
      data: [timeline.step, ms(timeline.observed_s), ms(timeline.expected_s)],
    });
    pk.plot(document.getElementById("step"), {
      height: 160, label: "step, ms", spans, marks, fromZero: true,
      series: [line("step", "soft")], data: [timeline.step, ms(timeline.step_s)],
    });
  });
});
